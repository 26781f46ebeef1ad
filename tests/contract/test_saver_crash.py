"""What the saver does when a process is killed, many write at once, the server goes away, or the thread is deleted."""

import asyncio
import json
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import CheckpointTuple
from langgraph.graph import START, StateGraph
from langgraph.types import Command

from pancake_langgraph._errors import CorruptCheckpoint, StoreUnavailable, ThreadDeleted
from pancake_langgraph.saver import PancakeSaver
from tests.contract.saver_kit import (
    MODES,
    REDIS,
    SHARED,
    WAIT_S,
    Chat,
    call,
    chat_graph,
    load_children,
    run_chat,
    start,
    thread,
)


@pytest.fixture(scope="module")
def children() -> ModuleType:
    return load_children()


# -- kill -9 --------------------------------------------------------------------------------------------------------


def check_whole(found: CheckpointTuple, item: Callable[[int], str]) -> int:
    """Check that nothing in a checkpoint is half there; return its number."""
    values = found.checkpoint["channel_values"]
    number = values["n"]
    assert values == {"items": [item(n) for n in range(number + 1)], "blob": f"blob {number} " * 200, "n": number}
    assert found.metadata["step"] == number
    assert set(Counter(task for task, _, _ in found.pending_writes or ()).values()) <= {3}
    return int(number)


@SHARED
def test_200_kills_lose_nothing_acknowledged_and_leave_nothing_half_written(
    saver_factory: Any, children: ModuleType
) -> None:
    reader = saver_factory()
    for name in "abcdefgh":
        acknowledged: list[Any] = []
        with start("kills", saver_factory.where, name, "25") as process:
            assert process.stdout is not None
            for line in process.stdout:  # the next writer is at work meanwhile
                told = json.loads(line)
                acknowledged += told
                latest = check_whole(reader.get_tuple(thread(name)), children.item)
                assert latest >= max([number for kind, _, number in told if kind == "put"], default=0)
            assert process.wait(WAIT_S) == 0, process.stderr.read() if process.stderr else ""
        found = {each.checkpoint["id"]: each for each in reader.list(thread(name))}
        numbers = sorted(check_whole(each, children.item) for each in found.values())
        assert numbers == list(range(len(numbers)))
        for kind, checkpoint_id, what in acknowledged:
            if kind == "put":
                assert found[checkpoint_id].checkpoint["channel_values"]["n"] == what
            else:
                assert what in {task for task, _, _ in found[checkpoint_id].pending_writes}
        assert len({checkpoint_id for kind, checkpoint_id, _ in acknowledged if kind == "put"}) >= 25


# -- many at once ---------------------------------------------------------------------------------------------------


@SHARED
def test_two_processes_of_eight_threads_write_without_an_error(saver_factory: Any, children: ModuleType) -> None:
    processes = [start("hammer", saver_factory.where, name, "8", "200") for name in ("one", "two")]
    for process in processes:
        output, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, output) == (0, ""), errors
    saver = saver_factory()
    for name in ("one", "two"):
        for number in range(0, 8, 2):
            found = list(saver.list(thread(f"{name} {number}")))  # 200 checkpoints, and 200 times writes
            assert [each.checkpoint["channel_values"]["n"] for each in found] == list(range(199, -1, -1))
            assert all(len(each.pending_writes) == 1 for each in found)
    common = list(saver.list(thread("common")))
    assert Counter(each.metadata["writer"] for each in common) == {
        f"{name} {number}": 200 for name in ("one", "two") for number in range(1, 8, 2)
    }
    assert all(
        each.checkpoint["channel_values"]["items"] == [children.item(n)]
        for each in common[:50]
        for n in [each.checkpoint["channel_values"]["n"]]
    )


async def test_a_paused_listing_holds_up_nobody(saver_factory: Any) -> None:
    saver = saver_factory()
    before = run_chat(saver)
    sync_listing, async_listing = saver.list(None), saver.alist(thread())
    assert next(sync_listing) == await anext(async_listing) == before[0]
    async with asyncio.timeout(WAIT_S):
        await chat_graph(saver).ainvoke(Command(resume="yes"), thread())
        await asyncio.to_thread(run_chat, saver, "other")
    rest = [item async for item in async_listing]
    assert [each.checkpoint["id"] for each in rest] == [each.checkpoint["id"] for each in before[1:]]
    assert {each.checkpoint["id"] for each in sync_listing} >= {each.checkpoint["id"] for each in before[1:]}


