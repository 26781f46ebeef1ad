"""What the runtime makes of the runs, graphs and calls that it watches."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt

from pancake_langgraph._types import ActionKind, Outcome
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.forecast.transitions import TransitionForecaster
from pancake_langgraph.ledger import SpanKind, SpanStarted
from pancake_langgraph.runtime import Runtime, attach, runtime_of
from pancake_langgraph.runtime.background import BackgroundLoop
from tests.contract.runtime_bed import (
    WORDS,
    Bed,
    State,
    chats,
    open_bed,
    run,
    stub_bed,
    tool_loop,
    until,
)


@pytest.fixture
def bed() -> Iterator[Bed]:
    with open_bed() as made:
        yield made


async def test_the_engine_is_probed_once() -> None:
    with stub_bed() as bed:
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert bed.stub.probes == 1


async def test_graph_and_sub_graph_on_one_runtime_are_watched_once(bed: Bed) -> None:
    async def pause() -> None:
        await asyncio.to_thread(bed.press, prompts=4)
        assert await asyncio.to_thread(bed.runtime.wait_idle)

    builder = StateGraph(State)
    builder.add_node("team", attach(tool_loop(bed, pause), runtime=bed.runtime))
    builder.add_edge(START, "team")
    graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
    await run(graph)
    assert bed.runtime.wait_idle()
    started = [e.span_id for e in bed.runtime.ledger.events() if isinstance(e, SpanStarted)]
    assert len(started) == len(set(started))
    assert bed.runtime.statistics().calls == 2
    assert {a.outcome for a in bed.actions()} == {Outcome.USED}


async def test_a_call_outside_any_run_is_not_expected_to_come_back(bed: Bed) -> None:
    @tool
    def look(q: str) -> str:
        """Look it up."""
        return q

    model = bed.model().bind_tools([look])
    answer = await model.ainvoke([SystemMessage(WORDS), ("user", "look")], {"callbacks": [bed.runtime.handler()]})
    assert answer.tool_calls
    assert bed.runtime.wait_idle()
    assert bed.runtime.statistics().calls == 1
    assert bed.runtime.statistics().expected_calls == 0


async def test_a_call_that_a_node_gave_up_is_not_under_way_any_more(bed: Bed) -> None:
    model = bed.model()

    async def node(state: State) -> dict[str, Any]:
        bed.server.on_engine(lambda engine: engine.hold("chat"))
        call = asyncio.create_task(model.ainvoke(state["messages"]))
        await until(lambda: bed.runtime.statistics().open_calls == 1)
        call.cancel()
        await asyncio.wait([call])
        await until(lambda: bed.runtime.statistics().open_calls == 0)
        bed.server.on_engine(lambda engine: engine.release("chat"))
        return {"messages": ["gave up"]}

    builder = StateGraph(State)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    await run(attach(builder.compile(), runtime=bed.runtime), "hello")


class Diary(TransitionForecaster):
    """Writes down what it is taught."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def observe_transition(self, graph_id: str, source: str, target: str, **more: Any) -> None:
        self.seen.append((source, target))
        super().observe_transition(graph_id, source, target, **more)


async def test_an_interrupt_is_not_learned_as_the_end_of_the_graph() -> None:
    diary = Diary()
    with stub_bed(forecaster=diary) as bed:
        builder = StateGraph(State)
        builder.add_node("ask", lambda _: {"messages": [interrupt("sure?")]})
        builder.add_edge(START, "ask")
        graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
        await run(graph)
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert diary.seen == [("__start__", "ask")]
        await graph.ainvoke(Command(resume="yes"), {"configurable": {"thread_id": "t"}})
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert diary.seen[-1] == ("ask", "__end__")


def test_attaching_keeps_the_graphs_own_callbacks_once(bed: Bed) -> None:
    class Counting(BaseCallbackHandler):
        runs = 0

        def on_chain_start(self, *_: Any, parent_run_id: Any = None, **__: Any) -> None:
            self.runs += parent_run_id is None

    builder = StateGraph(State)
    builder.add_node("node", lambda _: {"messages": ["done"]})
    builder.add_edge(START, "node")
    graph = builder.compile()
    for wrap in (lambda handler: [handler], lambda handler: CallbackManager([handler])):
        own = Counting()
        attached = attach(graph.with_config(callbacks=wrap(own)), runtime=bed.runtime)
        assert runtime_of(attached) is bed.runtime
        attached.invoke({"messages": ["hello"]})
        assert own.runs == 1


