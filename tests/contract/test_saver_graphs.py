"""Real graphs behave with the saver as they do with LangGraph's own in-memory saver, state for state."""

import os
import random
import re
import threading
from collections import Counter
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

from pancake_langgraph.saver import PancakeSaver
from tests.contract.graph_drive import (
    BOTH_MODES,
    WAIT_S,
    Chat,
    Drive,
    Log,
    Scenario,
    equals_reference,
    log_graph,
    thread,
    three_asking,
    two_equal_subgraphs,
    writer,
)

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
    graph = three_asking(drive.saver)
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
        states = [await time_travel_and_forks(drive), await drive.history(log_graph(drive.saver), thread())]
        checkpoint = drive.saver.get_tuple(thread()).checkpoint
        assert all(re.fullmatch(r"\d{32}\.[\d.e-]+", version) for version in checkpoint["channel_versions"].values())
        return states

    await equals_reference(scenario, saver_factory(), mode)


def test_the_saver_counts_integers_and_keeps_the_form_of_texts() -> None:
    saver = PancakeSaver()
    assert [saver.get_next_version(None), saver.get_next_version(41)] == [1, 42]
    assert saver.get_next_version(f"{7:032d}.0.25") > f"{7:032d}.0.25"
