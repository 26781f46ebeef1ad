"""What stores over one engine share: batches of searches, results that are kept, partitions read ahead."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from pancake_langgraph import PancakeStore, PancakeVectorStore, attach, phase
from pancake_langgraph._errors import ConfigError, EmbedderMismatch, RetrievalError
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Query
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.inspection import describe
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from pancake_langgraph.retrieval.partitions import PartitionId
from tests.contract.runtime_bed import open_bed
from tests.embedders import AsyncWordEmbedder, WordEmbedder
from tests.vector_suite import Clock

LIMIT_S = 30.0
NS = ("notes",)
AnyStore = PancakeStore | PancakeVectorStore


class GatedEngine(MemoryVectorEngine):
    """Remembers the sizes of calls; `search` and `put` wait for their gates."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__(dim)
        self.sizes: list[int] = []
        self.began = threading.Semaphore(0)
        self.search_gate, self.put_gate = threading.Event(), threading.Event()
        self.search_gate.set()
        self.put_gate.set()
        self.putting = threading.Semaphore(0)

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        self.sizes.append(len(queries))
        self.began.release()
        assert self.search_gate.wait(LIMIT_S)
        return super().search(queries)

    def put(self, items: Sequence[Item]) -> None:
        self.putting.release()
        assert self.put_gate.wait(LIMIT_S)
        super().put(items)


class NoisyEmbedder(WordEmbedder):
    """Answers as another word embedder, and never twice with the same bits; `salt` makes another one of it."""

    salt = ""
    noise = 1e-6

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        answers = super().embed_documents([f"{text} {self.salt}" if self.salt else text for text in texts])
        noise = np.random.default_rng(len(self.documents)).standard_normal((len(texts), self.dim))
        return [[float(x) for x in row] for row in np.array(answers) * (1 + self.noise * noise)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class OtherEmbedder(NoisyEmbedder):
    salt = "another model altogether, whose vectors are as long"


def memory_store(embedder: Any, **settings: Any) -> PancakeStore:
    return PancakeStore(index={"dims": 16, "embed": embedder, "fields": ["text"]}, **settings)


def put(store: AnyStore, key: str, text: str) -> None:
    if isinstance(store, PancakeStore):
        store.put(NS, key, {"text": text})
    else:
        store.add_texts([text], ids=[key])


def found(store: AnyStore, text: str, limit: int = 3) -> list[str | None]:
    if isinstance(store, PancakeStore):
        return [item.key for item in store.search(NS, query=text, limit=limit)]
    return [document.id for document in store.similarity_search(text, k=limit)]


@pytest.fixture(params=[memory_store, PancakeVectorStore])
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[..., AnyStore]]:
    opened: list[AnyStore] = []

    def open_one(embedder: Any, **settings: Any) -> AnyStore:
        opened.append(request.param(embedder, **settings))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


# -- the embedder of an index ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-6, 1e-3])
def test_an_index_knows_its_embedder_again_in_spite_of_noise(
    open_store: Callable[..., AnyStore], tmp_path: Path, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NoisyEmbedder, "noise", noise)
    store = open_store(NoisyEmbedder(), path=tmp_path)
    put(store, "a", "the gate opens at nine")
    store.close()
    first = describe(tmp_path).fingerprint
    assert first is not None
    assert found(open_store(NoisyEmbedder(documents=[["other noise"]] * 5), path=tmp_path), "gate") == ["a"]


