"""How stores open what they keep: with which embedder, for reading or writing, and who closes it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pancake_langgraph import (
    ConfigError,
    CorruptIndex,
    EmbedderMismatch,
    IndexLocked,
    PancakeStore,
    PancakeVectorStore,
    RetrievalError,
)
from pancake_langgraph.retrieval import dropped
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.dropped import Ending, close_when_dropped, wait_for_dropped
from pancake_langgraph.retrieval.inspection import describe
from pancake_langgraph.retrieval.manifest import SEGMENTS
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from tests.embedders import WordEmbedder
from tests.vector_suite import Clock

LIMIT_S = 30.0
NS = ("notes",)
AnyStore = PancakeStore | PancakeVectorStore


class Owner:
    """Whatever may be dropped."""


class OtherEmbedder(WordEmbedder):
    """Vectors as long as those of `WordEmbedder`, which mean something else."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents([f"{text} otherwise altogether" for text in texts])

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def memory_store(embedder: Any, **settings: Any) -> PancakeStore:
    return PancakeStore(index={"dims": 16, "embed": embedder, "fields": ["text"]}, **settings)


def put(store: AnyStore, key: str, text: str) -> None:
    if isinstance(store, PancakeStore):
        store.put(NS, key, {"text": text})
    else:
        store.add_texts([text], ids=[key])


def found(store: AnyStore, text: str) -> list[str | None]:
    if isinstance(store, PancakeStore):
        return [item.key for item in store.search(NS, query=text, limit=3)]
    return [document.id for document in store.similarity_search(text, k=3)]


@pytest.fixture(params=[memory_store, PancakeVectorStore])
def open_store(request: pytest.FixtureRequest) -> Iterator[Callable[..., AnyStore]]:
    opened: list[AnyStore] = []

    def open_one(embedder: Any, **settings: Any) -> AnyStore:
        opened.append(request.param(embedder, **settings))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


# -- the embedder of an engine that is given ----------------------------------------------------------------------


@pytest.mark.parametrize("read_only", [False, True])
def test_an_engine_that_is_given_keeps_to_its_embedder(
    open_store: Callable[..., AnyStore], tmp_path: Path, read_only: bool
) -> None:
    first = open_store(WordEmbedder(), path=tmp_path)
    put(first, "a", "red")
    first.close()
    engine = DiskVectorEngine(tmp_path, read_only=read_only)
    other = open_store(OtherEmbedder(), engine=engine)
    with pytest.raises(EmbedderMismatch, match="answers otherwise"):
        found(other, "red")
    if not read_only:
        with pytest.raises(EmbedderMismatch):
            put(other, "b", "blue")
    assert found(open_store(WordEmbedder(), engine=engine), "red") == ["a"]
    assert engine.stats().num_items == 1
    engine.close()


