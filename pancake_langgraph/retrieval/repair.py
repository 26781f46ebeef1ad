"""Makes a damaged index usable again: what can be read is written anew, and what cannot is named and put aside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval.disk import Disk, write_trouble
from pancake_langgraph.retrieval.index_writer import IndexWriter, WriteOptions
from pancake_langgraph.retrieval.inspection import Finding, verify
from pancake_langgraph.retrieval.loading import Damage
from pancake_langgraph.retrieval.manifest import (
    LOST,
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    newest_whole,
    publish,
    read_current,
)
from pancake_langgraph.retrieval.planner import EXACT_ROWS
from pancake_langgraph.retrieval.segment import DamagedPart, Ordinals, Segment
from pancake_langgraph.retrieval.segment_build import BuildPlan
from pancake_langgraph.retrieval.segment_files import CODES
from pancake_langgraph.retrieval.segment_view import SegmentView
from pancake_langgraph.retrieval.write_lock import WriteLock

_ROWS: Final = 4096
_OPTIONS: Final = WriteOptions("group", 1 << 62, BuildPlan("pq", 16384, EXACT_ROWS), in_background=False)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of an index: how many items it has, what is lost, and where the damaged files are kept.

    `kept_in` is `None` where nothing was damaged; nothing was done then.
    """

    num_items: int
    lost: tuple[str, ...]
    kept_in: Path | None


def repair(path: str | os.PathLike[str]) -> Repaired:
    """Write anew what can be read of the index at `path`; damaged files are kept in its folder `lost`.

    Codes are made again.  Of a segment whose tombstones are damaged nothing is kept, or what was deleted would be back.

    Raises:
        IndexLocked: if somebody writes to it.
        CorruptIndex: if no manifest is whole, so that nothing says what belongs to it.
        RetrievalError: if there is no index, a later version made it, or it cannot be written.
    """
    root = Path(path)
    if not root.is_dir():
        raise RetrievalError(f"{root}: there is no index here")
    _newest(root)  # before anything is made where there is none
    disk, damage = Disk(), Damage("skip")
    try:
        lock = WriteLock(root)
        try:
            findings = verify(root)
            if findings:
                kept_in = _put_aside(root, findings)
                manifest = _without_bad_codes(root, _newest(root), findings)
                publish(root, manifest, disk)
        finally:
            lock.release()
        writer = IndexWriter(root, dim=None, fingerprint=None, options=_OPTIONS, damage=damage, disk=disk)
        try:
            if not findings:
                return Repaired(_num_items(writer), (), None)
            gone = [entry for entry in manifest.segments if entry.name not in writer.index.segments]
            lost = [f"{root / SEGMENTS / one.name}: all of its {one.num_items - one.num_dead} items" for one in gone]
            for view in list(writer.index.segments.values()):
                lost += _drop_unreadable(writer, view)
            writer.rewrite()
            return Repaired(_num_items(writer), (*(_said(one) for one in damage.found), *lost), kept_in)
        finally:
            writer.close()
    except OSError as error:
        raise write_trouble(error, f"{root}: it could not be repaired") from error


def _newest(root: Path) -> Manifest:
    try:
        return read_current(root)
    except CorruptIndex as error:
        found = newest_whole(root)
        if found is None:
            raise CorruptIndex(
                f"{_said(str(error))}; no manifest is whole, so that nothing says what belongs to the index; "
                "restore it from a copy"
            ) from error
        return found


def _without_bad_codes(root: Path, manifest: Manifest, findings: Sequence[Finding]) -> Manifest:
    """Return the next manifest, in which segments do not have codes that are damaged: all else of them is whole."""
    bad = {finding.file for finding in findings}
    entries = [
        replace(entry, kind="flat", trained_rows=0, files=tuple(mark for mark in entry.files if mark.name != CODES))
        if str(root / SEGMENTS / entry.name / CODES) in bad
        else entry
        for entry in manifest.segments
    ]
    return manifest.next(segments=tuple(entries))


def _put_aside(root: Path, findings: Sequence[Finding]) -> Path:
    """Link what is damaged, whole segments where one file of them is, into a new folder."""
    target = next(one for number in range(1, 1 << 30) if not (one := root / LOST / f"{number:03d}").exists())
    target.mkdir(parents=True)
    units: set[Path] = set()
    for finding in findings:
        file = Path(finding.file)
        folder, *rest = file.relative_to(root).parts
        units.add(root / folder / rest[0] if folder == SEGMENTS and rest else file)
        if folder == TOMBSTONES:
            units.add(root / SEGMENTS / file.name.partition("-")[0])
    for unit in units:
        aside = target / unit.relative_to(root)
        aside.parent.mkdir(parents=True, exist_ok=True)
        if unit.is_dir():
            shutil.copytree(unit, aside, copy_function=_link)
        elif unit.exists():
            # Not linked: a log may be written on.
            shutil.copy2(unit, aside)
    return target


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system can
        shutil.copy2(source, target)


def _drop_unreadable(writer: IndexWriter, view: SegmentView) -> list[str]:
    """Take out all items of a segment that cannot be read; return what is lost with them."""
    segment = view.segment
    lost = []
    bad: list[int] = []
    for ordinal in view.live_items().tolist():
        try:
            segment.sealed_document(ordinal)
        except DamagedPart as error:
            bad.append(ordinal)
            lost.append(_said(str(error)))
    live = set(view.live_items().tolist()) - set(bad)
    for start in range(0, len(segment.raw), _ROWS):
        stop = min(start + _ROWS, len(segment.raw))
        for ordinal in _with_bad_rows(segment, np.arange(start, stop)):
            if ordinal in live:
                bad.append(ordinal)
                lost.append(f"{_name_of(segment, ordinal)}: its vector is damaged")
    with writer.lock:
        writer.index.drop(segment.entry.name, np.array(bad, np.int64))
    return lost


def _with_bad_rows(segment: Segment, rows: Ordinals) -> list[int]:
    try:
        segment.gathered(rows)
    except DamagedPart as error:
        return sorted({*error.ordinals.tolist()})
    return []


def _name_of(segment: Segment, ordinal: int) -> str:
    return f"item {segment.document(ordinal).key!r} of {'/'.join(segment.namespace_of(ordinal))}"


def _num_items(writer: IndexWriter) -> int:
    state = writer.index.state
    return sum(int(np.count_nonzero(one.alive())) for one in state.deltas) + sum(
        view.num_items for view in state.segments
    )


def _said(message: str) -> str:
    """Return a message without what to do."""
    return message.partition("; ")[0]
