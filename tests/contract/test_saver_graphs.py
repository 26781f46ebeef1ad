"""Real graphs behave with the saver as they do with LangGraph's own in-memory saver, state for state.

A scenario runs twice, on the reference and on ours, and returns every state snapshot it saw.  They are compared as
text in which ids are replaced by numbers in order of appearance, so that links between snapshots count and ids do not.
"""

import asyncio
import operator
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, ToolMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Interrupt, PregelTask, Send, StateSnapshot, interrupt

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.saver import PancakeSaver

CHILDREN = Path(__file__).parents[1] / "saver_children.py"
WAIT_S = 60
BOTH_MODES = pytest.mark.parametrize("mode", ["sync", "async"])
#: Backends on which a second saver object sees what the first one stored.
SHARED = pytest.mark.parametrize("saver_factory", ["sqlite", "redis"], indirect=True)
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32}\b")


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


class Chat(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Drive:
    """A saver, and the graph methods of one mode behind one set of names."""

    def __init__(self, saver: BaseCheckpointSaver[Any], mode: str) -> None:
        self.saver: Any = saver
        self.is_async = mode == "async"
        self._tap(saver)
        self.on_writes: Callable[[Sequence[tuple[str, Any]]], None] = lambda writes: None

    def _tap(self, saver: Any) -> None:
        put_writes, aput_writes = saver.put_writes, saver.aput_writes

        def tapped(config: Any, writes: Any, *rest: Any) -> None:
            put_writes(config, writes, *rest)
            self.on_writes(writes)

        async def atapped(config: Any, writes: Any, *rest: Any) -> None:
            await aput_writes(config, writes, *rest)
            self.on_writes(writes)

        saver.put_writes, saver.aput_writes = tapped, atapped

    async def invoke(self, graph: Any, value: Any, config: Any, **options: Any) -> Any:
        if self.is_async:
            return await graph.ainvoke(value, config, **options)
        return graph.invoke(value, config, **options)

    async def state(self, graph: Any, config: Any, *, subgraphs: bool = False) -> Any:
        if self.is_async:
            return await graph.aget_state(config, subgraphs=subgraphs)
        return graph.get_state(config, subgraphs=subgraphs)

    async def history(self, graph: Any, config: Any, **options: Any) -> list[StateSnapshot]:
        if self.is_async:
            return [snapshot async for snapshot in graph.aget_state_history(config, **options)]
        return list(graph.get_state_history(config, **options))

    async def update(self, graph: Any, config: Any, values: Any, as_node: str | None = None) -> Any:
        if self.is_async:
            return await graph.aupdate_state(config, values, as_node)
        return graph.update_state(config, values, as_node)


def plain(value: Any) -> Any:
    """Return a snapshot, or what is in one, as plain data in one order; only the time of creation is left out."""
    if isinstance(value, StateSnapshot):
        fields = {name: plain(found) for name, found in value._asdict().items() if name != "created_at"}
        # The reference returns tuples in metadata (counters of incremental channels) as lists, we as tuples.
        return {**fields, "metadata": str(fields["metadata"]).replace("(", "[").replace(")", "]")}
    if isinstance(value, PregelTask):
        return {name: plain(found) for name, found in value._asdict().items()}
    if isinstance(value, Interrupt):
        return ("interrupt", plain(value.value), value.id)
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value)}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return repr(value)


def text_of(value: Any) -> str:
    numbers: dict[str, str] = {}
    return _ID.sub(lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), repr(plain(value)))


Scenario = Callable[[Drive], Any]


async def equals_reference(scenario: Scenario, saver: PancakeSaver, mode: str) -> None:
    expected = text_of(await scenario(Drive(InMemorySaver(), mode)))
    assert "values" in expected
    assert text_of(await scenario(Drive(saver, mode))) == expected


def thread(name: object = "t", **more: Any) -> Any:
    return {"configurable": {"thread_id": name, **more}}


def writer(name: str) -> Any:
    return lambda state: {"log": [name]}


# -- interrupts -----------------------------------------------------------------------------------------------------