def test_a_listing_goes_on_over_what_is_taken_out_meanwhile(saver_factory: Any) -> None:
    saver = saver_factory()
    before = run_chat(saver)
    listing, other = saver.list(thread()), saver.list(thread())
    assert next(listing) == next(other) == before[0]
    saver.prune(["t"])
    assert list(listing) == []
    saver.delete_thread("t")
    assert list(other) == []


async def test_two_loops_at_once(saver_factory: Any) -> None:
    saver = saver_factory()
    graph = chat_graph(saver)

    async def run(name: str) -> int:
        for turn in range(5):
            value = {"messages": [HumanMessage(f"{turn}")], "items": [], "extra": None}
            await graph.ainvoke(value, thread(f"{name} {turn}"))
        return sum([1 async for _ in saver.alist(None)])

    other = asyncio.to_thread(lambda: asyncio.run(run("other loop")))
    counts = await asyncio.gather(run("this loop"), other)
    assert max(counts) == 10 * 3


# -- a server that goes away ----------------------------------------------------------------------------------------


@MODES
async def test_a_server_that_restarts_mid_run_leaves_the_thread_resumable(start_valkey: Any, mode: str) -> None:
    server = start_valkey(appendonly="yes", appendfsync="always")
    runs = Counter[str]()

    def first(state: Chat) -> Any:
        runs["first"] += 1
        return {"extra": "first"}

    def second(state: Chat) -> Any:
        runs["second"] += 1
        if runs["second"] == 1:
            server.stop()
        return {"extra": state["extra"] + " second"}

    with PancakeSaver(server.url) as saver:
        builder = StateGraph(Chat).add_node(first).add_node(second).add_edge(START, "first").add_edge("first", "second")
        graph = builder.compile(checkpointer=saver)
        value = {"messages": [], "items": ["kept"], "extra": None}
        with pytest.raises(StoreUnavailable, match="start the server, then resume the thread"):
            async with asyncio.timeout(WAIT_S):
                await call(graph, mode, value, durability="sync")
        with pytest.raises(StoreUnavailable):
            saver.get_tuple(thread())
        server.start()
        assert graph.get_state(thread()).next == ("second",)
        result = await call(graph, mode, None)
        assert (result["extra"], result["items"]) == ("first second", ["kept"])
        assert runs == {"first": 1, "second": 2}


@MODES
async def test_a_server_that_hangs_gives_a_bounded_error(start_valkey: Any, mode: str) -> None:
    server = start_valkey()
    with server.client() as client:
        process_id = client.info("server")["process_id"]
    with PancakeSaver(f"{server.url}?socket_timeout=0.2") as saver:
        graph = chat_graph(saver)
        value: Any = {"messages": [], "items": [], "extra": None}
        os.kill(process_id, signal.SIGSTOP)
        try:
            with pytest.raises(StoreUnavailable, match="did not answer"):
                async with asyncio.timeout(WAIT_S):
                    await call(graph, mode, value)
        finally:
            os.kill(process_id, signal.SIGCONT)
        await call(graph, mode, value)
        assert graph.get_state(thread()).next == ("ask",)


def test_a_server_that_may_evict_is_warned_of(start_valkey: Any, caplog: pytest.LogCaptureFixture) -> None:
    server = start_valkey(**{"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"})
    with caplog.at_level(logging.WARNING), PancakeSaver(server.url) as saver:
        run_chat(saver)
    [record] = [record for record in caplog.records if record.name.startswith("pancake_langgraph")]
    assert "allkeys-lru" in record.getMessage()
    assert "noeviction" in record.getMessage()


@REDIS
def test_an_evicted_part_is_reported_as_lost(saver_factory: Any, valkey: Any) -> None:
    saver = saver_factory()
    run_chat(saver)
    with valkey.client() as client:
        for key in client.keys("pancake:{t}:*"):
            value = client.dump(key)
            client.delete(key)
            if key.endswith((b":c", b":e")):
                with pytest.raises(CorruptCheckpoint):
                    list(saver.list(thread()))
                with pytest.raises(CorruptCheckpoint):
                    saver.get_tuple(thread())
            client.restore(key, 0, value)
    assert len(list(saver.list(thread()))) == 3


# -- deleted while running ------------------------------------------------------------------------------------------


