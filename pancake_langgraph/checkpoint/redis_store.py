"""Checkpoints in any Redis (6 or later) or Valkey, alone or as a cluster, with core commands only.

One MULTI/EXEC per write.  A write leans on what it has read (was the thread deleted, is a checkpoint still there) by
watching the thread's state key, which changes only when something is taken out or replaced: writes of one thread do
not get into each other's way.  `redis_keys` describes the layout.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from pancake_langgraph._errors import CorruptCheckpoint, SchemaMismatch, StoreUnavailable
from pancake_langgraph.checkpoint import redis_keys as layout
from pancake_langgraph.checkpoint.redis_commands import (
    Membership,
    count_members,
    expiry_commands,
    removal_commands,
    row_commands,
    touch_state,
    unix_ms,
    write_commands,
)
from pancake_langgraph.checkpoint.redis_keys import FORMAT, FORMAT_KEY, ThreadKeys, thread_keys
from pancake_langgraph.checkpoint.redis_link import Command, RedisLink, Session, warn_if_evicting
from pancake_langgraph.checkpoint.redis_queries import (
    fetch,
    has_no_checkpoint,
    indexed,
    is_torn,
    mark_dead,
    row_at,
    unpacked,
    visible_rows,
    write_order,
)
from pancake_langgraph.checkpoint.redis_registry import NEVER, Registry
from pancake_langgraph.checkpoint.rows import (
    CheckpointRow,
    PutCheckpoint,
    PutWrites,
    Removal,
    Spot,
    ThreadContent,
    WriteRow,
)
from pancake_langgraph.checkpoint.store import DELETION_KEPT_S, StaleNeed, late_put, late_writes, orphans_expire_at_s

T = TypeVar("T")

#: All commands that a restricted user needs for a server that is no cluster, on keys `pancake:*`.
COMMANDS: Final = (
    *("watch", "unwatch", "multi", "exec", "exists", "unlink", "get", "setnx"),
    *("expire", "pexpireat", "persist", "pttl"),
    *("hget", "hmget", "hgetall", "hkeys", "hset", "hsetnx", "hdel", "hexists", "hincrby"),
    *("zadd", "zrem", "zscore", "zcard", "zrange", "zrangebyscore", "zrangebylex", "zrevrangebylex"),
    *("sadd", "srem", "sismember", "smembers", "sscan"),
)
_ATTEMPTS: Final = 100
_MAX_PAUSE_S: Final = 0.05
_MAX_LIMIT: Final = 2**31


class RedisStore:
    """The port `Store` over a server.

    `url` is `redis://`, `rediss://` (TLS), `unix://`, or, naming one node of a cluster, `redis+cluster://` or
    `rediss+cluster://`.  `timeout_s` bounds every wait for the server.
    """

    def __init__(self, url: str, *, timeout_s: float = 5.0) -> None:
        """Check the URL; nothing is opened.

        Raises:
            ConfigError: if the URL's scheme is not known.
        """
        self._link = RedisLink(url, timeout_s)
        self._registry = Registry(self._link)
        self._is_open = False
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # -- life -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """See `Store.open`.  Warns once if the server may evict what it keeps."""
        if self._is_open:
            return
        if self._pid != os.getpid():  # a fork may have copied a lock that nobody will release
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            if not self._is_open:
                self._link.open()
                self._check()
                self._is_open = True

    def close(self) -> None:
        """See `Store.close`.  The next call opens the store again."""
        with self._lock:
            self._is_open = False
            self._link.close()

    def _check(self) -> None:
        # Where MULTI alone is forbidden, the commands after it run one by one: find that out before anything is stored.
        self._link.run(FORMAT_KEY, lambda session: session.multi([("GET", FORMAT_KEY)]))
        _, found = self._link.ask(FORMAT_KEY, ("SETNX", FORMAT_KEY, FORMAT), ("GET", FORMAT_KEY))
        if found != b"%d" % FORMAT:
            raise SchemaMismatch(
                f"{self._link.shown} holds threads in format {found!r:.20}, this package reads {FORMAT}; "
                "install a later pancake-langgraph, or use another database number"
            )
        warn_if_evicting(self._link, FORMAT_KEY)

    # -- writing ----------------------------------------------------------------------------------------------------

    def put_checkpoint(self, put: PutCheckpoint, *, expires_at_s: float | None) -> None:
        """See `Store.put_checkpoint`."""
        keys, row, spot = thread_keys(put.thread_id), put.row, put.row.spot
        field = layout.row_field(spot)
        parent = b"" if row.parent_id is None else layout.row_field(spot._replace(checkpoint_id=row.parent_id))
        needs = b"" if put.needs is None else layout.row_field(put.needs)
        membership = Membership(self._registry, put.thread_id, keys, expires_at_s)

        def plan(session: Session) -> list[Command]:
            _, deletion_id, has_parent, has_need, *known = session.ask(
                ("WATCH", keys.state),
                ("HGET", keys.state, "d"),
                ("HEXISTS", keys.rows, parent),
                ("HEXISTS", keys.rows, needs),
                *membership.questions(row.run_id),
            )
            if deletion_id is not None and (
                spot.checkpoint_id <= deletion_id.decode() or (row.parent_id is not None and not has_parent)
            ):
                mark_dead(session, keys, spot)
                raise late_put(put.thread_id, spot)
            if put.needs is not None and not has_need:
                session.unwatch()
                raise StaleNeed
            return [
                *(("HSETNX", keys.elements, digest, data) for digest, data in put.elements.items()),
                *row_commands(keys, field, row),
                *membership.commands(row.run_id, known),
            ]

        self._transact(keys, plan)
        membership.confirm()

    def put_writes(self, put: PutWrites, *, expires_at_s: float | None) -> None:
        """See `Store.put_writes`."""
        keys = thread_keys(put.thread_id)
        spots = list({row.spot: None for row in put.rows})
        membership = Membership(self._registry, put.thread_id, keys, expires_at_s)

        def plan(session: Session) -> list[Command]:
            _, deletion_id, *replies = session.ask(
                ("WATCH", keys.state, keys.dead),
                ("HGET", keys.state, "d"),
                *(("HEXISTS", keys.rows, layout.row_field(spot)) for spot in spots),
                *(("SISMEMBER", keys.dead, spot.checkpoint_id.encode()) for spot in spots),
                *membership.questions(""),
            )
            if deletion_id is not None:
                for spot, exists, is_dead in zip(spots, replies, replies[len(spots) :], strict=False):
                    if not exists and (is_dead or spot.checkpoint_id <= deletion_id.decode()):
                        session.unwatch()
                        raise late_writes(put.thread_id, spot)
            has_rows, *known = replies[2 * len(spots) :]
            if not has_rows and has_no_checkpoint(session, keys):
                ends = expiry_commands(keys, orphans_expire_at_s(expires_at_s))
            else:
                ends = membership.commands("", [True, *known])
            return [
                *(("HSETNX", keys.elements, digest, data) for digest, data in put.elements.items()),
                *(command for row in put.rows for command in write_commands(keys, row)),
                *ends,
            ]

        self._transact(keys, plan)
        membership.confirm()

    def delete_thread(self, thread_id: str, *, deletion_id: str) -> None:
        """See `Store.delete_thread`.  A later deletion id that is there already stays."""
        keys = thread_keys(thread_id)

        def plan(session: Session) -> list[Command]:
            _, known = session.ask(("WATCH", keys.state), ("HGET", keys.state, "d"))
            return [
                ("ZRANGE", keys.runs, 0, -1),
                ("UNLINK", *keys.data),
                ("HSET", keys.state, "d", max(deletion_id.encode(), known or b"")),
                ("HINCRBY", keys.state, "g", 1),  # changes the key even where the id is the same
                ("EXPIRE", keys.state, DELETION_KEPT_S),
            ]

        run_ids = self._transact(keys, plan)[0]
        self._registry.remove(thread_id, [run_id.decode() for run_id in run_ids])

    def rewrite_thread(self, thread_id: str, decide: Callable[[ThreadContent], Removal]) -> None:
        """See `Store.rewrite_thread`.

        Raises:
            StoreUnavailable: also if others wrote to the thread during every one of many attempts.
        """
        keys = thread_keys(thread_id)

        def plan(session: Session) -> list[Command]:
            _, deletion_id, ttl_ms = session.ask(
                ("WATCH", keys.state, keys.rows, keys.writes, keys.elements),
                ("HGET", keys.state, "d"),
                ("PTTL", keys.rows),
            )
            content = self.read_thread(thread_id)  # what changes from here on fails the EXEC
            if not content.rows:
                return []
            expires_at_s = None if ttl_ms < 0 else time.time() + ttl_ms / 1_000
            commands = removal_commands(keys, content, decide(content), expires_at_s=expires_at_s)
            if not commands:
                return []
            forget: list[Command] = [("UNLINK", keys.state)] if deletion_id is None else []
            return [("ZRANGE", keys.runs, 0, -1), *touch_state(keys), *forget, *commands]

        done = self._transact(keys, plan)
        if done and not self._ask(keys, ("EXISTS", keys.rows))[0]:
            self._registry.remove(thread_id, [run_id.decode() for run_id in done[0]])

    def write_thread(self, thread_id: str, content: ThreadContent, *, expires_at_s: float | None) -> None:
        """See `Store.write_thread`."""
        self.open()
        keys = thread_keys(thread_id)
        run_ids = {row.run_id for row in content.rows} - {""}
        has_any = bool(content.rows)
        until: str | int = NEVER
        if has_any:
            until = self._registry.add(thread_id, run_ids, expires_at_s=expires_at_s)
        commands: list[Command] = [
            *touch_state(keys),
            ("UNLINK", keys.state, keys.dead, keys.rows, keys.writes, keys.elements, keys.index),
        ]
        if has_any:
            commands += [
                *(("HSET", keys.elements, digest, data) for digest, data in content.elements.items()),
                *(command for row in content.rows for command in row_commands(keys, layout.row_field(row.spot), row)),
                *(command for write in content.writes for command in write_commands(keys, write)),
                *(("ZADD", keys.runs, until, run_id.encode()) for run_id in run_ids),
                *expiry_commands(keys, expires_at_s),
            ]
        self._transact(keys, lambda _: commands)
        if has_any:
            self._registry.add(thread_id, run_ids, expires_at_s=expires_at_s)
        else:
            self._registry.remove(thread_id, ())

    def touch(self, thread_id: str, *, expires_at_s: float) -> None:
        """See `Store.touch`."""
        keys = thread_keys(thread_id)
        due = ("ZRANGEBYSCORE", keys.runs, "-inf", f"({unix_ms(expires_at_s)}")
        *_, run_ids = self._transact(keys, lambda _: [*expiry_commands(keys, expires_at_s), due])
        if run_ids:
            until = self._registry.add(thread_id, [run.decode() for run in run_ids], expires_at_s=expires_at_s)
            scores = [part for run in run_ids for part in (until, run)]
            self._ask(keys, ("ZADD", keys.runs, "XX", *scores))  # XX: the thread may be gone by now

    def expire(self, *, now_s: float) -> int:
        """See `Store.expire`.  The server removes threads itself: tidies some of the set of all threads, returns 0."""
        del now_s
        self.open()
        self._registry.sweep()
        return 0

    # -- reading ----------------------------------------------------------------------------------------------------

    def get_checkpoint(self, thread_id: str, checkpoint_ns: str, checkpoint_id: str | None) -> CheckpointRow | None:
        """See `Store.get_checkpoint`."""
        if checkpoint_id is None:
            found = self.list_checkpoints(thread_id, checkpoint_ns, before_id=None, limit=1)
            return found[0] if found else None
        keys, spot = thread_keys(thread_id), Spot(checkpoint_ns, checkpoint_id)
        return self._settled(thread_id, lambda session: row_at(session, keys, spot))[0]

    def list_checkpoints(
        self, thread_id: str, checkpoint_ns: str | None, *, before_id: str | None, limit: int
    ) -> Sequence[CheckpointRow]:
        """See `Store.list_checkpoints`."""
        keys = thread_keys(thread_id)
        greatest, smallest = layout.rows_range(checkpoint_ns, before_id)
        query = ("ZREVRANGEBYLEX", keys.index, greatest, smallest, "LIMIT", 0, min(limit, _MAX_LIMIT))
        return self._settled(thread_id, lambda session: visible_rows(session, keys, query))

    def get_writes(self, thread_id: str, spot: Spot) -> tuple[WriteRow, ...]:
        """See `Store.get_writes`."""
        keys = thread_keys(thread_id)
        query = ("ZRANGEBYLEX", keys.index, *layout.writes_range(spot))

        def read(session: Session) -> tuple[WriteRow, ...] | None:
            found = indexed(session, keys.index, query, keys.writes)
            if found is None:
                return None
            return tuple(sorted((layout.unpack_write(*item) for item in found.items()), key=write_order))

        return self._settled(thread_id, read)

    def get_elements(self, thread_id: str, hashes: Collection[bytes]) -> Mapping[bytes, bytes]:
        """See `Store.get_elements`."""
        keys = thread_keys(thread_id)
        self.open()
        return self._link.run(keys.elements, lambda session: fetch(session, keys.elements, list(hashes)))

    def read_thread(self, thread_id: str) -> ThreadContent:
        """See `Store.read_thread`."""
        keys = thread_keys(thread_id)
        queries: list[Command] = [("HGETALL", key) for key in (keys.rows, keys.writes, keys.elements)]
        *flats, num_members = self._transact(keys, lambda _: [*queries, ("ZCARD", keys.index)])
        content = unpacked(*flats)
        if num_members != count_members(content):
            raise self._torn(thread_id)
        return content if content.rows else ThreadContent((), (), {})

    def threads(self) -> Iterator[str]:
        """See `Store.threads`."""
        self.open()
        yield from self._registry.threads()

    def threads_of_run(self, run_id: str) -> Sequence[str]:
        """See `Store.threads_of_run`."""
        self.open()
        return self._registry.threads_of_run(run_id)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _ask(self, keys: ThreadKeys, *commands: Command) -> list[Any]:
        self.open()
        return self._link.ask(keys.state, *commands)

    def _transact(self, keys: ThreadKeys, plan: Callable[[Session], list[Command]]) -> list[Any]:
        """Run what `plan` returns (it watches and reads) as one transaction; again while watched keys change."""

        def work(session: Session) -> list[Any]:
            for attempt in range(_ATTEMPTS):
                commands = plan(session)
                if not commands:
                    return []
                done = session.multi(commands)
                if done is not None:
                    return done
                time.sleep(random.uniform(0, min(_MAX_PAUSE_S, 0.001 * attempt)))  # noqa: S311 - not for secrets
            raise self._too_busy()

        self.open()
        return self._link.run(keys.state, work)

    def _settled(self, thread_id: str, read: Callable[[Session], T | None]) -> T:
        """Return what `read` returns; again while it returns `None` as rows came or went between its questions.

        Raises:
            CorruptCheckpoint: if rows are missing for good.
            StoreUnavailable: if it does not settle.
        """
        keys = thread_keys(thread_id)

        def work(session: Session) -> T:
            for _ in range(_ATTEMPTS):
                found = read(session)
                if found is not None:
                    return found
                if is_torn(session, keys):
                    raise self._torn(thread_id)
            raise self._too_busy()

        self.open()
        return self._link.run(keys.state, work)

    def _torn(self, thread_id: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self._link.shown}: parts of thread {thread_id!r} are gone, by eviction or by another program; restore "
            "them from a copy, or delete the thread; set maxmemory-policy to noeviction"
        )

    def _too_busy(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self._link.shown}: a thread changed during each of {_ATTEMPTS} attempts; nothing of this call was "
            "stored; call again when fewer write to it"
        )