async def interrupt_and_resume(drive: Drive) -> Any:
    def ask(state: Chat) -> Any:
        answer = interrupt({"question": "Which city?", "number": len(state["messages"])})
        return {"messages": [AIMessage(f"You said {answer}", id="a1")]}

    builder = StateGraph(Chat).add_node(ask).add_node("end", lambda state: {"messages": [AIMessage("Bye", id="a2")]})
    builder.add_edge(START, "ask").add_edge("ask", "end")
    graph = builder.compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"messages": [HumanMessage("Hi", id="h1")]}, thread())
    open_state = await drive.state(graph, thread())
    assert [found.value["question"] for found in open_state.interrupts] == ["Which city?"]
    await drive.invoke(graph, Command(resume="Rome"), thread())
    return [open_state, await drive.history(graph, thread())]


async def static_interrupts(drive: Drive) -> Any:
    builder = StateGraph(Log)
    for name in "abc":
        builder.add_node(name, writer(name))
    builder.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
    graph = builder.compile(checkpointer=drive.saver, interrupt_before=["b"], interrupt_after=["b"])
    seen = []
    await drive.invoke(graph, {"log": ["in"]}, thread())
    for _ in range(2):
        seen.append(await drive.state(graph, thread()))
        await drive.invoke(graph, None, thread())
    return [*seen, await drive.history(graph, thread())]


async def three_interrupts_answered_by_id(drive: Drive) -> Any:
    def ask(state: Any) -> Log:
        return {"log": [f"{state['who']}: {interrupt(state['who'])}"]}

    builder = StateGraph(Log).add_node("ask", ask)
    builder.add_conditional_edges(START, lambda state: [Send("ask", {"who": who}) for who in ("x", "y", "z")], ["ask"])
    graph = builder.compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"log": []}, thread())
    first = await drive.state(graph, thread())
    ids = {found.value: found.id for found in first.interrupts}
    assert len(set(ids.values())) == 3
    await drive.invoke(graph, Command(resume={ids["z"]: "three", ids["x"]: "one"}), thread())
    second = await drive.state(graph, thread())
    assert [found.value for task in second.tasks for found in task.interrupts if not task.result] == ["y"]
    result = await drive.invoke(graph, Command(resume={ids["y"]: "two"}), thread())
    assert result["log"] == ["x: one", "y: two", "z: three"]
    return [first, second, await drive.history(graph, thread())]


async def two_interrupts_in_one_node(drive: Drive) -> Any:
    runs: list[str] = []

    def ask(state: Log) -> Log:
        runs.append("run")
        return {"log": [interrupt("first"), interrupt("second")]}

    graph = StateGraph(Log).add_node("ask", ask).add_edge(START, "ask").compile(checkpointer=drive.saver)
    seen: list[Any] = []
    value: Any
    for value in ({"log": []}, Command(resume="1"), Command(resume="2")):
        await drive.invoke(graph, value, thread())
        seen.append(await drive.state(graph, thread()))
    return [*seen, len(runs), await drive.history(graph, thread())]


# -- time travel ----------------------------------------------------------------------------------------------------


async def time_travel_and_forks(drive: Drive) -> Any:
    def count(state: Log) -> Log:
        return {"log": [str(len(state["log"]))]}

    builder = StateGraph(Log).add_node("count", count).add_node("end", writer("end")).add_edge(START, "count")
    builder.add_conditional_edges("count", lambda state: "end" if len(state["log"]) >= 4 else "count", ["count", "end"])
    graph = builder.compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"log": []}, thread())
    before = await drive.history(graph, thread())
    middle = next(snapshot for snapshot in before if snapshot.values["log"] == ["0", "1"])
    replayed = await drive.invoke(graph, None, middle.config)
    fork = await drive.update(graph, middle.config, {"log": ["forked"]})
    forked = await drive.invoke(graph, None, fork)
    assert (replayed["log"][:2], forked["log"][:3]) == (["0", "1"], ["0", "1", "forked"])
    old = await drive.state(graph, middle.config)
    assert old.values == middle.values
    history = await drive.history(graph, thread())
    older = await drive.history(graph, thread(), before=history[3].config, limit=4)
    by_source = await drive.history(graph, thread(), filter={"source": "update"})
    assert (len(older), len(by_source)) == (4, 1)
    return [before, replayed, forked, old, history, older, by_source]