def test_a_forked_process_leaves_the_parents_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    loop = BackgroundLoop("test")
    assert loop.call(ran.append, "parent")
    with monkeypatch.context() as child:
        child.setattr("pancake_langgraph.runtime.background.os.getpid", lambda: 0)
        assert not loop.is_running
        assert not loop.call(ran.append, "child")
        loop.stop()
    assert loop.is_running
    loop.run(asyncio.sleep(0)).result(5)
    assert ran == ["parent"]
    loop.stop()


async def test_parallel_workers_of_a_fan_out_keep_a_context_each(bed: Bed) -> None:
    """Three workers at one node pause at once; each one's own context is held, and each claim finds its own."""
    from langgraph.types import Send

    paused = 0
    enough = asyncio.Event()

    @tool
    async def look(q: str) -> str:
        """Look it up."""
        nonlocal paused
        paused += 1
        if paused == 3:
            await asyncio.to_thread(bed.press, prompts=1)
            assert await asyncio.to_thread(bed.runtime.wait_idle)
            enough.set()
        await asyncio.wait_for(enough.wait(), 10)
        return "found"

    model = bed.model().bind_tools([look])

    class Job(TypedDict):
        messages: Annotated[list[AnyMessage], add_messages]
        name: str

    async def worker(state: Job) -> dict[str, Any]:
        head = SystemMessage(f"{state['name']} " + " ".join(f"{state['name']}{n}" for n in range(60)))
        answer = await model.ainvoke([head, *state["messages"]])
        if answer.tool_calls:
            result = await look.ainvoke(answer.tool_calls[0])
            answer = await model.ainvoke([head, *state["messages"], answer, result])
        return {"messages": [answer]}

    builder = StateGraph(State)
    builder.add_node("worker", worker)
    builder.add_conditional_edges(
        START, lambda s: [Send("worker", {"messages": s["messages"], "name": name}) for name in "abc"], ["worker"]
    )
    builder.add_edge("worker", END)
    await run(attach(builder.compile(), runtime=bed.runtime))
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert all(call.cached_tokens > 40 for call in chats(bed)[3:])
    assert Outcome.WASTED not in {a.outcome for a in bed.actions() if a.kind is not ActionKind.PREFETCH}
    assert bed.runtime.statistics().expected_calls == 0


async def test_the_branch_that_was_not_taken_is_given_up_at_once(bed: Bed) -> None:
    from pancake_langgraph.runtime.expectations import Cause

    seen: list[list[str]] = []

    def node(name: str) -> Any:
        model = bed.model()

        async def call(state: State) -> dict[str, Any]:
            answer = await model.ainvoke([SystemMessage(f"{name} {WORDS}"), *state["messages"]])
            assert await asyncio.to_thread(bed.runtime.wait_idle)
            seen.append(
                [e.place.node for e in bed.runtime._state.expectations if e.cause is Cause.SUCCESSOR and e.is_branch]
            )
            return {"messages": [answer]}

        return call

    builder = StateGraph(State)
    for name in ("router", "often", "seldom"):
        builder.add_node(name, node(name))
    builder.add_edge(START, "router")
    builder.add_conditional_edges(
        "router", lambda s: "seldom" if "rare" in s["messages"][0].content else "often", ["often", "seldom"]
    )
    builder.add_edge("often", END)
    builder.add_edge("seldom", END)
    graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
    for number in range(4):
        await run(graph, "usual", f"t{number}")
    seen.clear()
    await run(graph, "rare", "other")
    assert seen == [["often"], []]


async def test_a_graph_inside_somebody_elses_chain_is_a_run_of_its_own(bed: Bed) -> None:
    from langchain_core.runnables import RunnableLambda

    async def pause() -> None:
        raise RuntimeError("broken tool")

    graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
    chain = RunnableLambda(lambda text: {"messages": [("user", text)]}) | graph
    with pytest.raises(RuntimeError, match="broken tool"):
        await chain.ainvoke("look", {"configurable": {"thread_id": "inner"}})
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert bed.runtime.statistics().expected_calls == 0
    runs = [e for e in bed.runtime.ledger.events() if isinstance(e, SpanStarted) and e.kind is SpanKind.RUN]
    assert len(runs) == 1


def test_a_closed_runtime_says_so() -> None:
    from pancake_langgraph._errors import RuntimeClosed

    runtime = Runtime(RuntimeSettings(engine="null"))
    runtime.close()
    with pytest.raises(RuntimeClosed, match="closed"):
        runtime.wait_idle()
