"""What the runtime remembers of held contexts, and what it says of them at the end of a run."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._types import AgentKey, Prompt, ThreadId, TokenPrefix
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.forecast import create_forecaster
from pancake_langgraph.ledger import Ledger
from pancake_langgraph.runtime.expectations import SURE, Cause, Expectation, Place
from pancake_langgraph.runtime.hints import HintDesk
from pancake_langgraph.runtime.state import State

AGENT = AgentKey("agent", "", "hash")
SHARED = tuple(range(100))


def desk() -> HintDesk:
    clock = VirtualClock()
    settings = RuntimeSettings(engine="fake")
    return HintDesk(State.build(settings, clock=clock, ledger=Ledger(), forecaster=create_forecaster()))


def paused(desk: HintDesk, run_id: UUID, *own: int) -> str:
    """Let the agent pause in a run, come back, and end its call; return the id of what was held meanwhile."""
    expectation = Expectation(
        place=Place(ThreadId("t"), "", "agent"),
        agent=AGENT,
        cause=Cause.RESUME,
        run_id=run_id,
        prompt=Prompt.of([]),
        cache_salt=None,
        p_next=1.0,
        created_at_s=0.0,
        prefix=TokenPrefix((*SHARED, *own)),
    )
    hint_id = f"hint-{own}"
    desk.call_held(expectation, hint_id, 100)
    desk.let_go(expectation)
    return hint_id


def test_all_pauses_of_a_run_that_is_over_are_retired_and_not_only_the_first() -> None:
    made, first, second = desk(), uuid4(), uuid4()
    paused(made, first, 1, 1)
    made.run_ended(first, is_over=True)
    held = [paused(made, second, 2, 2), paused(made, second, 2, 2, 2), paused(made, second, 2, 2, 2, 2)]
    made.run_ended(second, is_over=True)
    hints = made.for_call(uuid4())
    assert [(hint.hint_id, hint.keep_tokens) for hint in hints.retire] == [(name, len(SHARED)) for name in held]
    assert not set(hints.release) & set(held)


def expected(cause: Cause, *, p_next: float = 1.0, is_whole: bool = False) -> Expectation:
    return Expectation(
        place=Place(ThreadId("t"), "", "agent"),
        agent=AGENT,
        cause=cause,
        run_id=uuid4(),
        prompt=Prompt.of([]),
        cache_salt=None,
        p_next=p_next,
        created_at_s=0.0,
        edge_tokens=100,
        is_whole=is_whole,
    )


def test_a_foretold_agent_stands_behind_all_that_have_paused() -> None:
    made = desk()
    foretold = made.compose(expected(Cause.SUCCESSOR), eta_s=0.1).hold
    paused_long = made.compose(expected(Cause.RESUME), eta_s=99.0).hold
    paused_unknown = made.compose(expected(Cause.RESUME), eta_s=None).hold
    own = made.for_call(uuid4()).hold
    assert foretold is not None
    for other in (paused_long, paused_unknown, own):
        assert other is not None
        assert foretold.priority < other.priority


def test_only_what_begins_with_all_that_a_thread_has_read_is_said_to_be_whole() -> None:
    for is_whole in (True, False):
        hold = desk().compose(expected(Cause.RESUME, is_whole=is_whole), eta_s=1.0).hold
        assert hold is not None
        assert hold.is_whole is is_whole


def test_what_the_engine_was_asked_to_hold_is_released_also_without_its_answer() -> None:
    made, expectation = desk(), expected(Cause.SUCCESSOR)
    hold = made.compose(expectation, eta_s=1.0).hold
    assert hold is not None
    made.let_go(expectation)
    assert made.for_call(uuid4()).release == (hold.hint_id,)


@pytest.mark.parametrize(
    ("cause", "p_next", "is_sure"),
    [(Cause.RESUME, 0.0, True), (Cause.SUCCESSOR, SURE, True), (Cause.SUCCESSOR, SURE - 0.01, False)],
)
def test_who_has_paused_comes_back_and_others_come_when_the_chance_says_so(
    cause: Cause, p_next: float, is_sure: bool
) -> None:
    assert expected(cause, p_next=p_next).is_sure is is_sure
