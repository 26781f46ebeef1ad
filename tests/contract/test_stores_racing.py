"""What others do at the same moment: writes while something is read, ends while something is served or drafted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from pancake_langgraph import PancakeStore, PancakeVectorStore
from pancake_langgraph.retrieval.base import Item, ItemId
from pancake_langgraph.retrieval.desk import Desk, desk_of
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from pancake_langgraph.retrieval.worker import BatchWorker

LIMIT_S = 30.0
NS = ("notes",)


class InterruptedEngine(MemoryVectorEngine):
    """Lets somebody else in right after it was read, or right before times are moved on."""

    other: Callable[[], None] | None = None
    before_touch: Callable[[], None] | None = None

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        found = super().get(ids)
        other, self.other = self.other, None
        if other is not None:
            other()
        return found

    def touch(
        self, expiries: Mapping[ItemId, float | None], *, updated_at_s: Mapping[ItemId, float] | None = None
    ) -> int:
        other, self.before_touch = self.before_touch, None
        if other is not None:
            other()
        return super().touch(expiries, updated_at_s=updated_at_s)


class PlainEngine:
    """The port and nothing more: times can only be moved on by storing an item again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._engine = MemoryVectorEngine(1, clock=clock)
        self.num_gets = 0
        self.after_get: Callable[[int], None] = lambda number: None
        for name in ("put", "delete", "search", "items", "namespaces", "stats", "close"):
            setattr(self, name, getattr(self._engine, name))
        self.dim = 1

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        found = self._engine.get(ids)
        self.num_gets += 1
        self.after_get(self.num_gets)
        return found


def test_what_was_written_after_a_read_keeps_its_own_end() -> None:
    now_s = [1000.0]
    engine = InterruptedEngine(1, clock=lambda: now_s[0])
    store = PancakeStore(engine=engine, clock=lambda: now_s[0])
    store.put(NS, "a", {"v": 1}, ttl=1)
    now_s[0] += 30.0
    engine.other = lambda: store.put(NS, "a", {"v": 2})  # for good
    assert store.get(NS, "a") is not None
    now_s[0] += 120.0
    kept = store.get(NS, "a")
    assert kept is not None
    assert kept.value == {"v": 2}
    store.close()


@pytest.mark.parametrize("ttl", [None, 1])
def test_a_read_of_one_store_leaves_alone_what_another_one_writes_meanwhile(ttl: float | None) -> None:
    now_s = [1000.0]
    engine = InterruptedEngine(1, clock=lambda: now_s[0])
    reader, writer = (PancakeStore(engine=engine, clock=lambda: now_s[0]) for _ in range(2))
    reader.put(NS, "a", {"v": 1}, ttl=10)
    now_s[0] += 300.0
    engine.before_touch = lambda: writer.put(NS, "a", {"v": 2}, ttl=ttl)
    seen = reader.get(NS, "a")
    assert seen is not None
    assert seen.value == {"v": 1}
    assert engine.before_touch is None, "the end was moved on"
    [kept] = engine.get([ItemId(NS, "a")])
    assert kept is not None
    assert kept.expires_at_s == (None if ttl is None else now_s[0] + 60.0 * ttl)
    for store in (reader, writer):
        found = store.get(NS, "a")
        assert found is not None
        assert found.value == {"v": 2}
        store.close()


def test_an_engine_that_stores_items_again_for_their_end_brings_no_older_value_back() -> None:
    now_s = [1000.0]
    engine = PlainEngine(lambda: now_s[0])
    reader, writer = (PancakeStore(engine=engine, clock=lambda: now_s[0]) for _ in range(2))
    reader.put(NS, "a", {"v": 1}, ttl=10)
    now_s[0] += 300.0
    writing = threading.Thread(target=lambda: writer.put(NS, "a", {"v": 2}))
    began = threading.Event()
    first_of_read = engine.num_gets + 1

    def let_in(number: int) -> None:
        if number == first_of_read + 1:  # what was read is about to be stored again
            writing.start()
            assert began.wait(LIMIT_S)
            writing.join(0.05)  # it has to wait; where it did not, it would be through by now
        elif number > first_of_read + 1:
            began.set()

    engine.after_get = let_in
    assert reader.get(NS, "a") is not None
    writing.join(LIMIT_S)
    assert not writing.is_alive()
    assert began.is_set()
    found = reader.get(NS, "a")
    assert found is not None
    assert found.value == {"v": 2}
    [kept] = engine.get([ItemId(NS, "a")])
    assert kept is not None
    assert kept.expires_at_s is None
    reader.close()
    writer.close()


async def test_a_worker_that_is_closed_over_a_failing_batch_answers_everybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began, gate = threading.Event(), threading.Event()

    def serve(batch: list[int]) -> list[int]:
        began.set()
        assert gate.wait(LIMIT_S)
        raise ValueError("engine down")

    worker = BatchWorker("test", serve, settings=LaneSettings(bulk_chunk=4))
    with monkeypatch.context() as paused:  # so that both come into one batch, the second one in part
        paused.setattr(worker, "_start", lambda: None)
        waiting = asyncio.create_task(worker.arun([1, 2], priority=Priority.BULK))
        await asyncio.sleep(0)
        large = worker.submit(list(range(10)), priority=Priority.BULK)
    with worker._changed:
        worker._start()
    assert await asyncio.to_thread(began.wait, LIMIT_S)
    closing = asyncio.create_task(asyncio.to_thread(worker.close))
    while not large.done():
        await asyncio.sleep(0.001)
    gate.set()
    with pytest.raises(ValueError, match="engine down"):
        await asyncio.wait_for(waiting, LIMIT_S)
    await closing


def test_a_draft_that_comes_behind_the_last_close_starts_no_thread(tmp_path: Any) -> None:
    engine = DiskVectorEngine(tmp_path / "index", dim=4)
    desk = desk_of(engine)
    desk.leave()
    desk.draft("ann", "where is the key", lambda text: np.ones(4, np.float32))
    assert desk._prefetcher is None
    engine.close()


def test_no_view_of_documents_allows_more_than_the_store_it_was_made_of() -> None:
    documents = PancakeVectorStore(DeterministicFakeEmbedding(size=8))
    documents.add_texts(["one", "two"], ids=["x1", "x2"])
    narrow = documents.view(("documents",), allowed=["x1"])
    for view in (narrow, narrow.view(("documents",)), narrow.view(("documents",), allowed=["x1", "x2"])):
        assert [found.id for found in view.similarity_search("two")] == ["x1"]
    narrow.delete(["x2"])
    narrow.delete()
    assert [found.id for found in documents.similarity_search("two")] == ["x2"]
    documents.close()


def test_drafts_for_an_index_that_is_slow_to_open_are_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PancakeStore(
        path=tmp_path / "index", index={"dims": 8, "embed": DeterministicFakeEmbedding(size=8), "fields": ["text"]}
    )
    opening, gate = [], threading.Event()
    get = store._core._late.get

    def slow() -> Any:
        opening.append(1)
        assert gate.wait(LIMIT_S)
        return get()

    monkeypatch.setattr(store._core._late, "get", slow)
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(Desk, "draft", lambda self, agent, text, embed: told.append((agent, text)))
    for number in range(300):
        store.draft("ann", f"draft {number}")
    for number in range(300):
        store.draft(f"agent {number}", "where is it")
    gate.set()
    store._core.readers.stop()
    assert len(opening) == 1
    last = [("ann", "draft 298"), ("ann", "draft 299")]
    assert told == [*last, *((f"agent {number}", "where is it") for number in range(255))]
    assert store.prefetch_stats().failures == 300 - 255
    store.close()
