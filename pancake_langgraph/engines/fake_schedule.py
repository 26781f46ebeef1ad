"""Admission, steps and modelled time of the fake engine."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from pancake_langgraph._clock import Clock, VirtualClock
from pancake_langgraph.engines.fake_pool import Allocation, LruBlockPool

Work = Literal["chat", "warm"]

_MAX_SERVED: Final = 1000


@dataclass(frozen=True, slots=True)
class ServedCall:
    """One request that was served to its end or given up, with its times on the engine's clock."""

    work: Work
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cancelled: bool
    arrived_s: float
    first_token_s: float | None
    ended_s: float


class FakeScheduler:
    """Lets requests in by priority, and moves the clock for what they compute.  Belongs to one event loop."""

    def __init__(
        self,
        pool: LruBlockPool,
        clock: Clock,
        *,
        step_tokens: int,
        prefill_s_per_token: float,
        decode_s_per_token: float,
    ) -> None:
        """Schedule on `pool`; a clock that is not virtual is read, never moved."""
        self.pool = pool
        self.clock = clock
        self.step_tokens = step_tokens
        self.prefill_s_per_token = prefill_s_per_token
        self.decode_s_per_token = decode_s_per_token
        self.served: deque[ServedCall] = deque(maxlen=_MAX_SERVED)
        self.running = 0
        self._waiting: list[tuple[int, int]] = []
        self._tickets = 0
        self._freed = asyncio.Event()
        self._gates: dict[Work, asyncio.Event] = {"chat": asyncio.Event(), "warm": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()

    @property
    def waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    def hold(self, work: Work) -> None:
        """Stop requests of this kind before their next step."""
        self._gates[work].clear()

    def release(self, work: Work) -> None:
        """Let held requests go on."""
        self._gates[work].set()

    def call(
        self, work: Work, token_ids: list[int], cache_salt: str | None, *, priority: int, planned_tokens: int
    ) -> FakeCall:
        """Make a request that produces `planned_tokens`; it is admitted when entered as a context."""
        return FakeCall(self, work, token_ids, cache_salt, priority=priority, planned_tokens=planned_tokens)

    async def turn(self, work: Work) -> None:
        """Let others run, and wait while this kind of work is held."""
        await asyncio.sleep(0)
        await self._gates[work].wait()

    def advance(self, delta_s: float) -> None:
        """Move the clock, if it can be moved."""
        if isinstance(self.clock, VirtualClock):
            self.clock.advance(delta_s)

    async def admit(
        self, token_ids: list[int], cache_salt: str | None, *, priority: int, extra_tokens: int
    ) -> Allocation:
        """Wait for enough free blocks; the lowest priority number goes first, then the first to come."""
        self._tickets += 1
        ticket = (priority, self._tickets)
        insort(self._waiting, ticket)
        try:
            while True:
                if self._waiting[0] == ticket:
                    allocation = self.pool.allocate(token_ids, cache_salt, extra_tokens=extra_tokens)
                    if allocation is not None:
                        self.running += 1
                        return allocation
                await self._freed.wait()
        finally:
            self._waiting.remove(ticket)
            self._wake()

    def end(self, allocation: Allocation, record: ServedCall) -> None:
        """Take the blocks of an admitted request back and note how it went."""
        self.running -= 1
        self.pool.free(allocation)
        self.served.append(record)
        self._wake()

    def _wake(self) -> None:
        freed, self._freed = self._freed, asyncio.Event()
        freed.set()


class FakeCall:
    """One request, from admission to the return of its blocks."""

    def __init__(
        self,
        scheduler: FakeScheduler,
        work: Work,
        token_ids: list[int],
        cache_salt: str | None,
        *,
        priority: int,
        planned_tokens: int,
    ) -> None:
        """Describe the request; enter it as a context to start."""
        self.output_tokens = self.cached_tokens = 0
        self.complete = False
        self._scheduler, self._work = scheduler, work
        self._token_ids, self._cache_salt = token_ids, cache_salt
        self._priority, self._planned_tokens = priority, planned_tokens
        self._allocation: Allocation | None = None
        self._arrived_s = scheduler.clock.now_s()
        self._first_token_s: float | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Prompt and what was produced so far, while it is admitted."""
        return tuple(self._allocation.token_ids) if self._allocation is not None else tuple(self._token_ids)

    async def __aenter__(self) -> FakeCall:
        """Wait for admission."""
        self._allocation = await self._scheduler.admit(
            self._token_ids,
            self._cache_salt,
            priority=self._priority,
            extra_tokens=max(self._planned_tokens - 1, 0),
        )
        self.cached_tokens = self._allocation.cached_tokens
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the blocks back."""
        if self._allocation is None:
            return
        record = ServedCall(
            work=self._work,
            prompt_tokens=len(self._token_ids),
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            cancelled=not self.complete,
            arrived_s=self._arrived_s,
            first_token_s=self._first_token_s,
            ended_s=self._scheduler.clock.now_s(),
        )
        self._scheduler.end(self._allocation, record)

    async def prefill(self) -> None:
        """Compute what the pool does not hold, step by step."""
        scheduler, done = self._scheduler, self.cached_tokens
        while done < len(self._token_ids):
            await scheduler.turn(self._work)
            step = min(scheduler.step_tokens, len(self._token_ids) - done)
            done += step
            self._spend(step * scheduler.prefill_s_per_token, done)

    async def decode(self, ids: list[int], *, limit: int) -> bool:
        """Produce `ids`; false when `limit` tokens were produced before their end."""
        for token in ids:
            if self.output_tokens >= limit:
                return False
            await self._scheduler.turn(self._work)
            if self._allocation is not None:
                self._allocation.token_ids.append(token)
            self.output_tokens += 1
            # The newest token is known but not yet read: its own KV is not there.
            self._spend(self._scheduler.decode_s_per_token, len(self._token_ids) + self.output_tokens - 1)
            if self._first_token_s is None:
                self._first_token_s = self._scheduler.clock.now_s()
        return True

    def _spend(self, delta_s: float, computed_tokens: int) -> None:
        self._scheduler.advance(delta_s)
        if self._allocation is not None:
            self._scheduler.pool.computed(self._allocation, computed_tokens)
