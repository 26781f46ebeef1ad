"""The lock of an index's one writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from pancake_langgraph._errors import IndexLocked


class WriteLock:
    """Holds the file `LOCK` from construction to `release`.  The system lets go of it when the process ends.

    Raises:
        IndexLocked: if another process, or another engine of this one, holds it; the message names the process.
    """

    def __init__(self, root: Path) -> None:
        """Take the lock without waiting."""
        path = root / "LOCK"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise IndexLocked(
                f"{root}: process {holder} writes to this index; there is one writer and any number of readers: "
                "open it with read_only=True, or close the other one"
            ) from None
        except OSError:
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


#: Forked children inherit the lock with the descriptor; they close it, so that it ends with its owner.
_held: weakref.WeakSet[WriteLock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_in_child)
