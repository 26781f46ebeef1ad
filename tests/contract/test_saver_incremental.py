"""Incremental channels, whatever happens to their ancestors, and how fast the store grows."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages

from pancake_langgraph._errors import ThreadDeleted
from tests.contract.graph_drive import (
    BOTH_MODES,
    SHARED,
    WAIT_S,
    Drive,
    equals_reference,
    thread,
)

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
