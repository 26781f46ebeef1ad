"""Objects in a folder: written whole or not at all, served only when they are proven right.

Everything that goes wrong is counted and becomes a miss.  A wrong object is removed, so that the next store writes it
again; one that another key or release may still open is left until a store of the same object replaces it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pancake_lmcache.counts import Counts
from pancake_lmcache.frame import CODEC_RAW, Buffer, Identity, Refusal, Refused, Sealer
from pancake_lmcache.packing import AS_IS, Packing
from pancake_lmcache.space import OBJECT_SUFFIX, NoRoom, Reservation, Space

#: A link or a pipe under an object's name is not followed and not waited for.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class ObjectFolder:
    """Sealed objects in one folder.  Thread-safe, and safe beside other processes on the same folder."""

    def __init__(
        self, space: Space, sealer: Sealer, counts: Counts, *, on_removed: Callable[[list[str]], None] | None = None
    ) -> None:
        """Count the folder and bring it under its cap; a folder that cannot be used now is tried again by each store.

        Args:
            space: The folder and its cap.
            sealer: How objects are sealed.
            counts: Where misses and drops are counted.
            on_removed: Told the names of objects that went, from the thread that removed them.
        """
        self._space = space
        self._sealer = sealer
        self._counts = counts
        self._on_removed = on_removed or (lambda names: None)
        try:
            self._told(space.recount())
        except OSError as error:
            counts.add("folder_unusable", detail=str(error))

    @staticmethod
    def name_of(identity: Identity) -> str:
        """Return the file name of an object."""
        return identity.name() + OBJECT_SUFFIX

    def has_all(self, wanted: list[tuple[Identity, Packing]]) -> list[bool]:
        """Say which objects are there, as `has` does."""
        return [self.has(identity, packing) for identity, packing in wanted]

    def has(self, identity: Identity, packing: Packing = AS_IS) -> bool:
        """Say whether an object is there that looks right from its header and size.  Marks it as used."""
        try:
            with self._open(identity) as (fd, num_bytes):
                head = os.pread(fd, self._sealer.header_bytes(identity), 0)
                self._sealer.check_header(identity, head, total_bytes=num_bytes, codecs=packing.codecs)
                self._space.touch(fd)
        except Refused as refused:
            self._refuse(identity, refused.refusal)
        except FileNotFoundError:
            pass  # the plain miss: never stored, or evicted
        except OSError as error:
            self._counts.add("unreadable", detail=str(error.strerror))
        else:
            return True
        return False

    def load(self, identity: Identity, payload: memoryview, packing: Packing = AS_IS) -> bool:
        """Fill `payload` and say whether it is right; what it holds after `False` is not to be used."""
        try:
            with self._open(identity) as (fd, num_bytes):
                head = os.pread(fd, self._sealer.header_bytes(identity), 0)
                found = self._sealer.check_header(identity, head, total_bytes=num_bytes, codecs=packing.codecs)
                if found.raw_bytes != len(payload):  # told apart before any of it goes to its place
                    raise Refused(Refusal.SIZE)
                in_place = found.codec == CODEC_RAW and not self._sealer.encrypts
                body = payload if in_place else memoryview(bytearray(found.body_bytes))
                if _read(fd, body, len(head)) != len(body):
                    raise Refused(Refusal.SIZE)
                opened = self._sealer.open(identity, head, body, codecs=packing.codecs)
                if not in_place:
                    packing.unpack(found.codec, opened, payload)
                self._space.touch(fd)
        except Refused as refused:
            self._refuse(identity, refused.refusal)
        except FileNotFoundError:
            self._counts.add("gone")
        except OSError as error:
            self._counts.add("unreadable", detail=str(error.strerror))
        else:
            return True
        return False

    def store(self, identity: Identity, payload: Buffer, packing: Packing = AS_IS) -> int | None:
        """Write an object unless it is there; return the bytes written (0: it was there), or `None` if it was dropped.

        Whatever is under its name but is not this object, going by header and size, is replaced.
        """
        if self._stands(identity, len(payload), packing):
            return 0
        codec, packed = packing.pack(payload)
        head, body = self._sealer.seal(identity, packed, codec=codec, raw_bytes=len(payload))
        num_bytes = len(head) + len(body)
        try:
            reservation = self._space.reserve(num_bytes)
        except NoRoom:
            self._counts.add("no_room", detail=f"{num_bytes} bytes do not fit")
            return None
        except OSError as error:
            self._count_failed_store(error)
            return None
        is_written = self._fill(reservation, identity, [memoryview(head), memoryview(body)])
        self._told(reservation.evicted)
        return num_bytes if is_written else None

    def delete(self, identity: Identity) -> bool:
        """Remove an object; say whether it was there and is gone."""
        try:
            return self._space.remove(self._path(identity)) is not None
        except OSError as error:
            self._counts.add("not_removed", detail=str(error.strerror))
            return False

    def _fill(self, reservation: Reservation, identity: Identity, parts: list[memoryview]) -> bool:
        is_done = False
        try:
            _write(reservation.fd, parts)
            self._space.commit(reservation, self._path(identity))
            is_done = True
        except OSError as error:
            self._count_failed_store(error)
        finally:
            if not is_done:
                self._space.abandon(reservation)
        return is_done

    def _path(self, identity: Identity) -> Path:
        return self._space.root / self.name_of(identity)

    @contextmanager
    def _open(self, identity: Identity) -> Iterator[tuple[int, int]]:
        """Yield descriptor and size of an object's file."""
        try:
            fd = os.open(self._path(identity), _READ_FLAGS)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Refused(Refusal.FOREIGN) from error
            raise
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise Refused(Refusal.FOREIGN)
            yield fd, facts.st_size
        finally:
            os.close(fd)

    def _stands(self, identity: Identity, payload_bytes: int, packing: Packing) -> bool:
        """Say whether a store can be left out; what is in its way is counted."""
        try:
            with self._open(identity) as (fd, num_bytes):
                head = os.pread(fd, self._sealer.header_bytes(identity), 0)
                found = self._sealer.check_header(identity, head, total_bytes=num_bytes, codecs=packing.codecs)
                if found.raw_bytes == payload_bytes:
                    self._space.touch(fd)
                    return True
                raise Refused(Refusal.SIZE)
        except Refused as refused:
            self._counts.add("rewritten", detail=refused.refusal.value)
        except OSError:
            pass  # not there or not readable: writing it is the way to know
        return False

    def _refuse(self, identity: Identity, refusal: Refusal) -> None:
        self._counts.add(f"refused_{refusal.value}", detail=self.name_of(identity))
        if not refusal.may_be_of_use and self.delete(identity):
            self._counts.add("removed")
            self._on_removed([self.name_of(identity)])

    def _told(self, evicted: list[str]) -> None:
        if evicted:
            self._counts.add("evicted", len(evicted))
            self._on_removed(evicted)

    def _count_failed_store(self, error: OSError) -> None:
        self._counts.add("disk_full" if error.errno in _FULL else "store_failed", detail=str(error.strerror))


def _read(fd: int, place: memoryview, offset: int) -> int:
    """Fill `place` from a file, from `offset` on; return how many bytes there were."""
    done = 0
    while done < len(place):
        count = os.preadv(fd, [place[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _write(fd: int, parts: list[memoryview]) -> None:
    offset = 0
    for part in parts:
        done = 0
        while done < len(part):
            count = os.pwrite(fd, part[done:], offset)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += count
            offset += count
