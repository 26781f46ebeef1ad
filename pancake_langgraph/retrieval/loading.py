"""Opens what a manifest names: segments, tombstones, logs.  Damaged parts are refused, or left out and named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval.disk import Disk, checksum_of, size_of
from pancake_langgraph.retrieval.index_state import Index
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, LogTail, LogWriter, read_log, salvage
from pancake_langgraph.retrieval.log_sizes import read_sizes, trouble_of
from pancake_langgraph.retrieval.manifest import (
    LOGS,
    LOST,
    REPAIR,
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    SegmentEntry,
    check_unused,
    exists,
    log_path,
    newest_whole,
    numbered,
    publish,
    read_current,
)
from pancake_langgraph.retrieval.masks import Bits
from pancake_langgraph.retrieval.segment import DamagedPart, Ordinals, Segment
from pancake_langgraph.retrieval.segment_view import SegmentView

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
#: How the names of what an index consists of begin.
_OWN: Final = ("LOCK", LOGS, SEGMENTS, TOMBSTONES, "CURRENT", "CLOSED", "MANIFEST-", LOST)
_NOTHING: Final = LogTail((), 0, None)

#: What to do about damage: `raise` refuses what needs the damaged part, `skip` leaves it out, says so, and goes on.
OnCorrupt = Literal["raise", "skip"]


@dataclass(slots=True)
class Damage:
    """What was found damaged; with `skip` it is left out."""

    on_corrupt: OnCorrupt
    found: list[str] = field(default_factory=list)

    def met(self, error: CorruptIndex) -> None:
        """Note damage and return, or raise it."""
        if self.on_corrupt == "raise":
            raise error
        if str(error) not in self.found:
            self.found.append(str(error))
            logger.error("left out of the index: %s", error)


def check_folder(root: Path) -> None:
    """Make sure that a place is an index or can become one.

    Raises:
        RetrievalError: if it is a file, or a folder that holds something else.
    """
    if not root.exists():
        return
    if not root.is_dir():
        raise RetrievalError(f"{root}: an index is a folder, and this is a file; give the name of a folder")
    if exists(root):
        return
    # What the making of an index that was cut off leaves is none of others.
    others = [path.name for path in root.iterdir() if not path.name.startswith((".", *_OWN))]
    if others:
        raise RetrievalError(
            f"{root}: there is no index here, and the folder is not empty (it has {min(others)!r}); give the name of "
            "an empty folder, or of one that is to be made"
        )


def adapted(manifest: Manifest, index: Index, dim: int | None, fingerprint: str | None) -> Manifest:
    """Return a manifest as it is for the embedder that asks.

    An index without a fingerprint takes over the first one, and one that never had a vector the length as well.
    """
    if manifest.fingerprint is not None:
        return manifest
    if dim is not None and dim != manifest.dim:
        if index.has_rows or any(entry.num_rows for entry in manifest.segments):
            return manifest
        manifest = replace(manifest, dim=dim)
    return manifest if fingerprint is None else replace(manifest, fingerprint=fingerprint)


def make(root: Path, dim: int | None, fingerprint: str | None, disk: Disk, damage: Damage) -> None:
    """Make an empty index; where damage may be skipped, one of which only `CURRENT` is missing is left to be found.

    Raises:
        CorruptIndex: if there seems to be one, of which only `CURRENT` is missing.
        RetrievalError: if `dim` is not known.
        OSError: if it cannot be written.
    """
    try:
        check_unused(root)
    except CorruptIndex as error:
        damage.met(error)
        return
    if dim is None:
        raise RetrievalError(f"{root}: there is no index here, and a new one needs `dim`, got None; pass it")
    disk.sync_folder(root.parent)
    LogWriter(log_path(root, 1), disk).close()
    publish(root, Manifest(1, dim, fingerprint, log_floor=1, seq=0, next_segment=1), disk)


def tidy(root: Path, manifest: Manifest, disk: Disk) -> None:
    """Remove what a manifest does not name: what was begun before a crash, and what was replaced."""
    segments = {entry.name for entry in manifest.segments}
    bits = {entry.dead.name for entry in manifest.segments if entry.dead}
    logs = [path for path in (root / LOGS).glob("*.log") if path.stem.isdigit()]
    for path in (
        *(one for one in (root / SEGMENTS).iterdir() if one.name not in segments),
        *(one for one in (root / TOMBSTONES).iterdir() if one.name not in bits),
        *(one for one in logs if int(one.stem) < manifest.log_floor),
        *(one for one in (root / LOGS).glob("*-*.cut") if int(one.stem.partition("-")[0]) < manifest.log_floor),
        *(one for one in root.glob("MANIFEST-*.*") if one.name not in (manifest.file_name, manifest.copy_name)),
    ):
        disk.remove(path)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where a log ends that may be appended to; `number` is that of a new one where it may not."""

    number: int
    end: int