def test_a_new_engine_takes_over_its_first_embedder(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    engine = DiskVectorEngine(tmp_path, dim=16)
    reader = DiskVectorEngine(tmp_path, read_only=True)
    put(open_store(WordEmbedder(), engine=engine), "a", "red")
    named = describe(tmp_path).fingerprint
    assert named is not None
    assert engine.fingerprint == named
    for one in (engine, reader):
        with pytest.raises(EmbedderMismatch):
            found(open_store(OtherEmbedder(), engine=one), "red")
    assert describe(tmp_path).fingerprint == named
    engine.close()
    reader.close()
    assert found(open_store(WordEmbedder(), path=tmp_path), "red") == ["a"]


def test_what_was_written_is_there_after_an_embedder_was_noted(tmp_path: Path) -> None:
    engine = DiskVectorEngine(tmp_path, dim=16)
    bare = PancakeStore(engine=engine)
    bare.put(NS, "before", {})
    put(memory_store(WordEmbedder(), engine=engine), "after", "red")
    engine.close()
    with DiskVectorEngineClosing(tmp_path) as again:
        assert again.stats().num_items == 2


class DiskVectorEngineClosing(DiskVectorEngine):
    """Closes at the end of a block."""

    def __enter__(self) -> DiskVectorEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- one writer, many readers, damage -----------------------------------------------------------------------------


def test_a_reader_sees_what_a_writer_does_and_writes_nothing(
    open_store: Callable[..., AnyStore], tmp_path: Path
) -> None:
    writer = open_store(WordEmbedder(), path=tmp_path)
    put(writer, "a", "red")
    reader = open_store(WordEmbedder(), path=tmp_path, read_only=True)
    assert found(reader, "red") == ["a"]
    put(writer, "b", "red")
    assert found(reader, "red") == ["a", "b"]
    with pytest.raises(RetrievalError, match="read_only"):
        put(reader, "c", "red")
    with pytest.raises(IndexLocked, match="writes to this index"):
        found(open_store(WordEmbedder(), path=tmp_path), "red")
    with pytest.raises(EmbedderMismatch):
        found(open_store(OtherEmbedder(), path=tmp_path, read_only=True), "red")


def test_a_reader_makes_no_index(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    with pytest.raises(RetrievalError):
        found(open_store(WordEmbedder(), path=tmp_path / "none", read_only=True), "red")
    with pytest.raises(RetrievalError):
        PancakeStore(path=tmp_path / "none", read_only=True).get(NS, "a")
    assert not list(tmp_path.iterdir())


def test_a_reader_leaves_the_times_of_items_to_the_writer(tmp_path: Path) -> None:
    clock = Clock()
    with PancakeStore(path=tmp_path, ttl={"default_ttl": 10}, clock=clock) as writer:
        writer.put(NS, "a", {"n": 1})
        reader = PancakeStore(path=tmp_path, read_only=True, ttl={"refresh_on_read": True}, clock=clock)
        clock.now_s += 300
        assert reader.get(NS, "a") is not None
        clock.now_s += 301
        assert reader.get(NS, "a") is None
        reader.close()


def test_damaged_parts_may_be_skipped(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    for number in range(2):
        store = open_store(WordEmbedder(), path=tmp_path)
        put(store, f"key{number}", "red")
        engine = store._core.engine().engine
        assert isinstance(engine, DiskVectorEngine)
        engine._writer()._merger.flush()
        store.close()
    first, _ = sorted((tmp_path / SEGMENTS).iterdir())
    for file in first.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CorruptIndex):
        found(open_store(WordEmbedder(), path=tmp_path), "red")
    assert found(open_store(WordEmbedder(), path=tmp_path, read_only=True, on_corrupt="skip"), "red") == ["key1"]


@pytest.mark.parametrize(
    "settings",
    [
        {"read_only": True},
        {"on_corrupt": "skip"},
        {"on_corrupt": "ignore", "path": "x"},
        {"read_only": "yes", "path": "x"},
        {"engine": MemoryVectorEngine(16), "read_only": True},
        {"engine": object()},
        {"engine": object(), "path": "x"},
    ],
)
def test_what_does_not_go_together_is_refused(open_store: Callable[..., AnyStore], settings: Any) -> None:
    with pytest.raises(ConfigError, match="allowed"):
        open_store(WordEmbedder(), **settings)


def test_what_is_no_embedder_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 'embed' of type int"):
        PancakeStore(index={"dims": 3, "embed": 3})  # type: ignore[typeddict-item]
    with pytest.raises(ConfigError, match="embedding: got int"):
        PancakeVectorStore(3)  # type: ignore[arg-type]


# -- who closes it ------------------------------------------------------------------------------------------------


def test_a_block_closes_its_store(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    with open_store(WordEmbedder(), path=tmp_path) as store:
        put(store, "a", "red")
    with open_store(WordEmbedder(), path=tmp_path) as again:
        assert found(again, "red") == ["a"]


async def test_an_async_block_closes_its_store(open_store: Callable[..., AnyStore], tmp_path: Path) -> None:
    async with open_store(WordEmbedder(), path=tmp_path) as store:
        put(store, "a", "red")
    async with open_store(WordEmbedder(), path=tmp_path) as again:
        assert found(again, "red") == ["a"]


@pytest.mark.parametrize("make", [memory_store, PancakeVectorStore])
@pytest.mark.parametrize("how", ["plain", "cycle", "view", "draft"])
def test_a_store_that_is_dropped_lets_go_of_its_folder(make: Callable[..., AnyStore], how: str, tmp_path: Path) -> None:
    def use(key: str) -> list[str | None]:
        store = make(WordEmbedder(), path=tmp_path)
        put(store, key, "red")
        if how == "draft":
            store.draft("agent", "where is red")
            store._core.readers.stop()
        if how == "cycle":
            store.itself = store  # type: ignore[union-attr]
        if how == "view":
            store = store.view() if isinstance(store, PancakeStore) else store.view(("documents",))
        return found(store, "red")

    gc.disable()  # only what the second store does itself may find the first one in a cycle
    try:
        assert use("a") == ["a"]
        assert use("b") == ["a", "b"]
    finally:
        gc.enable()
    gc.collect()
    wait_for_dropped()


async def test_a_store_that_is_dropped_while_it_opens_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropped, "_JOIN_S", 100 * LIMIT_S)
    asked, gate = threading.Event(), threading.Event()

    def fingerprint() -> str:
        asked.set()
        assert gate.wait(LIMIT_S)
        return "one"

    others = dropped._under_way.copy()
    reading = asyncio.create_task(memory_store(WordEmbedder(), path=tmp_path, fingerprint=fingerprint).aget(NS, "a"))
    assert await asyncio.to_thread(asked.wait, LIMIT_S)
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    del reading
    await asyncio.sleep(0)  # the step that was woken by the task holds it
    gc.collect()
    [ending] = dropped._under_way - others
    gate.set()
    assert await asyncio.to_thread(ending.is_over.wait, LIMIT_S)
    assert not list(tmp_path.iterdir()), "nobody would use what it opened"


def test_whoever_is_dropped_does_not_wait_for_its_own_end() -> None:
    gate = threading.Event()

    def close() -> None:
        assert gate.wait(LIMIT_S)

    owner, ending = Owner(), Ending()
    close_when_dropped(owner, close, ending)
    wait_for_dropped(ending)
    del owner
    gc.collect()
    with pytest.raises(RetrievalError, match="nobody holds any more"):
        wait_for_dropped(ending)
    gate.set()
    assert ending.is_over.wait(LIMIT_S)


def test_a_view_keeps_its_store_open(tmp_path: Path) -> None:
    view = memory_store(WordEmbedder(), path=tmp_path).view(reads=[NS])
    put(view, "a", "red")
    gc.collect()
    wait_for_dropped()
    with pytest.raises(IndexLocked):
        PancakeStore(path=tmp_path).get(NS, "a")
    view.close()


@pytest.mark.parametrize("make", [memory_store, PancakeVectorStore])
async def test_stores_that_are_dropped_leave_no_threads(
    make: Callable[..., AnyStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.retrieval.worker._IDLE_S", 3600.0)
    before = set(threading.enumerate())
    for _ in range(50):
        store = make(WordEmbedder())
        put(store, "a", "red")
        assert found(store, "red") == ["a"]
        if isinstance(store, PancakeStore):
            await store.aput(NS, "b", {"text": "red"})
        else:
            await store.aadd_texts(["red"], ids=["b"])
    own = set(threading.enumerate()) - before
    assert own, "the last one is there still"
    del store
    gc.collect()
    wait_for_dropped()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("pancake"):
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name


def test_an_engine_that_was_given_outlives_a_dropped_store() -> None:
    engine = MemoryVectorEngine(16)
    put(memory_store(WordEmbedder(), engine=engine), "a", "red")
    gc.collect()
    wait_for_dropped()
    assert engine.stats().num_items == 1


def test_a_close_that_fails_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RetrievalError("the log could not be synced")

    owner = Owner()
    close_when_dropped(owner, fail, Ending())
    del owner
    gc.collect()
    wait_for_dropped()
    assert "could not be synced" in caplog.text
