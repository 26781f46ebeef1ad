"""The room on disk: one cap over everything in a folder, for all processes that write there and over restarts.

A small file in the folder holds how many bytes are taken; it is changed only under its lock.  When something new does
not fit, the folder is counted anew and what was used longest ago is removed.  A file under way is made at its full size
while the lock is held, so that the count is never below what will be there.  Files of other programs count, since they
take room, but only our own and those of LMCache's plain adapter are ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

OBJECT_SUFFIX: Final = ".pkv"
TEMP_SUFFIX: Final = ".pkv-new"

_BOOKS_NAME: Final = ".pancake-tier"
_BOOKS: Final = struct.Struct("<8sQQ")
_BOOKS_MAGIC: Final = b"pkbooks1"
#: As LMCache's plain adapter names its files: model, rank, group, hash, salt.
_PLAIN_FILE: Final = re.compile(r".+@0x[0-9a-f]{8,}@[0-9a-f]+@[0-9a-f]+(@[^@]*)?\.(data|tmp)")
#: After a clean-up this share of the cap is free, so that not every store begins with counting the folder.
_SLACK: Final = 0.05
_LOCK_WAIT_S: Final = 5.0
_LOCK_PAUSE_S: Final = 0.005
#: A wrong object is removed while somebody waits for a lookup; if that takes longer, the next store replaces it.
_REMOVE_WAIT_S: Final = 0.25
_MAX_STAMP: Final = 2**63 - 1
NO_CAP: Final = 2**62


class NoRoom(Exception):
    """The object does not fit under the cap, even with everything removed that may be."""


@dataclass(slots=True)
class Reservation:
    """Room that was taken: a locked file under way, to be filled and committed, or given up."""

    temp: Path
    fd: int
    num_bytes: int
    evicted: list[str] = field(default_factory=list)
    """Names of what was removed for it."""


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    num_bytes: int
    mtime_ns: int
    removable: bool


@dataclass(slots=True)
class _Books:
    fd: int
    used: int
    stamp: int
    """The youngest time stamp of any use: new ones are younger, whatever the clock says."""

    def save(self) -> None:
        """Write the numbers down for all processes."""
        self.used = max(0, self.used)
        os.pwrite(self.fd, _BOOKS.pack(_BOOKS_MAGIC, self.used, min(self.stamp, _MAX_STAMP)), 0)


class Space:
    """Room in one folder under a cap.  Thread-safe, and safe beside other processes on the same folder."""

    def __init__(self, root: Path, *, cap_bytes: int = NO_CAP, lock_wait_s: float = _LOCK_WAIT_S) -> None:
        """Name the folder; nothing is touched.

        Args:
            root: The folder; made when the first room is taken.
            cap_bytes: Most bytes that all files in it may have together.
            lock_wait_s: How long to wait for another process, in seconds.
        """
        self.root = root
        self.cap_bytes = cap_bytes
        self._lock_wait_s = lock_wait_s
        self._in_process = threading.Lock()
        self._stamp = 0
        self._stamp_lock = threading.Lock()

    def recount(self) -> list[str]:
        """Count the folder anew, leftovers of earlier runs included, and remove what is over the cap; return its names.

        Raises:
            OSError: if the folder cannot be used.
            TimeoutError: if another process keeps the lock.
        """
        with self._books() as books:
            return self._make_room(books, 0)

    def used_bytes(self) -> int:
        """Return how many bytes are taken, by all processes; 0 if the folder cannot be read."""
        try:
            with open(self.root / _BOOKS_NAME, "rb") as file:
                magic, used, _ = _BOOKS.unpack(file.read(_BOOKS.size))
        except (OSError, struct.error):
            return 0
        return used if magic == _BOOKS_MAGIC else 0

    def reserve(self, num_bytes: int) -> Reservation:
        """Take room and return the file to fill.

        Raises:
            NoRoom: if it cannot fit under the cap.
            OSError: if the folder cannot be used or the disk is full.
            TimeoutError: if another process keeps the lock.
        """
        with self._books() as books:
            evicted: list[str] = []
            if books.used + num_bytes > self.cap_bytes:
                evicted = self._make_room(books, num_bytes)
                if books.used + num_bytes > self.cap_bytes:
                    raise NoRoom
            books.used += num_bytes
            books.save()  # before the file is there: a process that dies here leaves the count too high, never too low
            temp = self.root / f"{uuid.uuid4().hex}{TEMP_SUFFIX}"
            try:
                fd = _new_file(temp, num_bytes)
            except OSError:
                books.used -= num_bytes
                books.save()
                raise
            return Reservation(temp, fd, num_bytes, evicted)

    def commit(self, reservation: Reservation, path: Path) -> None:
        """Put the filled file in its place, instead of whatever is there.

        Raises:
            OSError: if that fails; the reservation is to be abandoned then.
            TimeoutError: if another process keeps the lock; likewise.
        """
        with self._books() as books:  # a file that moves while the folder is counted could be counted nowhere
            books.stamp = self.touch(reservation.fd)
            replaced = _size_of(path)
            os.replace(reservation.temp, path)
            books.used -= replaced
            books.save()
        os.close(reservation.fd)

    def abandon(self, reservation: Reservation) -> None:
        """Give the room back.  Never raises."""
        try:
            with self._books() as books:
                reservation.temp.unlink(missing_ok=True)
                books.used -= reservation.num_bytes
                books.save()
        except OSError as error:  # its lock is given up below: whoever counts next removes it
            logger.debug("%s stays for now: %s", reservation.temp.name, error)
        finally:
            os.close(reservation.fd)

    def remove(self, path: Path) -> int | None:
        """Remove a file; return how many bytes came free, or `None` if it was not there.

        Raises:
            OSError: if it cannot be removed.
            TimeoutError: if another process keeps the lock.
        """
        with self._books(min(_REMOVE_WAIT_S, self._lock_wait_s)) as books:
            num_bytes = _size_of(path)
            try:
                path.unlink()
            except FileNotFoundError:
                return None
            books.used -= num_bytes
            books.save()
            return num_bytes

    def touch(self, fd: int) -> int:
        """Mark an open object as used last of all; return the time stamp.  Never raises."""
        with self._stamp_lock:
            stamp = self._stamp = min(max(time.time_ns(), self._stamp + 1), _MAX_STAMP)
        with contextlib.suppress(OSError):  # a folder that is only readable
            os.utime(fd, ns=(stamp, stamp))
        return stamp

    @contextlib.contextmanager
    def _books(self, wait_s: float | None = None) -> Iterator[_Books]:
        """Yield the numbers, locked against other threads and processes."""
        until = time.monotonic() + (self._lock_wait_s if wait_s is None else wait_s)
        if not self._in_process.acquire(timeout=max(0.0, until - time.monotonic())):
            raise _too_late()
        try:
            with self._locked_books(until) as books:
                yield books
        finally:
            self._in_process.release()

    @contextlib.contextmanager
    def _locked_books(self, until: float) -> Iterator[_Books]:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.root / _BOOKS_NAME, flags, 0o600)
        try:
            _lock(fd, until)
            data = os.pread(fd, _BOOKS.size, 0)
            magic, used, stamp = _BOOKS.unpack(data) if len(data) == _BOOKS.size else (b"", 0, 0)
            books = _Books(fd, used, stamp)
            if magic != _BOOKS_MAGIC:
                books.used = sum(found.num_bytes for found in self._scan(books))
                books.save()
            with self._stamp_lock:
                self._stamp = books.stamp = max(self._stamp, books.stamp)
            yield books
            with self._stamp_lock:
                self._stamp = max(self._stamp, books.stamp)  # counting may have met a younger one
        finally:
            os.close(fd)

    def _make_room(self, books: _Books, num_bytes: int) -> list[str]:
        """Count, then remove what was used longest ago until `num_bytes` fit; return the names of what went."""
        found = self._scan(books)
        books.used = sum(one.num_bytes for one in found)
        evicted: list[str] = []
        if books.used + num_bytes > self.cap_bytes:
            # What can never fit must not empty the folder.
            fixed = sum(one.num_bytes for one in found if not one.removable)
            goal = int(self.cap_bytes * (1.0 - _SLACK)) - num_bytes
            if goal < fixed:
                goal = self.cap_bytes - num_bytes
            if goal >= fixed:
                evicted = _evict(books, found, goal)
        books.save()
        return evicted

    def _scan(self, books: _Books) -> list[_Found]:
        """Return all files; remove those that a process which is gone left under way."""
        result: list[_Found] = []
        with os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name == _BOOKS_NAME:
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # gone meanwhile
                if not stat.S_ISREG(facts.st_mode):
                    continue
                path = Path(entry.path)
                if entry.name.endswith(TEMP_SUFFIX):
                    if not _remove_orphan(path):
                        result.append(_Found(path, facts.st_size, facts.st_mtime_ns, removable=False))
                    continue
                ours = entry.name.endswith(OBJECT_SUFFIX)
                if ours:
                    books.stamp = max(books.stamp, min(facts.st_mtime_ns, _MAX_STAMP))
                removable = ours or _PLAIN_FILE.fullmatch(entry.name) is not None
                result.append(_Found(path, facts.st_size, facts.st_mtime_ns, removable=removable))
        return result


def _lock(fd: int, until: float) -> None:
    """Lock, but do not wait for ever: the other process may be frozen."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise _too_late() from None
            time.sleep(_LOCK_PAUSE_S)
        else:
            return


def _too_late() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "another process or thread keeps the folder's lock")


def _evict(books: _Books, found: list[_Found], goal: int) -> list[str]:
    evicted: list[str] = []
    for one in sorted((one for one in found if one.removable), key=lambda one: (one.mtime_ns, one.path.name)):
        if books.used <= goal:
            break
        try:
            one.path.unlink()
        except FileNotFoundError:
            pass
        except OSError:
            continue  # not ours to remove; the next one may be
        books.used -= one.num_bytes
        evicted.append(one.path.name)
    return evicted


def _new_file(path: Path, num_bytes: int) -> int:
    """Make a locked file of this size; the lock says that somebody still writes it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, num_bytes)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd


def _remove_orphan(path: Path) -> bool:
    """Remove a file under way whose writer is gone; say whether it was one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
