"""What a model writes reaches an index as a draft while the model still writes it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from pancake_langgraph import PancakeStore, attach, phase
from pancake_langgraph._types import Prompt, ThreadId
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.fake import FakeAnswer, FakeEngine, FakeEngineSettings, FakeToolCall
from pancake_langgraph.forecast import create_forecaster
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.plan import read_phases
from pancake_langgraph.retrieval.base import Item, ItemId
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.runtime import Runtime
from pancake_langgraph.runtime.retrievals import RetrievalWatch
from pancake_langgraph.runtime.signals import Closed, Drafted, Opened, Requested, Signal
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer
from pancake_langgraph.topology import read_topology
from tests.embedders import WordEmbedder, text_vector

LIMIT_S = 30.0
QUERY = "opening hours of the gate behind the old mill in winter"
NS = ("notes",)


class Index:
    """Remembers drafts."""

    def __init__(self) -> None:
        self.drafts: list[str] = []
        self.agents: set[str] = set()

    def draft(self, agent: str, text: str) -> None:
        self.agents.add(agent)
        self.drafts.append(text)


def beginnings(*counts: int) -> list[str]:
    return [" ".join(QUERY.split()[:count]) for count in counts]


# -- the watch, signal by signal ------------------------------------------------------------------------------------


class Bench:
    """A watch of one graph that is given signals by hand."""

    def __init__(self, graph: Any) -> None:
        topology = read_topology(graph)
        self.graph_id = topology.fingerprint
        forecaster = create_forecaster()
        forecaster.add_graph(self.graph_id, topology)
        self.watch = RetrievalWatch(forecaster)
        self.watch.declare(self.graph_id, topology, read_phases(graph))

    def tell(self, signal: Signal) -> None:
        self.watch.receive(signal)

    def opens(self, kind: SpanKind, name: str, question: str | None = "the question") -> UUID:
        run_id = uuid4()
        fields = {"messages": [HumanMessage(question)]} if kind is SpanKind.NODE and question else None
        place = "" if kind is SpanKind.RUN else f"{name}:1"
        opened = Opened(0.0, run_id, None, kind, name, ThreadId("t"), place, fields=fields, graph_id=self.graph_id)
        self.tell(opened)
        return run_id

    def calls(self, node: str) -> UUID:
        self.opens(SpanKind.NODE, node)
        return self.opens(SpanKind.CALL, node)

    def wanted(self, node: str) -> frozenset[str]:
        return self.watch.wanted(self.graph_id, f"{node}:1")


def chain(*names: str, **searching: Index) -> Any:
    """Return a graph of nodes in a row, of which some search."""
    builder = StateGraph(MessagesState)
    for before, name in zip([START, *names], names, strict=False):
        node = (lambda state: {}) if name not in searching else phase(retrieves=searching[name])(lambda state: {})
        builder.add_node(name, node).add_edge(before, name)
    return builder.add_edge(names[-1], END).compile()


def agent_graph(index: Index) -> Any:
    @phase(retrieves=index)
    @tool
    def look(query: str) -> str:
        """Look it up."""
        return query

    builder = StateGraph(MessagesState).add_node("agent", lambda state: {}).add_node("tools", ToolNode([look]))
    builder.add_edge(START, "agent").add_conditional_edges("agent", tools_condition, ["tools", END])
    return builder.add_edge("tools", "agent").compile()


def test_what_is_written_before_a_search_is_told_as_it_grows_and_as_a_whole() -> None:
    index = Index()
    bench = Bench(chain("rewrite", "check", "search", search=index))
    call = bench.calls("rewrite")
    for text in beginnings(2, 4, 8):
        bench.tell(Drafted(1.0, call, "", text))
    bench.tell(Closed(2.0, call, SpanStatus.OK, AIMessage(QUERY)))
    assert index.drafts == ["the question", *beginnings(2, 4, 8), QUERY]
    bench.opens(SpanKind.NODE, "check")
    bench.opens(SpanKind.NODE, "search")
    assert index.drafts[-1] == QUERY, "the question does not take its place again"
    bench.opens(SpanKind.NODE, "rewrite")
    assert index.drafts[-1] == "the question", "until it was searched for"
    assert index.agents == {"t"}


def test_an_answer_that_was_not_streamed_is_told_when_it_is_there() -> None:
    index = Index()
    bench = Bench(chain("rewrite", "search", search=index))
    call = bench.calls("rewrite")
    bench.tell(Closed(2.0, call, SpanStatus.OK, AIMessage('{"reason": "none", "query": "gate opening hours"}')))
    assert index.drafts == ["the question", "gate opening hours"]


@pytest.mark.parametrize(
    "end",
    [
        Closed(2.0, uuid4(), SpanStatus.CANCELLED),
        Closed(2.0, uuid4(), SpanStatus.ERROR, AIMessage(QUERY)),
        Closed(2.0, uuid4(), SpanStatus.OK, AIMessage("", tool_calls=[{"name": "other", "args": {}, "id": "1"}])),
    ],
    ids=["cancelled", "failed", "went elsewhere"],
)
def test_a_call_that_was_given_up_tells_nothing_more_and_the_next_question_counts(end: Closed) -> None:
    index = Index()
    bench = Bench(chain("rewrite", "search", search=index))
    run = bench.opens(SpanKind.RUN, "graph")
    call = bench.calls("rewrite")
    bench.tell(Drafted(1.0, call, "", "opening hours"))
    bench.tell(end._replace(run_id=call))
    bench.tell(Drafted(2.0, call, "", "opening hours of the"))
    bench.tell(Closed(2.0, run, SpanStatus.CANCELLED))
    assert index.drafts == ["the question", "opening hours"]
    bench.opens(SpanKind.RUN, "graph")
    bench.calls("rewrite")
    assert index.drafts == ["the question", "opening hours", "the question"]


def test_what_was_written_for_a_branch_that_is_not_taken_is_forgotten_within_the_run() -> None:
    index = Index()
    names = ["rewrite", "search", *(f"n{number}" for number in range(6))]
    bench = Bench(chain(*names, search=index))
    bench.tell(Drafted(1.0, bench.calls("rewrite"), "", QUERY))
    bench.opens(SpanKind.NODE, "rewrite")
    assert index.drafts[-1] == QUERY
    for number in range(6):
        bench.opens(SpanKind.NODE, f"n{number}")
    assert index.drafts[-1] == QUERY
    bench.opens(SpanKind.NODE, "rewrite")
    assert index.drafts[-1] == "the question"


def test_a_prompt_does_not_take_the_place_of_what_was_written() -> None:
    index = Index()
    bench = Bench(chain("rewrite", "search", search=index))
    bench.tell(Drafted(1.0, bench.calls("rewrite"), "", QUERY))
    again = bench.opens(SpanKind.CALL, "rewrite")
    bench.tell(Requested(2.0, again, Prompt.of([{"role": "user", "content": "check this"}]), None, None))
    assert index.drafts == ["the question", QUERY]


def test_arguments_of_a_tool_that_searches_are_told_and_those_of_others_and_plain_words_are_not() -> None:
    index = Index()
    bench = Bench(agent_graph(index))
    call = bench.calls("agent")
    assert bench.wanted("agent") == {"look"}
    for name, text in (
        ("look", "opening hours"),
        ("other", "no"),
        ("", "let me see"),
        ("look", QUERY),
        ("look", QUERY),
    ):
        bench.tell(Drafted(1.0, call, name, text))
    bench.tell(Closed(2.0, call, SpanStatus.OK, AIMessage("plain words")))
    bench.opens(SpanKind.NODE, "tools")
    bench.opens(SpanKind.TOOL, "look")
    assert index.drafts == ["the question", "opening hours", QUERY]
    bench.opens(SpanKind.NODE, "agent")
    assert index.drafts[-1] == "the question"


def test_nothing_is_wanted_where_nothing_is_searched() -> None:
    bench = Bench(chain("a", "b"))
    assert bench.wanted("a") == frozenset()
    assert bench.watch.wanted("another graph", "a:1") == frozenset()
    call = bench.calls("a")
    bench.tell(Drafted(1.0, call, "", QUERY))
    assert not bench.watch._calls


def test_nodes_that_lead_to_no_search_are_asked_for_no_words_once_that_is_known() -> None:
    index = Index()
    bench = Bench(chain("rewrite", "search", "answer", search=index))
    assert bench.wanted("answer") == {""}
    call = bench.calls("answer")
    assert bench.wanted("answer") == frozenset()
    bench.tell(Drafted(1.0, call, "", QUERY))
    bench.tell(Closed(1.0, call, SpanStatus.OK, AIMessage(QUERY)))
    bench.calls("rewrite")
    assert bench.wanted("rewrite") == {""}
    assert index.drafts == ["the question"]


# -- in a graph -----------------------------------------------------------------------------------------------------


@contextmanager
def opened(answer: Callable[[Prompt], FakeAnswer | str]) -> Iterator[tuple[Runtime, PancakeChatModel]]:
    engine = FakeEngine(FakeEngineSettings(pool_blocks=200, max_model_len_tokens=1200, script=answer))
    with FakeEngineServer(engine) as server:
        with Runtime(RuntimeSettings(engine="fake"), engine=BridgedEngine(server)) as runtime:
            yield runtime, PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=200)
            assert runtime.wait_idle()
            assert runtime.statistics().failed_signals == 0
        runtime.check_integrity()


def rewriting(model: PancakeChatModel, search: Callable[[MessagesState], dict[str, Any]]) -> Any:
    async def rewrite(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState).add_node("rewrite", rewrite).add_node("search", search)
    return builder.add_edge(START, "rewrite").add_edge("rewrite", "search").add_edge("search", END).compile()


def heard(runtime: Runtime) -> list[Signal]:
    """Return what a runtime is told from now on."""
    signals: list[Signal] = []
    post = runtime.post

    def listen(signal: Signal) -> None:
        signals.append(signal)
        post(signal)

    runtime.post = listen  # type: ignore[method-assign]
    return signals


ASKED = {"messages": [("user", "when is it open")]}
CONFIG: Any = {"configurable": {"thread_id": "t"}}


async def test_an_index_hears_a_query_grow_while_the_model_writes_it() -> None:
    index = Index()
    with opened(lambda prompt: QUERY) as (runtime, model):
        graph = attach(rewriting(model, phase(retrieves=index)(lambda state: {})), runtime=runtime)
        await graph.ainvoke(ASKED, CONFIG)
        assert runtime.wait_idle()
    assert index.drafts == ["when is it open", *beginnings(2, 4, 8), QUERY]


async def test_an_index_hears_the_argument_of_a_tool_grow() -> None:
    index = Index()

    def answer(prompt: Prompt) -> FakeAnswer | str:
        is_asked = prompt.messages[-1]["role"] == "user"
        return FakeAnswer(tool_calls=(FakeToolCall("look", {"limit": 3, "query": QUERY}),)) if is_asked else "done"

    @phase(retrieves=index)
    @tool
    async def look(limit: int, query: str) -> str:
        """Look it up."""
        return query

    with opened(answer) as (runtime, model):
        bound = model.bind_tools([look])

        async def agent(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await bound.ainvoke(state["messages"])]}

        builder = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([look]))
        builder.add_edge(START, "agent").add_conditional_edges("agent", tools_condition, ["tools", END])
        graph = attach(builder.add_edge("tools", "agent").compile(), runtime=runtime)
        await graph.ainvoke(ASKED, CONFIG)
        assert runtime.wait_idle()
    assert index.drafts == ["when is it open", *beginnings(2, 4, 8), QUERY, "when is it open"]


async def test_where_nothing_is_searched_no_words_are_sent() -> None:
    with opened(lambda prompt: QUERY) as (runtime, model):
        signals = heard(runtime)
        graph = attach(rewriting(model, lambda state: {}), runtime=runtime)
        await graph.ainvoke(ASKED, CONFIG)
        assert runtime.wait_idle()
        handler = graph.config["callbacks"][0]
        assert not handler._drafted
    assert any(isinstance(signal, Closed) for signal in signals)
    assert not any(isinstance(signal, Drafted) for signal in signals)


async def test_partitions_are_brought_up_before_the_answer_ends(tmp_path: Path) -> None:
    engine = DiskVectorEngine(tmp_path, dim=16, ack="none", codes="sq8", coded_rows=256, exact_rows=64, merge="manual")
    rows = np.random.default_rng(1).standard_normal((2000, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    engine.put([Item(ItemId(NS, str(n)), {"text": str(n)}, (row,)) for n, row in enumerate(rows)])
    engine.compact()
    store = PancakeStore(engine=engine, index={"dims": 16, "embed": WordEmbedder(), "fields": ["text"]})
    near = engine.partitions(np.array(text_vector(beginnings(4)[0], 16), np.float32), 32)
    cold_and_warm = [engine.is_warm([one.id for one in near])]

    with opened(lambda prompt: QUERY) as (runtime, model):

        async def rewrite(state: MessagesState) -> dict[str, Any]:
            answer = ""
            async for piece in model.astream(state["messages"]):
                answer += str(piece.content)
                if len(answer.split()) == 6 and len(cold_and_warm) == 1:
                    async with asyncio.timeout(LIMIT_S):
                        while not all(engine.is_warm([one.id for one in near])):
                            await asyncio.sleep(0.005)
                    cold_and_warm.append(engine.is_warm([one.id for one in near]))
            return {"messages": [AIMessage(answer)]}

        @phase(retrieves=store)
        async def search(state: MessagesState) -> dict[str, Any]:
            assert await asyncio.to_thread(runtime.wait_idle)
            prefetcher = store._core.engine()._prefetcher
            assert prefetcher is not None
            assert await asyncio.to_thread(prefetcher.wait_idle, LIMIT_S)
            assert await store.asearch(NS, query=str(state["messages"][-1].content))
            return {}

        builder = StateGraph(MessagesState).add_node("rewrite", rewrite).add_node("search", search)
        builder.add_edge(START, "rewrite").add_edge("rewrite", "search").add_edge("search", END)
        await attach(builder.compile(), runtime=runtime).ainvoke(ASKED, CONFIG)
        assert runtime.wait_idle()
    assert cold_and_warm == [[False] * 32, [True] * 32], "when six words of eleven were written"
    prefetcher = store._core.engine()._prefetcher
    assert prefetcher is not None
    assert prefetcher.wait_idle(LIMIT_S)
    stats = store.prefetch_stats()
    assert (stats.searches, stats.failures) == (1, 0)
    assert stats.hits == stats.needed > 0
    store.close()
    engine.close()
