"""How much of real prompts is foreseen before their nodes run, by the way in which the app makes them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, dynamic_prompt
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from pancake_langgraph._types import Candidate, NodeId, Outcome, Prompt, ThreadId
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.engines.fake_text import render
from pancake_langgraph.ledger import SpanKind
from pancake_langgraph.phases import phase
from pancake_langgraph.prompts.agent_code import prompts_of
from pancake_langgraph.prompts.prediction import Source, Unknown, with_other_ends
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.runtime.expectations import Cause, Expectation
from pancake_langgraph.runtime.prompting import PromptWatch
from pancake_langgraph.runtime.signals import Opened
from pancake_langgraph.runtime.spans import OpenSpan
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from tests.contract.prompt_styles import RULES, STYLES, SYSTEM, State, build
from tests.contract.runtime_bed import Bed


@dataclass
class Foreseen:
    """One real call and what had been foreseen of it."""

    node: str
    real: Prompt
    cause: Cause | None = None
    source: Source | None = None
    share: float = 0.0
    is_true: bool = True
    stop: str = ""


@dataclass
class Watched(Bed):
    """A bed that writes down every call with what was expected of it."""

    calls: list[Foreseen] = field(default_factory=list)

    def settle(self) -> None:
        assert self.runtime.wait_idle()


def foreseen(node: str, real: Prompt, claim: Expectation | None) -> Foreseen:
    if claim is None:
        return Foreseen(node, real)
    predicted = render(claim.prompt, add_generation_prompt=False)
    if claim.is_cut:
        one, other = (render(p, add_generation_prompt=False) for p in with_other_ends(claim.prompt))
        predicted = one[: common_prefix_tokens(one, other) - 1]
    tokens = render(real, add_generation_prompt=False)
    shared = common_prefix_tokens(predicted, tokens)
    is_true = shared == len(predicted)
    return Foreseen(node, real, claim.cause, claim.source, shared / len(tokens), is_true, claim.stop)


def script(prompt: Any) -> FakeAnswer | str | None:
    last = prompt.messages[-1]
    if last["role"] == "user" and "look" in str(last["content"]):
        return FakeAnswer(tool_calls=(FakeToolCall("look", {"q": "a"}),))
    return "done"


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=400, max_model_len_tokens=4000, script=script))
    with FakeEngineServer(engine) as server:
        runtime = Runtime(RuntimeSettings(engine="fake", action_ttl_s=30.0), engine=BridgedEngine(server))
        runtime.start()
        watched = Watched(server, runtime)
        learn = PromptWatch.learn

        def noted(self: Any, agent: Any, thread_id: Any, signal: Any, opened: Any, claim: Any) -> None:
            watched.calls.append(foreseen(agent.namespace, signal.prompt, claim))
            learn(self, agent, thread_id, signal, opened, claim)

        monkeypatch.setattr(PromptWatch, "learn", noted)
        yield watched
        runtime.close()
        runtime.check_integrity()
        assert runtime.statistics().failed_signals == 0


def config(thread: object) -> Any:
    return {"configurable": {"thread_id": str(thread)}}


@pytest.mark.parametrize("name", STYLES)
async def test_the_next_prompt_is_foreseen_before_its_node_runs(bed: Watched, name: str) -> None:
    style, run = STYLES[name], 0
    saver = InMemorySaver() if style.keeps_thread else None
    graph = attach(build(style, bed.model(), lambda: run, saver), runtime=bed.runtime)
    for number in range(1, style.runs + 1):
        run = number
        await graph.ainvoke({}, config("one" if style.keeps_thread else number))
    bed.settle()
    assert len(bed.calls) == style.runs
    late = bed.calls[style.from_run - 1 :]
    assert all(call.is_true for call in late), [(c.share, c.is_true, c.source, c.stop) for c in bed.calls]
    assert min(call.share for call in late) >= style.share, [(c.share, c.source, c.stop) for c in bed.calls]
    wrong = [not call.is_true for call in bed.calls]
    assert not any(one and two for one, two in itertools.pairwise(wrong)), wrong


@tool
async def look(q: str) -> str:
    """Look it up."""
    return f"found {q}"


def agent_of(bed: Watched, **more: Any) -> Any:
    return create_agent(bed.model(), [look], system_prompt=f"You look things up. {RULES}", **more)


async def test_an_agents_loop_is_foreseen_from_its_second_call_on(bed: Watched) -> None:
    graph = attach(agent_of(bed), runtime=bed.runtime)
    await graph.ainvoke({"messages": [("user", "look please")]}, config(1))
    bed.settle()
    _, second = bed.calls
    assert second.is_true
    assert second.share >= 0.95


async def test_an_agents_prompt_and_tools_are_known_before_its_first_call(bed: Watched) -> None:
    """The agent stands behind a node of its own graph: what it will read is rendered while that node runs."""

    async def prepare(state: State) -> dict[str, Any]:
        return {"messages": [HumanMessage("look at this, please")]}

    builder = StateGraph(State)
    builder.add_node("prepare", prepare)
    builder.add_node("agent", agent_of(bed))
    builder.add_edge(START, "prepare")
    builder.add_edge("prepare", "agent")
    await attach(builder.compile(), runtime=bed.runtime).ainvoke({"messages": [HumanMessage("hello")]}, config(1))
    bed.settle()
    first = bed.calls[0]
    assert (first.source, first.is_true) == (Source.CODE, True)
    assert first.share >= 0.95
    assert first.real.tools


class Shout(AgentMiddleware):
    """Rewrites the prompt."""

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        text = request.system_message.content.upper()
        return await handler(request.override(system_message=SystemMessage(text)))


async def test_an_agent_whose_prompt_middleware_may_rewrite_is_learned_from_calls(bed: Watched) -> None:
    async def prepare(state: State) -> dict[str, Any]:
        return {}

    builder = StateGraph(State)
    builder.add_node("prepare", prepare)
    builder.add_node("agent", agent_of(bed, middleware=[Shout()]))
    builder.add_edge(START, "prepare")
    builder.add_edge("prepare", "agent")
    graph = attach(builder.compile(), runtime=bed.runtime)
    for number in range(3):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    assert [call.is_true for call in bed.calls] == [True] * 3
    assert [call.share >= 0.95 for call in bed.calls] == [False, True, True]


async def test_an_agent_whose_system_prompt_counts_its_messages_is_foreseen_when_it_comes_back(bed: Watched) -> None:
    @dynamic_prompt
    def counted(request: Any) -> str:
        return f"You look things up. {RULES} Messages so far: {len(request.messages)}."

    graph = attach(agent_of(bed, middleware=[counted]), runtime=bed.runtime)
    for number in range(6):
        await graph.ainvoke({"messages": [HumanMessage(f"look for thing {number}, please")]}, config(number))
    bed.settle()
    back = bed.calls[1::2]
    assert all(call.cause is Cause.RESUME for call in back)
    assert all(call.is_true and call.share > 0.95 for call in back[3:]), [(c.share, c.is_true, c.stop) for c in back]


def two_nodes(writer: Any, *, state: Any = State) -> Any:
    async def prepare(state: Any) -> dict[str, Any]:
        return {}

    builder: Any = StateGraph(state)
    builder.add_node("prepare", prepare)
    builder.add_node("writer", writer)
    builder.add_edge(START, "prepare")
    builder.add_edge("prepare", "writer")
    return builder.compile()


async def test_a_prompt_declared_by_a_phase_is_read_from_the_node(bed: Watched) -> None:
    model = bed.model()

    def made(state: Any) -> list[Any]:
        return [SYSTEM, HumanMessage(str(state["messages"][-1].content).upper())]

    @phase(kind="generation", prompt=made)
    async def writer(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(made(state))]}

    graph = attach(two_nodes(writer), runtime=bed.runtime)
    for number in range(2):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    assert [call.source for call in bed.calls] == [None, Source.DECLARED]
    assert bed.calls[1].share > 0.99


def test_the_prompts_of_an_odd_graph_are_left_to_be_learned() -> None:
    class Odd:
        nodes: ClassVar[dict[str, Any]] = {"a": object(), "b": None}

        def get_subgraphs(self) -> Any:
            raise RuntimeError("not for you")

    assert prompts_of(Odd()) == ()
    assert prompts_of(object()) == ()


async def test_what_is_kept_for_runs_that_never_end_is_bounded() -> None:
    engine = FakeEngine(FakeEngineSettings())
    with FakeEngineServer(engine) as server:
        runtime = Runtime(RuntimeSettings(engine="fake", max_contexts=16), engine=BridgedEngine(server))
        watch = PromptWatch(runtime._state)
        for number in range(200):
            run_id = uuid4()
            opened = Opened(0.0, run_id, None, SpanKind.NODE, "node", ThreadId(""), f"node:{number}", fields={"a": 1})
            span = OpenSpan(opened, run_id)
            watch.node_started(opened, span)
            candidate = Candidate(NodeId(f"next{number}"), 1.0, 1, None, "")
            assert watch.predict(candidate, ThreadId(""), "", span) is None
            watch._tell(candidate.node, ThreadId(""), Unknown("a reason", seen=True))
        assert len(watch._waiting) == len(watch._told) == 16
        runtime.close()


async def test_of_two_prompts_in_one_node_the_first_one_is_foreseen(bed: Watched) -> None:
    model = bed.model()

    async def writer(state: State) -> dict[str, Any]:
        draft = await model.ainvoke([SYSTEM, *state["messages"]])
        critic = SystemMessage(f"You are the critic. {RULES}")
        return {"messages": [await model.ainvoke([critic, HumanMessage(str(draft.content))])]}

    graph = attach(two_nodes(writer), runtime=bed.runtime)
    for number in range(4):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    opening = bed.calls[::2]
    assert all(call.is_true for call in bed.calls)
    assert min(call.share for call in opening[1:]) >= 0.95


async def test_a_worker_with_an_input_of_its_own_is_not_foreseen_from_the_graphs_state(bed: Watched) -> None:
    model = bed.model()

    async def worker(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SYSTEM, *state["messages"]])]}

    async def prepare(state: State) -> dict[str, Any]:
        return {}

    builder: Any = StateGraph(State)
    builder.add_node("prepare", prepare)
    builder.add_node("worker", worker)
    builder.add_edge(START, "prepare")
    jobs = lambda s: [Send("worker", {"messages": [HumanMessage("a job of its own")]})]  # noqa: E731
    builder.add_conditional_edges("prepare", jobs, ["worker"])
    builder.add_edge("worker", END)
    graph = attach(builder.compile(), runtime=bed.runtime)
    for number in range(4):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    assert all(call.is_true for call in bed.calls[2:])
    assert all(call.share > 0.5 for call in bed.calls[2:])


async def test_the_first_prompt_of_a_new_thread_is_foreseen_from_the_runs_input(bed: Watched) -> None:
    model = bed.model()

    async def writer(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SYSTEM, *state["messages"]])]}

    builder = StateGraph(State)
    builder.add_node("writer", writer)
    builder.add_edge(START, "writer")
    graph = attach(builder.compile(checkpointer=InMemorySaver()), runtime=bed.runtime)
    for number in range(3):
        await graph.ainvoke({"messages": [("user", f"hello {number}")]}, config(number))
    await graph.ainvoke({"messages": [("user", "and again")]}, config(0))
    bed.settle()
    assert all(call.is_true for call in bed.calls)
    assert [call.share > 0.99 for call in bed.calls] == [False, True, True, True]


async def test_the_next_turn_of_a_node_that_follows_itself_is_foreseen(bed: Watched) -> None:
    model = bed.model()

    async def worker(state: State) -> dict[str, Any]:
        answer = await model.ainvoke([SYSTEM, HumanMessage(f"Plan: {state['plan']}")])
        return {"messages": [answer], "round": state["round"] + 1, "plan": f"{state['plan']}, then more"}

    builder: Any = StateGraph(State)
    builder.add_node("worker", worker)
    builder.add_edge(START, "worker")
    builder.add_conditional_edges("worker", lambda s: "worker" if s["round"] < 3 else END, ["worker", END])
    graph = attach(builder.compile(), runtime=bed.runtime)
    for number in range(5):
        await graph.ainvoke({"messages": [], "round": 0, "plan": f"go to {number}"}, config(number))
    bed.settle()
    assert all(call.is_true for call in bed.calls[6:])
    assert min(call.share for call in bed.calls[12:]) > 0.9, [(c.share, c.source, c.stop) for c in bed.calls]


async def test_teams_that_run_side_by_side_are_each_foreseen_from_their_own_state(bed: Watched) -> None:
    model = bed.model()

    def speaker(name: str) -> Any:
        async def speak(state: State) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([SystemMessage(f"{name} {RULES}"), *state["messages"]])]}

        return speak

    team = StateGraph(State)
    for name in ("search", "sum_up"):
        team.add_node(name, speaker(name))
    team.add_edge(START, "search")
    team.add_edge("search", "sum_up")
    builder: Any = StateGraph(State)
    builder.add_node("team", team.compile())
    sends = [Send("team", {"messages": [HumanMessage(f"part {part} of it " * 9)]}) for part in range(3)]
    builder.add_conditional_edges(START, lambda s: sends, ["team"])
    graph = attach(builder.compile(), runtime=bed.runtime)
    for number in range(3):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    summaries = [call for call in bed.calls if call.node == "team|sum_up"]
    assert all(call.is_true for call in summaries)
    assert min(call.share for call in summaries[3:]) > 0.9


async def test_a_loop_that_trims_its_history_is_held_to_what_stays(bed: Watched) -> None:
    """After one mistake, an agent that comes back from a tool is expected to read its system prompt only."""
    model = bed.model().bind_tools([look])

    async def writer(state: State) -> dict[str, Any]:
        for turn in range(4):
            asked = HumanMessage(f"look, turn {turn}: " + " ".join([f"word{turn}"] * 40))
            await model.ainvoke([SYSTEM, asked])
        return {}

    await attach(two_nodes(writer), runtime=bed.runtime).ainvoke({"messages": [HumanMessage("go")]}, config(1))
    bed.settle()
    assert [call.is_true for call in bed.calls] == [True, False, True, True]


async def test_why_nothing_can_be_foreseen_stands_in_the_ledger_once(bed: Watched) -> None:
    model, numbers = bed.model(), itertools.count()

    async def writer(state: State) -> dict[str, Any]:
        number = next(numbers)
        return {"messages": [await model.ainvoke([HumanMessage(f"{number * 7919:x} is {number}"), *state["messages"]])]}

    graph = attach(two_nodes(writer), runtime=bed.runtime)
    for number in range(6):
        await graph.ainvoke({"messages": [HumanMessage(f"hello {number}")]}, config(number))
    bed.settle()
    reasons = [a.reason for a in bed.actions() if a.outcome is Outcome.REJECTED and a.reason.startswith("no prompt")]
    assert len(reasons) == 1
    assert all(call.is_true for call in bed.calls)


async def test_a_state_that_raises_when_it_is_read_costs_nothing_but_the_forecast(bed: Watched) -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise RuntimeError("not for you")

    model = bed.model()

    async def worker(state: Any) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([SYSTEM, AIMessage("so"), HumanMessage("go")])]}

    builder: Any = StateGraph(State)
    builder.add_node("worker", worker)
    builder.add_conditional_edges(START, lambda s: [Send("worker", Odd())], ["worker"])
    builder.add_edge("worker", END)
    result = await attach(builder.compile(), runtime=bed.runtime).ainvoke({"messages": [HumanMessage("go")]}, config(1))
    bed.settle()
    assert result["messages"][-1].content == "done"
    assert len(bed.calls) == 1