@MODES
async def test_a_run_that_outlives_its_thread_does_not_revive_it(saver_factory: Any, mode: str) -> None:
    saver = saver_factory()
    reached, go = threading.Event(), threading.Event()

    def slow(state: Chat) -> Any:
        reached.set()
        assert go.wait(WAIT_S)
        return {"extra": "late"}

    builder = StateGraph(Chat).add_node(slow).add_node("after", lambda state: {"extra": "after"})
    graph = builder.add_edge(START, "slow").add_edge("slow", "after").compile(checkpointer=saver)
    value: Any = {"messages": [], "items": [], "extra": None}
    zombie = asyncio.ensure_future(call(graph, mode, value))
    await asyncio.to_thread(reached.wait, WAIT_S)
    await saver.adelete_thread("t")
    go.set()
    with pytest.raises(ThreadDeleted, match="'t' was deleted"):
        await zombie
    assert await saver.aget_tuple(thread()) is None
    assert list(saver.list(None)) == []
    await call(graph, mode, {**value, "items": ["new"]})
    assert graph.get_state(thread()).values["items"] == ["new"]
    assert len(list(saver.list(thread()))) == 4


class Holding:
    """Holds the next `put` back until writes to its checkpoint were accepted; then it is made, or lost."""

    def __init__(self, store: Any, *, then: str) -> None:
        self.held: str | None = None
        self.accepted: set[str] = set()
        self._store, self._then = store, then
        self._put_checkpoint, self._put_writes = store.put_checkpoint, store.put_writes
        self._changed = threading.Condition()

    def put_checkpoint(self, put: Any, *, expires_at_s: float | None) -> None:
        with self._changed:
            is_first = self.held is None
            if is_first:
                self.held = put.row.spot.checkpoint_id
                assert self._changed.wait_for(lambda: self.held in self.accepted, WAIT_S)
        if is_first and self._then == "lost":
            raise StoreUnavailable("lost on its way")
        self._put_checkpoint(put, expires_at_s=expires_at_s)

    def put_writes(self, put: Any, *, expires_at_s: float | None) -> None:
        self._put_writes(put, expires_at_s=expires_at_s)
        with self._changed:
            self.accepted.update(row.spot.checkpoint_id for row in put.rows)
            self._changed.notify_all()

    def start(self) -> None:
        self._store.put_checkpoint, self._store.put_writes = self.put_checkpoint, self.put_writes

    def stop(self) -> None:
        del self._store.put_checkpoint, self._store.put_writes


@MODES
@pytest.mark.parametrize("then", ["made", "lost"])
async def test_writes_that_outlive_their_thread_do_not_revive_it_either(
    saver_factory: Any, mode: str, then: str, tmp_path: Path
) -> None:
    saver = saver_factory()
    holding = Holding(saver._core.store, then=then)
    reached, go = threading.Event(), threading.Event()

    def slow(state: Chat) -> Any:
        reached.set()
        assert go.wait(WAIT_S)
        return {"extra": "late"}

    builder = StateGraph(Chat).add_node(slow).add_node("after", lambda state: {"extra": "after"})
    graph = builder.add_edge(START, "slow").add_edge("slow", "after").compile(checkpointer=saver)
    value: Any = {"messages": [], "items": [], "extra": None}
    zombie = asyncio.ensure_future(call(graph, mode, value, durability="async"))
    await asyncio.to_thread(reached.wait, WAIT_S)
    while len(await asyncio.to_thread(lambda: list(saver.list(thread())))) < 2:
        await asyncio.sleep(0.01)
    await saver.adelete_thread("t")
    holding.start()
    go.set()
    with pytest.raises((ThreadDeleted, StoreUnavailable)):
        await zombie
    holding.stop()
    assert holding.held in holding.accepted  # it was minted after the deletion, and never came
    assert list(saver.threads()) == list(saver.list(None)) == []
    assert saver.info("t") is None
    assert saver.sizes("t") == {"(checkpoints)": 0}
    saver.copy_thread("t", "u")
    assert list(saver.threads()) == []
    assert list(saver.export_threads(tmp_path / "export")) == []
    saver.prune(["t"])
    go.set()
    await call(graph, mode, {**value, "items": ["new"]})
    assert graph.get_state(thread()).values["items"] == ["new"]
    assert len(list(saver.list(thread()))) == 4
    saver.delete_thread("t")
    assert saver._core.store.read_thread("t").writes == ()


@MODES
async def test_a_new_run_on_a_deleted_thread_may_write_before_its_first_checkpoint(
    saver_factory: Any, mode: str
) -> None:
    saver = saver_factory()
    run_chat(saver)
    await saver.adelete_thread("t")
    holding = Holding(saver._core.store, then="made")
    holding.start()
    graph = chat_graph(saver)
    await call(graph, mode, {"messages": [], "items": [], "extra": None}, durability="async")
    holding.stop()
    found = list(saver.list(thread()))
    assert [each.metadata["step"] for each in found] == [1, 0, -1]
    assert all(each.pending_writes for each in found)
    assert found[-1].checkpoint["id"] == holding.held
    assert list(saver.threads()) == ["t"]
    assert (await call(graph, mode, Command(resume="yes")))["extra"] == "yes"
