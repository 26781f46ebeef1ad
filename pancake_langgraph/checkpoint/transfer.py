"""Threads in a file: one self-describing export, which any store and any keys can take in again.

JSON lines: a head, one line for each thread, and an end.  A thread's content is MessagePack in base64, in plain, with a
digest over id and content.  The digests find damage; they are no signature, whoever can write the file can make new
ones.  Values stay encoded all the way, so neither export nor import needs the app's classes, and a type that is not
allowed is refused when it is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ormsgpack

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, SchemaMismatch
from pancake_langgraph.checkpoint.core import Core
from pancake_langgraph.checkpoint.elements import ElementSink, Fetch, Listed, Ref, open_entries, open_refs
from pancake_langgraph.checkpoint.record import Record, place_of_element, place_of_row, place_of_write
from pancake_langgraph.checkpoint.rows import CheckpointRow, Spot, ThreadContent, WriteRow
from pancake_langgraph.checkpoint.seal import Seal

FORMAT: Final = "pancake-threads"
VERSION: Final = 1
_PRIVATE: Final = 0o600
_MEND: Final = "export anew, or take another copy of the file"

#: Told the id of each thread when it is done.
OnThread = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlainThread:
    """A thread's content, opened: each row with what its body holds, and elements by hash."""

    rows: tuple[tuple[CheckpointRow, Record], ...]
    writes: tuple[tuple[WriteRow, Ref], ...]
    elements: Mapping[bytes, bytes]


def export_threads(
    core: Core, path: Path, thread_ids: Iterable[str] | None, *, overwrite: bool, on_thread: OnThread
) -> tuple[str, ...]:
    """Write threads to a file that only its owner may read; return their ids.

    Args:
        core: Where the threads are.
        path: The file; it appears when it is complete.
        thread_ids: Which ones; `None` for all.
        overwrite: Whether a file that exists is replaced.
        on_thread: See `OnThread`.

    Raises:
        ConfigError: if the file exists, or a thread holds nothing.
        CorruptCheckpoint: if a thread cannot be read whole.
    """
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; name another file, or say that it may be overwritten (`--force`)")
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    digests: dict[str, str] = {}
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE), "w", encoding="ascii") as file:
            file.write(_line({"format": FORMAT, "version": VERSION, "encrypted": False}))
            for thread_id in core.store.threads() if thread_ids is None else dict.fromkeys(map(str, thread_ids)):
                thread = opened_thread(core, thread_id)
                if thread is None:
                    if thread_ids is None:  # deleted while the export went on
                        continue
                    raise ConfigError(f"there is no thread {thread_id!r}; `pancake threads list` shows those there are")
                content = packed_thread(thread)
                digests[thread_id] = digest_of(thread_id, content)
                item = {"thread_id": thread_id, "checkpoints": len(thread.rows), "digest": digests[thread_id]}
                file.write(_line({**item, "content": base64.b64encode(content).decode("ascii")}))
                on_thread(thread_id)
            file.write(_line({"end": True, "threads": len(digests), "digest": _digest_of_all(digests.values())}))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return tuple(digests)


def import_threads(core: Core, path: Path, thread_ids: Iterable[str] | None, *, on_thread: OnThread) -> tuple[str, ...]:
    """Take threads in from a file; return their ids.

    Everything is checked before anything is stored: digests, the end of the file, that parts fit together, and that no
    thread exists already.  Each thread is stored at once or not at all.

    Raises:
        ConfigError: if a thread exists, or is not in the file.
        CorruptCheckpoint: if the file is damaged or incomplete.
        SchemaMismatch: if it is no export, or of a later version.
    """
    wanted = None if thread_ids is None else frozenset(map(str, thread_ids))
    chosen: list[str] = []
    for thread_id, content in _read_export(path):
        regrown(unpacked_thread(content), Seal().digest)
        if wanted is None or thread_id in wanted:
            require_free(core, thread_id)
            chosen.append(thread_id)
    if wanted is not None and (missing := sorted(wanted - set(chosen))):
        raise ConfigError(f"{path} has no thread {missing[0]!r}; leave the names out to import all it has")
    for thread_id, content in _read_export(path):
        if wanted is None or thread_id in wanted:
            thread = regrown(unpacked_thread(content), core.seal.digest)
            core.store.write_thread(thread_id, sealed_thread(core, thread_id, thread), expires_at_s=core.expires_at_s())
            core.memory.forget(thread_id)
            on_thread(thread_id)
    return tuple(chosen)


