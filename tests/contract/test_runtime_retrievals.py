"""Retrieval in the forecast: an index hears what will be searched for while the model still writes."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import pancake_langgraph
from pancake_langgraph import attach, phase
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.phases import Phase
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.draft import DraftSettings
from pancake_langgraph.retrieval.prefetch import PartitionPrefetcher
from pancake_langgraph.runtime import Runtime
from tests.contract.runtime_bed import open_bed
from tests.unit.partition_kit import Shelves

LIMIT_S = 30.0


class Index:
    """Remembers drafts."""

    def __init__(self) -> None:
        self.drafts: list[tuple[str, str]] = []
        self.heard = threading.Event()
        self.error: Exception | None = None

    def draft(self, agent: str, text: str) -> None:
        self.drafts.append((agent, text))
        self.heard.set()
        if self.error is not None:
            raise self.error


def pipeline(search: Callable[[MessagesState], dict[str, Any]], think: Callable[[], object]) -> Any:
    """A model that writes a query, another node, and the search."""

    def write(state: MessagesState) -> dict[str, Any]:
        think()
        return {"messages": [("ai", "a query")]}

    builder = StateGraph(MessagesState).add_node("write", write).add_node("search", search)
    builder.add_node("check", lambda state: {})
    builder.add_edge(START, "write").add_edge("write", "check").add_edge("check", "search").add_edge("search", END)
    return builder.compile()


def run(graph: Any, runtime: Runtime, text: str = "where is it", thread: str = "t1") -> Any:
    result = graph.invoke({"messages": [("user", text)]}, {"configurable": {"thread_id": thread}})
    assert runtime.wait_idle()
    return result


def test_an_index_hears_the_question_while_the_model_still_writes() -> None:
    index = Index()
    search = phase(retrieves=index)(lambda state: {})
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(pipeline(search, lambda: index.heard.wait(LIMIT_S)), runtime=runtime)
        run(graph, runtime)
        assert index.drafts[0] == ("t1", "where is it")
        assert {text for _, text in index.drafts} == {"where is it"}
        run(graph, runtime, "and that", "t2")
        assert index.drafts[-1] == ("t2", "and that")
        assert runtime.statistics().failed_signals == 0


def test_a_nodes_metadata_may_say_it_too() -> None:
    index = Index()
    builder = StateGraph(MessagesState).add_node("search", lambda s: {}, metadata={"pancake": {"retrieves": index}})
    graph = builder.add_edge(START, "search").add_edge("search", END).compile()
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        run(attach(graph, runtime=runtime), runtime)
    assert index.drafts == [("t1", "where is it")]


def test_a_graph_without_messages_tells_its_question() -> None:
    class Asked(TypedDict):
        question: str

    index = Index()
    builder = StateGraph(Asked).add_node("search", phase(retrieves=index)(lambda state: {}))
    graph = builder.add_edge(START, "search").add_edge("search", END).compile()
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        attach(graph, runtime=runtime).invoke({"question": "where"}, {"configurable": {"thread_id": "t"}})
        assert runtime.wait_idle()
    assert index.drafts == [("t", "where")]


def test_nodes_far_from_a_search_tell_nothing() -> None:
    index = Index()
    builder = StateGraph(MessagesState).add_node("search", phase(retrieves=index)(lambda state: {}))
    for name in ("a", "b"):
        builder.add_node(name, lambda state: {})
    builder.add_edge(START, "search").add_edge("search", "a").add_edge("a", "b").add_edge("b", END)
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        run(attach(builder.compile(), runtime=runtime), runtime)
    assert index.drafts == [("t1", "where is it")]  # once: from the node itself


def test_an_index_that_fails_hurts_no_run() -> None:
    index = Index()
    index.error = OSError("broken")
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(pipeline(phase(retrieves=index)(lambda state: {}), lambda: None), runtime=runtime)
        assert run(graph, runtime)["messages"][-1].content == "a query"
        assert runtime.statistics().failed_signals > 0


@pytest.mark.parametrize("content", ["", [{"type": "text", "text": "parts"}]])
def test_a_message_without_plain_text_tells_nothing(content: Any) -> None:
    index = Index()
    with Runtime(RuntimeSettings(engine="null")) as runtime:
        graph = attach(pipeline(phase(retrieves=index)(lambda state: {}), lambda: None), runtime=runtime)
        graph.invoke({"messages": [HumanMessage(content)]}, {"configurable": {"thread_id": "t"}})
        assert runtime.wait_idle()
        assert runtime.statistics().failed_signals == 0
    assert index.drafts == []


async def test_what_a_model_writes_for_a_tool_that_searches_is_a_draft() -> None:
    index = Index()

    @phase(retrieves=index)
    @tool
    async def look(q: str) -> str:
        """Look it up."""
        return "found"

    with open_bed() as bed:
        model = bed.model().bind_tools([look])

        async def agent(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await model.ainvoke([SystemMessage("rules"), *state["messages"]])]}

        builder = StateGraph(MessagesState).add_node("agent", agent).add_node("tools", ToolNode([look]))
        builder.add_edge(START, "agent").add_conditional_edges("agent", tools_condition, ["tools", END])
        graph = attach(builder.add_edge("tools", "agent").compile(), runtime=bed.runtime)
        result = await graph.ainvoke({"messages": [("user", "look please")]}, {"configurable": {"thread_id": "t"}})
        assert isinstance(result["messages"][-1], AIMessage)
        assert bed.runtime.wait_idle()
    assert index.drafts[:2] == [("t", "look please"), ("t", "a")]


def test_a_prefetcher_has_partitions_warm_when_the_search_comes() -> None:
    shelves = Shelves(64, 8)

    def embed(text: str) -> Vector:
        found = np.random.default_rng(len(text)).standard_normal(8)
        return (found / np.linalg.norm(found)).astype(np.float32)

    settings = DraftSettings(budget_bytes=shelves.total_bytes // 4, per_query=4)
    with PartitionPrefetcher(shelves, settings, embed=embed) as prefetcher:

        @phase(retrieves=prefetcher)
        def search(state: MessagesState) -> dict[str, Any]:
            prefetcher.searched("t1", embed(str(state["messages"][0].content)))
            return {}

        def think() -> None:
            assert shelves.began.acquire(timeout=LIMIT_S)  # the first byte is read while the model thinks
            assert prefetcher.wait_idle(LIMIT_S)

        with Runtime(RuntimeSettings(engine="null")) as runtime:
            run(attach(pipeline(search, think), runtime=runtime), runtime)
        assert prefetcher.wait_idle(LIMIT_S)
        stats = prefetcher.stats()
    assert (stats.hits, stats.needed, stats.late) == (4, 4, 0)


@pytest.mark.parametrize("value", ["index", 3, object()])
def test_what_takes_no_drafts_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"retrieves=.*a method draft\(agent, text\)"):
        Phase(retrieves=value)


def test_the_runtime_loads_no_index() -> None:
    code = "import sys, pancake_langgraph.runtime; print(*sorted(sys.modules))"
    env = {"PYTHONPATH": str(Path(pancake_langgraph.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "pancake_langgraph.runtime" in loaded
    assert not loaded & {"faiss", "pancake_langgraph.retrieval"}
