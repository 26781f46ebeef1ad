"""The write-ahead log: what was put and deleted since the last flush, one checked record for each call.

A record is `magic, length, checksum, number, synced` and its payload; `synced` is up to where the log was on the
device when the record was appended.  A log that ends in the middle of a record was cut off by a crash, and what stands
there was never acknowledged.  A bad record *before* a place that was synced is damage, and is said.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from pancake_langgraph._errors import CorruptIndex, InvalidItem, RetrievalError
from pancake_langgraph.retrieval.base import Namespace
from pancake_langgraph.retrieval.disk import Disk, write_trouble

#: When a call returns: `sync` before anybody sees what it wrote and with a sync of its own, `group` after a sync that
#: it may share, `none` when the system has it: a killed process loses nothing then, a machine without power may.
Ack = Literal["sync", "group", "none"]
MAX_RECORD_BYTES: Final = 1 << 30
_HEADER: Final = b"PCKWAL\x00\x01"
#: Size of a log without records.
EMPTY_LOG_BYTES: Final = len(_HEADER)
_MAGIC: Final = b"\xf5PcR"
_HEAD: Final = struct.Struct("<4sIIQQ")
_SEALED: Final = struct.Struct("<IQQ")


class LogItem(msgspec.Struct, array_like=True, frozen=True):
    """An item as it stands in log and delta: its value as JSON, its vectors as float32 one after the other."""

    namespace: Namespace
    key: str
    created_at_s: float
    updated_at_s: float
    expires_at_s: float | None
    value: bytes
    vectors: bytes


class Operation(msgspec.Struct, array_like=True, frozen=True):
    """One call: what it puts, and what it deletes."""

    puts: list[LogItem] = []
    deletes: list[tuple[Namespace, str]] = []


@dataclass(frozen=True, slots=True)
class Record:
    """An operation and its number."""

    seq: int
    operation: Operation


@dataclass(frozen=True, slots=True)
class LogTail:
    """What a log holds from some place on: whole records, and where they end.

    `damage` says what is wrong at `end`, where something acknowledged is not what was written.
    """

    records: Sequence[Record]
    end: int
    damage: str | None


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Operation).decode


def encode(operation: Operation) -> bytes:
    """Return an operation as a record's payload.

    Raises:
        InvalidItem: if it is larger than one record may be.
    """
    payload = _encode(operation)
    if len(payload) > MAX_RECORD_BYTES:
        raise InvalidItem(f"got {len(payload)} bytes in one call, allowed are {MAX_RECORD_BYTES}; split the call")
    return payload


def read_log(path: Path, offset: int = 0) -> LogTail:
    """Return what stands in a log from `offset` on, which is 0 or the end of an earlier tail.

    Raises:
        FileNotFoundError: if there is no such log.
        CorruptIndex: if it is no log.
        RetrievalError: if a later version wrote it.
    """
    with path.open("rb", buffering=0) as file:
        if offset == 0:
            header = file.read(len(_HEADER))
            if len(header) < len(_HEADER):
                return LogTail((), 0, None)  # its writer was killed while making it
            _check_header(header, path)
            offset = len(_HEADER)
        file.seek(offset)
        data = file.readall()
    records: list[Record] = []
    at = 0
    while (found := _record(data, at, path)) is not None:
        record, at, _ = found
        records.append(record)
    return LogTail(records, offset + at, _damage(data, at, offset, path))


def salvage(path: Path) -> Sequence[Record]:
    """Return all whole records of a damaged log.

    Raises:
        CorruptIndex: if it is no log.
    """
    data = path.read_bytes()
    records: list[Record] = []
    at = len(_HEADER)
    while (at := data.find(_MAGIC, at)) >= 0:
        found = _record(data, at, path)
        if found is None:
            at += 1
        else:
            records.append(found[0])
            at = found[1]
    return records


class LogWriter:
    """Appends to one log.  `append` is called under the writer's lock, `wait` from any thread without it."""

    def __init__(self, path: Path, disk: Disk, *, end: int = 0) -> None:
        """Open or make the log at `path` and cut off what stands behind `end`.

        Raises:
            OSError: if it cannot be written.
        """
        self._disk, self.path = disk, path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._sync_lock = threading.Lock()
        self._broken: str | None = None
        try:
            os.ftruncate(self._fd, end)
            if end < len(_HEADER):
                disk.append(self._fd, _HEADER, 0)
                end = len(_HEADER)
            disk.sync(self._fd)
            disk.sync_folder(path.parent)
        except OSError:
            os.close(self._fd)
            raise
        self.end = self._synced = end

    @property
    def is_broken(self) -> bool:
        """Whether nobody knows what is on the device."""
        return self._broken is not None

    def check(self) -> None:
        """Refuse to go on where nobody knows what is on the device.

        Raises:
            RetrievalError: if it is so.
        """
        if self._broken:
            raise RetrievalError(self._broken)

    def append(self, seq: int, payload: bytes) -> int:
        """Write a record and return where it ends.

        Raises:
            RetrievalError: if it could not be written; the log is as it was.
        """
        self.check()
        sealed = _SEALED.pack(len(payload), seq, self._synced)
        head = _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload, zlib.crc32(sealed)), seq, self._synced)
        self._disk.point("log:append")
        try:
            self._disk.append(self._fd, head + payload, self.end)
        except OSError as error:
            try:
                os.ftruncate(self._fd, self.end)
            except OSError as second:
                self._broken = f"{self.path}: a record could neither be written nor taken back ({second}); open anew"
            raise write_trouble(error, f"{self.path}: {len(payload)} bytes could not be logged") from error
        self._disk.point("log:appended")
        self.end += len(head) + len(payload)
        return self.end

    def wait(self, end: int) -> None:
        """Return when everything up to `end` is on the device; whoever comes meanwhile shares one sync.

        Raises:
            RetrievalError: if that failed; nothing more is accepted then, because nobody knows what is on the device.
        """
        if self._synced >= end:
            return
        with self._sync_lock:
            self.check()
            if self._synced >= end or self._fd < 0:
                return
            written = self.end
            self._disk.point("log:sync")
            try:
                self._disk.sync(self._fd)
            except OSError as error:
                self._broken = f"{self.path}: the log could not be synced ({error.strerror}); close and open the index"
                raise RetrievalError(self._broken) from error
            self._synced = written
            self._disk.point("log:synced")

    def close(self) -> None:
        """Sync what is there and close.  May be called twice.

        Raises:
            RetrievalError: if it could not be synced.
        """
        try:
            if self._fd >= 0 and not self._broken:
                self.wait(self.end)
        finally:
            with self._sync_lock:
                fd, self._fd = self._fd, -1
                if fd >= 0:
                    os.close(fd)


