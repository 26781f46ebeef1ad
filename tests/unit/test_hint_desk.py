"""What the runtime remembers of held contexts, and what it says of them at the end of a run."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._types import AgentKey, Prompt, ThreadId, TokenPrefix
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.forecast import create_forecaster
from pancake_langgraph.ledger import Ledger
from pancake_langgraph.prompts import Source
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


@pytest.mark.parametrize(
    ("cause", "p_next", "source", "is_sure", "is_whole"),
    [
        (Cause.RESUME, 0.0, None, True, True),
        (Cause.SUCCESSOR, SURE, Source.STATE, True, True),
        (Cause.SUCCESSOR, 1.0, Source.CODE, True, True),
        (Cause.SUCCESSOR, 1.0, Source.DECLARED, True, True),
        (Cause.SUCCESSOR, SURE - 0.01, Source.STATE, False, True),
        (Cause.SUCCESSOR, 1.0, Source.THREAD, True, False),  # its last answer, which a tier may have, comes behind
        (Cause.SUCCESSOR, 1.0, Source.HEAD, True, False),
        (Cause.SUCCESSOR, 1.0, Source.NODE, True, False),
        (Cause.SUCCESSOR, 1.0, None, True, False),
    ],
)
def test_only_who_surely_comes_is_held_and_only_what_the_state_tells_is_whole(
    cause: Cause, p_next: float, source: Source | None, is_sure: bool, is_whole: bool
) -> None:
    expectation = Expectation(
        place=Place(ThreadId("t"), "", "agent"),
        agent=AGENT,
        cause=cause,
        run_id=uuid4(),
        prompt=Prompt.of([]),
        cache_salt=None,
        p_next=p_next,
        created_at_s=0.0,
        source=source,
        edge_tokens=100,
    )
    assert (expectation.is_sure, expectation.is_whole) == (is_sure, is_whole)
    hold = desk().compose(expectation, eta_s=1.0).hold
    assert hold is not None
    assert hold.is_whole is is_whole
