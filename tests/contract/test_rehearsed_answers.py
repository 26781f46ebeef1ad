"""Searches that are made for drafts answer those that follow, and never say what a search would not say now."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pancake_langgraph import PancakeStore, PancakeVectorStore
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, MarksChanges, Query, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from tests.embedders import WordEmbedder
from tests.index_children import Unsynced

LIMIT_S = 30.0
DIM = 16
NS = ("notes",)
OTHER = ("diaries",)
WORDS = ("key", "gate", "lift", "tea", "door", "night")
AnyStore = PancakeStore | PancakeVectorStore


class CountedEngine(DiskVectorEngine):
    """Counts the searches that somebody waits for."""

    num_waited_for = 0

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        if threading.current_thread().name != "pancake-prefetch":
            self.num_waited_for += len(queries)
        return super().search(queries)


def item(key: str, text: str, expires_at_s: float | None = None) -> Item:
    vector = np.array(WordEmbedder(DIM).embed_query(text), np.float32)
    return Item(ItemId(NS, key), {"text": text}, (vector / np.linalg.norm(vector),), expires_at_s=expires_at_s)


def open_engine(path: Path, **options: Any) -> CountedEngine:
    return CountedEngine(
        path, dim=DIM, ack="none", merge="manual", coded_rows=100, exact_rows=20, disk=Unsynced(), **options
    )


@pytest.fixture
def now_s() -> list[float]:
    return [1000.0]


@pytest.fixture
def engine(tmp_path: Path, now_s: list[float]) -> Iterator[CountedEngine]:
    with closing(open_engine(tmp_path, clock=lambda: now_s[0])) as opened:
        random = np.random.default_rng(1)
        opened.put([item(str(n), " ".join(random.choice(WORDS, 3))) for n in range(300)])
        opened.compact()
        yield opened


def memory_store(engine: DiskVectorEngine) -> PancakeStore:
    return PancakeStore(index={"dims": DIM, "embed": WordEmbedder(DIM), "fields": ["text"]}, engine=engine)


def vector_store(engine: DiskVectorEngine) -> PancakeVectorStore:
    return PancakeVectorStore(WordEmbedder(DIM), engine=engine, namespace=NS)


@pytest.fixture(params=[memory_store, vector_store])
def store(request: pytest.FixtureRequest, engine: CountedEngine) -> Iterator[AnyStore]:
    with request.param(engine) as opened:
        found(opened, "anything")  # tells how searches are made here
        yield opened


def found(store: AnyStore, text: str) -> list[str | None]:
    if isinstance(store, PancakeStore):
        return [one.key for one in store.search(NS, query=text, limit=5)]
    return [document.id for document in store.similarity_search(text, k=5)]


async def found_on_a_loop(store: AnyStore, text: str) -> list[str | None]:
    if isinstance(store, PancakeStore):
        return [one.key for one in await store.asearch(NS, query=text, limit=5)]
    return [document.id for document in await store.asimilarity_search(text, k=5)]


def drafted(store: AnyStore, text: str) -> None:
    """Have a draft of the searching agent followed."""
    store.draft("/".join(NS), text)
    prefetcher = store._core.engine()._prefetcher
    assert prefetcher is not None
    assert prefetcher.wait_idle(LIMIT_S)


def best(engine: DiskVectorEngine, text: str) -> list[str | None]:
    [hits] = engine.search([Query(item("", text).vectors[0], View((NS,)), limit=5)])
    return [hit.item.id.key for hit in hits]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_search_for_the_words_of_a_draft_has_its_answer(
    store: AnyStore, engine: CountedEngine, is_async: bool
) -> None:
    expected = found(store, "gate key")
    before = engine.num_waited_for
    drafted(store, "gate key")
    assert (asyncio.run(found_on_a_loop(store, "gate key")) if is_async else found(store, "gate key")) == expected
    assert engine.num_waited_for == before
    assert store.prefetch_stats().answered == 1
    assert found(store, "gate key") == expected
    assert engine.num_waited_for == before + 1, "an answer is given once"
    stats = store.prefetch_stats()
    assert (stats.rehearsed, stats.answered, stats.failures) == (1, 1, 0)


def test_a_search_for_other_words_is_made(store: AnyStore, engine: CountedEngine) -> None:
    drafted(store, "gate")
    before = engine.num_waited_for
    assert found(store, "gate key") == best(engine, "gate key")
    assert engine.num_waited_for == before + 2
    assert store.prefetch_stats().answered == 0


def changed_by_the_store(store: AnyStore, engine: DiskVectorEngine, now_s: list[float]) -> None:
    if isinstance(store, PancakeStore):
        store.put(NS, "new", {"text": "night door"})
    else:
        store.add_texts(["night door"], ids=["new"])


def changed_behind_it(store: AnyStore, engine: DiskVectorEngine, now_s: list[float]) -> None:
    engine.put([item("new", "night door")])


def changed_by_another(store: AnyStore, engine: DiskVectorEngine, now_s: list[float]) -> None:
    with memory_store(engine) as other:
        other.put(NS, "new", {"text": "night door"})


CHANGES = [changed_by_the_store, changed_behind_it, changed_by_another]


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_written_since_the_draft_is_found(
    store: AnyStore,
    engine: CountedEngine,
    now_s: list[float],
    change: Callable[[AnyStore, DiskVectorEngine, list[float]], None],
) -> None:
    drafted(store, "night door")
    change(store, engine, now_s)
    assert "new" in found(store, "night door")
    assert store.prefetch_stats().answered == 0


def test_what_was_deleted_or_has_expired_since_the_draft_is_not_found(
    store: AnyStore, engine: CountedEngine, now_s: list[float]
) -> None:
    engine.put([item("short", "quay", expires_at_s=now_s[0] + 10)])
    drafted(store, "quay")
    assert found(store, "quay")[0] == "short"
    assert store.prefetch_stats().answered == 1
    drafted(store, "quay")
    now_s[0] += 10
    assert "short" not in found(store, "quay")
    engine.put([item("short", "quay")])
    drafted(store, "quay")
    engine.delete([ItemId(NS, "short")])
    assert "short" not in found(store, "quay")
    assert store.prefetch_stats().answered == 1


@pytest.fixture
def cached(engine: CountedEngine) -> Iterator[PancakeStore]:
    index: Any = {"dims": DIM, "embed": WordEmbedder(DIM), "fields": ["text"]}
    with PancakeStore(index=index, engine=engine, cache_s=60) as store:
        found(store, "anything")
        yield store


def test_answers_go_into_the_cache_of_results_and_are_the_callers_own(
    cached: PancakeStore, engine: CountedEngine
) -> None:
    cached.put(NS, "nested", {"text": "quay", "tags": ["one"]})  # still in memory, where values could be shared
    drafted(cached, "quay")
    before = engine.num_waited_for
    for _ in range(2):
        first = cached.search(NS, query="quay", limit=5)[0]
        assert (first.key, first.value["tags"]) == ("nested", ["one"])
        first.value["tags"].append("changed")
    assert engine.num_waited_for == before
    assert (cached.prefetch_stats().answered, cached.cache_stats().hits) == (1, 1)
    stored = cached.get(NS, "nested")
    assert stored is not None
    assert stored.value["tags"] == ["one"]


@pytest.mark.parametrize("moment", ["before look_up", "after look_up", "before store"])
def test_a_write_while_an_answer_is_taken_is_found_in_spite_of_the_cache(
    cached: PancakeStore, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    drafted(cached, "quay")
    cache = cached._core.cache
    assert cache is not None
    when, name = moment.split()
    called = getattr(cache, name)

    def writing(*args: Any) -> Any:
        monkeypatch.undo()
        early = called(*args) if when == "after" else None
        cached.put(NS, "new", {"text": "quay"})
        return called(*args) if when == "before" else early

    monkeypatch.setattr(cache, name, writing)
    found(cached, "quay")
    assert found(cached, "quay")[0] == "new"


def test_a_store_that_was_closed_holds_no_answers(store: AnyStore, engine: CountedEngine) -> None:
    drafted(store, "tea")
    prefetcher = store._core.engine()._prefetcher
    assert prefetcher is not None
    assert len(prefetcher._rehearsals) == 1
    store.close()
    assert len(prefetcher._rehearsals) == 0
    before = engine.num_waited_for
    assert found(store, "tea")
    assert engine.num_waited_for == before + 1


# -- the mark of a state ----------------------------------------------------------------------------------------------


def test_each_change_of_what_searches_find_gives_another_mark(engine: CountedEngine, now_s: list[float]) -> None:
    assert isinstance(engine, MarksChanges)
    seen = [engine.mark()]

    def is_new() -> bool:
        mark = engine.mark()
        assert mark is engine.mark()
        seen.append(mark)
        return mark is not None and all(mark is not old for old in seen[:-1])

    engine.search([Query(item("", "tea").vectors[0])])
    assert not is_new(), "a search changes nothing"
    engine.put([item("a", "tea", expires_at_s=now_s[0] + 5)])
    assert is_new()
    engine.touch({ItemId(NS, "a"): now_s[0] + 9})
    assert is_new()
    now_s[0] += 9
    assert engine.mark() is None, "it has expired, and nobody has looked yet"
    assert engine.get([ItemId(NS, "a")]) == [None]
    assert is_new()
    engine.delete([ItemId(NS, "7")])
    assert is_new()
    engine.compact()
    assert is_new()


def test_one_that_reads_or_is_closed_has_no_mark(engine: CountedEngine, tmp_path: Path) -> None:
    with closing(open_engine(tmp_path, read_only=True)) as reader:
        assert reader.mark() is None
    engine.close()
    assert engine.mark() is None


# -- whatever happens -------------------------------------------------------------------------------------------------

TEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map(" ".join)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("draft"), TEXTS),
        st.tuples(st.just("search"), TEXTS),
        st.tuples(st.just("ask"), TEXTS),
        st.tuples(st.just("put"), TEXTS),
        st.tuples(st.just("delete"), TEXTS),
        st.tuples(st.just("compact"), st.just("")),
        st.tuples(st.just("wait"), st.just("")),
    ),
    min_size=5,
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_with_drafts_a_store_finds_what_the_engine_finds(
    steps: Sequence[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    now_s = [1000.0]
    with (
        closing(open_engine(tmp_path_factory.mktemp("index"), clock=lambda: now_s[0])) as engine,
        memory_store(engine) as store,
    ):
        engine.put([item(str(n), WORDS[n % 6]) for n in range(200)])
        found(store, "anything")
        for number, (what, text) in enumerate(steps):
            if what == "draft":
                drafted(store, text)
            elif what == "ask":
                expected, answered = best(engine, text), store.prefetch_stats().answered
                drafted(store, text)
                assert found(store, text) == expected
                assert store.prefetch_stats().answered == answered + 1
            elif what == "search":
                assert found(store, text) == best(engine, text)
            elif what == "put":
                engine.put([item(f"new {text}", text, expires_at_s=now_s[0] + 3 + number % 5)])
            elif what == "delete":
                engine.delete([ItemId(NS, f"new {text}")])
            elif what == "compact":
                engine.compact()
            else:
                now_s[0] += 2
        assert store.prefetch_stats().failures == 0
