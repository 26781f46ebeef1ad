"""Decides what to do so that expected prompts come into the engine's pool and stay there.

Woken by events only (a call started or ended, a tool started, the pool changed).  Each waking evaluates every
expected call once, with the pure rules of `pancake_langgraph.plan`, and starts at most a few requests.
"""

from __future__ import annotations

import asyncio
import logging
from uuid import UUID

from pancake_langgraph._errors import EngineError
from pancake_langgraph._types import ActionKind, Outcome
from pancake_langgraph.engines.base import Engine, Residency
from pancake_langgraph.plan import TOO_LATE, HoldVerb, Waiting, WarmInputs, plan_holds, plan_warm
from pancake_langgraph.runtime.expectations import Cause, Expectation
from pancake_langgraph.runtime.hints import HintDesk
from pancake_langgraph.runtime.performer import Performer
from pancake_langgraph.runtime.rendering import Renderer
from pancake_langgraph.runtime.state import State
from pancake_langgraph.tiers.base import Tier

logger = logging.getLogger(__name__)

#: Events that arrive within this time are looked at together.
COALESCE_S = 0.01
#: The one refusal that time alone may undo.
_TOO_LATE_KEY = f"{ActionKind.WARM}:{TOO_LATE.split(':', 1)[0]}"


class Actor:
    """Evaluates what is expected, has it performed, and gives it up.  Lives on the runtime's loop."""

    def __init__(self, state: State, engine: Engine, tier: Tier) -> None:
        """Act on `engine` and `tier`, which others open and close."""
        self._state = state
        self._engine = engine
        self._wake = asyncio.Event()
        self._renderer = Renderer(state, engine)
        self.hints = HintDesk(state)
        self._performer = Performer(state, engine, tier, self.hints, self.poke)
        self._alarm: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._evaluating = False

    def poke(self) -> None:
        """Ask for an evaluation; where nothing is expected there is nothing to evaluate."""
        if self._soon is None and len(self._state.expectations):
            self._soon = asyncio.get_running_loop().call_later(COALESCE_S, self._look)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and no evaluation is asked for."""
        is_asked = self._soon is not None or self._wake.is_set()
        return not self._performer.is_working and not self._evaluating and not is_asked

    @property
    def is_working(self) -> bool:
        """Whether any request is under way.  May be asked from any thread."""
        return self._performer.is_working

    async def stop(self) -> None:
        """Cancel every request under way, also those whose call has come, and wait for their ends."""
        for timer in (self._alarm, self._soon):
            if timer is not None:
                timer.cancel()
        await self._performer.stop()

    async def serve(self) -> None:
        """Evaluate whenever poked, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._evaluating = failed = True
            try:
                await self._evaluate()
            except EngineError as exc:  # hints fail open: counted by the breaker, tried again at the next event
                self._state.engine_breaker.failed(type(exc).__name__)
                logger.debug("evaluation failed: %s", type(exc).__name__)
            except Exception as exc:  # a bug costs this evaluation, not all that follow; counted
                self._state.engine_breaker.failed(type(exc).__name__)
                logger.log(self._state.count_bug(), "an evaluation failed unexpectedly", exc_info=True)
            else:
                failed = False
            finally:
                self._evaluating = False
            if failed and not self._state.engine_breaker.is_open:
                self.poke()  # the events that woke this evaluation are used up; once open, sweeping tries again

    def give_way(self) -> None:
        """A call has come: cancel warm-ups that compute.  The one for that call is claimed and no longer expected."""
        for expectation in self._state.expectations:
            if expectation.busy and expectation.computing:
                self._performer.cancel(expectation, "gave way to foreground work")

    def drop(self, expectation: Expectation, reason: str) -> None:
        """Give up an expectation: finished work is wasted, running work is cancelled."""
        self._state.expectations.discard(expectation)
        for handle in expectation.handles:
            self._performer.settle(handle, Outcome.WASTED, reason)
        expectation.handles.clear()
        self._performer.cancel(expectation, reason)
        self.hints.let_go(expectation)

    def settle_claim(self, expectation: Expectation, outcome: Outcome, reason: str) -> None:
        """Settle all finished work of an expectation whose call has come and ended; what still runs is given up."""
        for handle in expectation.handles:
            self._performer.settle(handle, outcome, reason)
        expectation.handles.clear()
        self._performer.cancel(expectation, reason)
        self.hints.let_go(expectation)

    def run_ended(self, run_id: UUID, *, is_over: bool) -> None:
        """Take in the end of a run; `is_over` says that its thread will not go on."""
        self.hints.run_ended(run_id, is_over=is_over)

    def sweep(self) -> None:
        """Drop what was not claimed within its time to live, and calls that ended without saying so."""
        now_s, ttl_s = self._state.clock.now_s(), self._state.settings.action_ttl_s
        for expectation in self._state.expectations:
            if now_s - max(expectation.created_at_s, expectation.eta_at_s or 0.0) > ttl_s:
                self.drop(expectation, f"not claimed within {ttl_s:g} s")
        for call in tuple(self._state.calls.values()):
            if call.over_at_s is not None and now_s - call.over_at_s > ttl_s:
                del self._state.calls[call.run_id]
                if call.claim is not None:
                    self.settle_claim(call.claim, Outcome.WASTED, "the end of its call was never reported")
        if len(self._state.expectations) and self._state.engine_breaker.is_open:
            self.poke()  # an engine that came back tells nobody

    # -- evaluation -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Evaluate now what was poked for.  No task is woken for an engine that nothing can be asked of."""
        self._soon = None
        resolved = self._state.resolved
        if resolved is None:
            return
        if resolved.warm:
            self._wake.set()
            return
        for expectation in self._state.expectations:
            self._refuse(expectation, ActionKind.WARM, resolved.reasons[0] if resolved.reasons else "no warm-ups")

    async def _evaluate(self) -> None:
        state = self._state
        resolved = state.resolved
        if resolved is None or not state.engine_breaker.may_try():
            return
        for expectation in state.expectations:
            if not expectation.busy:
                await self._renderer.render(expectation)
        ready = [e for e in state.expectations if e.prefix is not None and not e.busy and not e.barred]
        residencies = [(e, await self._engine.residency(e.prefix)) for e in ready if e.prefix is not None]
        live = [(e, r) for e, r in residencies if e in state.expectations and not self._is_in_use(e, r)]
        held = [(e, r) for e, r in live if resolved.hold and r.known and self._is_held(e, r)]
        held_keys = {id(e) for e, _ in held}
        held_tokens = self._hold(held)
        for expectation, residency in live:
            if id(expectation) not in held_keys:
                self._warm(expectation, residency, held_tokens=held_tokens)

    def _is_in_use(self, expectation: Expectation, residency: Residency) -> bool:
        """Whether a call under way reads all of it: then it needs no room of its own, and no work.

        Once that call answers, its blocks are in use, so that nothing pushes them out.
        """
        readers = [call for call in self._state.running if call.reads(expectation)]
        if residency.known and any(call.began for call in readers):
            expectation.used_at_allocated_tokens = residency.allocated_tokens
        return bool(readers)

    def _is_held(self, expectation: Expectation, residency: Residency) -> bool:
        missing_tokens = expectation.edge_tokens - residency.resident_tokens
        return expectation.cause is Cause.RESUME or missing_tokens <= 0

    def _hold(self, held: list[tuple[Expectation, Residency]]) -> int:
        """Do what is best for contexts that are to stay in the pool; return how many tokens of it they take."""
        state, resolved = self._state, self._state.resolved
        if not held or resolved is None or resolved.pool_tokens is None:
            return sum(expectation.edge_tokens for expectation, _ in held)
        by_key = {}
        waiting = []
        for number, (expectation, residency) in enumerate(held):
            if expectation.used_at_allocated_tokens is None:
                expectation.used_at_allocated_tokens = residency.allocated_tokens
            key = f"{number:06d}"
            by_key[key] = expectation, residency
            missing = max(expectation.edge_tokens - residency.resident_tokens, 0)
            waiting.append(
                Waiting(
                    key=key,
                    num_tokens=expectation.edge_tokens,
                    resident_tokens=expectation.edge_tokens - missing,
                    turnover_tokens=residency.allocated_tokens - expectation.used_at_allocated_tokens,
                    eta_s=self._performer.eta_s(expectation),
                    is_held=self.hints.is_held(expectation),
                    is_asked=expectation.pool_hint_id is not None,
                    waited_s=state.clock.now_s() - expectation.created_at_s,
                    restored_after_s=expectation.restored_after_s,
                    restored_tokens=expectation.restored_tokens,
                    restorable=self._performer.restorable(expectation),
                )
            )
        for decision in plan_holds(
            waiting,
            pool_tokens=resolved.pool_tokens,
            running_tokens=state.running_tokens,
            reserve_ratio=state.settings.reserve_ratio,
            block_size_tokens=resolved.block_size_tokens,
            takes_hints=resolved.pool_hints,
            is_idle=not state.running,
        ):
            expectation, residency = by_key[decision.key]
            if decision.verb is HoldVerb.TOUCH:
                self._performer.submit(expectation, ActionKind.HOLD, decision.reason, missing_tokens=0)
            elif decision.verb is HoldVerb.RESTORE:
                missing = expectation.edge_tokens - residency.resident_tokens
                self._performer.submit(expectation, ActionKind.WARM, decision.reason, missing_tokens=missing)
            elif decision.verb is HoldVerb.REFUSE:
                self._refuse(expectation, ActionKind.HOLD, decision.reason)
            elif decision.again_in_s is not None:
                self._look_again_in(decision.again_in_s)
        return sum(context.room_tokens for context in waiting)

    def _look_again_at(self, expectation: Expectation, action_s: float | None) -> None:
        """Evaluate once more when a call that was to come any moment is well overdue: it may stay away for long."""
        eta_s = self._performer.eta_s(expectation)
        if eta_s is not None:
            self._look_again_in(max(eta_s, 0.0) + (action_s or 0.0))

    def _look_again_in(self, after_s: float) -> None:
        """Evaluate once more after so many seconds, or earlier where that was asked for before."""
        loop = asyncio.get_running_loop()
        if self._alarm is not None:
            if self._alarm.when() <= loop.time() + after_s:
                return
            self._alarm.cancel()
        self._alarm = loop.call_later(after_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.poke()

    def _warm(self, expectation: Expectation, residency: Residency, *, held_tokens: int) -> None:
        state, resolved = self._state, self._state.resolved
        if resolved is None:
            return
        if expectation.cause is Cause.RESUME and not residency.known:
            self._refuse(expectation, ActionKind.HOLD, "residency unknown: the engine gives no KV events")
            return
        if not residency.known and (expectation.handles or expectation.refused - {_TOO_LATE_KEY}):
            return  # warmed or refused once; without events nothing new can be known
        missing = expectation.edge_tokens - residency.resident_tokens
        action_s = self._performer.action_s(expectation, missing)
        verdict = plan_warm(
            WarmInputs(
                p_next=expectation.p_next,
                num_tokens=expectation.edge_tokens,
                resident_tokens=residency.resident_tokens if residency.known else None,
                restorable=self._performer.restorable(expectation),
                foreground_calls=len(state.running),
                pool_tokens=resolved.pool_tokens,
                busy_tokens=state.running_tokens + held_tokens,
                wasted_ratio=state.wasted_ratio,
                eta_s=self._performer.eta_s(expectation),
                action_s=action_s,
            ),
            p_warm_min=state.settings.p_warm_min,
            reserve_ratio=state.settings.reserve_ratio,
            waste_budget_ratio=state.settings.waste_budget_ratio,
            block_size_tokens=resolved.block_size_tokens,
        )
        if not verdict.submit:
            self._refuse(expectation, ActionKind.WARM, verdict.reason)
            if verdict.reason == TOO_LATE:
                self._look_again_at(expectation, action_s)
            return
        self._performer.submit(expectation, ActionKind.WARM, verdict.reason, missing_tokens=missing)

    def _refuse(self, expectation: Expectation, kind: ActionKind, reason: str) -> None:
        """Book a refusal, once per expectation and kind of reason (figures in a reason do not make it new)."""
        key = f"{kind}:{reason.split(':', 1)[0].split('=', 1)[0]}"
        if key in expectation.refused:
            return
        expectation.refused.add(key)
        self._state.handles.reject(
            kind,
            agent=str(expectation.agent),
            thread_id=expectation.place.thread_id,
            num_tokens=expectation.edge_tokens,
            reason=reason,
        )