async def updates_of_the_state(drive: Drive) -> Any:
    builder = StateGraph(Chat)
    for name in ("a", "b"):
        builder.add_node(name, lambda state, name=name: {"messages": [AIMessage(name, id=f"{name}{len(state)}")]})
    builder.add_edge(START, "a").add_edge("a", "b")
    graph = builder.compile(checkpointer=drive.saver)
    await drive.update(graph, thread(), {"messages": [HumanMessage("from outside", id="h0")]}, "a")
    await drive.invoke(graph, None, thread())
    await drive.invoke(graph, {"messages": [HumanMessage("Hi", id="h1")]}, thread())
    await drive.update(graph, thread(), {"messages": [HumanMessage("Changed", id="h1")]}, "b")
    await drive.update(graph, thread(), {"messages": [RemoveMessage("h0")]}, "b")
    await drive.update(graph, thread(), None, END)
    return await drive.history(graph, thread())


# -- sub-graphs -----------------------------------------------------------------------------------------------------


def two_equal_subgraphs(saver: BaseCheckpointSaver[Any], checkpointer: bool | None) -> Any:
    def sub(prefix: str) -> Any:
        builder = StateGraph(Log).add_node("x", writer(f"{prefix}.x"))
        builder.add_node("y", lambda state: {"log": [f"{prefix}.y {interrupt(prefix)}"]})
        builder.add_node("z", lambda state: {"log": [f"{prefix}.z saw {len(state['log'])}"]})
        return builder.add_edge(START, "x").add_edge("x", "y").add_edge("y", "z").compile(checkpointer=checkpointer)

    builder = StateGraph(Log).add_node("one", sub("one")).add_node("two", sub("two"))
    return builder.add_edge(START, "one").add_edge("one", "two").compile(checkpointer=saver)


async def back_into_the_second_subgraph(drive: Drive) -> Any:
    graph = two_equal_subgraphs(drive.saver, None)
    await drive.invoke(graph, {"log": ["in"]}, thread())
    seen: list[Any] = [await drive.state(graph, thread(), subgraphs=True)]
    await drive.invoke(graph, Command(resume="1"), thread())
    inside: Any = await drive.state(graph, thread(), subgraphs=True)
    seen.append(inside)
    sub_config = inside.tasks[0].state.config
    assert sub_config["configurable"]["checkpoint_ns"].startswith("two:")
    seen.append(await drive.history(graph, {"configurable": {**sub_config["configurable"], "checkpoint_id": None}}))
    await drive.invoke(graph, Command(resume="2"), thread())
    seen.append(await drive.history(graph, thread()))
    again = await drive.invoke(graph, Command(resume="again"), sub_config)
    fork = await drive.update(graph, sub_config, {"log": ["forked"]}, "y")
    forked = await drive.invoke(graph, None, fork)
    return [*seen, again, forked, await drive.history(graph, thread())]


async def subgraphs_that_keep_their_state(drive: Drive) -> Any:
    inner = StateGraph(Log).add_node("x", lambda state: {"log": [f"inner {len(state['log'])}"]}).add_edge(START, "x")
    kept = inner.compile(checkpointer=True)

    def outer(state: Log) -> Log:
        return {"log": [f"outer saw {len(kept.invoke({'log': ['call']})['log'])}"]}

    graph = StateGraph(Log).add_node("outer", outer).add_edge(START, "outer").compile(checkpointer=drive.saver)
    for turn in range(3):
        await drive.invoke(graph, {"log": [f"turn {turn}"]}, thread())
    return [await drive.history(graph, thread()), await drive.history(graph, thread(checkpoint_ns="outer"))]


async def commands_to_the_parent(drive: Drive) -> Any:
    def leave(state: Log) -> Command[Any]:
        return Command(graph=Command.PARENT, goto="after", update={"log": ["from below"]})

    sub = StateGraph(Log).add_node("leave", leave).add_edge(START, "leave").compile()
    builder = StateGraph(Log).add_node("sub", sub, destinations=("after",)).add_node("after", writer("after"))
    graph = builder.add_edge(START, "sub").compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"log": ["in"]}, thread())
    return await drive.history(graph, thread())


