"""The kernel really holds back the reads of a process whose disk was made slow."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pancake_langgraph.bench.slow_disk import limited_reads

pytestmark = pytest.mark.real

_PAGE_BYTES = 4_096
_READS = 300
_READS_PER_S = 200


def _missing(folder: Path) -> str:
    """Return what this system lacks; empty if nothing."""
    device = folder.stat().st_dev
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        return "a disk below the folder for temporary files"
    handed_on = Path("/sys/fs/cgroup/cgroup.subtree_control")
    if os.access("/sys/fs/cgroup/blkio/cgroup.procs", os.W_OK):
        return ""
    if os.access(handed_on, os.W_OK) and "io" in handed_on.read_text().split():
        return ""
    return "control groups that limit disks, and the right to use them"


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
    if missing := _missing(tmp_path):
        pytest.skip(f"beyond this system: needs {missing}")
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(_READS * 64 * _PAGE_BYTES))
        os.fsync(file.fileno())
    group = Path("/proc/self/cgroup").read_text()
    with limited_reads(tmp_path, _READS_PER_S):
        assert Path("/proc/self/cgroup").read_text() != group
        slow_s = _read_cold(path)
    assert Path("/proc/self/cgroup").read_text() == group
    assert not list(Path("/sys/fs/cgroup").rglob("pancake-bench-*"))
    # Not a measure of speed: a limit that holds cannot let them through sooner, but for a slice of a tenth of a second.
    assert slow_s > (_READS - 2 * _READS_PER_S * 0.1) / _READS_PER_S
