"""The record: conserved, bounded, settled once."""

import pytest

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._errors import InvariantError
from pancake_langgraph._types import ActionKind, Outcome
from pancake_langgraph.ledger import BreakerChanged, Ledger
from pancake_langgraph.runtime.breaker import Breaker
from pancake_langgraph.runtime.handles import HandleTable


def table(ledger: Ledger) -> HandleTable:
    return HandleTable(clock=VirtualClock(), record=ledger.append)


def plan(handles: HandleTable, tokens: int = 100):
    return handles.plan(ActionKind.WARM, agent="a", thread_id=None, num_tokens=tokens, reason="r")


def test_every_planned_token_is_settled_or_open() -> None:
    ledger = Ledger()
    handles = table(ledger)
    for outcome in Outcome:
        handles.settle(plan(handles), outcome, "r")
    plan(handles, 7)
    stats = ledger.statistics()
    assert (stats.planned_actions, stats.open_actions, stats.planned_tokens, stats.open_tokens) == (6, 1, 507, 7)
    assert stats.outcomes == dict.fromkeys(Outcome, 1)
    ledger.check_integrity()


def test_nothing_settles_twice() -> None:
    handles = table(Ledger())
    handle = plan(handles)
    handles.settle(handle, Outcome.USED, "r")
    with pytest.raises(InvariantError, match="settled twice"):
        handles.settle(handle, Outcome.WASTED, "r")


def test_counts_survive_the_bound_on_events() -> None:
    ledger = Ledger(max_events=4)
    handles = table(ledger)
    for _ in range(100):
        handles.settle(plan(handles), Outcome.USED, "r")
    stats = ledger.statistics()
    assert (stats.events, stats.dropped_events, stats.outcomes[Outcome.USED]) == (4, 196, 100)
    ledger.check_integrity()


def test_a_rejection_is_booked_whole() -> None:
    ledger = Ledger()
    table(ledger).reject(ActionKind.HOLD, agent="a", thread_id=None, num_tokens=5, reason="over budget")
    assert ledger.statistics().outcomes[Outcome.REJECTED] == 1


def breaker(clock: VirtualClock, ledger: Ledger) -> Breaker:
    return Breaker("tier", clock=clock, record=ledger.append, failures=2, open_s=1.0)


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_one_success() -> None:
    clock, ledger = VirtualClock(), Ledger()
    guard = breaker(clock, ledger)
    guard.failed("no")
    guard.succeeded()
    guard.failed("no")
    assert guard.may_try()
    guard.failed("no")
    assert (guard.is_open, guard.may_try()) == (True, False)
    clock.advance(1.0)
    assert guard.may_try()
    guard.failed("still no")
    assert not guard.may_try()
    clock.advance(1.0)
    guard.succeeded()
    assert (guard.is_open, guard.may_try()) == (False, True)
    assert [e.is_open for e in ledger.events() if isinstance(e, BreakerChanged)] == [True, False]
