"""The lock of an index's one writer."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import IndexLocked

#: For so long a dropped engine may take to stop what it merges.
_ENDING_S: Final = 10.0


class WriteLock:
    """Holds the file `LOCK` from construction to `release`.  The system lets go of it when the process ends.

    Raises:
        IndexLocked: if another process, or another engine of this one, holds it; the message names the process.
    """

    def __init__(self, root: Path) -> None:
        """Take the lock; what was dropped in this process and lets go of it anyway is waited for, nothing else."""
        path = root / "LOCK"
        #: Whether whoever holds it is about to let go.
        self.is_ending = False
        self._released = threading.Event()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _locked(fd):
                _end_what_was_dropped(fd)
                if not _locked(fd):
                    raise IndexLocked(_who_writes(root, fd))
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # who holds it is only said in messages
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Whether it was not let go of yet."""
        return self._fd >= 0

    def release(self) -> None:
        """Let go.  May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._released.set()

    def wait_released(self) -> None:
        """Return when it was let go of, or after a while."""
        self._released.wait(_ENDING_S)

    def is_of(self, fd: int) -> bool:
        """Whether it is on the file that `fd` is open on."""
        with contextlib.suppress(OSError):  # it is let go of meanwhile
            return self.is_held and os.path.sameopenfile(self._fd, fd)
        return False


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_what_was_dropped(fd: int) -> None:
    """Have engines of this process end that nobody can use any more; their cycles may keep them so far."""
    if any(lock.is_of(fd) for lock in list(_held)):
        gc.collect()
        for lock in list(_held):
            if lock.is_ending and lock.is_of(fd):
                lock.wait_released()


def _who_writes(root: Path, fd: int) -> str:
    holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    if holder == str(os.getpid()) and any(lock.is_of(fd) for lock in list(_held)):
        return (
            f"{root}: this very process ({holder}) writes to this index already, through another store or engine that "
            "was not closed; use that one, or close() it first (in a notebook, before the cell is run again)"
        )
    return (
        f"{root}: process {holder} writes to this index; there is one writer and any number of readers: "
        "open it with read_only=True, or close the other one"
    )


#: Forked children inherit the lock with the descriptor; they close it, so that it ends with its owner.
_held: weakref.WeakSet[WriteLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
