"""What the runtime tells about the prefixes of the calls that it watches."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph

from pancake_langgraph.ledger import Event
from pancake_langgraph.prompts.lint_kinds import BreakKind
from pancake_langgraph.runtime import attach
from tests.contract.runtime_bed import WORDS, Bed, State, open_bed, run, tool_loop

SECRET = "zebracrossing"


@pytest.fixture
def bed() -> Iterator[Bed]:
    with open_bed() as made:
        yield made


def clocked(bed: Bed, minutes: Iterator[int], *, where: str = "before") -> Any:
    """Return a graph whose only node writes the time into its system prompt, or behind the history."""
    model = bed.model()

    async def agent(state: State) -> dict[str, Any]:
        rules, clock = f"{SECRET} {WORDS}", f"It is 09:{next(minutes):02d}."
        head = [SystemMessage(f"{clock} {rules}" if where == "before" else rules)]
        tail = [] if where == "before" else [SystemMessage(clock)]
        return {"messages": [await model.ainvoke([*head, *state["messages"], *tail])]}

    builder = StateGraph(State)
    builder.add_node("agent", agent)
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    return attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)


async def test_a_tool_loop_that_only_grows_has_no_break(bed: Bed) -> None:
    async def pause() -> None:
        pass

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    for thread in ("one", "two"):
        await run(graph, thread=thread)
        await run(graph, "and so on", thread=thread)
    report = bed.runtime.prefix_report()
    assert (report.calls, report.breaks) == (6, 0)


async def test_a_clock_in_the_system_prompt_is_named_with_its_place_and_its_tokens(
    bed: Bed, caplog: pytest.LogCaptureFixture
) -> None:
    graph = clocked(bed, iter(range(10, 20)))
    with caplog.at_level(logging.DEBUG, logger="pancake_langgraph"):
        for _ in range(3):
            await run(graph, f"{SECRET} again", thread="one")
        [exact] = bed.runtime.prefix_report().agents[0].kinds
        await run(graph, f"{SECRET} again", thread="two")
        report = bed.runtime.prefix_report()
    [agent] = report.agents
    [clock] = agent.kinds
    assert (agent.agent, agent.calls, clock.kind, clock.count) == ("agent", 4, BreakKind.CLOCK, 3)
    assert (clock.worst.place.role, clock.worst.place.index) == ("system", 0)
    assert clock.worst.place.char == len("It is 09:1")
    assert (exact.count, exact.is_estimate) == (2, False), "the engine told its token ids"
    assert exact.worst.lost_tokens > 150
    assert clock.is_estimate, "what two threads share has no token ids of its own"
    assert 150 < clock.lost_tokens - exact.lost_tokens < exact.worst.lost_tokens
    told = [str(report), json.dumps(report.to_json()), caplog.text, repr(bed.runtime.statistics())]
    told += [repr(event) for event in events(bed)]
    assert not [text for text in told if SECRET in text or "09:1" in text]


async def test_a_clock_behind_the_history_costs_next_to_nothing(bed: Bed) -> None:
    graph = clocked(bed, iter(range(10, 20)), where="behind")
    for _ in range(3):
        await run(graph, "again", thread="one")
    report = bed.runtime.prefix_report()
    assert report.lost_tokens < 40


async def test_the_report_outlives_the_runtime() -> None:
    with open_bed() as bed:
        graph = clocked(bed, iter(range(10, 20)))
        for _ in range(2):
            await run(graph, "again", thread="one")
    assert bed.runtime.prefix_report().breaks == 1


async def test_a_lint_that_fails_is_counted_and_changes_nothing(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(bed.runtime._state.lint, "observe", broken)
    answer = await run(clocked(bed, iter(range(10, 20))), "again", thread="one")
    assert answer["messages"][-1].content == "done"
    assert bed.runtime.wait_idle()
    assert bed.runtime.statistics().failed_signals == 1
    assert "a call could not be linted: ValueError" in caplog.text
    assert SECRET not in caplog.text
    bed.runtime._state.counters.failed_signals = 0  # the bed holds that nothing else has failed


def events(bed: Bed) -> tuple[Event, ...]:
    return tuple(bed.runtime.ledger.events())