def require_free(core: Core, thread_id: str) -> None:
    """Raise `ConfigError` if a thread holds something."""
    content = core.store.read_thread(thread_id)
    if content.rows or content.writes:
        raise ConfigError(f"thread {thread_id!r} exists already; delete it first, or import the others by name")


# -- a thread, opened and sealed ------------------------------------------------------------------------------------


def opened_thread(core: Core, thread_id: str) -> PlainThread | None:
    """Return a thread's whole content in plain, with hashes that depend on no key; `None` if there is none.

    Raises:
        CorruptCheckpoint: if a part is missing or does not open.
    """
    content = core.store.read_thread(thread_id)
    if not content.rows and not content.writes:
        return None
    elements = {digest: core.open_element(thread_id, digest, data) for digest, data in content.elements.items()}
    thread = PlainThread(
        tuple((row, core.record(thread_id, row)) for row in content.rows),
        tuple((write, core.ref_of(thread_id, write)) for write in content.writes),
        elements,
    )
    return regrown(thread, Seal().digest)


def sealed_thread(core: Core, thread_id: str, thread: PlainThread) -> ThreadContent:
    """Return a thread's content as the store keeps it, sealed with the newest key."""
    seal = core.seal.seal
    return ThreadContent(
        tuple(replace(row, body=seal(record.packed(), place_of_row(thread_id, row))) for row, record in thread.rows),
        tuple(
            replace(write, body=seal(ormsgpack.packb(ref.packed()), place_of_write(thread_id, write)))
            for write, ref in thread.writes
        ),
        {digest: seal(data, place_of_element(thread_id, digest)) for digest, data in thread.elements.items()},
    )


def regrown(thread: PlainThread, digest: Callable[[bytes], bytes]) -> PlainThread:
    """Return the same thread with all hashes made by `digest`.

    Raises:
        CorruptCheckpoint: if a part is missing or damaged.
    """
    values = _Regrowth(thread.elements, digest)
    rows = tuple(
        (row, replace(record, values={channel: values.ref(ref) for channel, ref in record.values.items()}))
        for row, record in thread.rows
    )
    writes = tuple((write, values.ref(ref)) for write, ref in thread.writes)
    return PlainThread(rows, writes, values.sink.plain)


class _Regrowth:
    """Stores values once more, under other hashes; what values share is visited once."""

    def __init__(self, elements: Mapping[bytes, bytes], digest: Callable[[bytes], bytes]) -> None:
        self.sink = ElementSink(digest)
        self._fetch = fetch_from(elements)
        self._entries: dict[bytes, bytes] = {}
        self._leaves: dict[bytes, bytes] = {}

    def ref(self, ref: Ref) -> Ref:
        found = open_refs({"": ref}, self._fetch)[""]
        if not isinstance(found, Listed):
            return self.sink.single(found)
        fresh = [entry for entry in dict.fromkeys(found.entries) if entry not in self._entries]
        for entry, encoding in zip(fresh, open_entries(fresh, self._fetch), strict=True):
            self._entries[entry] = self.sink.entry(encoding)
        kept: list[bytes] = []
        for leaf in found.full_leaves:
            if leaf not in self._leaves:
                break
            kept.append(self._leaves[leaf])
        moved, leaves = self.sink.list_of([self._entries[entry] for entry in found.entries], kept)
        self._leaves.update(zip(found.full_leaves, leaves, strict=True))
        return moved


