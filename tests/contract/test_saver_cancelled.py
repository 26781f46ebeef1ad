"""What is left of a run that was cancelled, killed or overtaken, and how its thread goes on."""

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, Send

from tests.contract.graph_drive import (
    BOTH_MODES,
    SHARED,
    WAIT_S,
    Drive,
    Log,
    equals_reference,
    log_graph,
    thread,
    three_asking,
    writer,
)


@pytest.mark.parametrize("durability", ["sync", "async"])
async def test_a_save_of_a_cancelled_run_that_comes_late_does_not_become_the_newest(
    saver_factory: Any, durability: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_factory()
    held, let_go, late = threading.Event(), threading.Event(), threading.Event()
    store = saver._core.store
    put_checkpoint = store.put_checkpoint

    def gated(put: Any, **named: Any) -> None:
        if held.is_set() or put.thread_id != "t":
            return put_checkpoint(put, **named)
        held.set()
        assert let_go.wait(WAIT_S)
        put_checkpoint(put, **named)
        return late.set()

    graph = log_graph(saver)
    await graph.ainvoke({"log": ["before"]}, thread())
    with monkeypatch.context() as patch:
        patch.setattr(store, "put_checkpoint", gated)
        overtaken = asyncio.ensure_future(graph.ainvoke({"log": ["first"]}, thread(), durability=durability))
        assert await asyncio.to_thread(held.wait, WAIT_S)
        overtaken.cancel()
        await graph.ainvoke({"log": ["second"]}, thread(), durability=durability)
        newest = await graph.aget_state(thread())
        assert newest.values["log"] == ["before", "n", "second", "n"]
        assert not late.is_set()
        let_go.set()
        assert await asyncio.to_thread(late.wait, WAIT_S)
        await asyncio.wait([overtaken])
    assert await graph.aget_state(thread()) == newest
    assert (await saver.aget_tuple(thread())).config == newest.config
    if durability == "sync":  # else its node may have run while the save was held
        logs = [found.values["log"] async for found in graph.aget_state_history(thread()) if found.values]
        assert ["before", "n", "first", "n"] not in logs
    result = await graph.ainvoke({"log": ["third"]}, thread())
    assert result["log"] == ["before", "n", "second", "n", "third", "n"]


@pytest.mark.parametrize("goes_on", ["resumed", "with a new message"])
async def test_a_tool_that_had_finished_when_its_batch_was_cancelled_keeps_its_result(
    saver_factory: Any, goes_on: str
) -> None:
    async def scenario(drive: Drive) -> Any:
        runs, all_run, stored = Counter[str](), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_writes(writes: Any) -> None:
            if ("log", ["a done"]) in writes:
                loop.call_soon_threadsafe(stored.set)

        async def work(state: Any) -> Log:
            runs[state["call"]] += 1
            if len(runs) == 3:
                all_run.set()
            await all_run.wait()
            if state["call"] != "a" and runs[state["call"]] == 1:
                await asyncio.Event().wait()
            return {"log": [f"{state['call']} done"]}

        drive.on_writes = on_writes
        builder = StateGraph(Log).add_node("model", writer("model")).add_node("work", work)
        builder.add_edge(START, "model")
        builder.add_conditional_edges("model", lambda state: [Send("work", {"call": c}) for c in "abc"], ["work"])
        graph: Any = builder.compile(checkpointer=drive.saver)
        # With "sync" the checkpoint that the tools belong to is stored before any of their results.
        cancelled = asyncio.ensure_future(graph.ainvoke({"log": []}, thread(), durability="sync"))
        async with asyncio.timeout(WAIT_S):
            await stored.wait()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        between = await drive.state(graph, thread())
        if goes_on == "resumed":
            result = await graph.ainvoke(None, thread())
            assert result["log"] == ["model", "a done", "b done", "c done"]
            assert runs == {"a": 1, "b": 2, "c": 2}
        else:
            await graph.ainvoke({"log": ["new"]}, thread())
        # Not compared: whether LangGraph still stored that the others were cancelled; that is a race of its own.
        results = [task.result for task in between.tasks]
        history = [(found.values, found.next) async for found in graph.aget_state_history(thread())]
        return {"results": results, "runs": sorted(runs.items()), "values": history}

    await equals_reference(scenario, saver_factory(), "async")


@BOTH_MODES
async def test_a_call_whose_tool_is_gone_is_answered_with_its_name(saver_factory: Any, mode: str) -> None:
    @tool
    def old() -> str:
        """Return a text."""
        return "old"

    @tool
    def new() -> str:
        """Return a text."""
        return "new"

    async def scenario(drive: Drive) -> Any:
        def build(tools: list[Any]) -> Any:
            asked = AIMessage("", id="m", tool_calls=[{"name": "old", "args": {}, "id": "c"}])
            builder = StateGraph(MessagesState).add_node("model", lambda _: {"messages": [asked]})
            builder.add_node("tools", ToolNode(tools)).add_edge(START, "model").add_edge("model", "tools")
            return builder.compile(checkpointer=drive.saver, interrupt_before=["tools"])

        await drive.invoke(build([old, new]), {"messages": []}, thread())
        graph = build([new])
        assert (await drive.state(graph, thread())).next == ("tools",)
        await drive.invoke(graph, None, thread())
        state = await drive.state(graph, thread())
        answer = state.values["messages"][-1]
        assert isinstance(answer, ToolMessage)
        assert (answer.status, "old is not a valid tool" in answer.text) == ("error", True)
        return {"values": [message.text for message in state.values["messages"]], "next": state.next}

    await equals_reference(scenario, saver_factory(), mode)


@BOTH_MODES
@SHARED
async def test_open_interrupts_are_answered_through_another_saver(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    await drive.invoke(three_asking(drive.saver), {"log": []}, thread())
    for name, expected in (("z", 2), ("x", 1)):
        drive = Drive(saver_factory(), mode)
        graph = three_asking(drive.saver)
        ids = {found.value: found.id for found in (await drive.state(graph, thread())).interrupts}
        await drive.invoke(graph, Command(resume={ids[name]: f"answer {name}"}), thread())
        tasks = (await drive.state(graph, thread())).tasks
        assert len([task for task in tasks if not task.result]) == expected
    drive = Drive(saver_factory(), mode)
    result = await drive.invoke(three_asking(drive.saver), Command(resume="answer y"), thread())
    assert result["log"] == [f"{name}: answer {name}" for name in "xyz"]


KILLED = """
import os, sys, threading
from typing import Annotated, TypedDict
import operator
from langgraph.graph import START, StateGraph
from pancake_langgraph.saver import PancakeSaver

where, runs, durability = sys.argv[1:]
saver, stored, seen = PancakeSaver(where), threading.Event(), set()

def listen(told):
    seen.add((told.spot, told.channels == ("log",) and told.latest is None))
    if {(told.spot, True), (told.spot, False)} <= seen:  # the writes of `good`, and the checkpoint they belong to
        stored.set()

saver.subscribe(listen)

def ran(name):
    with open(runs, "a") as file:
        file.write(name + "\\n")

def good(state):
    ran("good")
    return {"log": ["good"]}

def bad(state):
    ran("bad")
    if "again" not in os.environ:
        os._exit(9 if stored.wait(60) else 1)
    return {"log": ["bad"]}

class Log(TypedDict):
    log: Annotated[list[str], operator.add]

builder = StateGraph(Log).add_node(good).add_node(bad).add_edge(START, "good").add_edge(START, "bad")
graph = builder.compile(checkpointer=saver)
config = {"configurable": {"thread_id": "t"}}
value = None if "again" in os.environ else {"log": ["accepted"]}
print(graph.invoke(value, config, durability=durability)["log"])
saver.close()
"""


@SHARED
@pytest.mark.parametrize("durability", ["sync", "async"])
def test_a_sibling_whose_result_was_stored_when_the_process_died_does_not_run_again(
    saver_factory: Any, durability: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `sync`, LangGraph may store a result before the checkpoint it belongs to; it counts with that."""
    runs = tmp_path / "runs"
    command = [sys.executable, "-c", KILLED, saver_factory.where, str(runs), durability]
    first = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert first.returncode == 9, first.stderr
    monkeypatch.setenv("again", "1")
    second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (second.returncode, second.stdout) == (0, "['accepted', 'bad', 'good']\n"), second.stderr
    assert Counter(runs.read_text().split()) == {"good": 1, "bad": 2}


@SHARED
def test_two_writers_with_one_parent_are_both_kept_whole_and_the_later_is_the_newest(saver_factory: Any) -> None:
    one, two = saver_factory(), saver_factory()
    items = [f"item {number} " * 20 for number in range(40)]

    def put(saver: Any, parent: Any, values: list[str], version: int) -> Any:
        checkpoint: Any = {**empty_checkpoint(), "channel_values": {"items": values}}
        return saver.put(parent, {**checkpoint, "channel_versions": {"items": version}}, {}, {"items": version})

    parent = put(one, thread(checkpoint_ns=""), items, 1)
    assert two.get_tuple(parent) is not None
    left, right = put(one, parent, [*items, "left"], 2), put(two, parent, [*items, "right"], 2)
    late = put(one, left, [*items, "left", "on"], 3)
    for saver in (one, two, saver_factory()):
        found = {each.config["configurable"]["checkpoint_id"]: each for each in saver.list(thread())}
        ends = [found[config["configurable"]["checkpoint_id"]] for config in (left, right, late)]
        assert [each.checkpoint["channel_values"]["items"][40:] for each in ends] == [
            ["left"],
            ["right"],
            ["left", "on"],
        ]
        assert [each.parent_config for each in ends] == [parent, parent, left]
        assert saver.get_tuple(thread()).config == late
