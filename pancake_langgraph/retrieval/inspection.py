"""Looks at an index on disk without opening it: what it consists of, and whether all of it is what was written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pancake_langgraph._errors import CorruptIndex
from pancake_langgraph.retrieval.disk import FileMark, checksum_of, size_of
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, read_log
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

    `num_items` are those in segments that were there at the last flush; `num_waiting` is how many were put since, those
    that replace others included.
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
        CorruptIndex: if the manifest or a log is damaged or missing.
        RetrievalError: if there is no index.
    """
    root = Path(path)
    while True:
        manifest = read_current(root)
        try:
            return _described(root, manifest)
        except FileNotFoundError as error:
            if read_current(root).number == manifest.number:  # else it was replaced meanwhile
                raise CorruptIndex(f"{error.filename}: it is missing; restore it from a copy") from None


def _described(root: Path, manifest: Manifest) -> IndexInfo:
    segments = tuple(
        SegmentInfo(one.name, one.kind, one.num_items, one.num_dead, one.num_rows, one.num_bytes)
        for one in manifest.segments
    )
    logs = _logs(root, manifest)
    waiting = sum(len(record.operation.puts) for log in logs for record in read_log(log).records)
    log_bytes = sum(map(size_of, logs))
    return IndexInfo(
        manifest.dim,
        manifest.fingerprint,
        manifest.format,
        sum(one.num_items - one.num_dead for one in segments),
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
    logs = _logs(root, manifest)
    for at, log in enumerate(logs):
        findings += _log_findings(log, is_last=at == len(logs) - 1)
    return findings


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


def _log_findings(log: Path, *, is_last: bool) -> list[Finding]:
    try:
        tail = read_log(log)
    except CorruptIndex as error:
        return [_finding(error)]
    except FileNotFoundError:
        return [Finding(str(log), "it is missing")]
    except OSError as error:
        return [Finding(str(log), f"it cannot be read ({error.strerror})")]
    if tail.damage is not None:
        return [_finding(CorruptIndex(tail.damage))]
    if not is_last and tail.end < size_of(log):
        return [Finding(str(log), f"it is damaged at byte {tail.end}")]
    return []


def _finding(error: CorruptIndex) -> Finding:
    file, _, problem = str(error).partition(": ")
    return Finding(file, problem)


def _logs(root: Path, manifest: Manifest) -> list[Path]:
    """Return the logs that there should be, in order; those behind the last one with records hold nothing."""
    found = numbered((root / LOGS).glob("*.log"))
    last = max((int(log.stem) for log in found if size_of(log) > EMPTY_LOG_BYTES), default=0)
    return [log_path(root, number) for number in range(manifest.log_floor, max(last, manifest.log_floor) + 1)]
