"""The port to what keeps checkpoints: a file, or a server.

A store moves opaque bytes; what they mean is the business of `pancake_langgraph.checkpoint.core`.  Every method is
synchronous, thread-safe, and atomic: all of it is stored or nothing, and a reader sees the state before or after.  No
method keeps a lock after it returned.

A thread is there if it has a checkpoint.  Pending writes alone make none: they may belong to a checkpoint that comes
in a moment, or to one that never comes because its thread was deleted.  They can be read by their checkpoint's id, and
are gone `ORPHANS_KEPT_S` after the last of them, or with the thread's expiry or deletion if that is earlier.

All methods raise `StoreUnavailable` when the database or server does not answer in bounded time, and `SchemaMismatch`
when it was made by something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, Protocol

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)

#: How long a deleted thread refuses late writes.
DELETION_KEPT_S: Final = 86_400
#: How long writes wait for the first checkpoint of their thread, counted from the last of them.
ORPHANS_KEPT_S: Final = DELETION_KEPT_S


def orphans_expire_at_s(expires_at_s: float | None) -> float:
    """Return when writes to a thread without a checkpoint are gone, Unix time, if the thread expires as given."""
    bound_s = time.time() + ORPHANS_KEPT_S
    return bound_s if expires_at_s is None else min(expires_at_s, bound_s)


class StaleNeed(Exception):
    """The checkpoint that a put leans on is gone; the put has to carry all its elements."""


def late_put(thread_id: str, spot: Spot) -> ThreadDeleted:
    """Return the error for a checkpoint that came after its thread was deleted."""
    return ThreadDeleted(
        f"thread {thread_id!r} was deleted while a run was writing to it: checkpoint {spot.checkpoint_id} was refused; "
        "start a new run on the thread to use its id again"
    )


def late_writes(thread_id: str, spot: Spot) -> ThreadDeleted:
    """Return the error for writes that came after their thread was deleted."""
    return ThreadDeleted(
        f"thread {thread_id!r} was deleted while a run was writing to it: writes to checkpoint {spot.checkpoint_id} "
        "were refused; start a new run on the thread to use its id again"
    )


class Store(Protocol):
    """One database or server.  Opens itself with the first call; `close` is idempotent."""

    def open(self) -> None:
        """Connect, make or check the schema.  Idempotent."""

    def close(self) -> None:
        """Release everything."""

    def put_checkpoint(self, put: PutCheckpoint, *, expires_at_s: float | None) -> None:
        """Store a checkpoint; elements that exist are left as they are.  The same spot again replaces the row.

        A thread that was deleted stays deleted: let D be the checkpoint id minted at its deletion.  The put is refused
        if the row's id is not greater than D, or if it names a parent that does not exist in the thread.

        Args:
            put: What to store.
            expires_at_s: Unix time at which the whole thread expires; `None` for never, also if it had a time before.

        Raises:
            StaleNeed: if `put.needs` does not exist; nothing was stored.
            ThreadDeleted: see above; nothing was stored, and the row's id counts as dead from now on.
        """

    def put_writes(self, put: PutWrites, *, expires_at_s: float | None) -> None:
        """Store pending writes.  Their checkpoint may arrive later; without any the thread is not there yet.

        Raises:
            ThreadDeleted: if the thread was deleted, the checkpoint does not exist, and its id is not greater than
                the id minted at the deletion or is dead.
        """

    def get_checkpoint(self, thread_id: str, checkpoint_ns: str, checkpoint_id: str | None) -> CheckpointRow | None:
        """Return one row (hidden ones too), or without an id the latest that is not hidden; `None` if there is none."""

    def get_writes(self, thread_id: str, spot: Spot) -> tuple[WriteRow, ...]:
        """Return the writes of a checkpoint, ordered by (`task_path`, `task_id`, `idx`)."""

    def get_elements(self, thread_id: str, hashes: Collection[bytes]) -> Mapping[bytes, bytes]:
        """Return those elements that exist, in as few round trips as there can be."""

    def list_checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, *, before_id: str | None, limit: int
    ) -> Sequence[CheckpointRow]:
        """Return up to `limit` rows that are not hidden, newest first by id (ties: namespace ascending).

        Args:
            thread_id: The thread.
            checkpoint_ns: One namespace (may be empty: the root), or `None` for all.
            before_id: Only ids that are smaller.
            limit: At least 1.
        """

    def threads(self) -> Iterator[str]:
        """Iterate over the ids of all threads that are there, page by page; no lock is held in between."""

    def threads_of_run(self, run_id: str) -> Sequence[str]:
        """Return the threads that hold, or held, checkpoints of a run."""

    def delete_thread(self, thread_id: str, *, deletion_id: str) -> None:
        """Remove all that a thread holds, and remember `deletion_id` (a checkpoint id minted now)."""

    def rewrite_thread(self, thread_id: str, decide: Callable[[ThreadContent], Removal]) -> None:
        """Read a thread (hidden rows too), let `decide` say what goes, and take it out; atomic.

        `decide` is pure and may be called again when others wrote meanwhile.  Writes of removed checkpoints go with
        them.  Where nothing is left, the thread is gone as if it had never been (and not counted as deleted).  For a
        thread that is not there `decide` is not called.
        """

    def read_thread(self, thread_id: str) -> ThreadContent:
        """Return a consistent copy of all that a thread holds; empty if it is not there."""

    def write_thread(self, thread_id: str, content: ThreadContent, *, expires_at_s: float | None) -> None:
        """Replace a thread by `content`, by nothing if that has no checkpoint; forget that it was deleted."""

    def touch(self, thread_id: str, *, expires_at_s: float) -> None:
        """Move the expiry of a whole thread."""

    def expire(self, *, now_s: float) -> int:
        """Remove threads whose time has come, where the server does not do that itself; return how many."""