# -- fan-out and failures -------------------------------------------------------------------------------------------


async def fan_out(drive: Drive) -> Any:
    builder = StateGraph(Log).add_node("plan", writer("plan")).add_node("join", writer("join"))
    builder.add_node("work", lambda state: {"log": [f"work {state['n']}"]})
    builder.add_edge(START, "plan").add_edge("work", "join")
    builder.add_conditional_edges("plan", lambda state: [Send("work", {"n": n}) for n in range(5)], ["work"])
    graph = builder.compile(checkpointer=drive.saver)
    for _ in range(2):
        await drive.invoke(graph, {"log": ["in"]}, thread())
    return await drive.history(graph, thread())


async def a_failed_sibling(drive: Drive) -> Any:
    stored, runs = threading.Event(), Counter[str]()
    drive.on_writes = lambda writes: stored.set() if ("log", ["good"]) in writes else None

    def good(state: Log) -> Log:
        runs["good"] += 1
        return {"log": ["good"]}

    def bad(state: Log) -> Log:
        runs["bad"] += 1
        if runs["bad"] == 1:
            assert stored.wait(WAIT_S)
            raise RuntimeError("the first time")
        return {"log": ["bad"]}

    builder = StateGraph(Log).add_node(good).add_node(bad).add_node("end", writer("end"))
    builder.add_edge(START, "good").add_edge(START, "bad").add_edge(["good", "bad"], "end")
    graph = builder.compile(checkpointer=drive.saver)
    with pytest.raises(RuntimeError, match="the first time"):
        await drive.invoke(graph, {"log": []}, thread())
    failed = await drive.state(graph, thread())
    await drive.invoke(graph, None, thread())
    assert runs == {"good": 1, "bad": 2}
    return [failed, await drive.history(graph, thread())]


async def twelve_branches_resumed(drive: Drive) -> Any:
    def branch(number: int) -> Any:
        return lambda state: {"log": [interrupt("wait") if number == 5 else f"{number:02}"]}

    builder = StateGraph(Log)
    for number in range(12):
        builder.add_node(f"b{number:02}", branch(number)).add_edge(START, f"b{number:02}")
    graph = builder.compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"log": []}, thread())
    result = await drive.invoke(graph, Command(resume="05"), thread())
    assert result["log"] == [f"{number:02}" for number in range(12)]
    return await drive.history(graph, thread())


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        interrupt_and_resume,
        static_interrupts,
        three_interrupts_answered_by_id,
        two_interrupts_in_one_node,
        time_travel_and_forks,
        updates_of_the_state,
        back_into_the_second_subgraph,
        subgraphs_that_keep_their_state,
        commands_to_the_parent,
        fan_out,
        a_failed_sibling,
        twelve_branches_resumed,
    )
}


@BOTH_MODES
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_graph_runs_as_on_the_reference(saver_factory: Any, name: str, mode: str) -> None:
    await equals_reference(SCENARIOS[name], saver_factory(), mode)


@BOTH_MODES
@pytest.mark.parametrize("name", ["three_interrupts_answered_by_id", "back_into_the_second_subgraph"])
async def test_encryption_changes_nothing(saver_factory: Any, name: str, mode: str) -> None:
    await equals_reference(SCENARIOS[name], saver_factory(keys=[os.urandom(32)]), mode)


@BOTH_MODES
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_every_durability_leaves_the_reference_states(saver_factory: Any, durability: str, mode: str) -> None:
    async def scenario(drive: Drive) -> Any:
        graph = two_equal_subgraphs(drive.saver, None)
        seen: list[Any] = []
        value: Any
        for value in ({"log": ["in"]}, Command(resume="1"), Command(resume="2"), {"log": ["next turn"]}):
            await drive.invoke(graph, value, thread(), durability=durability)
            seen.append(await drive.state(graph, thread(), subgraphs=True))
        return [seen, await drive.history(graph, thread())]

    await equals_reference(scenario, saver_factory(), mode)