def test_another_embedder_of_the_same_length_is_refused(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    store = open_store(NoisyEmbedder(), path=tmp_path)
    put(store, "a", "the gate opens at nine")
    store.close()
    other = open_store(OtherEmbedder(), path=tmp_path)
    with pytest.raises(EmbedderMismatch, match=r"fingerprint 'e1:16:.*', the index has 'e1:16:"):
        found(other, "gate")
    with pytest.raises(EmbedderMismatch):
        put(other, "b", "two")
    assert found(open_store(NoisyEmbedder(), path=tmp_path), "gate") == ["a"]


def test_a_store_without_an_embedder_is_kept_and_needs_no_fingerprint(tmp_path: Path) -> None:
    for _ in range(2):
        store = PancakeStore(path=tmp_path)
        store.put(NS, "a", {"text": "x"})
        assert [item.key for item in store.search(NS)] == ["a"]
        store.close()


# -- searches together ----------------------------------------------------------------------------------------------


async def test_searches_that_come_together_are_few_calls_of_engine_and_embedder() -> None:
    engine, embedder = GatedEngine(), WordEmbedder()
    notes, documents = memory_store(embedder, engine=engine), PancakeVectorStore(embedder, engine=engine)
    await notes.aput(NS, "a", {"text": "red apple"})
    await documents.aadd_texts(["blue sea"], ids=["b"])
    engine.search_gate.clear()
    first = asyncio.create_task(notes.asearch(NS, query="red"))
    assert await asyncio.to_thread(engine.began.acquire, timeout=LIMIT_S)
    rest = [asyncio.create_task(notes.asearch(NS, query=f"red {n}", limit=1)) for n in range(10)]
    rest += [asyncio.create_task(documents.asimilarity_search(f"sea {n}", k=1)) for n in range(10)]
    scheduler = notes._core.engine()._searches()
    while scheduler.stats().queued_items < 20:
        await asyncio.sleep(0.001)
    engine.search_gate.set()
    answers = await asyncio.gather(*rest)
    await first
    assert engine.sizes[:2] == [1, 20]
    assert [one[0].key for one in answers[:10]] == ["a"] * 10
    assert [one[0].id for one in answers[10:]] == ["b"] * 10
    for store in (notes, documents):
        await store.aclose()


async def test_equal_questions_are_embedded_once(open_store: Callable[..., AnyStore]) -> None:
    embedder = WordEmbedder()
    store = open_store(embedder)
    put(store, "a", "red")
    before = len(embedder.queries)
    for _ in range(3):
        assert found(store, "red") == ["a"]
    assert embedder.queries[before:] == ["red"]
    native = AsyncWordEmbedder()
    async_store = memory_store(native)
    for _ in range(3):
        await async_store.asearch(NS, query="red")
    assert native.queries == ["red"]
    await async_store.aclose()


async def test_no_search_waits_for_imports() -> None:
    engine = GatedEngine()
    store = memory_store(WordEmbedder(), engine=engine)
    await store.aput(NS, "a", {"text": "red"}, ttl=5)
    assert engine.putting.acquire(timeout=LIMIT_S)
    engine.put_gate.clear()
    imports = [asyncio.create_task(store.aput((f"n{n}",), "x", {"text": f"word {n}"})) for n in range(5)]
    assert await asyncio.to_thread(engine.putting.acquire, timeout=LIMIT_S)
    assert [item.key for item in await store.asearch(NS, query="red", limit=9)] == ["a"]
    assert (await store.aget(NS, "a")).value == {"text": "red"}  # type: ignore[union-attr]
    assert not any(task.done() for task in imports)
    engine.put_gate.set()
    await asyncio.gather(*imports)
    await store.aclose()


def test_the_last_store_to_leave_an_engine_ends_its_threads() -> None:
    engine = MemoryVectorEngine(16)
    one, other = (memory_store(WordEmbedder(), engine=engine) for _ in range(2))
    put(one, "a", "red")
    assert found(one, "red") == found(other, "red") == ["a"]
    scheduler = one._core.engine()._searches()
    assert scheduler is other._core.engine()._searches()
    one.close()
    one.close()
    assert found(other, "red") == ["a"]
    other.close()
    with pytest.raises(RetrievalError, match="closed"):
        scheduler.search(Query(np.ones(16, np.float32)))
    assert found(one, "red") == ["a"], "a store may be used again"
    one.close()


def test_a_store_that_was_forgotten_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pancake_langgraph.retrieval.worker._IDLE_S", 0.01)
    engine = MemoryVectorEngine(16)
    store = memory_store(WordEmbedder(), engine=engine)
    put(store, "a", "red")
    assert found(store, "red") == ["a"]
    gone = threading.Event()
    weakref.finalize(engine, gone.set)
    del store, engine
    deadline_s = time.monotonic() + LIMIT_S
    while not gone.wait(0.01) and time.monotonic() < deadline_s:
        gc.collect()
    assert gone.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_searches_what_was_there() -> None:
    store = memory_store(WordEmbedder(), cache_s=60)
    put(store, "a", "red apple")
    assert found(store, "red") == ["a"]
    pid = os.fork()
    if not pid:
        right = False
        try:
            put(store, "b", "red car")
            right = sorted(found(store, "red")) == sorted(found(store, "red car")) == ["a", "b"]
            store.close()
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert found(store, "red") == ["a"]
    store.close()


# -- results that are kept ------------------------------------------------------------------------------------------


def test_results_are_given_again_until_something_is_written(open_store: Callable[..., AnyStore]) -> None:
    engine = GatedEngine()
    store, other = (open_store(WordEmbedder(), engine=engine, cache_s=60) for _ in range(2))
    plain = open_store(WordEmbedder(), engine=engine)
    put(store, "a", "red")
    assert [found(store, "red") for _ in range(3)] == [["a"]] * 3
    assert len(engine.sizes) == 1
    assert found(other, "red") == found(other, "red") == ["a"], "each store keeps its own"
    assert len(engine.sizes) == 2
    for number, writer in enumerate((store, other, plain)):
        put(writer, f"b{number}", f"red {number}")
        assert len(found(store, "red", 9)) == len(found(other, "red", 9)) == number + 2
    if isinstance(store, PancakeStore):
        store.delete(NS, "b0")
    else:
        store.delete(["b0"])
    assert len(found(other, "red", 9)) == 3
    calls = len(engine.sizes)
    found(plain, "red")
    found(plain, "red")
    assert len(engine.sizes) == calls + 2, "off by default"
    assert store.cache_stats().hits >= 2
    assert plain.cache_stats().misses == 0


def test_a_result_is_for_the_view_that_it_was_found_in() -> None:
    store = memory_store(WordEmbedder(), cache_s=60)
    store.put(("team",), "gate", {"text": "the gate"})
    store.put(("agents", "ann"), "tea", {"text": "the tea"})
    ann, bob = (store.view(reads=[("team",), ("agents", name)]) for name in ("ann", "bob"))
    few = store.view(allowed=[(("team",), "gate")])
    for _ in range(2):
        assert len(ann.search((), query="the")) == len(store.search((), query="the")) == 2
        assert [item.key for item in bob.search((), query="the")] == ["gate"]
        assert [item.key for item in few.search((), query="the")] == ["gate"]
    assert store.cache_stats().hits == 4
    store.close()


def test_results_end_with_their_time_and_with_their_items() -> None:
    clock = Clock()
    store = memory_store(WordEmbedder(), cache_s=600, clock=clock)
    store.put(NS, "a", {"text": "red"}, ttl=1)
    assert [item.key for item in store.search(NS, query="red", refresh_ttl=False)] == ["a"]
    clock.now_s += 61
    assert store.search(NS, query="red") == []
    store.close()


@pytest.mark.parametrize("cache_s", [0, -1, float("nan"), float("inf"), True, "5"])
def test_only_times_are_taken_for_keeping_results(open_store: Callable[..., AnyStore], cache_s: Any) -> None:
    with pytest.raises(ConfigError, match="cache_s"):
        open_store(WordEmbedder(), cache_s=cache_s)


# -- reading ahead --------------------------------------------------------------------------------------------------


class WatchedEngine(DiskVectorEngine):
    """Says when partitions have been warmed, and in which order that and searches came."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(
            path, dim=16, ack="none", codes="sq8", coded_rows=256, exact_rows=64, merge="manual", **options
        )
        self.order: list[str] = []
        self.warmed = threading.Event()

    def warm(self, ids: Sequence[PartitionId]) -> int:
        num_bytes = super().warm(ids)
        self.order.append("warm")
        self.warmed.set()
        return num_bytes

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        if threading.current_thread().name != "pancake-prefetch":  # what is searched for ahead, for its reading only
            self.order.append("search")
        return super().search(queries)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[WatchedEngine]:
    engine = WatchedEngine(tmp_path)
    random = np.random.default_rng(1)
    rows = random.standard_normal((2000, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    engine.put([Item(ItemId(NS, str(n)), {"text": str(n), "value": {"n": n}}, (row,)) for n, row in enumerate(rows)])
    engine.compact()
    assert engine.partitions(rows[0], 4)
    yield engine
    engine.close()


def test_a_draft_warms_what_the_search_of_a_graphs_node_needs(
    open_store: Callable[..., AnyStore], disk: WatchedEngine
) -> None:
    store = open_store(WordEmbedder(), engine=disk)
    if isinstance(store, PancakeVectorStore):
        store = store.view(NS)

    @phase(retrieves=store)
    def look(state: MessagesState) -> dict[str, Any]:
        assert disk.warmed.wait(LIMIT_S), "the draft came before"
        prefetcher = store._core.engine()._prefetcher
        assert prefetcher is not None
        assert prefetcher.wait_idle(LIMIT_S), "and all that it needs was brought up"
        assert found(store, str(state["messages"][0].content))
        return {}

    with open_bed() as bed:
        model = bed.model()

        def write(state: MessagesState) -> dict[str, Any]:
            return {"messages": [model.invoke(state["messages"])]}

        builder = StateGraph(MessagesState).add_node("write", write).add_node("look", look)
        builder.add_edge(START, "write").add_edge("write", "look").add_edge("look", END)
        graph = attach(builder.compile(), runtime=bed.runtime)
        asked = {"messages": [HumanMessage("where is the key")]}
        graph.invoke(asked, {"configurable": {"thread_id": "t1"}})
        assert bed.runtime.wait_idle()
    prefetcher = store._core.engine()._prefetcher
    assert prefetcher is not None
    assert prefetcher.wait_idle(LIMIT_S)
    assert disk.order[0] == "warm"
    assert disk.order.count("search") == 1
    stats = store.prefetch_stats()
    assert (stats.searches, stats.failures) == (1, 0)
    assert stats.hits == stats.needed > 0
    assert prefetcher._outlook._averages.get("t1") is not None, "the search was taken for the thread's"


def test_a_draft_for_an_index_that_is_not_open_yet_opens_it(tmp_path: Path) -> None:
    store = memory_store(WordEmbedder(), path=tmp_path / "index")
    store.draft("t1", "where is the key")
    store.draft("t1", " ")
    store._core.readers.stop()
    assert (tmp_path / "index").exists()
    prefetcher = store._core.engine()._prefetcher
    assert prefetcher is not None
    assert prefetcher.wait_idle(LIMIT_S)
    assert store.prefetch_stats().failures == 0
    store.close()


def test_drafts_are_followed_by_name_namespace_or_thread(disk: WatchedEngine) -> None:
    store = PancakeVectorStore(WordEmbedder(), engine=disk, namespace=NS)
    named = store.view(NS, agent="ann")
    for number, (index, agent) in enumerate(((store, "notes"), (named, "any"))):
        index.draft(agent, f"where is {number}")
        prefetcher = store._core.engine()._prefetcher
        assert prefetcher is not None
        assert prefetcher.wait_idle(LIMIT_S)
        index.similarity_search(f"where is {number}")
        assert prefetcher.wait_idle(LIMIT_S)
    stats = store.prefetch_stats()
    assert stats.searches == 2
    assert stats.fetched == stats.useful > 0
    store.close()


def test_drafts_cost_nothing_and_hurt_nothing_elsewhere(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    memory, bare = memory_store(embedder), PancakeStore(path=tmp_path / "bare")
    memory.draft("t", "text")
    bare.draft("t", "text")
    other = memory_store(embedder, path=tmp_path / "index", fingerprint=lambda: 1 // 0)
    other.draft("t", "text")
    for store in (memory, bare, other):
        store.close()
    assert (embedder.documents, embedder.queries) == ([], [])
    assert other.prefetch_stats().failures == 1
