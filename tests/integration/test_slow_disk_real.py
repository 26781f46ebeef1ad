"""The kernel really holds back the reads of a process whose disk was made slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.slow_disk import limited_reads

pytestmark = pytest.mark.real

_PAGE_BYTES = 4_096
_READS = 300
_READS_PER_S = 200


def _read_cold(path: Path) -> float:
    """Read pages that lie far from each other, none of them from the system's cache; return the seconds it took."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        started_s = time.perf_counter()
        for number in range(_READS):
            assert os.pread(file, _PAGE_BYTES, number * 64 * _PAGE_BYTES)
        return time.perf_counter() - started_s
    finally:
        os.close(file)


def test_no_more_reads_begin_than_were_allowed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(_READS * 64 * _PAGE_BYTES))
        os.fsync(file.fileno())
    group = Path("/proc/self/cgroup").read_text()
    try:
        with limited_reads(tmp_path, _READS_PER_S):
            assert Path("/proc/self/cgroup").read_text() != group
            slow_s = _read_cold(path)
    except ConfigError as exc:
        pytest.skip(f"beyond this system: {exc}")
    assert Path("/proc/self/cgroup").read_text() == group
    # Not a measure of speed: a limit that holds cannot let them through sooner, but for a slice of a tenth of a second.
    assert slow_s > (_READS - 2 * _READS_PER_S * 0.1) / _READS_PER_S
