"""Carries out what was decided for expected calls: requests to the tier and the engine, each settled once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pancake_langgraph._errors import EngineError, EngineRejected, TierError
from pancake_langgraph._types import ActionKind, Outcome, SpanId, TokenPrefix
from pancake_langgraph.engines.base import Engine, WarmReport
from pancake_langgraph.ledger import SpanEnded, SpanKind, SpanStarted, SpanStatus
from pancake_langgraph.runtime.action_times import ActionTimes, Work
from pancake_langgraph.runtime.expectations import Expectation
from pancake_langgraph.runtime.handles import Handle
from pancake_langgraph.runtime.hints import HintDesk
from pancake_langgraph.runtime.state import State
from pancake_langgraph.tiers.base import Tier

logger = logging.getLogger(__name__)


class Performer:
    """Runs requests in tasks of the runtime's loop, a bounded number at once.

    `hints` are told by it; `ended` is called after each request, when more may be begun.
    """

    def __init__(self, state: State, engine: Engine, tier: Tier, hints: HintDesk, ended: Callable[[], None]) -> None:
        """Act on `engine` and `tier`, which others open and close."""
        self._state = state
        self._engine = engine
        self._tier = tier
        self._hints = hints
        self._on_end = ended
        self._times = ActionTimes()
        self._inflight = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_working(self) -> bool:
        """Whether any request is under way.  May be asked from any thread."""
        return self._inflight > 0

    async def stop(self) -> None:
        """Cancel every request under way, also those whose call has come, and wait for their ends."""
        for task in self._tasks:
            task.cancel("runtime closed")
        if self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)  # what was cancelled before its first step is settled right behind

    def eta_s(self, expectation: Expectation) -> float | None:
        """Return in how many seconds a call is expected, under 0 when it is overdue; `None` when that is unknown."""
        if expectation.eta_at_s is None:
            return None
        return expectation.eta_at_s - self._state.clock.now_s()

    def restorable(self, expectation: Expectation) -> bool:
        """Whether lost tokens can come from the tier, which answers; else they have to be computed."""
        return expectation.restorable and not self._state.tier_breaker.is_open

    def action_s(self, expectation: Expectation, missing_tokens: int) -> float | None:
        """Return how many seconds bringing so many tokens will take; `None` while that was not seen yet."""
        work, now_s = self._work(expectation, missing_tokens), self._state.clock.now_s()
        return self._times.expected_s(work, num_tokens=missing_tokens, now_s=now_s)

    def _work(self, expectation: Expectation, missing_tokens: int) -> Work:
        if missing_tokens <= 0:
            return Work.TOUCH
        return Work.RESTORE if self.restorable(expectation) else Work.COMPUTE

    def submit(self, expectation: Expectation, kind: ActionKind, reason: str, *, missing_tokens: int) -> None:
        """Begin a request that brings an expected prompt up; nothing is begun where it would be in the way."""
        state = self._state
        if expectation.prefix is None or self._inflight >= state.settings.max_inflight_actions:
            return
        computing = kind is ActionKind.WARM and missing_tokens > 0 and not self.restorable(expectation)
        if computing and state.prefilling:
            return  # out of the way: the first piece of that call wakes the actor
        handle = state.handles.plan(
            kind,
            agent=str(expectation.agent),
            thread_id=expectation.place.thread_id,
            num_tokens=expectation.edge_tokens,
            reason=reason,
        )
        handle.resident_tokens = max(expectation.edge_tokens - missing_tokens, 0)
        state.handles.submit(handle, reason)
        expectation.computing = computing
        self._inflight += 1
        expectation.task = asyncio.get_running_loop().create_task(
            self._perform(expectation, handle, expectation.prefix), name=f"pancake-{handle.action_id}"
        )
        self._tasks.add(expectation.task)
        expectation.task.add_done_callback(lambda task: self._ended(task, expectation, handle))

    def _ended(self, task: asyncio.Task[None], expectation: Expectation, handle: Handle) -> None:
        """Book a task that was cancelled before its first step: its own `except` never ran."""
        self._tasks.discard(task)
        if not handle.started:
            self._inflight -= 1
            expectation.computing = False
            self.settle(handle, Outcome.WASTED, "cancelled before it was sent")
            self._on_end()

    async def _perform(self, expectation: Expectation, handle: Handle, prefix: TokenPrefix) -> None:
        state = self._state
        handle.started = True
        missing_tokens = handle.num_tokens - handle.resident_tokens
        work, started_at_s = self._work(expectation, missing_tokens), state.clock.now_s()
        self._span(handle, SpanStatus.OK, ended=False)
        status = SpanStatus.OK
        try:
            if self._needs_lift(expectation, handle, missing_tokens):
                await self._prefetch(expectation, prefix)
            report = await asyncio.wait_for(
                self._carry(expectation, handle, prefix), timeout=state.settings.warm_deadline_s
            )
            now_s = state.clock.now_s()
            self._times.note(work, num_tokens=missing_tokens, elapsed_s=now_s - started_at_s, now_s=now_s)
            if work is Work.RESTORE:
                expectation.restored_after_s = started_at_s - expectation.created_at_s
                expectation.restored_tokens = missing_tokens
            if report.cached_tokens is not None:
                handle.computed_tokens = report.prompt_tokens - report.cached_tokens
            residency = await self._engine.residency(prefix)
            expectation.used_at_allocated_tokens = residency.allocated_tokens if residency.known else None
            state.engine_breaker.succeeded()
            self._finish(expectation, handle)
        except asyncio.CancelledError as exc:
            status = SpanStatus.CANCELLED
            outcome = Outcome.LATE if expectation.claimed else Outcome.WASTED
            handle.computed_tokens = await self._computed_so_far(expectation, handle, prefix)
            self.settle(handle, outcome, str(exc) or "runtime closed")
        except TimeoutError:
            status = SpanStatus.ERROR
            state.engine_breaker.failed("warm-up timed out")
            self.settle(handle, Outcome.FAILED, f"no answer within {state.settings.warm_deadline_s:g} s")
        except EngineRejected as exc:  # the engine is well, and would refuse the same prefix again
            status = SpanStatus.ERROR
            expectation.barred = True
            self.settle(handle, Outcome.FAILED, type(exc).__name__)
        except EngineError as exc:
            status = SpanStatus.ERROR
            state.engine_breaker.failed(type(exc).__name__)
            self.settle(handle, Outcome.FAILED, type(exc).__name__)
        except Exception as exc:  # hints fail open; counted
            status = SpanStatus.ERROR
            state.engine_breaker.failed(type(exc).__name__)
            self.settle(handle, Outcome.FAILED, type(exc).__name__)
            logger.log(state.count_bug(), "a warm-up failed unexpectedly", exc_info=True)
        finally:
            self._inflight -= 1
            expectation.computing = False
            self._span(handle, status, ended=True)
            self._on_end()

    async def _carry(self, expectation: Expectation, handle: Handle, prefix: TokenPrefix) -> WarmReport:
        """Send one request, with the hints that may travel with it."""
        resolved = self._state.resolved
        priority = resolved.priority if resolved else 0
        is_held = handle.kind is ActionKind.HOLD or expectation.is_sure
        if resolved is None or not resolved.pool_hints or not is_held:
            return await self._engine.warm(prefix, priority=priority)
        hints = self._hints.compose(expectation, eta_s=self.eta_s(expectation))
        report = await self._engine.warm(prefix, priority=priority, hints=hints)
        self._hints.answered(expectation, hints, report.answers)
        return report

    async def _computed_so_far(self, expectation: Expectation, handle: Handle, prefix: TokenPrefix) -> int | None:
        """Return what a cancelled warm-up left in the pool, as far as events tell; a copy computed nothing."""
        if handle.kind is ActionKind.HOLD or expectation.restorable:
            return 0
        try:
            residency = await self._engine.residency(prefix)
        except (EngineError, asyncio.CancelledError):  # closed while it looked: the action is settled all the same
            return None
        return max(residency.resident_tokens - handle.resident_tokens, 0) if residency.known else None

    def _needs_lift(self, expectation: Expectation, handle: Handle, missing_tokens: int) -> bool:
        """Whether something of a prompt may lie on the tier's disk only, as far as it was not asked for before.

        A block or less is what an answer's end is rendered to, which no tier has.
        """
        block_tokens = self._state.resolved.block_size_tokens if self._state.resolved is not None else 0
        is_new = expectation.edge_tokens > expectation.lifted_tokens
        return handle.kind is ActionKind.WARM and missing_tokens > block_tokens and is_new

    async def _prefetch(self, expectation: Expectation, prefix: TokenPrefix) -> None:
        """Ask the tier to lift what it has from disk first; its silence only costs the lift."""
        breaker = self._state.tier_breaker
        if not (self._state.resolved and self._state.resolved.tier and breaker.may_try()):
            return
        handle = self._state.handles.plan(
            ActionKind.PREFETCH,
            agent=str(expectation.agent),
            thread_id=expectation.place.thread_id,
            num_tokens=expectation.edge_tokens,
            reason="lift from disk before the engine reads it",
        )
        self._state.handles.submit(handle, "asked the tier")
        outcome, reason = Outcome.WASTED, "given up"
        try:
            report = await self._tier.prefetch(prefix)
            found = report.found_chunks
            outcome = Outcome.USED if found else Outcome.WASTED
            reason = f"{found} of {report.total_chunks} chunks found"
            expectation.lifted_tokens = handle.num_tokens
            breaker.succeeded()
        except TierError as exc:
            outcome, reason = Outcome.FAILED, type(exc).__name__
            logger.debug("tier did not prefetch: %s", type(exc).__name__)
            if not (health := await self._tier.health()).alive:  # a slow disk is no dead server
                breaker.failed(health.detail)
        finally:
            handle.computed_tokens = 0
            self._state.handles.settle(handle, outcome, reason)

    def _finish(self, expectation: Expectation, handle: Handle) -> None:
        if expectation.claimed:
            self.settle(handle, Outcome.LATE, "its call came first")
        elif expectation in self._state.expectations:
            expectation.handles.append(handle)
        else:
            self.settle(handle, Outcome.WASTED, "no longer expected")

    def cancel(self, expectation: Expectation, reason: str) -> None:
        """Give up the request that is under way for a call, if any."""
        if expectation.task is not None and not expectation.task.done():
            expectation.task.cancel(reason)

    def settle(self, handle: Handle, outcome: Outcome, reason: str) -> None:
        """Book how an action ended."""
        if outcome is Outcome.WASTED:
            self._state.counters.wasted_tokens += handle.computed_tokens or 0
        self._state.handles.settle(handle, outcome, reason)

    def _span(self, handle: Handle, status: SpanStatus, *, ended: bool) -> None:
        now_s, span_id = self._state.clock.now_s(), SpanId(handle.action_id)
        if ended:
            self._state.ledger.append(SpanEnded(now_s, span_id, status, prompt_tokens=handle.num_tokens))
        else:
            self._state.ledger.append(
                SpanStarted(now_s, span_id, SpanKind.WARM, f"{handle.kind} {handle.agent}", handle.thread_id, None)
            )
