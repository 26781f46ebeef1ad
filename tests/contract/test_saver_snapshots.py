"""What a snapshot holds, who may mix what, and what is left after pruning."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any, TypedDict

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt

from tests.contract.graph_drive import (
    BOTH_MODES,
    CHILDREN,
    SHARED,
    WAIT_S,
    Chat,
    Drive,
    Log,
    equals_reference,
    log_graph,
    thread,
    two_equal_subgraphs,
)

# -- mixing -----------------------------------------------------------------------------------------------------------


def test_sync_and_async_calls_and_two_loops_take_turns(saver_factory: Any) -> None:
    saver = saver_factory()
    graph = log_graph(saver)
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
    inner = log_graph(saver, "inner")

    async def node(state: Log) -> Log:
        found = inner.invoke({"log": ["called"]}, thread("other"))
        assert saver.get_tuple(thread("other")) is not None
        return {"log": found["log"]}

    graph = StateGraph(Log).add_node(node).add_edge(START, "node").compile(checkpointer=saver)
    async with asyncio.timeout(WAIT_S):
        assert (await graph.ainvoke({"log": []}, thread()))["log"] == ["called", "inner"]


async def test_many_threads_run_at_once_on_one_loop(saver_factory: Any) -> None:
    graph = log_graph(saver_factory())
    await asyncio.gather(*(graph.ainvoke({"log": [str(n)]}, thread(f"t{n}")) for n in range(32)))
    for number in range(32):
        assert (await graph.aget_state(thread(f"t{number}"))).values["log"] == [str(number), "n"]


@BOTH_MODES
async def test_an_integer_thread_id_is_its_text(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = log_graph(drive.saver)
    await drive.invoke(graph, {"log": ["a"]}, thread(7))
    await drive.invoke(graph, {"log": ["b"]}, thread("7"))
    assert (await drive.state(graph, thread(7))).values["log"] == ["a", "n", "b", "n"]
    assert len(list(drive.saver.list(thread(7)))) == 6
    drive.saver.delete_thread(7)
    assert list(drive.saver.list(thread("7"))) == []


@BOTH_MODES
async def test_thread_ids_of_any_character_do_not_meet(saver_factory: Any, mode: str) -> None:
    drive = Drive(saver_factory(), mode)
    graph = log_graph(drive.saver)
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
    graph = log_graph(drive.saver)
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
