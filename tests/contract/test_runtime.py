"""The runtime on a real LangGraph graph, a real HTTP wire and the fake engine's modelled pool."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode

from pancake_langgraph._errors import ConfigError, EngineUnavailable, TopologyError
from pancake_langgraph._types import ActionKind, Outcome
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.ledger import ActionState, BreakerChanged, SpanEnded, SpanKind, SpanStarted
from pancake_langgraph.runtime import Runtime, attach, runtime_of
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from tests.contract.runtime_bed import (
    WORDS,
    Bed,
    State,
    chats,
    open_bed,
    run,
    tool_loop,
)


@pytest.fixture
def bed() -> Iterator[Bed]:
    with open_bed() as made:
        yield made


async def test_a_paused_agents_context_that_others_pushed_out_is_back_before_it_resumes(bed: Bed) -> None:
    async def pause() -> None:
        await asyncio.to_thread(bed.press, prompts=4)
        assert await asyncio.to_thread(bed.runtime.wait_idle)

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    await run(graph)
    first, second = chats(bed)
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16
    assert bed.runtime.wait_idle()
    settled = bed.actions()
    assert {a.outcome for a in settled} <= {Outcome.USED}
    assert settled


async def test_without_the_runtime_the_same_agent_finds_nothing(bed: Bed) -> None:
    async def pause() -> None:
        await asyncio.to_thread(bed.press, prompts=4)

    await run(tool_loop(bed, pause))
    assert [call.cached_tokens for call in chats(bed)] == [0, 0]


async def test_without_pressure_nothing_is_sent(bed: Bed) -> None:
    async def pause() -> None:
        assert await asyncio.to_thread(bed.runtime.wait_idle)

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    for number in range(3):
        await run(graph, thread=f"t{number}")
    submitted = [a for a in bed.actions(ActionState.SUBMITTED) if a.kind is ActionKind.HOLD]
    assert submitted == []


async def test_work_for_a_run_that_fails_is_wasted_and_says_why(bed: Bed) -> None:
    async def pause() -> None:
        await asyncio.to_thread(bed.press, prompts=4)
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        raise RuntimeError("broken tool")

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    with pytest.raises(RuntimeError, match="broken tool"):
        await run(graph)
    assert bed.runtime.wait_idle()
    assert {a.outcome for a in bed.actions()} == {Outcome.WASTED}
    assert bed.runtime.statistics().expected_calls == 0


async def test_a_certain_successor_is_warm_before_it_starts(bed: Bed) -> None:
    waited = asyncio.Event()

    def node(name: str) -> Any:
        model = bed.model()

        async def call(state: State) -> dict[str, Any]:
            answer = await model.ainvoke([SystemMessage(f"{name} {WORDS}"), *state["messages"]])
            if name == "first" and len(chats(bed)) > 2:
                assert await asyncio.to_thread(bed.runtime.wait_idle)
                waited.set()
            return {"messages": [answer]}

        return call

    builder = StateGraph(State)
    builder.add_node("first", node("first"))
    builder.add_node("second", node("second"))
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
    await run(graph, "hello", "one")
    await asyncio.to_thread(bed.press, prompts=4)
    await run(graph, "hello", "two")
    assert waited.is_set()
    warm = [call.cached_tokens > 100 for call in chats(bed)]
    assert (warm[:2], warm[3]) == ([False, False], True)  # the third's prompt is known from the run's input on
    assert bed.runtime.wait_idle()
    settled = {(a.outcome, a.reason) for a in bed.actions()}
    gave_way = (Outcome.WASTED, "gave way to foreground work")  # given up as the engine had just finished it
    assert Outcome.USED in {outcome for outcome, _ in settled} or gave_way in settled


async def test_state_history_equals_the_plain_graphs(bed: Bed) -> None:
    async def pause() -> None:
        return None

    plain, watched = tool_loop(bed, pause), attach(tool_loop(bed, pause), runtime=bed.runtime)
    histories = []
    for graph in (plain, watched):
        await run(graph)
        histories.append(
            [
                (s.next, s.metadata.get("step"), [(m.type, m.content) for m in s.values.get("messages", [])])
                for s in graph.get_state_history({"configurable": {"thread_id": "t"}})
            ]
        )
    assert histories[0] == histories[1]


async def test_a_dead_engine_never_reaches_the_graph_and_opens_the_breaker(bed: Bed) -> None:
    async def pause() -> None:
        await asyncio.to_thread(bed.press, prompts=4)
        bed.server.engine.fail_with(EngineUnavailable("gone"))
        bed.runtime.wait_idle()
        await asyncio.sleep(0.05)
        bed.server.engine.fail_with(None)

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    for number in range(3):
        state = await run(graph, thread=f"t{number}")
        assert state["messages"][-1].content == "done"


async def test_spans_nest_and_carry_token_counts(bed: Bed) -> None:
    async def pause() -> None:
        return None

    await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
    assert bed.runtime.wait_idle()
    events = bed.runtime.ledger.events()
    started = [e for e in events if isinstance(e, SpanStarted)]
    kinds = [e.kind for e in started if e.kind is not SpanKind.WARM]
    assert kinds == [
        SpanKind.RUN,
        SpanKind.NODE,
        SpanKind.CALL,
        SpanKind.NODE,
        SpanKind.TOOL,
        SpanKind.NODE,
        SpanKind.CALL,
    ]
    ids = {e.span_id for e in started}
    assert all(e.parent_id in ids for e in started if e.kind not in (SpanKind.RUN, SpanKind.WARM))
    calls = {e.span_id for e in started if e.kind is SpanKind.CALL}
    ended = [e for e in events if isinstance(e, SpanEnded) and e.span_id in calls]
    assert all(e.prompt_tokens for e in ended)
    assert not any(isinstance(e, BreakerChanged) for e in events)


def test_sync_graphs_are_watched_too(bed: Bed) -> None:
    @tool
    def look(q: str) -> str:
        """Look it up."""
        bed.press(prompts=4)
        assert bed.runtime.wait_idle()
        return "found"

    model = bed.model().bind_tools([look])
    builder = StateGraph(State)
    builder.add_node("agent", lambda s: {"messages": [model.invoke([SystemMessage(WORDS), *s["messages"]])]})
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", lambda s: "tools" if s["messages"][-1].tool_calls else END, ["tools", END])
    builder.add_edge("tools", "agent")
    graph = attach(builder.compile(), runtime=bed.runtime)
    graph.invoke({"messages": [("user", "look")]})
    assert chats(bed)[1].cached_tokens > 100


def test_attach_refuses_what_it_cannot_watch_and_says_how_to_mend(bed: Bed) -> None:
    with pytest.raises(TopologyError, match="compile"):
        attach(StateGraph(State), runtime=bed.runtime)  # type: ignore[type-var]
    graph = tool_loop(bed, None)
    with pytest.raises(ConfigError, match="either a runtime or settings"):
        attach(graph, runtime=bed.runtime, model="x")
    attached = attach(graph, runtime=bed.runtime)
    assert runtime_of(attached) is bed.runtime
    assert runtime_of(graph) is None
    assert type(attached) is type(graph)
    with pytest.raises(ConfigError, match="already"):
        attach(attached, runtime=bed.runtime)


async def test_a_run_right_before_the_end_is_taken_in_and_all_is_released(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.runtime.background.LOOK_S", 600.0)
    closed: list[str] = []

    class Watched(BridgedEngine):
        async def close(self) -> None:
            closed.append("engine")
            await super().close()

    runtime = Runtime(RuntimeSettings(engine="fake"), engine=Watched(bed.server))
    await run(attach(tool_loop(bed, lambda: asyncio.sleep(0)), runtime=runtime))
    await asyncio.to_thread(runtime.close)
    assert runtime.statistics().calls == 2
    assert sum(isinstance(event, SpanEnded) for event in runtime.ledger.events()) >= 7
    assert closed == ["engine"]


def test_a_runtime_that_never_ran_closes_at_once() -> None:
    runtime = Runtime(RuntimeSettings(engine="null"))
    runtime.close()
    runtime.close()
    runtime.check_integrity()
