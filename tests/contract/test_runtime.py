"""The runtime on a real LangGraph graph, a real HTTP wire and the fake engine's modelled pool."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict
from uuid import uuid4

import pytest
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from pancake_langgraph._errors import ConfigError, EngineRejected, EngineUnavailable, TierError, TopologyError
from pancake_langgraph._types import ActionKind, Outcome, TokenPrefix
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import Capabilities, Residency, WarmReport
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.forecast.transitions import TransitionForecaster
from pancake_langgraph.ledger import ActionRecorded, ActionState, BreakerChanged, SpanEnded, SpanKind, SpanStarted
from pancake_langgraph.runtime import Runtime, attach, runtime_of
from pancake_langgraph.runtime.background import BackgroundLoop
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.tiers.base import PrefetchReport, Tier
from pancake_langgraph.tiers.null import NullTier

WORDS = " ".join(f"rule{number}" for number in range(180))


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@dataclass
class Bed:
    """A fake engine behind a port, and a runtime on it."""

    server: FakeEngineServer
    runtime: Runtime

    def model(self, **fields: Any) -> PancakeChatModel:
        return PancakeChatModel(model="fake", base_url=self.server.base_url, max_tokens=16, **fields)

    def press(self, *, prompts: int) -> None:
        """Push other contexts through the pool, as other traffic does."""

        async def push() -> None:
            for number in range(prompts):
                base = 50_000 + number * 1000
                await self.server.engine.warm(TokenPrefix(tuple(range(base, base + 400))), priority=0)

        self.server.run(push()).result(10)

    def actions(self, state: ActionState = ActionState.SETTLED) -> list[ActionRecorded]:
        return [e for e in self.runtime.ledger.events() if isinstance(e, ActionRecorded) and e.state is state]


def script(prompt: Any) -> FakeAnswer | str | None:
    last = prompt.messages[-1]
    if last["role"] == "user" and "look" in str(last["content"]):
        return FakeAnswer(tool_calls=(FakeToolCall("look", {"q": "a"}),))
    return "done"


@pytest.fixture
def bed() -> Iterator[Bed]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=80, max_model_len_tokens=1200, script=script))
    with FakeEngineServer(engine) as server:
        runtime = Runtime(RuntimeSettings(engine="fake", action_ttl_s=5.0), engine=BridgedEngine(server))
        runtime.start()
        yield Bed(server, runtime)
        runtime.close()
        runtime.check_integrity()
        assert runtime.statistics().failed_signals == 0
        assert runtime.ledger.statistics().open_actions == 0


def tool_loop(bed: Bed, pause: Any) -> Any:
    @tool
    async def look(q: str) -> str:
        """Look it up."""
        await pause()
        return "found"

    model = bed.model().bind_tools([look])

    async def agent(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SystemMessage(WORDS), *state["messages"]])]}

    def route(state: State) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    builder = StateGraph(State)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([look]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", route, ["tools", END])
    builder.add_edge("tools", "agent")
    return builder.compile(checkpointer=InMemorySaver())


def chats(bed: Bed) -> list[Any]:
    return [call for call in bed.server.engine.served if call.work == "chat"]


async def run(graph: Any, text: str = "look please", thread: str = "t") -> Any:
    return await graph.ainvoke({"messages": [("user", text)]}, {"configurable": {"thread_id": thread}})


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
    assert [call.cached_tokens > 100 for call in chats(bed)] == [False, False, False, True]
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


def test_a_runtime_that_never_ran_closes_at_once() -> None:
    runtime = Runtime(RuntimeSettings(engine="null"))
    runtime.close()
    runtime.close()
    runtime.check_integrity()


def an_expectation(node: str = "agent") -> Any:
    from pancake_langgraph._types import AgentKey, Prompt, ThreadId
    from pancake_langgraph.runtime.expectations import Cause, Expectation, Place

    expectation = Expectation(
        place=Place(ThreadId("t"), "", node),
        agent=AgentKey("agent", "", "0"),
        cause=Cause.RESUME,
        run_id=uuid4(),
        prompt=Prompt(()),
        cache_salt=None,
        p_next=1.0,
        created_at_s=0.0,
    )
    expectation.set_tokens(tuple(range(100)), 16)
    return expectation


async def test_work_cancelled_before_its_first_step_is_settled_too(bed: Bed) -> None:
    def submit_and_drop() -> None:
        actor = bed.runtime._actor
        assert actor is not None
        expectation = an_expectation()
        actor._submit(expectation, ActionKind.WARM, "test", missing_tokens=96)
        actor.drop(expectation, "gone at once")

    bed.runtime._background.call(submit_and_drop)
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert [a.outcome for a in bed.actions()] == [Outcome.WASTED]
    assert bed.runtime.ledger.statistics().open_actions == 0


async def test_a_computing_warm_up_gives_way_also_to_a_call_at_its_own_place(bed: Bed) -> None:
    """A sibling worker of a fan-out calls: this warm-up is for another worker at the same node."""
    bed.server.on_engine(lambda engine: engine.hold("warm"))

    def submit() -> None:
        actor = bed.runtime._actor
        assert actor is not None
        expectation = an_expectation()
        bed.runtime._state.expectations.add(expectation)
        actor._submit(expectation, ActionKind.WARM, "test", missing_tokens=96)

    bed.runtime._background.call(submit)
    await asyncio.sleep(0.05)
    bed.runtime._background.call(lambda: bed.runtime._actor.give_way())  # type: ignore[union-attr]
    bed.server.on_engine(lambda engine: engine.release("warm"))
    assert await asyncio.to_thread(bed.runtime.wait_idle)
    given_up = [a for a in bed.actions() if a.outcome is Outcome.WASTED]
    assert given_up[0].reason == "gave way to foreground work"


# -- where work could be lost, doubled or in the way -------------------------------------------------------------------


class Stub(BridgedEngine):
    """A bridged engine that stalls or breaks where a test wants it to."""

    probes = residency_bugs = warms = looks = 0
    is_stalled = is_blind = False
    warm_error: Exception | None = None

    async def probe(self) -> Capabilities:
        self.probes += 1
        await asyncio.sleep(0.01)
        return await super().probe()

    async def warm(self, prefix: TokenPrefix, *, priority: int) -> WarmReport:
        self.warms += 1
        if self.is_stalled:
            await asyncio.Event().wait()
        if self.warm_error is not None:
            raise self.warm_error
        return await super().warm(prefix, priority=priority)

    async def residency(self, prefix: TokenPrefix) -> Residency:
        self.looks += 1
        if self.is_blind:
            await asyncio.Event().wait()
        if self.residency_bugs:
            self.residency_bugs -= 1
            raise ValueError("a bug")
        return await super().residency(prefix)


class DeadTier(NullTier):
    """A tier that does not answer."""

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        raise TierError("gone")


@dataclass
class StubBed(Bed):
    """A bed whose engine port is a `Stub`."""

    stub: Stub


@contextmanager
def stub_bed(tier: Tier | None = None, forecaster: Forecaster | None = None, **settings: Any) -> Iterator[StubBed]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=80, max_model_len_tokens=1200, script=script))
    with FakeEngineServer(engine) as server:
        stub = Stub(server)
        runtime = Runtime(RuntimeSettings(engine="fake", **settings), engine=stub, tier=tier, forecaster=forecaster)
        runtime.start()
        yield StubBed(server, runtime, stub)
        runtime.close()
        runtime.check_integrity()
        assert runtime.ledger.statistics().open_actions == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def pressed_pause(bed: StubBed, *, until_set: asyncio.Event | None = None) -> Any:
    """Return a tool's pause in which the agent's context is lost and a warm-up for it is sent, which stalls."""

    async def pause() -> None:
        bed.stub.is_stalled = True
        sent = bed.stub.warms
        await asyncio.to_thread(bed.press, prompts=4)
        await until(lambda: bed.stub.warms > sent)
        if until_set is not None:
            await until_set.wait()

    return pause


async def test_work_under_way_when_its_call_has_ended_is_given_up_and_late() -> None:
    with stub_bed() as bed:
        await run(attach(tool_loop(bed, pressed_pause(bed)), runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]


async def test_closing_does_not_wait_for_work_whose_call_has_come(caplog: pytest.LogCaptureFixture) -> None:
    with stub_bed() as bed:

        async def pause() -> None:
            await pressed_pause(bed)()
            bed.server.on_engine(lambda engine: engine.hold("chat"))

        graph = attach(tool_loop(bed, pause), runtime=bed.runtime)
        running = asyncio.create_task(run(graph))
        await until(lambda: bed.runtime.statistics().calls == 2)
        await asyncio.to_thread(bed.runtime.close)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]
        assert not caplog.records
        bed.server.on_engine(lambda engine: engine.release("chat"))
        await running


async def test_an_action_cancelled_twice_is_settled_once() -> None:
    with stub_bed() as bed:

        async def pause() -> None:
            await pressed_pause(bed)()
            bed.stub.is_blind, bed.stub.looks = True, 0

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        await until(lambda: bed.stub.looks > 0)
        await asyncio.to_thread(bed.runtime.close)
        assert [a.outcome for a in bed.actions()] == [Outcome.LATE]


async def test_an_unexpected_error_in_a_warm_up_or_an_evaluation_is_counted_and_costs_only_itself() -> None:
    with stub_bed(breaker_open_s=0.01) as bed:
        bed.stub.warm_error = ValueError("a bug")
        bed.stub.residency_bugs = 1

        async def pause() -> None:
            await asyncio.to_thread(bed.press, prompts=4)
            await until(lambda: bed.stub.warms > 0)
            bed.stub.warm_error = None
            await asyncio.sleep(0.02)
            await asyncio.to_thread(bed.press, prompts=1)
            assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert {a.outcome for a in bed.actions()} == {Outcome.FAILED, Outcome.USED}
        assert bed.runtime.statistics().failed_signals >= 2


async def test_a_prefix_that_the_engine_refuses_is_sent_once_and_opens_no_breaker() -> None:
    with stub_bed() as bed:
        bed.stub.warm_error = EngineRejected("too long", status_code=400)

        async def pause() -> None:
            for _ in range(3):
                await asyncio.to_thread(bed.press, prompts=4)
                assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        assert bed.stub.warms == 1
        assert not any(isinstance(e, BreakerChanged) for e in bed.runtime.ledger.events())


async def test_without_an_answering_tier_a_restore_computes_and_gives_way() -> None:
    settings: dict[str, Any] = {
        "tier_url": "http://127.0.0.1:9",
        "tier_model": "m",
        "breaker_failures": 1,
        "breaker_open_s": 60.0,
    }
    with stub_bed(DeadTier(), **settings) as bed:

        async def pause() -> None:
            await asyncio.to_thread(bed.press, prompts=4)
            assert await asyncio.to_thread(bed.runtime.wait_idle)

        await run(attach(tool_loop(bed, pause), runtime=bed.runtime))
        await until(lambda: any(isinstance(e, BreakerChanged) for e in bed.runtime.ledger.events()))
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        before, over = len(bed.actions()), asyncio.Event()
        graph = attach(tool_loop(bed, pressed_pause(bed, until_set=over)), runtime=bed.runtime)
        paused = asyncio.create_task(run(graph, thread="paused"))
        await until(lambda: bed.stub.is_stalled and len(bed.actions(ActionState.SUBMITTED)) > before)
        await run(graph, "hello", thread="other")
        await until(lambda: len(bed.actions()) > before)
        settled = bed.actions()[before]
        assert (settled.outcome, settled.reason) == (Outcome.WASTED, "gave way to foreground work")
        over.set()
        await paused


async def test_a_warm_up_that_computes_stays_away_until_the_call_it_gave_way_to_answers() -> None:
    with stub_bed() as bed:
        over = asyncio.Event()
        graph = attach(tool_loop(bed, pressed_pause(bed, until_set=over)), runtime=bed.runtime)
        paused = asyncio.create_task(run(graph, thread="paused"))
        await until(lambda: bed.stub.warms == 1)
        bed.server.on_engine(lambda engine: engine.hold("chat"))
        other = asyncio.create_task(run(graph, "hello", thread="other"))
        await until(lambda: bed.actions() != [])
        assert await asyncio.to_thread(bed.runtime.wait_idle)
        assert bed.stub.warms == 1
        bed.server.on_engine(lambda engine: engine.release("chat"))
        await until(lambda: bed.stub.warms > 1)
        over.set()
        await asyncio.gather(paused, other)


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
