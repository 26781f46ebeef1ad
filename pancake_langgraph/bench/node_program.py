"""The program of bench `retrieval-node`: a model is asked, then a node searches an index that is cold.

The graph is that of retrieval as people write it: the model says something about the question, and the next node looks
the question up.  While the model still writes, an attached runtime has told the store what will be searched for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypedDict

from langchain_core.messages import AnyMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph.bench.arms import Arm, ArmRun
from pancake_langgraph.bench.cold_index import ColdIndex
from pancake_langgraph.bench.recorder import CallRecord, CallRecorder
from pancake_langgraph.bench.text import passages
from pancake_langgraph.phases import phase
from pancake_langgraph.retrieval.prefetch import PrefetchStats
from pancake_langgraph.runtime import attach

#: What the model reads besides the question, and how much it writes.
PROMPT_WORDS: Final = 150
ANSWER_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Question:
    """What a user writes, and what a node then searches for."""

    said: str
    searched: str


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What one arm did once: calls, programs, how long each search took and what it found, and what drafts did."""

    calls: tuple[CallRecord, ...]
    program_s: tuple[float, ...]
    wall_s: float
    waits_s: tuple[float, ...]
    found: tuple[tuple[str, ...], ...]
    drafts: tuple[PrefetchStats, ...]


class NodeState(TypedDict):
    """State of a program; `looks_for` is what is searched for, which nobody can foresee but from the messages."""

    messages: Annotated[list[AnyMessage], add_messages]
    looks_for: str


@dataclass(slots=True)
class _Searches:
    """What searches took and found, one after the other."""

    waits_s: list[float] = field(default_factory=list)
    found: list[tuple[str, ...]] = field(default_factory=list)


async def run_node(index: ColdIndex, run: ArmRun, questions: Sequence[Question], *, repeat: int) -> NodeRun:
    """Answer the first question for practice, then the others on the clock, each with a cold index (oracle: warm)."""
    searches = _Searches()
    graph = _graph(index, run, searches)
    if run.runtime is not None:
        graph = attach(graph, runtime=run.runtime)
    recorder = CallRecorder()
    program_s: list[float] = []
    drafts: list[PrefetchStats] = []
    began_s = time.perf_counter()
    for number, question in enumerate(questions):
        await (index.warm(question.searched) if run.arm is Arm.ORACLE else index.cool())
        config = RunnableConfig(
            configurable={"thread_id": f"program-{repeat}-{number}"}, callbacks=[recorder] if number else []
        )
        started_s = time.perf_counter()
        await graph.ainvoke({"messages": [("user", question.said)], "looks_for": question.searched}, config)
        program_s.append(time.perf_counter() - started_s)
        if run.runtime is not None:
            drafts.append(await index.settled())
    return NodeRun(
        calls=tuple(recorder.records),
        program_s=tuple(program_s[1:]),
        wall_s=time.perf_counter() - began_s,
        waits_s=tuple(searches.waits_s[1:]),
        found=tuple(searches.found[1:]),
        drafts=tuple(drafts[1:]),
    )


def _graph(index: ColdIndex, run: ArmRun, searches: _Searches) -> Any:
    """Build the graph: `think`, which asks the model, then `look`, which searches."""
    model = run.model(max_tokens=ANSWER_TOKENS)
    system = SystemMessage(f"Say in one sentence what to look for. {passages(PROMPT_WORDS, seed=4000)}")

    async def think(state: NodeState, config: RunnableConfig) -> dict[str, Any]:
        return {"messages": [await model.ainvoke([system, *state["messages"]], config)]}

    async def look(state: NodeState) -> dict[str, Any]:
        started_s = time.perf_counter()
        items = await index.search(state["looks_for"])
        searches.waits_s.append(time.perf_counter() - started_s)
        searches.found.append(tuple(item.key for item in items))
        return {}

    builder = StateGraph(NodeState)
    builder.add_node("think", think)
    builder.add_node("look", look if run.runtime is None else phase(retrieves=index.store)(look))
    builder.add_edge(START, "think")
    builder.add_edge("think", "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=InMemorySaver())