def fetch_from(elements: Mapping[bytes, bytes]) -> Fetch:
    """Return a function that fetches elements' plain bytes by hash from `elements`."""

    def fetch(hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
        try:
            return {digest: elements[digest] for digest in hashes}
        except KeyError as exc:
            raise CorruptCheckpoint("stored parts of a thread are missing; restore it from a copy") from exc

    return fetch


# -- the file -------------------------------------------------------------------------------------------------------


def packed_thread(thread: PlainThread) -> bytes:
    """Return a thread's content as bytes; elements go without their hashes, which follow from them."""
    rows = [
        [*row.spot, row.parent_id, row.run_id, row.is_hidden, record.packed()]
        for row, record in sorted(thread.rows, key=lambda item: item[0].spot)
    ]
    writes = [[*w.spot, w.task_path, w.task_id, w.idx, w.channel, ref.packed()] for w, ref in thread.writes]
    return ormsgpack.packb([VERSION, rows, writes, sorted(thread.elements.values())])


def unpacked_thread(content: bytes) -> PlainThread:
    """Undo `packed_thread`.

    Raises:
        CorruptCheckpoint: if it is not one.
    """
    try:
        version, rows, writes, elements = ormsgpack.unpackb(content)
        if version != VERSION:
            raise ValueError(f"version {version}")
        return PlainThread(
            tuple(_row(*values) for values in rows),
            tuple(_write(*values) for values in writes),
            {Seal().digest(_checked(data, bytes)): data for data in elements},
        )
    except (ormsgpack.MsgpackDecodeError, TypeError, ValueError) as exc:
        raise CorruptCheckpoint(f"a thread's content is not what an export writes; {_MEND}") from exc


def _row(
    checkpoint_ns: object, checkpoint_id: object, parent_id: object, run_id: object, is_hidden: object, body: object
) -> tuple[CheckpointRow, Record]:
    spot = Spot(_checked(checkpoint_ns, str), _checked(checkpoint_id, str))
    parent = None if parent_id is None else _checked(parent_id, str)
    row = CheckpointRow(spot, parent, _checked(run_id, str), b"", is_hidden=_checked(is_hidden, bool))
    return row, Record.unpacked(_checked(body, bytes))


def _write(
    checkpoint_ns: object,
    checkpoint_id: object,
    task_path: object,
    task_id: object,
    idx: object,
    channel: object,
    ref: object,
) -> tuple[WriteRow, Ref]:
    spot = Spot(_checked(checkpoint_ns, str), _checked(checkpoint_id, str))
    row = WriteRow(
        spot, _checked(task_path, str), _checked(task_id, str), _checked(idx, int), _checked(channel, str), b""
    )
    return row, Ref.unpacked(_checked(ref, list))


def _checked(value: object, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    return value


def digest_of(thread_id: str, content: bytes) -> str:
    """Return the digest of one thread: over its id and its content."""
    return hashlib.blake2b(json.dumps(thread_id).encode("ascii") + b"\n" + content, digest_size=32).hexdigest()


def _digest_of_all(digests: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(digests).encode("ascii"), digest_size=32).hexdigest()


def _line(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


def _read_export(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield ids and contents, each checked; the last `next` checks that the file is complete."""
    digests: dict[str, str] = {}
    is_complete = False
    with path.open("rb") as file:
        _check_head(path, file.readline(1 << 16))
        for number, line in enumerate(file, start=2):
            fields = _fields(line)
            if is_complete or fields is None:
                raise CorruptCheckpoint(f"{path}, line {number}: damaged; nothing was imported; {_MEND}")
            if fields.get("end") is True:
                expected = (len(digests), _digest_of_all(digests.values()))
                is_complete = (fields.get("threads"), fields.get("digest")) == expected
                if not is_complete:
                    raise CorruptCheckpoint(f"{path}: threads are missing; nothing was imported; {_MEND}")
                continue
            thread_id, content = _thread_of(path, number, fields)
            if thread_id in digests:
                raise CorruptCheckpoint(f"{path}: thread {thread_id!r} is in it twice; nothing was imported; {_MEND}")
            digests[thread_id] = fields["digest"]
            yield thread_id, content
    if not is_complete:
        raise CorruptCheckpoint(f"{path}: cut short after {len(digests)} threads; nothing was imported; {_MEND}")


def _check_head(path: Path, line: bytes) -> None:
    head = _fields(line) or {}
    if head.get("format") != FORMAT:
        raise SchemaMismatch(f"{path} is no export of `pancake threads export`; name one, or use `--from-sqlite`")
    if head.get("version") != VERSION:
        raise SchemaMismatch(
            f"{path} has export version {head.get('version')!r}, this package reads {VERSION}; "
            "install the version of pancake-langgraph that wrote it, or a later one"
        )


def _fields(line: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _thread_of(path: Path, number: int, fields: Mapping[str, Any]) -> tuple[str, bytes]:
    thread_id, content = fields.get("thread_id"), fields.get("content")
    try:
        if isinstance(thread_id, str) and isinstance(content, str):
            plain = base64.b64decode(content, validate=True)
            if fields.get("digest") == digest_of(thread_id, plain):
                return thread_id, plain
    except (binascii.Error, ValueError):
        pass
    raise CorruptCheckpoint(
        f"{path}, line {number}: the digest of thread {thread_id!r} does not fit its content; nothing was imported; "
        f"{_MEND}"
    )
