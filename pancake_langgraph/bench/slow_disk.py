"""Makes this process's disk a slow one: the kernel lets it begin so many reads a second, and holds the others back.

That is how cloud providers meter their volumes, so a fast disk can stand for one that is rented.  It takes control
groups (`blkio` of version 1, or `io` of version 2) and the right to make one, which root has.  The kernel counts in
slices of a tenth of a second, so that as many reads as fit into one may come at once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import ConfigError

_ROOT: Final = Path("/")
_REMEDY: Final = "run it as root on Linux with control groups, or leave `--reads-per-s` out"


@dataclass(frozen=True, slots=True)
class _Groups:
    """Where groups are made, where this process was before, and how a group's limit is written."""

    folder: Path
    before: Path
    file_name: str
    line: str


@contextlib.contextmanager
def limited_reads(folder: Path, reads_per_s: int, *, root: Path = _ROOT) -> Iterator[None]:
    """Let all threads of this process begin at most `reads_per_s` reads a second on the disk that `folder` lies on.

    What the system's cache has is not read and not counted; other processes are not limited.  Not for two at once.

    Args:
        folder: Any folder on that disk.
        reads_per_s: At least 1.
        root: Where the system's files are found.

    Raises:
        ConfigError: if the number is out of range, or the system cannot do it or does not allow it.
    """
    if reads_per_s < 1:
        raise ConfigError(f"reads_per_s: got {reads_per_s}, allowed is 1 or more")
    groups, device = _groups(root), _disk_of(folder, root)
    group = groups.folder / f"pancake-bench-{os.getpid()}"
    try:
        try:
            group.mkdir()
            (group / groups.file_name).write_text(groups.line.format(device=device, reads_per_s=reads_per_s))
            _enter(group)
        except OSError as exc:
            raise ConfigError(f"reads of disk {device} could not be limited: {exc}; {_REMEDY}") from exc
        yield
    finally:
        _leave(group, groups.before)


def _enter(group: Path) -> None:
    (group / "cgroup.procs").write_text(f"{os.getpid()}\n")


def _leave(group: Path, before: Path) -> None:
    if group.is_dir():
        _enter(before)
        with contextlib.suppress(OSError):  # a process that was started meanwhile is still in it
            group.rmdir()


def _groups(root: Path) -> _Groups:
    """Find the control groups that can limit reads."""
    try:
        mounts = [line.split() for line in (root / "proc/self/mounts").read_text().splitlines()]
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError as exc:
        raise ConfigError(f"this system has no control groups ({exc}); {_REMEDY}") from exc
    own = {names: path.lstrip("/") for _, names, path in (line.split(":", 2) for line in lines)}
    for _, where, kind, options, *_ in mounts:
        folder = root / where.lstrip("/")
        if kind == "cgroup" and "blkio" in options.split(","):
            path = next((path for names, path in own.items() if "blkio" in names.split(",")), "")
            return _Groups(folder, folder / path, "blkio.throttle.read_iops_device", "{device} {reads_per_s}")
        if kind == "cgroup2" and "io" in (folder / "cgroup.subtree_control").read_text().split():
            return _Groups(folder, folder / own.get("", ""), "io.max", "{device} riops={reads_per_s}")
    raise ConfigError(f"no control group of this system limits reads (neither `blkio` nor `io` is there); {_REMEDY}")


def _disk_of(folder: Path, root: Path) -> str:
    """Return `major:minor` of the whole disk that a folder lies on, since limits are no partition's."""
    number = folder.stat().st_dev
    entry = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        raise ConfigError(
            f"{folder} lies on no disk of its own (tmpfs, overlay, network); name one that does by TMPDIR"
        )
    whole = entry.resolve().parent if (entry / "partition").exists() else entry
    return (whole / "dev").read_text().strip()
