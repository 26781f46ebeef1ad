"""How a thread lies in a Redis server: names of keys, fields and index members, and rows as bytes.

A thread has a fixed number of keys, all in one hash slot and all with the same expiry:

=========== ========== ==============================================================================================
key         type       content
=========== ========== ==============================================================================================
`…:c`       hash       namespace, id -> checkpoint row
`…:w`       hash       namespace, id, task id, idx -> write row
`…:e`       hash       hash of an element -> element
`…:i`       sorted set scores 0; members in byte order: visible rows by namespace and by id, hidden rows, writes
`…:r`       sorted set run id -> Unix time in ms until which the run's set of threads is kept
=========== ========== ==============================================================================================

Two more remember a deletion, for a day: `…:s` (hash: the id minted then) and `…:d` (set: ids of refused checkpoints).

Texts inside fields are UTF-8 with the bytes 0 and 1 escaped, ended by 0: byte order is text order, part for part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import ormsgpack

from pancake_langgraph._errors import CorruptCheckpoint, SchemaMismatch
from pancake_langgraph.checkpoint.rows import CheckpointRow, Spot, WriteRow

#: Of the layout and of the rows.
FORMAT: Final = 1
FORMAT_KEY: Final = b"pancake:format"
#: Set of the ids of all threads; may name some that are gone.
THREADS_KEY: Final = b"pancake:threads"

_END: Final = b"\x00"
_AFTER_END: Final = b"\x01"
_BY_NAMESPACE: Final = b"n"
_BY_ID: Final = b"a"
_HIDDEN: Final = b"h"
_WRITES: Final = b"w"
_INVERTED: Final = bytes(255 - byte for byte in range(256))
_INVERTED_END: Final = b"\xff"


@dataclass(frozen=True, slots=True)
class ThreadKeys:
    """The names of one thread's keys."""

    rows: bytes
    writes: bytes
    elements: bytes
    index: bytes
    runs: bytes
    state: bytes
    dead: bytes

    @property
    def data(self) -> tuple[bytes, ...]:
        """Return the keys that make up the thread; the other two remember a deletion."""
        return (self.rows, self.writes, self.elements, self.index, self.runs)


def thread_keys(thread_id: str) -> ThreadKeys:
    """Return the names of a thread's keys; no two threads share one, whatever is in their ids."""
    tag = quote(thread_id, safe="") or "%"  # an empty tag would be none, and each key in a slot of its own
    stem = f"pancake:{{{tag}}}:".encode()
    return ThreadKeys(*(stem + suffix for suffix in (b"c", b"w", b"e", b"i", b"r", b"s", b"d")))


def run_key(run_id: str) -> bytes:
    """Return the name of the set of threads of a run."""
    return b"pancake:run:" + quote(run_id, safe="").encode()


# -- fields and members ---------------------------------------------------------------------------------------------


def _escaped(text: str) -> bytes:
    raw = text.encode()
    if _END in raw or _AFTER_END in raw:
        raw = raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01")
    return raw


def _unescaped(raw: bytes) -> str:
    return raw.replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01").decode()


def row_field(spot: Spot) -> bytes:
    """Return the field of a checkpoint row."""
    return _escaped(spot.checkpoint_ns) + _END + _escaped(spot.checkpoint_id)


def write_field(row: WriteRow) -> bytes:
    """Return the field of a write row."""
    return row_field(row.spot) + _END + _escaped(row.task_id) + _END + b"%d" % row.idx


def visible_members(spot: Spot) -> tuple[bytes, bytes]:
    """Return the index members of a visible row."""
    namespace = _escaped(spot.checkpoint_ns)
    by_id = _BY_ID + _escaped(spot.checkpoint_id) + _END + namespace.translate(_INVERTED) + _INVERTED_END
    return _BY_NAMESPACE + row_field(spot), by_id


def hidden_member(spot: Spot) -> bytes:
    """Return the index member of a hidden row; it only lets a lost row be told from one that never was."""
    return _HIDDEN + row_field(spot)


def members(spot: Spot) -> tuple[bytes, ...]:
    """Return all index members that a row may have."""
    return (*visible_members(spot), hidden_member(spot))