@BOTH_MODES
async def test_versions_as_a_server_numbers_them(saver_factory: Any, mode: str) -> None:
    async def scenario(drive: Drive) -> Any:
        draw = random.Random(0)

        def next_version(current: str | None, channel: None = None) -> str:
            number = 0 if current is None else int(current.partition(".")[0])
            return f"{number + 1:032d}.{draw.random()}"

        drive.saver.get_next_version = next_version
        states = [await time_travel_and_forks(drive), await drive.history(_log_graph(drive.saver), thread())]
        checkpoint = drive.saver.get_tuple(thread()).checkpoint
        assert all(re.fullmatch(r"\d{32}\.[\d.e-]+", version) for version in checkpoint["channel_versions"].values())
        return states

    await equals_reference(scenario, saver_factory(), mode)


def test_the_saver_counts_integers_and_keeps_the_form_of_texts() -> None:
    saver = PancakeSaver()
    assert [saver.get_next_version(None), saver.get_next_version(41)] == [1, 42]
    assert saver.get_next_version(f"{7:032d}.0.25") > f"{7:032d}.0.25"


def _log_graph(saver: BaseCheckpointSaver[Any], name: str = "n") -> Any:
    return StateGraph(Log).add_node(name, writer(name)).add_edge(START, name).compile(checkpointer=saver)


# -- incremental channels -------------------------------------------------------------------------------------------


def merged(state: list[Any], writes: Sequence[Any]) -> list[Any]:
    return [*state, *(item for write in writes for item in write)]


class Incremental(TypedDict):
    messages: Annotated[list[AnyMessage], DeltaChannel(merged, snapshot_frequency=25)]
    notes: Annotated[list[str], DeltaChannel(merged)]
    turn: int


def incremental_graph(saver: BaseCheckpointSaver[Any]) -> Any:
    def answer(state: Incremental) -> Any:
        turn = state["turn"]
        return {"messages": [AIMessage(f"answer {turn}")], "notes": [f"note {turn}"]}  # without an id on purpose

    return StateGraph(Incremental).add_node(answer).add_edge(START, "answer").compile(checkpointer=saver)


async def run_turns(drive: Drive, graph: Any, turns: range, **options: Any) -> None:
    for turn in turns:
        config = {**thread(), "metadata": {"run_id": f"run {turn}"}}
        await drive.invoke(graph, {"messages": [HumanMessage(f"question {turn}")], "turn": turn}, config, **options)


def found_in(values: Any) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    return [(m.type, m.content, m.id) for m in values["messages"]], values["notes"]


