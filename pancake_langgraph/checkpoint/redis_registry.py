"""The sets that name threads: all of them, and those of a run.  In a cluster they lie in other slots than the threads.

They cannot change in one transaction with a thread, so they are kept by order instead.  Who writes names the thread
before and after; who removes takes the name out, then looks whether the thread is there after all.  A set may name a
thread that is gone, but a thread that has a checkpoint is named.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from pancake_langgraph.checkpoint.redis_keys import THREADS_KEY, any_row_query, run_key, thread_keys
from pancake_langgraph.checkpoint.redis_link import Command, RedisLink

_PAGE: Final = 500
#: A run's set outlives its threads by as long as they live, and this at least, so that it is seldom written again.
_MIN_MARGIN_S: Final = 3_600.0
#: Score of a run whose set has no expiry.
NEVER: Final = "+inf"


class Registry:
    """The sets of one server.  Thread-safe.  All methods raise as `RedisLink.run`."""

    def __init__(self, link: RedisLink) -> None:
        """Use `link`; nothing is sent."""
        self._link = link
        self._cursor: bytes | str = "0"

    def add(self, thread_id: str, run_ids: Collection[str], *, expires_at_s: float | None) -> str | int:
        """Name a thread among all, and in its runs; return until when (Unix time in ms, or `NEVER`)."""
        keys = [run_key(run_id) for run_id in run_ids]
        name = thread_id.encode()
        before: list[Command] = [("PTTL", key) for key in keys]
        replies = self._link.each([*before, *(("SADD", key, name) for key in (*keys, THREADS_KEY))])
        fixes: list[Command] = []
        if expires_at_s is None:
            fixes = [("PERSIST", key) for key, ttl_ms in zip(keys, replies, strict=False) if ttl_ms >= 0]
            self._link.each(fixes)
            return NEVER
        now_s = time.time()
        until_ms = int((expires_at_s + max(expires_at_s - now_s, _MIN_MARGIN_S)) * 1_000)
        for key, ttl_ms in zip(keys, replies, strict=False):
            is_forever = ttl_ms == -1  # another thread of the run has no expiry
            if not is_forever and now_s * 1_000 + ttl_ms < until_ms:
                fixes.append(("PEXPIREAT", key, until_ms))
        self._link.each(fixes)
        return until_ms

    def remove(self, thread_id: str, run_ids: Collection[str]) -> None:
        """Take a thread that is gone out of the sets; put it back if it came again meanwhile."""
        name = thread_id.encode()
        self._link.each([("SREM", key, name) for key in (*map(run_key, run_ids), THREADS_KEY)])
        if self._alive([thread_id])[0]:
            self.add(thread_id, run_ids, expires_at_s=None)

    def threads(self) -> Iterator[str]:
        """Iterate over all threads that are there, each once."""
        seen: set[str] = set()
        cursor: bytes | str = "0"
        while True:
            cursor, page = self._page(cursor)
            fresh = [thread_id for thread_id in page if thread_id not in seen]
            seen.update(fresh)
            yield from fresh
            if int(cursor) == 0:
                return

    def sweep(self) -> None:
        """Take threads that are gone out of the next page of the set of all."""
        self._cursor, _ = self._page(self._cursor)

    def threads_of_run(self, run_id: str) -> Sequence[str]:
        """Return the threads of a run, sorted."""
        key = run_key(run_id)
        return sorted(name.decode() for name in self._link.ask(key, ("SMEMBERS", key))[0])

    def _page(self, cursor: bytes | str) -> tuple[bytes, list[str]]:
        following, names = self._link.ask(THREADS_KEY, ("SSCAN", THREADS_KEY, cursor, "COUNT", _PAGE))[0]
        page = [name.decode() for name in names]
        alive = []
        for thread_id, is_alive in zip(page, self._alive(page), strict=True):
            if is_alive:
                alive.append(thread_id)
            else:
                self.remove(thread_id, ())
        return following, alive

    def _alive(self, thread_ids: Sequence[str]) -> list[bool]:
        """Say which threads have a checkpoint, or have lost it: those who read them are to hear of that."""
        keys = [thread_keys(thread_id) for thread_id in thread_ids]
        alive = [bool(num) for num in self._link.each([("EXISTS", each.rows) for each in keys])]
        unsure = [number for number, is_alive in enumerate(alive) if not is_alive]
        members = self._link.each([any_row_query(keys[number].index) for number in unsure])
        for number, found in zip(unsure, members, strict=True):
            alive[number] = bool(found)
        return alive