def write_member(field: bytes) -> bytes:
    """Return the index member of a write row."""
    return _WRITES + field


def is_write_member(member: bytes) -> bool:
    """Say whether an index member stands for a write."""
    return member.startswith(_WRITES)


def field_of_member(member: bytes) -> bytes:
    """Return the field of the row that an index member stands for."""
    if not member.startswith(_BY_ID):
        return member[1:]
    checkpoint_id, _, namespace = member[1:].partition(_END)
    return namespace[:-1].translate(_INVERTED) + _END + checkpoint_id


def rows_range(checkpoint_ns: str | None, before_id: str | None) -> tuple[bytes, bytes]:
    """Return the greatest and the smallest index member of rows, as ZREVRANGEBYLEX takes them; newest come first."""
    stem = _BY_ID if checkpoint_ns is None else _BY_NAMESPACE + _escaped(checkpoint_ns) + _END
    if before_id is None:
        return b"(" + (_after(stem) if checkpoint_ns is not None else b"b"), b"[" + stem
    # Members of `before_id` itself go on with an end mark when ids come first, and with nothing when they come last.
    return b"(" + stem + _escaped(before_id) + (_END if checkpoint_ns is None else b""), b"[" + stem


def writes_range(spot: Spot) -> tuple[bytes, bytes]:
    """Return the smallest and the greatest index member of a checkpoint's writes, as ZRANGEBYLEX takes them."""
    stem = _WRITES + row_field(spot) + _END
    return b"[" + stem, b"(" + _after(stem)


def any_row_query(index: bytes) -> tuple[bytes | str | int, ...]:
    """Return the command that asks the index for one of a thread's rows, visible or hidden."""
    return ("ZRANGEBYLEX", index, "-", b"(" + _WRITES, "LIMIT", 0, 1)  # members of writes are the greatest


def _after(stem: bytes) -> bytes:
    return stem[:-1] + _AFTER_END


# -- rows -----------------------------------------------------------------------------------------------------------


def pack_row(row: CheckpointRow) -> bytes:
    """Encode a checkpoint row; its field holds the rest."""
    return ormsgpack.packb((FORMAT, row.parent_id, row.run_id, row.is_hidden, row.body))


def unpack_row(field: bytes, data: bytes) -> CheckpointRow:
    """Decode a checkpoint row.  Raises as `_unpack`."""
    parent_id, run_id, is_hidden, body = _unpack(data, (str, type(None)), str, bool, bytes)
    namespace, _, checkpoint_id = field.partition(_END)
    return CheckpointRow(
        Spot(_unescaped(namespace), _unescaped(checkpoint_id)), parent_id, run_id, body, is_hidden=is_hidden
    )


def pack_write(row: WriteRow) -> bytes:
    """Encode a write row; its field holds the rest."""
    return ormsgpack.packb((FORMAT, row.task_path, row.channel, row.body))


def unpack_write(field: bytes, data: bytes) -> WriteRow:
    """Decode a write row.  Raises as `_unpack`."""
    task_path, channel, body = _unpack(data, str, str, bytes)
    namespace, checkpoint_id, task_id, idx = field.split(_END)
    spot = Spot(_unescaped(namespace), _unescaped(checkpoint_id))
    return WriteRow(spot, task_path, _unescaped(task_id), int(idx), channel, body)


def _unpack(data: bytes, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Decode a row.

    Raises:
        CorruptCheckpoint: if the bytes are no row.
        SchemaMismatch: if they were written by a later version.
    """
    try:
        values = ormsgpack.unpackb(data)
    except ValueError as exc:
        raise CorruptCheckpoint(f"a row of {len(data)} bytes is damaged; restore the server from a copy") from exc
    if not isinstance(values, list) or not values:
        raise CorruptCheckpoint(f"a row of {len(data)} bytes is damaged; restore the server from a copy")
    if values[0] != FORMAT:
        raise SchemaMismatch(
            f"a row has format {values[0]!r:.20}, this package reads {FORMAT}; install a later pancake-langgraph"
        )
    if len(values) != len(kinds) + 1 or not all(map(isinstance, values[1:], kinds)):
        raise CorruptCheckpoint(f"a row of {len(data)} bytes has other parts than a row; restore it from a copy")
    return values[1:]
