"""Questions that take more than one command, asked in one session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pancake_langgraph.checkpoint import redis_keys as layout
from pancake_langgraph.checkpoint.redis_keys import ThreadKeys
from pancake_langgraph.checkpoint.redis_link import Command, Session
from pancake_langgraph.checkpoint.rows import Spot, WriteRow

#: How long a deleted thread refuses late writes.
DELETION_KEPT_S: Final = 86_400
_BATCH: Final = 500


def fetch(session: Session, key: bytes, fields: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return those fields of a hash that exist, in one round trip."""
    if not fields:
        return {}
    batches = [fields[start : start + _BATCH] for start in range(0, len(fields), _BATCH)]
    commands: list[Command] = [("HMGET", key, *batch) for batch in batches]
    replies = session.ask(*commands)
    values = (value for reply in replies for value in reply)
    return {field: value for field, value in zip(fields, values, strict=True) if value is not None}


def indexed(session: Session, index: bytes, query: Command, key: bytes) -> dict[bytes, bytes] | None:
    """Return the fields that a query of the index names, in its order; `None` where not all of it is there."""
    members, has_index, has_content = session.ask(query, ("EXISTS", index), ("EXISTS", key))
    if has_content and not has_index:
        return None
    fields = [layout.field_of_member(member) for member in members]
    found = fetch(session, key, fields)
    return found if len(found) == len(fields) else None


def is_torn(session: Session, keys: ThreadKeys) -> bool:
    """Compare the index with what it stands for, at one instant."""
    found = session.multi([("HKEYS", keys.rows), ("HKEYS", keys.writes), ("ZRANGE", keys.index, 0, -1)])
    rows, writes, members = found or ([], [], [])
    named = {(layout.is_write_member(member), layout.field_of_member(member)) for member in members}
    return named != {*((False, field) for field in rows), *((True, field) for field in writes)}


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the reply of HGETALL as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def write_order(row: WriteRow) -> tuple[str, str, str, str, int]:
    """Order writes as LangGraph does, within their checkpoint."""
    return (row.spot.checkpoint_id, row.spot.checkpoint_ns, row.task_path, row.task_id, row.idx)


def mark_dead(session: Session, keys: ThreadKeys, spot: Spot) -> None:
    """Remember a refused checkpoint, and take out writes of it that came before."""
    session.unwatch()
    (members,) = session.ask(("ZRANGEBYLEX", keys.index, *layout.writes_range(spot)))
    commands: list[Command] = [
        ("SADD", keys.dead, spot.checkpoint_id.encode()),
        ("EXPIRE", keys.dead, DELETION_KEPT_S),
    ]
    if members:
        commands.append(("ZREM", keys.index, *members))
        commands.append(("HDEL", keys.writes, *(layout.field_of_member(member) for member in members)))
    session.multi(commands)
