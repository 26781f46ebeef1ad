"""What is done once per look at the signals, however many there were: telling prompts, asking the actor to evaluate."""

import asyncio
from uuid import UUID, uuid4

import pytest

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._types import AgentKey, Candidate, NodeId, Outcome, Prompt, ThreadId
from pancake_langgraph.config import RuntimeSettings, resolve
from pancake_langgraph.engines.null import NullEngine
from pancake_langgraph.forecast import create_forecaster
from pancake_langgraph.ledger import ActionRecorded, ActionState, Ledger, SpanKind
from pancake_langgraph.prompts import Prediction, Source, Unknown
from pancake_langgraph.prompts.parts import Known
from pancake_langgraph.runtime.actor import Actor
from pancake_langgraph.runtime.engine_watch import _facts
from pancake_langgraph.runtime.expectations import Cause, Expectation, Place
from pancake_langgraph.runtime.prompting import MAX_KNOWN, MAX_WAITING, PromptWatch
from pancake_langgraph.runtime.signals import Opened
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.runtime.state import State
from pancake_langgraph.runtime.watcher import Watcher
from pancake_langgraph.tiers.null import NullTier

AGENT = AgentKey("writer", "", "0" * 12)
THREAD = ThreadId("t")


@pytest.fixture
def state() -> State:
    settings = RuntimeSettings(engine="null")
    return State.build(settings, clock=VirtualClock(), ledger=Ledger(), forecaster=create_forecaster())


@pytest.fixture
def asked(state: State, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the states for which the book was asked for a prompt; odd ones tell nothing."""
    numbers: list[int] = []

    def predict(node: str, thread_id: str, known: Known, **_: object) -> Prediction | Unknown:
        number = known.fields["number"]
        numbers.append(number)
        if number % 2:
            return Unknown("the number is odd", seen=True)
        return Prediction(AGENT, said(number), Source.STATE)

    monkeypatch.setattr(state.book, "predict", predict)
    return numbers


def said(number: int) -> Prompt:
    return Prompt.of([{"role": "user", "content": f"number {number}"}])


def expected(state: State, *, run_id: UUID | None = None) -> Expectation:
    place = Place(THREAD, "", "writer")
    found = Expectation(place, AGENT, Cause.SUCCESSOR, run_id or uuid4(), Prompt(()), None, 1.0, 0.0)
    state.expectations.add(found)
    return found


def tell(watch: PromptWatch, expectation: Expectation, *numbers: int) -> None:
    for number in numbers:
        watch._foretell(expectation, Known({"number": number}), "g")


def span_of(run_id: UUID, node: str) -> OpenSpan:
    return OpenSpan(Opened(0.0, uuid4(), run_id, SpanKind.NODE, node, THREAD, f"{node}:1"), run_id)


def test_a_prompt_is_told_once_from_the_newest_state_that_tells_it(state: State, asked: list[int]) -> None:
    watch, expectation = PromptWatch(state), expected(state)
    tell(watch, expectation, 0, 2, 4, 5)
    assert asked == []
    watch.catch_up()
    assert asked == [5, 4]
    assert expectation.prompt == said(4)
    watch.catch_up()
    assert asked == [5, 4]


def test_what_tells_nothing_leaves_a_prompt_as_it_was(state: State, asked: list[int]) -> None:
    watch, expectation = PromptWatch(state), expected(state)
    tell(watch, expectation, 2)
    watch.catch_up()
    tell(watch, expectation, 3, 5)
    watch.catch_up()
    assert expectation.prompt == said(2)


def test_a_call_that_is_no_longer_expected_is_not_told(state: State, asked: list[int]) -> None:
    watch, expectation = PromptWatch(state), expected(state)
    tell(watch, expectation, 2)
    state.expectations.discard(expectation)
    watch.catch_up()
    assert asked == []


def test_states_of_a_call_do_not_pile_up_until_somebody_looks(state: State, asked: list[int]) -> None:
    watch, expectation = PromptWatch(state), expected(state)
    for number in range(4 * MAX_KNOWN):
        tell(watch, expectation, number)
        assert sum(len(due.known) for due in watch._due.values()) < MAX_KNOWN
    assert expectation.prompt != Prompt(())


def test_candidates_that_wait_at_one_level_are_bounded(state: State) -> None:
    watch, run_id = PromptWatch(state), uuid4()
    span = span_of(run_id, "hub")
    for number in range(2 * MAX_WAITING):
        assert watch.put_off(Candidate(NodeId(f"n{number}"), 1.0, 1, None, ""), THREAD, "", span)
    (level,) = watch._waiting.values()
    assert list(level) == [f"n{number}" for number in range(MAX_WAITING, 2 * MAX_WAITING)]


def test_a_silent_node_waits_on_and_is_asked_again_once_it_has_called(state: State) -> None:
    watch, run_id = PromptWatch(state), uuid4()
    span = span_of(run_id, "hub")
    watch.run_started(Opened(0.0, run_id, None, SpanKind.RUN, "run", THREAD, fields={"number": 1}))
    candidate = Candidate(NodeId("writer"), 1.0, 1, None, "")
    assert watch.put_off(candidate, THREAD, "", span)
    assert watch.waiting(run_id, "") == ()
    state.book.observe(AGENT, ThreadId("other"), said(0), None)
    assert watch.waiting(run_id, "") == ((candidate, THREAD, "", span),)
    assert watch.waiting(run_id, "") == ()


async def test_nothing_is_evaluated_where_nothing_is_expected(state: State) -> None:
    actor = Actor(state, NullEngine(), NullTier())
    actor.poke()
    assert actor.idle
    expected(state)
    actor.poke()
    assert not actor.idle
    await actor.stop()


async def test_an_engine_that_cannot_be_warmed_wakes_no_task_and_has_its_refusals_booked(state: State) -> None:
    state.resolved = resolve(state.settings, _facts(await NullEngine().probe()))
    actor = Actor(state, NullEngine(), NullTier())  # nobody serves
    for _ in range(3):
        expected(state)
        actor.poke()
        while not actor.idle:
            await asyncio.sleep(0.002)
    booked = [e for e in state.ledger.events() if isinstance(e, ActionRecorded) and e.state is ActionState.SETTLED]
    assert [event.outcome for event in booked] == [Outcome.REJECTED] * 3


async def test_however_many_signals_there_were_the_actor_is_asked_once(
    state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    pokes = 0

    def poke(_: Actor) -> None:
        nonlocal pokes
        pokes += 1

    monkeypatch.setattr(Actor, "poke", poke)
    watcher = Watcher(state, Actor(state, NullEngine(), NullTier()))
    run_id = uuid4()
    watcher.receive(Opened(0.0, run_id, None, SpanKind.RUN, "run", THREAD))
    for number in range(4):
        watcher.receive(Opened(0.0, uuid4(), run_id, SpanKind.NODE, "node", THREAD, f"node:{number}", step=number))
    assert pokes == 0
    for _ in range(2):
        watcher.settle()
        assert pokes == 1
