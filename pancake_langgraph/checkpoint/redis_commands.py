"""The commands that writes are made of, for one thread each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pancake_langgraph.checkpoint import redis_keys as layout
from pancake_langgraph.checkpoint.redis_keys import ThreadKeys
from pancake_langgraph.checkpoint.redis_link import Command
from pancake_langgraph.checkpoint.redis_registry import NEVER, Registry
from pancake_langgraph.checkpoint.rows import CheckpointRow, Removal, ThreadContent, WriteRow
from pancake_langgraph.checkpoint.store import orphans_expire_at_s

_BATCH = 500


class Membership:
    """What one write does so that the thread is found among all and by its run, and expires as a whole.

    Not thread-safe; made for one write.
    """

    def __init__(self, registry: Registry, thread_id: str, keys: ThreadKeys, expires_at_s: float | None) -> None:
        """Serve one write; nothing is sent."""
        self._registry = registry
        self._thread_id = thread_id
        self._keys = keys
        self._expires_at_s = expires_at_s
        self._to_confirm: set[str] | None = None

    def questions(self, run_id: str) -> list[Command]:
        """Return what has to be known before; the replies go to `commands`."""
        keys = self._keys
        end = NEVER if self._expires_at_s is None else unix_ms(self._expires_at_s)
        return [
            ("EXISTS", keys.rows),
            ("ZSCORE", keys.runs, run_id.encode()),
            ("ZRANGEBYSCORE", keys.runs, "-inf", f"({end}"),
        ]

    def commands(self, run_id: str, known: Sequence[Any]) -> list[Command]:
        """Name the thread where it is not named, and return what the transaction has to hold for it."""
        exists, score, due = known
        run_ids = {run.decode() for run in due}
        new = {run_id} if run_id and score is None else set()
        self._to_confirm = None
        expiry = expiry_commands(self._keys, self._expires_at_s)
        if exists and not run_ids and not new:
            return expiry
        until = self._registry.add(self._thread_id, run_ids | new, expires_at_s=self._expires_at_s)
        if new or not exists:
            self._to_confirm = new
        return [*(("ZADD", self._keys.runs, until, run.encode()) for run in run_ids | new), *expiry]

    def confirm(self) -> None:
        """Name the thread once more: who removed it meanwhile may have taken the name out."""
        if self._to_confirm is not None:
            self._registry.add(self._thread_id, self._to_confirm, expires_at_s=self._expires_at_s)


def unix_ms(at_s: float) -> int:
    """Return Unix time in whole milliseconds."""
    return int(at_s * 1_000)


def expiry_commands(keys: ThreadKeys, expires_at_s: float | None) -> list[Command]:
    """Return what lets a whole thread expire at one instant, or never."""
    if expires_at_s is None:
        return [("PERSIST", key) for key in keys.data]
    return [("PEXPIREAT", key, unix_ms(expires_at_s)) for key in keys.data]


def touch_state(keys: ThreadKeys) -> list[Command]:
    """Return what fails the transactions of those who watch the state, even if the key is removed again."""
    return [("HINCRBY", keys.state, "g", 1)]


def row_commands(keys: ThreadKeys, field: bytes, row: CheckpointRow) -> list[Command]:
    """Return what stores a checkpoint row, or replaces it."""
    store: Command = ("HSET", keys.rows, field, layout.pack_row(row))
    visible, hidden = layout.visible_members(row.spot), layout.hidden_member(row.spot)
    if row.is_hidden:
        return [store, ("ZREM", keys.index, *visible), ("ZADD", keys.index, 0, hidden)]
    return [store, ("ZREM", keys.index, hidden), ("ZADD", keys.index, *(part for m in visible for part in (0, m)))]


def write_commands(keys: ThreadKeys, row: WriteRow) -> list[Command]:
    """Return what stores a write row: replaces it, or leaves it as it is, by the sign of `idx`."""
    field = layout.write_field(row)
    verb = "HSET" if row.idx < 0 else "HSETNX"
    return [
        (verb, keys.writes, field, layout.pack_write(row)),
        ("ZADD", keys.index, 0, layout.write_member(field)),
    ]


def count_members(content: ThreadContent) -> int:
    """Return how many index members a thread has to have."""
    return sum(1 if row.is_hidden else 2 for row in content.rows) + len(content.writes)


def removal_commands(
    keys: ThreadKeys, content: ThreadContent, removal: Removal, *, expires_at_s: float | None
) -> list[Command]:
    """Return what takes a removal out of a thread that expires as given; nothing where there is nothing to do."""
    gone = [row.spot for row in content.rows if row.spot in removal.checkpoints]
    writes = [layout.write_field(write) for write in content.writes if write.spot in removal.checkpoints]
    if len(gone) == len(content.rows) and len(writes) == len(content.writes):
        return [("UNLINK", *keys.data)]
    hide = [
        CheckpointRow(row.spot, row.parent_id, row.run_id, row.body, is_hidden=True)
        for row in content.rows
        if row.spot in removal.hide and row.spot not in removal.checkpoints and not row.is_hidden
    ]
    members = [member for spot in gone for member in layout.members(spot)]
    members += map(layout.write_member, writes)
    is_orphaned = len(gone) == len(content.rows)
    return [
        *(expiry_commands(keys, orphans_expire_at_s(expires_at_s)) if is_orphaned else ()),
        *_in_batches("HDEL", keys.rows, map(layout.row_field, gone)),
        *_in_batches("HDEL", keys.writes, writes),
        *_in_batches("ZREM", keys.index, members),
        *_in_batches("HDEL", keys.elements, removal.elements & content.elements.keys()),
        *(command for row in hide for command in row_commands(keys, layout.row_field(row.spot), row)),
    ]


def _in_batches(verb: str, key: bytes, parts: Iterable[bytes]) -> Iterator[Command]:
    every = list(parts)
    for start in range(0, len(every), _BATCH):
        yield (verb, key, *every[start : start + _BATCH])
