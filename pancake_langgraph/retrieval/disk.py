"""The file system as an index uses it: whole files, renames, syncs, and named points between them.

Tests put another `Disk` in: one that is full, or one that ends the process at a point.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from pancake_langgraph._errors import RetrievalError

_CHUNK: Final = 1 << 20
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class FileMark:
    """A file as it was written: its name within its folder, its size in bytes, and its checksum (XXH3, 64 bits)."""

    name: str
    size: int
    checksum: str


class Disk:
    """Writes files durably.  Thread-safe; holds nothing."""

    def point(self, name: str) -> None:
        """Mark a step of log, publish or merge.  Does nothing here."""

    def append(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`.

        Raises:
            OSError: if not all could be written; some of it may be there.
        """
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, fd: int) -> None:
        """Return when what was written to `fd` is on the device."""
        os.fdatasync(fd)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in `folder` are on the device."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def write(self, path: Path, chunks: Iterable[Buffer]) -> FileMark:
        """Write a new file, sync it and return its mark.

        Raises:
            OSError: as the system says it; the file may be there in part.
        """
        seal = xxhash.xxh3_64()
        size = 0
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
                seal.update(view)
                self.append(fd, view, size)
                size += len(view)
            self.sync(fd)
        finally:
            os.close(fd)
        return FileMark(path.name, size, seal.hexdigest())

    def mark(self, path: Path) -> FileMark:
        """Return the mark of a file that something else wrote, after syncing it."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.sync(fd)
        finally:
            os.close(fd)
        return FileMark(path.name, path.stat().st_size, checksum_of(path))

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder its final name and sync the folder around it."""
        source.replace(target)
        self.sync_folder(target.parent)

    def remove(self, path: Path) -> None:
        """Remove a file or folder.  What cannot be removed stays; the next writer that opens the index tries again."""
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def checksum_of(path: Path) -> str:
    """Return the checksum of a file's bytes.

    Raises:
        OSError: if it cannot be read.
    """
    seal = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            seal.update(chunk)
    return seal.hexdigest()


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there (any more)."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_trouble(error: OSError, what: str) -> RetrievalError:
    """Return the typed error for a write that failed, with what to do about it."""
    if error.errno in _NO_ROOM:
        return RetrievalError(
            f"{what}: no room on the disk ({error.strerror}); what was acknowledged is kept; free some space"
        )
    return RetrievalError(f"{what}: {error.strerror or error}; what was acknowledged is kept")