@SHARED
@BOTH_MODES
async def test_incremental_channels_survive_reload_copy_prune_and_deleted_runs(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = incremental_graph(drive.saver)
    await run_turns(drive, graph, range(60))
    last = found_in((await drive.state(graph, thread())).values)
    assert [text for _, text, _ in last[0]] == [
        f"{kind} {turn}" for turn in range(60) for kind in ("question", "answer")
    ]
    assert last[1] == [f"note {turn}" for turn in range(60)]
    assert None not in {message_id for _, _, message_id in last[0]}
    configs = [found.config for found in drive.saver.list(thread())]
    kept = [*range(20), *range(40, 60)]
    before = {turn: await drive.state(graph, configs[-3 * turn - 2]) for turn in kept[::7]}

    drive = Drive(saver_factory(), mode)  # nothing is remembered
    graph = incremental_graph(drive.saver)
    assert found_in((await drive.state(graph, thread())).values) == last
    drive.saver.copy_thread("t", "copy")
    assert found_in((await drive.state(graph, thread("copy"))).values) == last

    drive.saver.delete_for_runs([f"run {turn}" for turn in range(20, 40)])
    assert len(list(drive.saver.list(thread()))) == len(configs) * 2 // 3
    for turn, snapshot in before.items():
        assert len(snapshot.values["messages"]) == 2 * turn + 1
        assert await drive.state(graph, snapshot.config) == snapshot

    for name in ("t", "copy"):
        drive.saver.prune([name])
        assert [found_in(found.values) for found in await drive.history(graph, thread(name))] == [last]
    await run_turns(drive, graph, range(60, 62))
    drive.saver.delete_for_runs(["run 61"])
    state = await drive.state(graph, thread())
    assert found_in(state.values)[1] == [f"note {turn}" for turn in range(61)]
    drive.saver.delete_thread("t")
    assert (await drive.state(graph, thread())).values == {}
    assert found_in((await drive.state(graph, thread("copy"))).values) == last


@BOTH_MODES
@pytest.mark.parametrize("durability", ["sync", "async", "exit"])
async def test_incremental_channels_equal_the_reference(saver_factory: Any, durability: str, mode: str) -> None:
    async def scenario(drive: Drive) -> Any:
        graph = incremental_graph(drive.saver)
        await run_turns(drive, graph, range(14), durability=durability)
        config = (await drive.history(graph, thread()))[4].config
        await drive.invoke(graph, {"messages": [HumanMessage("elsewhere")], "turn": 99}, config, durability=durability)
        await drive.update(graph, thread(), {"notes": ["from outside"]}, "answer")
        return await drive.history(graph, thread())

    await equals_reference(scenario, saver_factory(), mode)


@BOTH_MODES
@SHARED
async def test_an_expiring_thread_is_there_as_a_whole_or_not_at_all(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(ttl_s=1.5), mode)
    graph = incremental_graph(drive.saver)
    await run_turns(drive, graph, range(8))
    whole = [f"note {turn}" for turn in range(8)]
    seen = []
    with suppress(ThreadDeleted):  # it may end while it is read
        async with asyncio.timeout(WAIT_S):
            while values := (await drive.state(graph, thread())).values:
                seen.append(values["notes"])
                await asyncio.sleep(0.02)
    assert seen == [whole] * len(seen)
    assert await drive.history(graph, thread()) == []
    await run_turns(drive, graph, range(1))
    assert (await drive.state(graph, thread())).values["notes"] == ["note 0"]


# -- growth ---------------------------------------------------------------------------------------------------------


class Long(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    manual: str


@SHARED
@BOTH_MODES
async def test_what_is_stored_grows_with_what_is_new(saver_factory: Any, mode: str) -> None:
    draw = random.Random(1)
    turns, manual = 200, draw.randbytes(50_000).hex()

    def answer(state: Long) -> Any:
        return {"messages": [AIMessage(draw.randbytes(500).hex(), id=f"a{len(state['messages'])}")]}

    drive = Drive(saver_factory(), mode)
    graph = StateGraph(Long).add_node(answer).add_edge(START, "answer").compile(checkpointer=drive.saver)
    for turn in range(turns):
        question = HumanMessage(draw.randbytes(500).hex(), id=f"h{turn}")
        await drive.invoke(graph, {"messages": [question], **({} if turn else {"manual": manual})}, thread())
    sizes = saver_factory().sizes("t")
    assert sizes["manual"] < 1.01 * len(manual)
    assert sum(sizes.values()) <= 3 * (turns * 2000 + len(manual)), sizes
    assert len((await drive.state(graph, thread())).values["messages"]) == 2 * turns
    assert len(await drive.history(graph, thread(), limit=20)) == 20


# -- mixing -----------------------------------------------------------------------------------------------------------


def test_sync_and_async_calls_and_two_loops_take_turns(saver_factory: Any) -> None:
    saver = saver_factory()
    graph = _log_graph(saver)
    graph.invoke({"log": ["sync"]}, thread())
    asyncio.run(graph.ainvoke({"log": ["first loop"]}, thread()))
    graph.invoke({"log": ["sync"]}, thread())
    asyncio.run(graph.ainvoke({"log": ["second loop"]}, thread()))
    expected = ["sync", "n", "first loop", "n", "sync", "n", "second loop", "n"]
    assert graph.get_state(thread()).values["log"] == expected

    async def listed() -> list[Any]:
        return [found.checkpoint["id"] async for found in saver.alist(thread())]

    assert asyncio.run(listed()) == [found.checkpoint["id"] for found in saver.list(thread())]


async def test_a_sync_call_inside_an_async_node_works(saver_factory: Any) -> None:
    saver = saver_factory()
    inner = _log_graph(saver, "inner")

    async def node(state: Log) -> Log:
        found = inner.invoke({"log": ["called"]}, thread("other"))
        assert saver.get_tuple(thread("other")) is not None
        return {"log": found["log"]}

    graph = StateGraph(Log).add_node(node).add_edge(START, "node").compile(checkpointer=saver)
    async with asyncio.timeout(WAIT_S):
        assert (await graph.ainvoke({"log": []}, thread()))["log"] == ["called", "inner"]


async def test_many_threads_run_at_once_on_one_loop(saver_factory: Any) -> None:
    graph = _log_graph(saver_factory())
    await asyncio.gather(*(graph.ainvoke({"log": [str(n)]}, thread(f"t{n}")) for n in range(32)))
    for number in range(32):
        assert (await graph.aget_state(thread(f"t{number}"))).values["log"] == [str(number), "n"]


@BOTH_MODES
async def test_an_integer_thread_id_is_its_text(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = _log_graph(drive.saver)
    await drive.invoke(graph, {"log": ["a"]}, thread(7))
    await drive.invoke(graph, {"log": ["b"]}, thread("7"))
    assert (await drive.state(graph, thread(7))).values["log"] == ["a", "n", "b", "n"]
    assert len(list(drive.saver.list(thread(7)))) == 6
    drive.saver.delete_thread(7)
    assert list(drive.saver.list(thread("7"))) == []


@BOTH_MODES
async def test_thread_ids_of_any_character_do_not_meet(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = _log_graph(drive.saver)
    names = ["a", "a*", "a:b", "a?", "[a]", "{a}", "%", "' OR 1=1 --", "ä\n\u20ac", "a\x00b", " ", "a/../b"]
    for name in names:
        await drive.invoke(graph, {"log": [name]}, thread(name))
    for name in names:
        assert (await drive.state(graph, thread(name))).values["log"] == [name, "n"]
    drive.saver.delete_thread("a*")
    drive.saver.delete_thread("{a}")
    assert sorted(drive.saver.threads()) == sorted(set(names) - {"a*", "{a}"})


@BOTH_MODES
async def test_metadata_filters_compare_whatever_key_they_name(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = _log_graph(drive.saver)
    tricky = {"a.b": "x'y", 'q"': 1, "$.source": "loop') OR ('1'='1", "ns:*": None}
    await drive.invoke(graph, {"log": ["a"]}, thread())
    await drive.invoke(graph, {"log": ["b"]}, {**thread(), "metadata": {k: v for k, v in tricky.items() if v}})
    for key, value in tricky.items():
        found = await drive.history(graph, thread(), filter={key: value})
        assert len(found) == (6 if value is None else 3)
        assert await drive.history(graph, thread(), filter={key: "other"}) == []
    assert await drive.history(graph, thread(), limit=0) == []


# -- what a snapshot holds ------------------------------------------------------------------------------------------


async def test_a_change_after_the_write_does_not_reach_the_snapshot(saver_factory: Any) -> None:
    saver = saver_factory()
    items = [["nested"]]
    checkpoint = {**empty_checkpoint(), "channel_values": {"x": items}, "channel_versions": {"x": 1}}
    config = saver.put(thread(checkpoint_ns=""), checkpoint, {}, {"x": 1})
    items[0].append("late")
    assert saver.get_tuple(config).checkpoint["channel_values"] == {"x": [["nested"]]}

    async_checkpoint = {**checkpoint, "id": empty_checkpoint()["id"]}
    pending = asyncio.ensure_future(saver.aput(thread(checkpoint_ns=""), async_checkpoint, {}, {"x": 1}))
    await asyncio.sleep(0)
    items.append(["later"])
    assert (await saver.aget_tuple(await pending)).checkpoint["channel_values"] == {"x": [["nested", "late"]]}


@BOTH_MODES
async def test_a_node_that_changes_its_list_after_returning_it(saver_factory: Any, mode: str) -> None:
    returned: list[str] = ["returned"]

    class State(TypedDict):
        items: list[str]
        seen: int

    def late(state: State) -> Any:
        returned.append("late")
        return {"seen": 1}

    drive = Drive(saver_factory(), mode)
    builder = StateGraph(State).add_node("first", lambda state: {"items": returned}).add_node(late)
    graph = builder.add_edge(START, "first").add_edge("first", "late").compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"seen": 0}, thread(), durability="sync")
    middle = next(found for found in await drive.history(graph, thread()) if found.next == ("late",))
    assert middle.values["items"] == ["returned"]


@BOTH_MODES
async def test_a_message_changed_in_place_is_in_the_next_snapshot(saver_factory: Any, mode: str) -> None:
    async def scenario(drive: Drive) -> Any:
        def change(state: Chat) -> Any:
            first = state["messages"][0]
            first.content = "changed"
            first.additional_kwargs.setdefault("nested", {})["deep"] = [1, 2]
            return {"messages": [AIMessage("done", id=f"a{len(state['messages'])}")]}

        graph = StateGraph(Chat).add_node(change).add_edge(START, "change").compile(checkpointer=drive.saver)
        for turn in range(40):  # enough for the list to be stored in more than one part
            await drive.invoke(graph, {"messages": [HumanMessage("Hi", id=f"h{turn}")]}, thread(), durability="sync")
        state = await drive.state(graph, thread())
        assert state.values["messages"][0].content == "changed"
        assert state.values["messages"][0].additional_kwargs == {"nested": {"deep": [1, 2]}}
        return await drive.history(graph, thread())

    await equals_reference(scenario, saver_factory(), mode)


# -- pruning in the middle ------------------------------------------------------------------------------------------


@BOTH_MODES
async def test_pruning_between_approvals_runs_no_tool_twice(saver_factory: Any, mode: str) -> None:
    runs = Counter[str]()

    def approve(state: Any) -> Chat:
        call = state["call"]
        if interrupt(f"May I call {call}?") != "yes":
            raise AssertionError
        runs[call] += 1
        return {"messages": [ToolMessage("done", tool_call_id=call, id=call)]}

    drive = Drive(saver_factory(), mode)
    builder = StateGraph(Chat).add_node("model", lambda state: {"messages": [AIMessage("", id="m")]})
    builder.add_node("approve", approve).add_node("end", lambda state: {"messages": [AIMessage("bye", id="e")]})
    builder.add_edge(START, "model").add_edge("approve", "end")
    builder.add_conditional_edges("model", lambda state: [Send("approve", {"call": c}) for c in "xyz"], ["approve"])
    graph = builder.compile(checkpointer=drive.saver)
    await drive.invoke(graph, {"messages": [HumanMessage("Hi", id="h")]}, thread())
    ids = {found.value[-2]: found.id for found in (await drive.state(graph, thread())).interrupts}
    await drive.invoke(graph, Command(resume={ids["x"]: "yes", ids["z"]: "yes"}), thread())
    assert runs == {"x": 1, "z": 1}
    drive.saver.prune(["t"])
    assert len(await drive.history(graph, thread())) == 1
    result = await drive.invoke(graph, Command(resume={ids["y"]: "yes"}), thread())
    assert runs == {"x": 1, "y": 1, "z": 1}
    assert [message.id for message in result["messages"]] == ["h", "m", "x", "y", "z", "e"]


@BOTH_MODES
async def test_every_checkpoint_that_stays_loads_as_before(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = two_equal_subgraphs(drive.saver, None)
    value: Any
    for turn in range(4):
        for value in ({"log": ["in"]}, Command(resume="1"), Command(resume="2")):
            await drive.invoke(graph, value, {**thread(), "metadata": {"run_id": f"run {turn}"}})
    before = {found.config["configurable"]["checkpoint_id"]: found for found in drive.saver.list(thread())}
    drive.saver.delete_for_runs(["run 1", "run 2"])
    left = list(drive.saver.list(thread()))
    assert {found.metadata["run_id"] for found in left} == {"run 0", "run 3"}
    assert len(left) * 2 == len(before)
    for found in left:
        assert found == before[found.config["configurable"]["checkpoint_id"]]


# -- LangGraph's strict switch ----------------------------------------------------------------------------------------


@SHARED
def test_compiling_under_the_strict_switch_shares_one_core_between_clones(saver_factory: Any) -> None:
    environment = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"}
    command = [sys.executable, str(CHILDREN), "strict", saver_factory.where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["cloned", "shared", "Note", "Level.HIGH"]), done.stderr
