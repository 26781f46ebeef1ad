"""The breaker that stops asking a part."""

from __future__ import annotations

from pancake_langgraph.ledger import BreakerChanged, Event
from pancake_langgraph.runtime.breaker import Breaker


class Clock:
    now = 100.0

    def now_s(self) -> float:
        return self.now


def made(clock: Clock) -> tuple[Breaker, list[Event]]:
    events: list[Event] = []
    return Breaker("tier", clock=clock, record=events.append, failures=2, open_s=5.0), events


def is_open(events: list[Event]) -> list[bool]:
    return [event.is_open for event in events if isinstance(event, BreakerChanged)]


def test_it_opens_after_failures_in_a_row_tries_again_and_closes() -> None:
    clock = Clock()
    breaker, events = made(clock)
    breaker.failed("gone")
    assert breaker.may_try()
    breaker.failed("gone")
    assert not breaker.may_try()
    clock.now += 5.0
    assert breaker.may_try()
    assert breaker.is_open
    breaker.succeeded()
    assert not breaker.is_open
    assert is_open(events) == [True, False]


def test_a_locked_one_stays_open_whatever_answers_until_it_is_unlocked() -> None:
    clock = Clock()
    breaker, events = made(clock)
    breaker.lock("wrong answers")
    breaker.lock("wrong answers")
    clock.now += 1_000.0
    breaker.succeeded()
    assert breaker.is_open
    assert not breaker.may_try()
    breaker.unlock()
    assert breaker.may_try()
    assert not breaker.is_open
    breaker.unlock()
    assert is_open(events) == [True, False]


def test_an_open_one_that_is_locked_says_why() -> None:
    breaker, events = made(Clock())
    for _ in range(3):
        breaker.failed("no answer")
    breaker.lock("wrong answers")
    assert [event.reason for event in events if isinstance(event, BreakerChanged)] == ["no answer", "wrong answers"]
