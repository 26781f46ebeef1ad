"""Makes this process's disk a slow one: the kernel lets it begin so many reads a second, and holds the others back.

It takes control groups (`blkio` of version 1, or `io` of version 2) and the right to make one, which root has.  The
kernel counts in slices of a tenth of a second, so that as many reads as fit into one may come at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import ConfigError

logger = logging.getLogger(__name__)

_ROOT: Final = Path("/")
_REMEDY: Final = "run it as root on Linux with control groups, or leave `--reads-per-s` out"
_PROCESSES: Final = "cgroup.procs"


@dataclass(frozen=True, slots=True)
class _Groups:
    """The group that this process is in, the one below which another is made, and how a limit is written there."""

    own: Path
    parent: Path
    file_name: str
    line: str


@contextlib.contextmanager
def limited_reads(folder: Path, reads_per_s: int, *, root: Path = _ROOT) -> Iterator[None]:
    """Let all threads of this process begin at most `reads_per_s` reads a second on the disk that `folder` lies on.

    What the system's cache has is not read and not counted; other processes are not limited, but for those started
    meanwhile.  Afterwards the process is in the group that it was in.  Not for two threads at once.

    Args:
        folder: Any folder on that disk.
        reads_per_s: At least 1.
        root: Where the system's files are found.

    Raises:
        ConfigError: if the number is out of range, or the system cannot do it or does not allow it.
    """
    if reads_per_s < 1:
        raise ConfigError(f"reads_per_s: got {reads_per_s}, allowed is 1 or more")
    try:
        groups, device = _groups(root), _disk_of(folder, root)
        group = Path(tempfile.mkdtemp(prefix="pancake-bench-", dir=groups.parent))
    except OSError as exc:
        raise _refusal(exc) from exc
    try:
        try:
            (group / groups.file_name).write_text(groups.line.format(device=device, reads_per_s=reads_per_s))
            _enter(group)
        except OSError as exc:
            raise _refusal(exc) from exc
        yield
    finally:
        _enter(groups.own)
        _remove(group)


def _refusal(exc: OSError) -> ConfigError:
    return ConfigError(f"reads of a disk could not be limited: {exc}; {_REMEDY}")


def _enter(group: Path) -> None:
    (group / _PROCESSES).write_text(f"{os.getpid()}\n")


def _remove(group: Path) -> None:
    try:
        group.rmdir()
    except OSError as exc:  # a process that was started meanwhile is still in it
        logger.warning("a control group is left behind, and what runs in it stays limited: %s", exc)


def _groups(root: Path) -> _Groups:
    """Find the control groups that can limit reads."""
    own = _own_groups(root)
    for mount in (root / "proc/self/mountinfo").read_text().splitlines():
        place, _, rest = mount.partition(" - ")
        inside, where = place.split()[3:5]
        kind, _, options = rest.split()[:3]
        folder = root / where.lstrip("/")
        if kind == "cgroup" and "blkio" in options.split(","):
            here = _below(folder, inside, own.get("blkio", ""))
            return _Groups(here, here, "blkio.throttle.read_iops_device", "{device} {reads_per_s}")
        if kind == "cgroup2":
            here = _below(folder, inside, own.get("", ""))
            parent = here if here == folder else here.parent  # a group with processes in it may not have limited ones
            if "io" in (parent / "cgroup.subtree_control").read_text().split():
                return _Groups(here, parent, "io.max", "{device} riops={reads_per_s}")
    raise ConfigError(f"no control group of this system limits reads (neither `blkio` nor `io` is there); {_REMEDY}")


def _own_groups(root: Path) -> dict[str, str]:
    """Return the path of this process's group by controller; that of version 2 is under an empty name."""
    lines = (root / "proc/self/cgroup").read_text().splitlines()
    return {name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")}


def _below(folder: Path, inside: str, path: str) -> Path:
    """Return where a group's files are, of a hierarchy whose part `inside` is mounted at `folder`."""
    found = folder / path.removeprefix(inside.rstrip("/")).lstrip("/")
    if not path.startswith(inside) or not os.access(found / _PROCESSES, os.W_OK):
        raise ConfigError(
            f"the control group of this process, {path or 'none'}, is not to be seen or to be changed here; {_REMEDY}"
        )
    return found


def _disk_of(folder: Path, root: Path) -> str:
    """Return `major:minor` of the whole disk that a folder lies on, since limits are no partition's."""
    number = folder.stat().st_dev
    entry = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        raise ConfigError(
            f"{folder} lies on no disk that the system tells of (tmpfs, overlay, network, btrfs, ZFS); "
            "name a folder that does by TMPDIR"
        )
    whole = entry.resolve().parent if (entry / "partition").exists() else entry
    return (whole / "dev").read_text().strip()
