"""What is said to the engine's own pool: which contexts to hold, which no longer, which to evict first.

A hint never costs a request of its own: it travels with a request that holds or warms.  What is to be released waits
for the next one; until then the hold lapses by itself.
"""

from __future__ import annotations

import itertools
import secrets
from collections import OrderedDict
from typing import Any
from uuid import UUID

from pancake_langgraph._types import AgentKey, HintState, HintVerb, TokenPrefix
from pancake_langgraph.engines.pool_hints import HintAnswer, HoldHint, PoolHints, RetireHint
from pancake_langgraph.ledger import HintAnswered
from pancake_langgraph.plan import hold_priority, hold_ttl_s
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.expectations import Expectation
from pancake_langgraph.runtime.state import State

#: Releases and retirements that wait for a carrier, each; the oldest fall out and lapse by themselves.
MAX_WAITING = 256
#: Runs and agents whose held contexts are remembered.
MAX_REMEMBERED = 1024
#: A hold is renewed when it ends within this time, in seconds.
RENEW_S = 1.0


class HintDesk:
    """Composes hints and books their answers.  Lives on the runtime's loop."""

    def __init__(self, state: State) -> None:
        """Say nothing yet."""
        self._state = state
        self._runtime = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._release: OrderedDict[str, None] = OrderedDict()
        self._retire: OrderedDict[str, int] = OrderedDict()
        self._of_run: OrderedDict[UUID, OrderedDict[str, tuple[AgentKey, TokenPrefix]]] = OrderedDict()
        self._of_agent: OrderedDict[tuple[AgentKey, str | None], tuple[UUID, tuple[int, ...]]] = OrderedDict()

    def is_held(self, expectation: Expectation) -> bool:
        """Say whether the engine holds all that is expected, and for some time to come."""
        until_s = expectation.pool_held_until_s
        return (
            until_s is not None
            and until_s - self._state.clock.now_s() > RENEW_S
            and expectation.pool_held_tokens >= expectation.edge_tokens
        )

    def compose(self, expectation: Expectation, *, eta_s: float | None) -> PoolHints:
        """Return the hints for a request that reads what `expectation` expects."""
        if expectation.pool_hint_id is None:
            expectation.pool_hint_id = f"{self._runtime}-{next(self._numbers)}"
        hold = HoldHint(
            expectation.pool_hint_id,
            expectation.edge_tokens,
            hold_ttl_s(eta_s, longest_s=self._state.settings.action_ttl_s),
            hold_priority(eta_s),
        )
        return PoolHints(
            hold=hold,
            release=tuple(self._release),
            retire=tuple(RetireHint(hint_id, keep) for hint_id, keep in self._retire.items()),
        )

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

    def _held(self, expectation: Expectation, hold: HoldHint, answer: HintAnswer) -> None:
        if answer.state not in (HintState.ACCEPTED, HintState.CLIPPED) or expectation.prefix is None:
            return
        expectation.pool_held_tokens = answer.num_tokens
        expectation.pool_held_until_s = self._state.clock.now_s() + hold.ttl_s
        of_run = self._of_run.setdefault(expectation.run_id, OrderedDict())
        of_run[hold.hint_id] = (expectation.agent, expectation.prefix)
        _bound(of_run, MAX_WAITING)
        _bound(self._of_run, MAX_REMEMBERED)
        if expectation not in self._state.expectations:  # its call came, or never will: the hold came late
            self.let_go(expectation)

    def let_go(self, expectation: Expectation) -> None:
        """Release what was held for a call that has come and ended, or will not come."""
        if expectation.pool_hint_id is not None and expectation.pool_held_until_s is not None:
            self._release[expectation.pool_hint_id] = None
            expectation.pool_held_until_s = None
            _bound(self._release, MAX_WAITING)

    def run_ended(self, run_id: UUID, *, is_over: bool) -> None:
        """Take in the end of a run; when its thread is over, what was held for it shall go first.

        What other threads read as well is spared: the part that it shares with the last run of the same agent, and with
        calls that are expected.  An agent that has run once shows no such part yet, so its context is left alone.
        """
        for hint_id, (agent, prefix) in self._of_run.pop(run_id, OrderedDict()).items():
            key = (agent, prefix.cache_salt)
            last = self._of_agent.get(key)
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


def _bound(table: OrderedDict[Any, Any], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
