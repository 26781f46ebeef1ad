"""What the suites of the store over Redis put into it; a put without more stores one element."""

from __future__ import annotations

from pancake_langgraph.checkpoint.redis_store import RedisStore
from pancake_langgraph.checkpoint.rows import CheckpointRow, PutCheckpoint, PutWrites, Spot, WriteRow

#: For servers that are to answer, on a machine with much else to do.
LONG_S = 60.0


def row(
    checkpoint_id: str, parent_id: str | None = None, *, ns: str = "", run_id: str = "", hidden: bool = False
) -> CheckpointRow:
    return CheckpointRow(Spot(ns, checkpoint_id), parent_id, run_id, b"body", is_hidden=hidden)


def write(checkpoint_id: str, idx: int = 0) -> WriteRow:
    return WriteRow(Spot("", checkpoint_id), "", "task", idx, "channel", b"write")


def put(
    store: RedisStore,
    what: CheckpointRow,
    *,
    thread_id: str = "t",
    needs: Spot | None = None,
    expires_at_s: float | None = None,
) -> None:
    digest = what.spot.checkpoint_id.encode().rjust(20)
    store.put_checkpoint(PutCheckpoint(thread_id, what, {digest: b"element"}, needs), expires_at_s=expires_at_s)


def put_writes(store: RedisStore, *rows: WriteRow, expires_at_s: float | None = None) -> None:
    store.put_writes(PutWrites("t", rows), expires_at_s=expires_at_s)


def listed(store: RedisStore) -> list[str]:
    return [each.spot.checkpoint_id for each in store.list_checkpoints("t", None, before_id=None, limit=1_000)]


def filled(store: RedisStore, *, expires_at_s: float | None = None) -> None:
    put(store, row("1", hidden=True, run_id="r"), expires_at_s=expires_at_s)
    put(store, row("2", run_id="r"), expires_at_s=expires_at_s)
    put_writes(store, write("2"), expires_at_s=expires_at_s)
