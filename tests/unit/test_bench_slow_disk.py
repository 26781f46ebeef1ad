"""A disk is made slow by the kernel, and is what it was afterwards."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.slow_disk import limited_reads

FIRST = """\
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
32 31 0:29 / /sys/fs/cgroup/cpu rw shared:3 - cgroup cgroup rw,cpu
"""
V1 = f"{FIRST}38 31 0:35 {{inside}} /sys/fs/cgroup/blkio rw,relatime shared:9 - cgroup cgroup rw,relatime,blkio\n"
V2 = f"{FIRST}38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
ME = f"{os.getpid()}\n"


class FakeSystem:
    """The files of a system below a folder: control groups and disks, without a kernel behind them."""

    def __init__(self, root: Path, *, mounts: str, own: str, subtree: str = "cpu io") -> None:
        self.root = root
        self.cgroup = root / "sys/fs/cgroup"
        self.write("proc/self/mountinfo", mounts)
        self.write("proc/self/cgroup", own)
        for group in ("", "blkio", "blkio/here", "cpu", "here", "here/inner"):
            self.write(f"sys/fs/cgroup/{group}/cgroup.procs", "")
            self.write(f"sys/fs/cgroup/{group}/cgroup.subtree_control", subtree)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def made(self) -> Path:
        """Return the one group that was made."""
        (group,) = self.cgroup.rglob("pancake-bench-*")
        return group

    def add_disk(self, folder: Path, *, partition: bool = False) -> None:
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


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove a group with its files, as the kernel does."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rmdir", shutil.rmtree)
        yield


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize(
    ("inside", "own"), [("/", "/here"), ("/docker/1", "/docker/1/here")], ids=["host", "container"]
)
def test_version_one_limits_the_whole_disk_and_this_process_goes_back_to_where_it_was(
    tmp_path: Path, inside: str, own: str, *, partition: bool
) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1.format(inside=inside), own=f"7:blkio:{own}\n1:cpu:/\n0::/\n")
    system.add_disk(tmp_path, partition=partition)
    with limited_reads(tmp_path, 500, root=system.root):
        group = system.made()
        assert group.parent == system.cgroup / "blkio/here"
        assert (group / "blkio.throttle.read_iops_device").read_text() == "8:0 500"
        assert (group / "cgroup.procs").read_text() == ME
        assert (group.parent / "cgroup.procs").read_text() == ""
    assert (group.parent / "cgroup.procs").read_text() == ME
    assert not group.exists()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(("own", "parent"), [("/here/inner", "here"), ("/", "")])
def test_version_two_makes_a_sibling_which_has_the_same_other_limits(tmp_path: Path, own: str, parent: str) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V2, own=f"0::{own}\n")
    system.add_disk(tmp_path)
    with limited_reads(tmp_path, 2_000, root=system.root):
        group = system.made()
        assert group.parent == system.cgroup / parent
        assert (group / "io.max").read_text() == "8:0 riops=2000"
        assert (group / "cgroup.procs").read_text() == ME
    assert (system.cgroup / own.lstrip("/") / "cgroup.procs").read_text() == ME
    assert not group.exists()


@pytest.mark.usefixtures("kernel")
def test_this_process_is_let_go_of_whatever_happens_meanwhile(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V2, own="0::/here/inner\n")
    system.add_disk(tmp_path)
    with pytest.raises(LookupError, match="the bench failed"), limited_reads(tmp_path, 500, root=system.root):
        raise LookupError("the bench failed")
    assert (system.cgroup / "here/inner/cgroup.procs").read_text() == ME
    assert not list(system.cgroup.rglob("pancake-bench-*"))


def test_a_group_that_something_still_runs_in_is_left_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V2, own="0::/\n")
    system.add_disk(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the next one has a name of its own
            with limited_reads(tmp_path, 500, root=system.root):
                pass
    assert len(list(system.cgroup.rglob("pancake-bench-*"))) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "pancake-bench-" in caplog.text


@pytest.mark.parametrize(
    ("mounts", "subtree"),
    [(FIRST, "io"), (V2, "cpu memory")],
    ids=["no control groups for disks", "io is not handed on"],
)
def test_a_system_that_cannot_is_refused_by_name(tmp_path: Path, mounts: str, subtree: str) -> None:
    system = FakeSystem(tmp_path / "system", mounts=mounts, own="0::/\n", subtree=subtree)
    system.add_disk(tmp_path)
    with pytest.raises(ConfigError, match=r"neither `blkio` nor `io` is there.*leave `--reads-per-s` out"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()


@pytest.mark.parametrize("own", ["7:blkio:/elsewhere\n", "7:blkio:/docker/2/here\n", "1:cpu:/\n"])
def test_a_group_that_one_could_not_go_back_to_is_not_left(tmp_path: Path, own: str) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1.format(inside="/docker/1"), own=own)
    system.add_disk(tmp_path)
    with pytest.raises(ConfigError, match=r"the control group of this process, .*, is not to be seen"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()
    assert not list(system.cgroup.rglob("pancake-bench-*"))


def test_a_system_without_such_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"could not be limited: .*No such file.*; run it as root"):
        limited_reads(tmp_path, 500, root=tmp_path).__enter__()


def test_a_folder_that_lies_on_no_disk_is_refused(tmp_path: Path) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1.format(inside="/"), own="7:blkio:/here\n")
    with pytest.raises(ConfigError, match=r"lies on no disk that the system tells of.*TMPDIR"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()


@pytest.mark.usefixtures("kernel")
def test_a_limit_that_the_kernel_refuses_is_told_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = FakeSystem(tmp_path / "system", mounts=V1.format(inside="/"), own="7:blkio:/here\n")
    system.add_disk(tmp_path)
    write = Path.write_text

    def refuse(path: Path, text: str) -> int:
        if path.name.startswith("blkio.throttle"):
            raise PermissionError("Operation not permitted")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ConfigError, match=r"could not be limited: Operation not permitted; run it as root"):
        limited_reads(tmp_path, 500, root=system.root).__enter__()
    assert not list(system.cgroup.rglob("pancake-bench-*"))


@pytest.mark.parametrize("reads_per_s", [0, -1])
def test_no_reads_at_all_are_refused(tmp_path: Path, reads_per_s: int) -> None:
    with pytest.raises(ConfigError, match=f"got {reads_per_s}, allowed is 1 or more"):
        limited_reads(tmp_path, reads_per_s).__enter__()