def current_manifest(root: Path, damage: Damage) -> Manifest:
    """Return the manifest that is published, or, where `CURRENT` is damaged and may be skipped, the newest whole one.

    Raises:
        CorruptIndex: if there is none.
        RetrievalError: if there is no index, or one of a later version.
    """
    try:
        return read_current(root)
    except CorruptIndex as error:
        damage.met(error)
        found = newest_whole(root)
        if found is None:
            raise
        return found


def open_segments(root: Path, manifest: Manifest, damage: Damage, known: Mapping[str, Segment]) -> list[SegmentView]:
    """Open the segments of a manifest; those that are `known` are used on.

    Raises:
        CorruptIndex: if one is damaged or missing; it is named.
        FileNotFoundError: if one is gone because a later manifest was published meanwhile.
    """
    views = []
    for entry in manifest.segments:
        try:
            segment = known.get(entry.name)
            if segment is None or segment.entry.files != entry.files:  # another index may be where one was
                segment = Segment(root, entry, manifest.dim)
            views.append(SegmentView.of(segment, read_tombstones(root, entry)))
        except CorruptIndex as error:
            damage.met(error)
        except FileNotFoundError as error:
            damage.met(CorruptIndex(f"{_missing(root, manifest.number, damage, error)}; {REPAIR}"))
    return views


def _missing(root: Path, number: int, damage: Damage, error: FileNotFoundError) -> CorruptIndex:
    """Return what it means that a file of a manifest is missing; where a later one was published, nothing."""
    if current_manifest(root, damage).number != number:
        raise error
    return CorruptIndex(f"{error.filename}: it is missing")


def read_tombstones(root: Path, entry: SegmentEntry) -> Bits | None:
    """Return the bits of the dead items of a segment, `None` if there are none.

    Raises:
        CorruptIndex: if they are not what was written.
        FileNotFoundError: if they are gone.
    """
    if entry.dead is None:
        return None
    path = root / TOMBSTONES / entry.dead.name
    if path.stat().st_size != entry.dead.size or checksum_of(path) != entry.dead.checksum:
        raise CorruptIndex(f"{path}: its checksum does not fit; {REPAIR}")
    return np.fromfile(path, np.uint8)


def replay(root: Path, manifest: Manifest, damage: Damage, index: Index) -> LogEnd:
    """Apply what stands in the logs of a manifest, and return where to go on writing.

    Raises:
        CorruptIndex: if something acknowledged is not what was written, or a log is missing.
        FileNotFoundError: if a log is gone because a later manifest was published meanwhile.
    """
    sizes = _sizes(root, damage)
    number = manifest.log_floor
    while True:
        path = log_path(root, number)
        is_last = not _has_records_behind(root, number, sizes)
        try:
            tail = read_log(path)
            problem = trouble_of(tail, path, is_last=is_last, closed_size=sizes.get(number, 0))
        except FileNotFoundError as error:
            tail, problem = _NOTHING, str(_missing(root, manifest.number, damage, error))
        except CorruptIndex as error:
            tail, problem = _NOTHING, str(error)
        records = tail.records
        if problem is not None:
            damage.met(CorruptIndex(f"{problem}; {REPAIR}"))
            records = salvage(path) if path.exists() else ()
        for record in records:
            healed(partial(index.apply, record.operation), index.drop, damage, nullcontext())
        if is_last:
            return LogEnd(number, tail.end) if problem is None else LogEnd(number + 1, 0)
        number += 1


def healed(
    work: Callable[[], _T],
    drop: Callable[[str, Ordinals], None],
    damage: Damage,
    lock: AbstractContextManager[object],
) -> _T:
    """Do work that may meet damage; where that may be skipped, the damaged items are taken out and it is done again.

    `drop` takes items out of the index that `work` looks at; `lock` is what guards changes of it.

    Raises:
        DamagedPart: if damage may not be skipped.
    """
    while True:
        try:
            return work()
        except DamagedPart as error:
            damage.met(error)
            with lock:
                drop(error.segment, error.ordinals)


def _has_records_behind(root: Path, number: int, sizes: Mapping[int, int]) -> bool:
    """Return whether there is, or was, a later log with anything in it; one that was only just made does not count."""
    found = {int(path.stem): size_of(path) for path in numbered((root / LOGS).glob("*.log"))}
    return any(one > number and size > EMPTY_LOG_BYTES for some in (found, sizes) for one, size in some.items())


def _sizes(root: Path, damage: Damage) -> Mapping[int, int]:
    try:
        return read_sizes(root)
    except CorruptIndex as error:
        damage.met(CorruptIndex(f"{error}; {REPAIR}"))
        return {}