def _check_header(header: bytes, path: Path) -> None:
    if header[:-1] != _HEADER[:-1]:
        raise CorruptIndex(f"{path}: it does not begin as a log does")
    if header[-1] > _HEADER[-1]:
        raise RetrievalError(
            f"{path}: it has format {header[-1]}, this version reads up to {_HEADER[-1]}; update pancake-langgraph"
        )


def _record(data: bytes, at: int, path: Path) -> tuple[Record, int, int] | None:
    """Return the record at a place, where it ends, and its `synced`; `None` if there is no whole one."""
    if len(data) - at < _HEAD.size:
        return None
    magic, length, checksum, seq, synced = _HEAD.unpack_from(data, at)
    start, end = at + _HEAD.size, at + _HEAD.size + length
    if magic != _MAGIC or end > len(data):
        return None
    payload = memoryview(data)[start:end]
    if zlib.crc32(payload, zlib.crc32(_SEALED.pack(length, seq, synced))) != checksum:
        return None
    try:
        return Record(seq, _decode(payload)), end, synced
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CorruptIndex(f"{path}: record {seq} is whole, but no operation ({error})") from error


def _damage(data: bytes, bad: int, offset: int, path: Path) -> str | None:
    """Say whether something acknowledged stands at or behind a place where there is no whole record."""
    at = bad
    while (at := data.find(_MAGIC, at)) >= 0:
        found = _record(data, at, path)
        if found is not None and found[2] > offset + bad:
            return f"{path}: the record at byte {offset + bad} is damaged, and record {found[0].seq} behind it is whole"
        at += 1 if found is None else found[1] - at
    return None
