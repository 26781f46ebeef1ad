"""Looks at an index on disk without opening it: what it consists of, and whether all of it is what was written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pancake_langgraph._errors import CorruptIndex
from pancake_langgraph.retrieval.disk import FileMark, checksum_of, size_of
from pancake_langgraph.retrieval.index_reader import IndexReader
from pancake_langgraph.retrieval.loading import Damage
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, read_log
from pancake_langgraph.retrieval.log_sizes import read_sizes, trouble_of
from pancake_langgraph.retrieval.manifest import (
    LOGS,
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    log_path,
    newest_whole,
    numbered,
    read_current,
)


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One segment: its kind (`flat` has no codes), its items and vectors, how many of the items are dead, its bytes."""

    name: str
    kind: str
    num_items: int
    num_dead: int
    num_vectors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """What an index consists of.

    `num_items` are all that are there; `num_waiting` is how many of them wait in the log for a segment.
    """

    dim: int
    fingerprint: str | None
    format: int
    num_items: int
    num_waiting: int
    num_bytes: int
    log_bytes: int
    segments: tuple[SegmentInfo, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """A file that is not what was written, and why."""

    file: str
    problem: str

    def __str__(self) -> str:
        """Return both as one line."""
        return f"{self.file}: {self.problem}"


def describe(path: str | os.PathLike[str]) -> IndexInfo:
    """Return what the index at `path` consists of.  Another process may write to it meanwhile.

    Raises:
        CorruptIndex: if something that has to be read for it is damaged or missing.
        RetrievalError: if there is no index.
    """
    root = Path(path)
    reader = IndexReader(root, dim=None, fingerprint=None, damage=Damage("raise"))
    manifest, index = reader.manifest, reader.index
    index.expire(time.time())
    state = index.state
    reader.close()
    segments = tuple(
        SegmentInfo(
            view.segment.entry.name,
            view.segment.entry.kind,
            view.segment.entry.num_items,
            view.num_dead_items,
            view.segment.entry.num_rows,
            view.segment.entry.num_bytes,
        )
        for view in state.segments
    )
    log_bytes = sum(map(size_of, _logs(root, manifest, {})))
    waiting = sum(int(np.count_nonzero(one.alive())) for one in state.deltas)
    return IndexInfo(
        manifest.dim,
        manifest.fingerprint,
        manifest.format,
        waiting + sum(view.num_items for view in state.segments),
        waiting,
        sum(one.num_bytes for one in segments) + log_bytes,
        log_bytes,
        segments,
    )


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Read all of the index at `path` and return what is damaged; nothing if it is whole.

    Nobody may write to it meanwhile, or what is replaced is taken for missing.

    Raises:
        RetrievalError: if there is no index, or a later version made it.
    """
    root = Path(path)
    findings: list[Finding] = []
    try:
        manifest: Manifest | None = read_current(root)
    except CorruptIndex as error:
        findings.append(_finding(error))
        manifest = newest_whole(root)
    if manifest is None:
        return findings
    for entry in manifest.segments:
        marks = [(root / SEGMENTS / entry.name / mark.name, mark) for mark in entry.files]
        if entry.dead is not None:
            marks.append((root / TOMBSTONES / entry.dead.name, entry.dead))
        findings += [Finding(str(file), problem) for file, mark in marks if (problem := _problem(file, mark))]
    try:
        sizes = read_sizes(root)
    except CorruptIndex as error:
        findings.append(_finding(error))
        sizes = {}
    logs = _logs(root, manifest, sizes)
    for at, log in enumerate(logs):
        findings += _log_findings(log, is_last=at == len(logs) - 1, closed_size=sizes.get(int(log.stem), 0))
    return findings


def torn_end(path: str | os.PathLike[str]) -> Finding | None:
    """Return how much of the last log is no whole record, which is what a crash leaves and no damage.

    Raises:
        CorruptIndex: if the manifest or a log is damaged or missing.
        RetrievalError: if there is no index.
    """
    root = Path(path)
    log = _logs(root, read_current(root), read_sizes(root))[-1]
    more = size_of(log) - read_log(log).end if log.exists() else 0
    return Finding(str(log), f"its last {more} bytes are no whole record, as a crash leaves them") if more else None


def _problem(file: Path, mark: FileMark) -> str | None:
    try:
        size = file.stat().st_size
        if size != mark.size:
            return f"got {size} bytes, written were {mark.size}"
        return None if checksum_of(file) == mark.checksum else "its checksum does not fit"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _log_findings(log: Path, *, is_last: bool, closed_size: int) -> list[Finding]:
    try:
        tail = read_log(log)
    except CorruptIndex as error:
        return [_finding(error)]
    except FileNotFoundError:
        return [Finding(str(log), "it is missing")]
    except OSError as error:
        return [Finding(str(log), f"it cannot be read ({error.strerror})")]
    problem = trouble_of(tail, log, is_last=is_last, closed_size=closed_size)
    return [] if problem is None else [_finding(CorruptIndex(problem))]


def _finding(error: CorruptIndex) -> Finding:
    file, _, problem = str(error).partition(": ")
    return Finding(file, problem)


def _logs(root: Path, manifest: Manifest, sizes: Mapping[int, int]) -> list[Path]:
    """Return the logs that there should be, in order; those behind the last one with records hold nothing."""
    found = {int(log.stem): size_of(log) for log in numbered((root / LOGS).glob("*.log"))}
    last = max((one for some in (found, sizes) for one, size in some.items() if size > EMPTY_LOG_BYTES), default=0)
    return [log_path(root, number) for number in range(manifest.log_floor, max(last, manifest.log_floor) + 1)]
