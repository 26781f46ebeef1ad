"""Questions that take more than one command, asked in one session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pancake_langgraph._errors import CorruptCheckpoint
from pancake_langgraph.checkpoint import redis_keys as layout
from pancake_langgraph.checkpoint.redis_keys import ThreadKeys
from pancake_langgraph.checkpoint.redis_link import Command, Session
from pancake_langgraph.checkpoint.rows import CheckpointRow, Spot, ThreadContent, WriteRow
from pancake_langgraph.checkpoint.store import DELETION_KEPT_S

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


def row_at(session: Session, keys: ThreadKeys, spot: Spot) -> tuple[CheckpointRow | None] | None:
    """Return a row, or `(None,)` where there is none; `None` where row and index do not go together.

    Raises:
        CorruptCheckpoint: if the row is damaged.
    """
    field, members = layout.row_field(spot), layout.members(spot)
    data, *scores = session.ask(("HGET", keys.rows, field), *(("ZSCORE", keys.index, member) for member in members))
    named = {member for member, score in zip(members, scores, strict=True) if score is not None}
    if data is None:
        return None if named else (None,)
    row = layout.unpack_row(field, data)
    if named.isdisjoint(_opposite_members(row)):
        return (row,)
    _doubted(session, keys, spot)
    return None


def visible_rows(session: Session, keys: ThreadKeys, query: Command) -> tuple[CheckpointRow, ...] | None:
    """Return the rows that a query of the index names; `None` where rows and index do not go together.

    Raises:
        CorruptCheckpoint: if a row is damaged.
    """
    found = indexed(session, keys.index, query, keys.rows)
    if found is None:
        return None
    rows = tuple(layout.unpack_row(*item) for item in found.items())
    hidden = next((row.spot for row in rows if row.is_hidden), None)
    if hidden is None:
        return rows
    _doubted(session, keys, hidden)
    return None


def _opposite_members(row: CheckpointRow) -> tuple[bytes, ...]:
    """Return the index members that a row has if its mark as hidden is wrong."""
    return layout.visible_members(row.spot) if row.is_hidden else (layout.hidden_member(row.spot),)


def _doubted(session: Session, keys: ThreadKeys, spot: Spot) -> None:
    """Compare a row's mark as hidden with the index at one instant; it may have been changed between two looks."""
    field, members = layout.row_field(spot), layout.members(spot)
    found = session.multi([("HGET", keys.rows, field), *(("ZSCORE", keys.index, member) for member in members)])
    if not found or found[0] is None:
        return
    named = {member for member, score in zip(members, found[1:], strict=True) if score is not None}
    if not named.isdisjoint(_opposite_members(layout.unpack_row(field, found[0]))):
        raise CorruptCheckpoint(
            f"checkpoint {spot.checkpoint_id}: the row's mark as hidden is damaged; restore the server from a copy, "
            "or delete the thread"
        )


def has_no_checkpoint(session: Session, keys: ThreadKeys) -> bool:
    """Say whether a thread has no checkpoint, not even a lost one; a transaction fails if one comes before it."""
    _, has_rows, members = session.ask(("WATCH", keys.rows), ("EXISTS", keys.rows), layout.any_row_query(keys.index))
    return not has_rows and not members


def unpacked(*flats: Sequence[bytes]) -> ThreadContent:
    """Return the replies of HGETALL, for rows, writes and elements, as what a thread holds."""
    rows, writes, elements = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in flats)
    return ThreadContent(
        tuple(sorted((layout.unpack_row(*item) for item in rows.items()), key=lambda row: row.spot[::-1])),
        tuple(sorted((layout.unpack_write(*item) for item in writes.items()), key=write_order)),
        elements,
    )


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
