"""A disk is made slow by the kernel, and is what it was afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.slow_disk import limited_reads

FIRST = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n/dev/vda / ext4 rw 0 0\n"
V1 = FIRST + "cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0\n"
V2 = FIRST + "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"


class FakeSystem:
    """The files of a system below a folder: control groups and disks, without a kernel behind them."""

    def __init__(self, root: Path, *, mounts: str, own: str, subtree: str = "cpu io") -> None:
        self.root = root
        self.write("proc/self/mounts", mounts)
        self.write("proc/self/cgroup", own)
        self.write("sys/fs/cgroup/cgroup.subtree_control", subtree)
        for group in ("blkio/here", "cpu", "here/inner"):
            self.write(f"sys/fs/cgroup/{group}/cgroup.procs", "")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def read(self, name: str) -> str:
        return (self.root / "sys/fs/cgroup" / name).read_text()

    def add_disk(self, folder: Path, *, partition: bool) -> None:
        """Let `folder` lie on a disk, or on a partition of it."""
        number = folder.stat().st_dev
        self.write("sys/devices/block/sda/dev", "8:0\n")
        entry = self.root / "sys/devices/block/sda"
        if partition:
            self.write("sys/devices/block/sda/sda2/dev", "8:2\n")
            self.write("sys/devices/block/sda/sda2/partition", "2\n")
            entry = entry / "sda2"
        link = self.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
        link.parent.mkdir(parents=True)
        link.symlink_to(entry)


GROUP = f"pancake-bench-{os.getpid()}"


@pytest.mark.parametrize("partition", [False, True])
def test_version_one_limits_the_whole_disk_and_this_process_goes_back_to_where_it_was(
    tmp_path: Path, partition: bool
) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1, own="7:blkio:/here\n1:cpu:/\n0::/\n")
    system.add_disk(tmp_path, partition=partition)
    with limited_reads(tmp_path, 500, root=system.root):
        assert system.read(f"blkio/{GROUP}/blkio.throttle.read_iops_device") == "8:0 500"
        assert system.read(f"blkio/{GROUP}/cgroup.procs") == f"{os.getpid()}\n"
        assert system.read("blkio/here/cgroup.procs") == ""
    assert system.read("blkio/here/cgroup.procs") == f"{os.getpid()}\n"


def test_version_two_is_told_in_its_own_words(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V2, own="0::/here/inner\n")
    system.add_disk(tmp_path, partition=False)
    with limited_reads(tmp_path, 2_000, root=system.root):
        assert system.read(f"{GROUP}/io.max") == "8:0 riops=2000"
        assert system.read(f"{GROUP}/cgroup.procs") == f"{os.getpid()}\n"
    assert system.read("here/inner/cgroup.procs") == f"{os.getpid()}\n"


@pytest.mark.parametrize(
    ("mounts", "subtree"),
    [(FIRST, "io"), (V2, "cpu memory")],
    ids=["no control groups for disks", "io is not handed on"],
)
def test_a_system_that_cannot_is_refused_by_name(tmp_path: Path, mounts: str, subtree: str) -> None:
    system = FakeSystem(tmp_path / "system", mounts=mounts, own="0::/\n", subtree=subtree)
    system.add_disk(tmp_path, partition=False)
    with pytest.raises(ConfigError, match=r"neither `blkio` nor `io` is there.*leave `--reads-per-s` out"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()


def test_a_system_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no control groups"):
        limited_reads(tmp_path, 500, root=tmp_path).__enter__()


def test_a_folder_that_lies_on_no_disk_is_refused(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1, own="7:blkio:/here\n")
    with pytest.raises(ConfigError, match=r"lies on no disk of its own.*TMPDIR"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()


def test_who_may_not_make_a_group_is_told_so(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1, own="7:blkio:/here\n")
    system.add_disk(tmp_path, partition=False)
    system.write(f"sys/fs/cgroup/blkio/{GROUP}", "a file is in the way")
    with pytest.raises(ConfigError, match=r"reads of disk 8:0 could not be limited: .*exists.*; run it as root"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()
    assert system.read("blkio/here/cgroup.procs") == ""


@pytest.mark.parametrize("reads_per_s", [0, -1])
def test_no_reads_at_all_are_refused(tmp_path: Path, reads_per_s: int) -> None:
    with pytest.raises(ConfigError, match=f"got {reads_per_s}, allowed is 1 or more"):
        limited_reads(tmp_path, reads_per_s).__enter__()
