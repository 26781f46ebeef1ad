"""What is said to the engine's own pool: which contexts to hold, which no longer, which to evict first.

A hint never costs a request of its own.  The hold of an agent that pauses travels with the very call that asks for the
tool; later ones travel with a request that holds or warms.  What is to be released waits for the next of either; until
then the hold lapses by itself.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from dataclasses import replace
from typing import Any
from uuid import UUID

from pancake_langgraph._types import AgentKey, HintState, HintVerb, TokenPrefix
from pancake_langgraph.engines.pool_hints import HintAnswer, HoldHint, PoolHints, RetireHint
from pancake_langgraph.ledger import HintAnswered
from pancake_langgraph.plan import hold_priority, hold_ttl_s
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.expectations import Cause, Expectation
from pancake_langgraph.runtime.state import State

#: Releases and retirements that wait for a carrier, each; the oldest fall out and lapse by themselves.
MAX_WAITING = 256
#: Runs and agents whose held contexts are remembered.
MAX_REMEMBERED = 1024
#: A hold is renewed when it ends within this time, in seconds.
RENEW_S = 1.0
#: Tokens that a call asks to be held: all that it has read and written, however many those are.
_ALL_TOKENS = 2**31 - 1


class HintDesk:
    """Composes hints and books their answers.  Lives on the runtime's loop, but for `for_call`."""

    def __init__(self, state: State) -> None:
        """Say nothing yet."""
        self._state = state
        self._runtime = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._release: OrderedDict[str, None] = OrderedDict()
        self._retire: OrderedDict[str, int] = OrderedDict()
        self._waiting = PoolHints()  # what `for_call` reads: replaced, never changed
        self._of_run: OrderedDict[UUID, OrderedDict[str, tuple[AgentKey, TokenPrefix]]] = OrderedDict()
        self._of_agent: OrderedDict[tuple[AgentKey, str | None], tuple[UUID, tuple[int, ...]]] = OrderedDict()

    def is_held(self, expectation: Expectation) -> bool:
        """Say whether the engine holds all that is expected, but for a block, and for some time to come.

        The end of an answer is rendered to a few tokens more than the call itself has read and written.
        """
        resolved = self._state.resolved
        spare_tokens = resolved.block_size_tokens if resolved is not None else 0
        missing_tokens = expectation.edge_tokens - expectation.pool_held_tokens
        return self._is_in_force(expectation) and missing_tokens <= spare_tokens

    def _is_in_force(self, expectation: Expectation) -> bool:
        until_s = expectation.pool_held_until_s
        return until_s is not None and until_s - self._state.clock.now_s() > RENEW_S

    def for_call(self, run_id: UUID) -> PoolHints:
        """Return the hints for a call that may ask for a tool.  May be called from any thread."""
        ttl_s = hold_ttl_s(None, longest_s=self._state.settings.action_ttl_s)
        hold = HoldHint(f"{self._runtime}-{run_id.hex}", _ALL_TOKENS, ttl_s, hold_priority(None), is_whole=True)
        return replace(self._waiting, hold=hold)

    def call_sent(self, hints: PoolHints) -> None:
        """Take in that a call is on its way: its answer will not tell what became of its hints; they count as done."""
        for hint_id in hints.release:
            self._release.pop(hint_id, None)
        for hint in hints.retire:
            self._retire.pop(hint.hint_id, None)
        self._publish()

    def call_held(self, expectation: Expectation, hint_id: str, num_tokens: int) -> None:
        """A call that carried a hold has ended and will be continued as `expectation` says.

        Nothing tells whether the engine had room for it under its cap: that follows from what else it holds.
        """
        now_s, resolved = self._state.clock.now_s(), self._state.resolved
        cap_tokens = resolved.hold_cap_tokens if resolved is not None else None
        held_tokens = sum(
            other.pool_held_tokens
            for other in self._state.expectations
            if other is not expectation and (other.pool_held_until_s or 0.0) > now_s
        )
        room_tokens = num_tokens if cap_tokens is None else max(cap_tokens - held_tokens, 0)
        expectation.pool_hint_id = hint_id
        expectation.pool_held_tokens = min(num_tokens, room_tokens)
        ttl_s = hold_ttl_s(None, longest_s=self._state.settings.action_ttl_s)
        expectation.pool_held_until_s = now_s + ttl_s

    def call_over(self, hint_id: str) -> None:
        """A call that carried a hold has ended for good."""
        self._release[hint_id] = None
        _bound(self._release, MAX_WAITING)
        self._publish()

    def compose(self, expectation: Expectation, *, eta_s: float | None) -> PoolHints:
        """Return the hints for a request that reads what `expectation` expects.

        What the engine has clipped is not asked for again while that hold is in force: contexts that do not fit under
        the cap together would only take it from each other, in turns.
        """
        if expectation.pool_hint_id is None:
            expectation.pool_hint_id = f"{self._runtime}-{next(self._numbers)}"
        is_answered = self._is_in_force(expectation) and expectation.pool_asked_tokens == expectation.edge_tokens
        hold = HoldHint(
            expectation.pool_hint_id,
            expectation.edge_tokens,
            hold_ttl_s(eta_s, longest_s=self._state.settings.action_ttl_s),
            hold_priority(eta_s, is_foretold=expectation.cause is Cause.SUCCESSOR),
            is_whole=expectation.is_whole,
        )
        is_clipped = is_answered and expectation.pool_held_tokens < expectation.edge_tokens
        return replace(self._waiting, hold=None if is_clipped else hold)

    def answered(self, expectation: Expectation, hints: PoolHints, answers: tuple[HintAnswer, ...]) -> None:
        """Take in what the engine said; without an answer nothing is held."""
        now_s = self._state.clock.now_s()
        for answer in answers:
            self._state.ledger.append(HintAnswered(now_s, answer.hint_id, answer.verb, answer.state, answer.num_tokens))
            if answer.verb is HintVerb.RELEASE:
                self._release.pop(answer.hint_id, None)
            elif answer.verb is HintVerb.RETIRE:
                self._retire.pop(answer.hint_id, None)
            elif hints.hold is not None and answer.hint_id == hints.hold.hint_id:
                self._held(expectation, hints.hold, answer)
        self._publish()

    def _held(self, expectation: Expectation, hold: HoldHint, answer: HintAnswer) -> None:
        if answer.state not in (HintState.ACCEPTED, HintState.CLIPPED) or expectation.prefix is None:
            return
        expectation.pool_asked_tokens = hold.num_tokens
        expectation.pool_held_tokens = answer.num_tokens
        expectation.pool_held_until_s = self._state.clock.now_s() + hold.ttl_s
        if expectation not in self._state.expectations:  # its call came, or never will: the hold came late
            self.let_go(expectation)

    def let_go(self, expectation: Expectation) -> None:
        """Release what was held for a call that has come and ended, or will not come.

        So is what the engine was asked to hold by a request whose answer was not waited for.
        """
        if expectation.pool_hint_id is None:
            return
        if expectation.pool_held_until_s is not None:
            expectation.pool_held_until_s = None
            if expectation.prefix is not None:
                of_run = self._of_run.setdefault(expectation.run_id, OrderedDict())
                of_run[expectation.pool_hint_id] = (expectation.agent, expectation.prefix)
                _bound(of_run, MAX_WAITING)
                _bound(self._of_run, MAX_REMEMBERED)
        self.call_over(expectation.pool_hint_id)

    def run_ended(self, run_id: UUID, *, is_over: bool) -> None:
        """Take in the end of a run; when its thread is over, what was held for it shall go first.

        What other threads read as well is spared: the part that it shares with the last run of the same agent, and with
        calls that are expected.  An agent that has run once shows no such part yet, so its context is left alone.
        """
        before: dict[tuple[AgentKey, str | None], tuple[UUID, tuple[int, ...]] | None] = {}
        for hint_id, (agent, prefix) in self._of_run.pop(run_id, OrderedDict()).items():
            key = (agent, prefix.cache_salt)
            last = before.setdefault(key, self._of_agent.get(key))  # not what this very run has left
            if is_over and last is not None and last[0] != run_id:
                expected = [
                    e.prefix.token_ids
                    for e in self._state.expectations
                    if e.prefix is not None and e.cache_salt == prefix.cache_salt
                ]
                keep = max(common_prefix_tokens(other, prefix.token_ids) for other in [last[1], *expected])
                self._release.pop(hint_id, None)
                self._retire[hint_id] = keep
                _bound(self._retire, MAX_WAITING)
            self._of_agent[key] = (run_id, prefix.token_ids)
            self._of_agent.move_to_end(key)
            _bound(self._of_agent, MAX_REMEMBERED)
        self._publish()

    def _publish(self) -> None:
        retire = tuple(RetireHint(hint_id, keep) for hint_id, keep in self._retire.items())
        self._waiting = PoolHints(release=tuple(self._release), retire=retire)


def _bound(table: OrderedDict[Any, Any], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
