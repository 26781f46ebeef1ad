"""`PancakeStore`: what LangGraph documents, what its own stores get wrong, and views for several agents."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.store.base import BaseStore, GetOp, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

import pancake_langgraph
from pancake_langgraph._errors import (
    ConfigError,
    EmbedderMismatch,
    EmbeddingError,
    InvalidItem,
    InvalidQuery,
    RetrievalError,
)
from pancake_langgraph.memory_store import PancakeStore
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from pancake_langgraph.vector_store import PancakeVectorStore
from tests.embedders import AsyncWordEmbedder, BrokenEmbedder, WordEmbedder, text_vector
from tests.vector_suite import Clock

NS = ("notes",)


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(embedder: WordEmbedder, clock: Clock) -> Iterator[Callable[..., PancakeStore]]:
    made: list[PancakeStore] = []

    def make(*fields: str, **settings: Any) -> PancakeStore:
        index = {"dims": 16, "embed": embedder, "fields": list(fields) or None}
        made.append(PancakeStore(**{"index": index, "clock": clock, **settings}))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make: Callable[..., PancakeStore]) -> PancakeStore:
    return make("text")


def keys(items: list[Any]) -> list[str]:
    return [item.key for item in items]


# -- against LangGraph's store in memory ----------------------------------------------------------------------------

WORDS = ("red apple", "red car", "blue sea", "deep blue sea", "green")
SPACES = (("a",), ("a", "b"), ("ab",), ("c", "b"))
PUTS = st.tuples(
    st.just("put"),
    st.sampled_from(SPACES),
    st.sampled_from("pqrs"),
    st.fixed_dictionaries(
        {"text": st.sampled_from(WORDS)},
        optional={"n": st.integers(0, 3), "tags": st.lists(st.sampled_from(WORDS), max_size=2)},
    ),
    st.sampled_from([None, False, ["tags[*]"], ["text", "n"], []]),
)
DELETES = st.tuples(st.just("delete"), st.sampled_from(SPACES), st.sampled_from("pqrs"))
SEARCHES = st.tuples(
    st.just("search"),
    st.sampled_from([(), ("a",), ("a", "b"), ("b",)]),
    st.none() | st.sampled_from(WORDS),
    st.sampled_from([None, {}, {"n": 1}, {"n": {"$ne": 1}}, {"text": "green", "n": {"$eq": 2}}]),
    st.sampled_from([1, 3, 50]),
)
LISTINGS = st.tuples(
    st.just("list"),
    st.sampled_from([None, ("a",), ("*", "b")]),
    st.sampled_from([None, ("b",), ("*",)]),
    st.sampled_from([None, 1, 2]),
)


@given(steps=st.lists(PUTS | DELETES | SEARCHES | LISTINGS, min_size=3, max_size=20))
def test_it_answers_as_langgraphs_store_in_memory(steps: list[tuple[Any, ...]]) -> None:
    index: Any = {"dims": 16, "embed": WordEmbedder(), "fields": ["text"]}
    ours, theirs = PancakeStore(index=index), InMemoryStore(index=index)
    for step, *arguments in steps:
        if step == "put":
            at, key, value, indexed = arguments
            for each in (ours, theirs):
                each.delete(at, key)  # theirs keeps vectors of fields that are no longer indexed
                each.put(at, key, value, index=indexed)
        elif step == "delete":
            for each in (ours, theirs):
                each.delete(*arguments)
        elif step == "search":
            at, query, where, limit = arguments
            found, wanted = (each.search(at, query=query, filter=where, limit=limit) for each in (ours, theirs))
            scores = [[item.score for item in items if item.score is not None] for items in (found, wanted)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-5)
            assert len(found) == len(wanted)
            if limit == 50:  # all there is; the order of equal ones is not defined
                assert sorted((i.namespace, i.key, str(i.value)) for i in found) == sorted(
                    (i.namespace, i.key, str(i.value)) for i in wanted
                )
        else:
            prefix, suffix, depth = arguments
            found, wanted = (each.list_namespaces(prefix=prefix, suffix=suffix) for each in (ours, theirs))
            # Theirs goes on listing namespaces that have been emptied, or only been asked for.
            assert found == [at for at in wanted if theirs._data[at]]
            assert ours.list_namespaces(max_depth=depth) == sorted(
                {at[:depth] for at in theirs._data if theirs._data[at]}
            )
    for at in SPACES:
        for key in "pqrs":
            one, other = ours.get(at, key), theirs.get(at, key)
            assert (one and one.value) == (other and other.value)
    ours.close()


# -- what LangGraph's stores get wrong ------------------------------------------------------------------------------


def test_two_items_with_the_same_text_may_be_put_in_one_batch(store: PancakeStore, embedder: WordEmbedder) -> None:
    store.batch([PutOp(NS, "a", {"text": "same"}), PutOp(NS, "b", {"text": "same"}), PutOp(NS, "c", {"text": "other"})])
    assert sorted(keys(store.search(NS, query="same", limit=2))) == ["a", "b"]
    assert embedder.documents == [["same", "other"]], "one call, every text once"


def test_an_item_that_is_no_longer_indexed_is_not_found_by_what_it_said(store: PancakeStore) -> None:
    store.put(NS, "a", {"text": "red"})
    store.put(NS, "a", {"text": "red"}, index=False)
    assert [item.score for item in store.search(NS, query="red")] == [None]


def test_a_field_that_is_gone_leaves_no_vector(make: Callable[..., PancakeStore]) -> None:
    store = make("text", "title")
    store.put(NS, "a", {"text": "blue", "title": "red"})
    store.put(NS, "a", {"text": "blue"})
    [found] = store.search(NS, query="red")
    left, right = np.array(text_vector("red", 16)), np.array(text_vector("blue", 16))
    assert found.score == pytest.approx(left @ right / np.linalg.norm(left) / np.linalg.norm(right), abs=1e-6)


def test_filters_may_ask_for_one_of_several(store: PancakeStore) -> None:
    for number in range(5):
        store.put(NS, str(number), {"text": "x", "n": number, "deep": {"n": number}})
    assert sorted(keys(store.search(NS, filter={"n": {"$in": [1, 3, 9]}}))) == ["1", "3"]
    assert sorted(keys(store.search(NS, query="x", filter={"$or": [{"n": 0}, {"deep": {"n": {"$gt": 3}}}]}))) == [
        "0",
        "4",
    ]
    assert keys(store.search(NS, filter={"$and": [{"n": {"$gt": 1}}, {"n": {"$lt": 3}}]})) == ["2"]
    assert sorted(keys(store.search(NS, filter={"n": {"$nin": [0, 1, 2]}}))) == ["3", "4"]


def test_sizes_that_cannot_be_compared_do_not_match(store: PancakeStore) -> None:
    store.put(NS, "a", {"text": "x", "n": "many"})
    store.put(NS, "b", {"text": "x"})
    store.put(NS, "c", {"text": "x", "n": 10})
    assert keys(store.search(NS, filter={"n": {"$gt": 9}})) == ["c"]


def test_a_query_is_embedded_as_a_query(store: PancakeStore, embedder: WordEmbedder) -> None:
    store.put(NS, "a", {"text": "red"})
    store.search(NS, query="what is red")
    assert (embedder.documents, embedder.queries) == ([["red"]], ["what is red"])


def test_all_that_match_are_found_however_far_they_are(store: PancakeStore) -> None:
    store.batch([PutOp(NS, f"near{n}", {"text": f"red apple {n}", "who": "you"}) for n in range(200)])
    store.batch([PutOp(NS, f"far{n}", {"text": f"deep sea {n}", "who": "me"}) for n in range(7)])
    found = store.search(NS, query="red apple", filter={"who": "me"}, limit=10)
    assert sorted(keys(found)) == [f"far{n}" for n in range(7)]


def test_prefixes_are_no_patterns(make: Callable[..., PancakeStore]) -> None:
    store = make("text")
    for user in ("u_1", "ux1", "u%", "u"):
        store.put(("users", user), "k", {"text": user})
    for user in ("u_1", "u%", "u"):
        assert [item.value["text"] for item in store.search(("users", user))] == [user]
        assert [item.value["text"] for item in store.search(("users", user), query="x")] == [user]


def test_pages_do_not_overlap_where_items_without_vectors_fill_up(store: PancakeStore, clock: Clock) -> None:
    for number in range(3):
        store.put(NS, f"scored{number}", {"text": f"red {number}"})
    for number in range(4):
        clock.now_s += 1
        store.put(NS, f"bare{number}", {"text": "x"}, index=False)
    pages = [keys(store.search(NS, query="red", limit=2, offset=offset)) for offset in range(0, 8, 2)]
    whole = keys(store.search(NS, query="red", limit=50))
    assert [key for page in pages for key in page] == whole
    assert whole[3:] == ["bare3", "bare2", "bare1", "bare0"]


# -- items ----------------------------------------------------------------------------------------------------------


def test_an_item_keeps_when_it_was_made_and_tells_when_it_was_changed(store: PancakeStore, clock: Clock) -> None:
    store.put(NS, "a", {"text": "one"})
    clock.now_s += 60
    store.put(NS, "a", {"text": "two"})
    found = store.get(NS, "a")
    assert found is not None
    assert (found.namespace, found.key, found.value) == (NS, "a", {"text": "two"})
    assert found.created_at == datetime.fromtimestamp(1000, UTC)
    assert found.updated_at == datetime.fromtimestamp(1060, UTC)


def test_values_are_copies(store: PancakeStore) -> None:
    value: dict[str, Any] = {"text": "x", "tags": ["a"]}
    store.put(NS, "a", value)
    value["tags"].append("b")
    for item in (store.get(NS, "a"), store.search(NS)[0], store.search(NS, query="x")[0]):
        assert item is not None
        assert item.value["tags"] == ["a"]
        item.value["tags"].append("c")


def test_reads_of_a_batch_see_what_was_there_before_and_the_last_write_counts(store: PancakeStore) -> None:
    store.put(NS, "a", {"text": "old"})
    results = store.batch(
        [
            PutOp(NS, "a", {"text": "new"}),
            GetOp(NS, "a"),
            PutOp(NS, "b", {"text": "lost"}),
            SearchOp(NS, query="old"),
            PutOp(NS, "b", None),
            GetOp(NS, "none"),
            PutOp(NS, "a", {"text": "newest"}),
            ListNamespacesOp((MatchCondition("prefix", ("notes",)),)),
        ]
    )
    assert results[1].value == {"text": "old"}
    assert keys(results[3]) == ["a"]
    assert [results[place] for place in (0, 2, 4, 5, 6)] == [None] * 5
    assert results[7] == [NS]
    assert [item.value for item in store.search(NS)] == [{"text": "newest"}]


def test_paths_reach_into_lists_and_objects(make: Callable[..., PancakeStore], embedder: WordEmbedder) -> None:
    store = make("title", "parts[*].text", "deep.er")
    store.put(NS, "a", {"title": "red", "parts": [{"text": "blue"}, {"no": 1}, {"text": "green"}], "deep": {"er": 5}})
    store.put(NS, "b", {"title": "red", "other": "blue"}, index=["other", "$"])
    assert embedder.documents == [["red", "blue", "green", "5"], ['{"other": "blue", "title": "red"}']]
    assert [item.score for item in store.search(NS, query="green", limit=1)] == [pytest.approx(1.0)]
    assert len(store.search(NS, query="blue")) == 2


def test_the_whole_value_is_indexed_by_default(make: Callable[..., PancakeStore], embedder: WordEmbedder) -> None:
    make().put(NS, "a", {"b": "é", "a": 1})
    assert embedder.documents == [['{"a": 1, "b": "é"}']]


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (PutOp(NS, "a", {"text": "  "}), "text at 'text' is empty"),
        (PutOp(NS, "a", {"text": "x", "n": {1}}), r"n: got set"),
        (PutOp(NS, "a", {"text": "x", "n": float("nan")}), "NaN"),
        (PutOp(NS, "a", ["x"]), "got list"),  # type: ignore[arg-type]
        (PutOp(NS, "a", {"text": "x"}, index=True), "index got bool"),  # type: ignore[arg-type]
        (PutOp(NS, "a", {"text": "x"}, index="text"), "index got str"),  # type: ignore[arg-type]
        (PutOp(NS, "a", {"text": "x"}, ttl=0), "minutes above 0"),
        (PutOp(NS, "", {"text": "x"}), "empty"),
        (PutOp(("a", ""), "a", {"text": "x"}), "empty"),
    ],
)
def test_what_cannot_be_stored_refuses_the_whole_batch(
    store: PancakeStore, embedder: WordEmbedder, op: PutOp, said: str
) -> None:
    with pytest.raises(InvalidItem, match=said):
        store.batch([PutOp(NS, "fine", {"text": "x"}), op])
    assert store.search(()) == []
    assert embedder.documents == []


@pytest.mark.parametrize(
    "op",
    [
        SearchOp(NS, limit=-1),
        SearchOp(NS, offset=-1),
        SearchOp(NS, filter={"a": {"$like": "x"}}),
        SearchOp(NS, filter={"$gt": 1}),
        SearchOp(NS, query=" \n"),
        SearchOp(("",)),
        ListNamespacesOp(limit=-1),
        ListNamespacesOp((MatchCondition("middle", NS),)),  # type: ignore[arg-type]
        "no operation",
    ],
)
def test_what_cannot_be_answered_is_refused(store: PancakeStore, op: Any) -> None:
    store.put(NS, "a", {"text": "x"})
    with pytest.raises(InvalidQuery):
        store.batch([op])


# -- expiry ---------------------------------------------------------------------------------------------------------


def test_items_expire_after_their_minutes_without_use(store: PancakeStore, clock: Clock) -> None:
    store.put(NS, "a", {"text": "x"}, ttl=1)
    store.put(NS, "b", {"text": "x"})
    clock.now_s += 59
    assert store.get(NS, "a", refresh_ttl=False) is not None
    assert len(store.search(NS, query="x", refresh_ttl=False)) == 2
    clock.now_s += 1
    assert store.get(NS, "a") is None
    assert keys(store.search(NS)) == keys(store.search(NS, query="x")) == ["b"]


class Untouched:
    """An engine that can only put again what it is to keep for longer."""

    def __init__(self, engine: MemoryVectorEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        if name == "touch":
            raise AttributeError(name)
        return getattr(self._engine, name)


@pytest.mark.parametrize("touches", [True, False])
@pytest.mark.parametrize("read", ["get", "search", "list"])
def test_reading_moves_the_time_on_and_nothing_else(
    make: Callable[..., PancakeStore], clock: Clock, read: str, touches: bool
) -> None:
    engine = MemoryVectorEngine(16, clock=clock)
    store = make("text", ttl={"default_ttl": 1}, engine=engine if touches else Untouched(engine))
    store.put(NS, "a", {"text": "x"})
    made = store.get(NS, "a")
    for _ in range(3):
        clock.now_s += 50
        if read == "get":
            assert store.get(NS, "a") == made
        else:
            [found] = store.search(NS, query="x" if read == "search" else None)
            assert (found.value, found.updated_at) == (made.value, made.updated_at)
    clock.now_s += 60
    assert store.get(NS, "a") is None


def test_a_store_may_be_told_not_to_refresh(make: Callable[..., PancakeStore], clock: Clock) -> None:
    store = make("text", ttl={"default_ttl": 1, "refresh_on_read": False})
    store.put(NS, "a", {"text": "x"})
    store.put(NS, "b", {"text": "x"}, ttl=None)
    clock.now_s += 50
    assert len(store.search(NS)) == 2
    assert store.get(NS, "a", refresh_ttl=True) is not None
    clock.now_s += 50
    assert store.get(NS, "a") is not None
    clock.now_s += 10
    assert keys(store.search(NS)) == ["b"]


# -- several agents -------------------------------------------------------------------------------------------------


@pytest.fixture
def team(store: PancakeStore) -> PancakeStore:
    store.put(("team",), "gate", {"text": "gate opens"})
    store.put(("agents", "ann"), "own", {"text": "ann gate"})
    store.put(("agents", "bob"), "own", {"text": "bob gate"})
    store.put(("agents", "ann", "deep"), "more", {"text": "ann more"})
    return store


def test_a_view_sees_its_branches_and_nothing_else(team: PancakeStore) -> None:
    ann = team.view(reads=[("team",), ("agents", "ann")], writes=[("agents", "ann")])
    assert isinstance(ann, BaseStore)
    for query in (None, "gate"):
        assert sorted(keys(ann.search((), query=query))) == ["gate", "more", "own"]
        assert sorted(keys(ann.search(("agents",), query=query))) == ["more", "own"]
        assert ann.search(("agents", "bob"), query=query) == []
        assert ann.search(("agents", "an"), query=query) == []
    assert ann.get(("agents", "bob"), "own") is None
    assert ann.get(("team",), "gate") is not None
    assert ann.list_namespaces() == [("agents", "ann"), ("agents", "ann", "deep"), ("team",)]
    assert ann.list_namespaces(max_depth=1) == [("agents",), ("team",)]


def test_documents_on_the_same_engine_are_seen_as_they_are(embedder: WordEmbedder) -> None:
    engine = MemoryVectorEngine(16)
    PancakeVectorStore(embedder, engine=engine).add_texts(["red"], [{"n": 1}], ids=["a"])
    [found] = PancakeStore(index={"dims": 16, "embed": embedder}, engine=engine).search(("documents",), query="red")
    assert (found.key, found.value) == ("a", {"text": "red", "metadata": {"n": 1}})


def test_a_view_writes_only_where_it_may(team: PancakeStore) -> None:
    ann = team.view(reads=[("team",), ("agents", "ann")], writes=[("agents", "ann")])
    ann.put(("agents", "ann"), "new", {"text": "x"})
    for at in (("team",), ("agents", "bob"), ("agents",)):
        with pytest.raises(InvalidItem, match="agents/ann"):
            ann.put(at, "new", {"text": "x"})
        with pytest.raises(InvalidItem, match="outside"):
            ann.delete(at, "own")
    assert team.get(("agents", "bob"), "own") is not None
    assert team.get(("agents", "ann"), "new") is not None


def test_an_allow_list_holds_for_every_way_to_read(team: PancakeStore) -> None:
    some = team.view(allowed=[(("team",), "gate"), (("agents", "bob"), "none")])
    assert keys(some.search(())) == keys(some.search((), query="gate")) == ["gate"]
    assert some.get(("agents", "ann"), "own") is None
    assert some.list_namespaces() == [("team",)]
    assert team.view(allowed=[]).search((), query="gate") == []


def test_a_view_of_a_view_is_never_wider(team: PancakeStore) -> None:
    agents = team.view(reads=[("agents",)], allowed=[(("agents", "ann"), "own")])
    ann = agents.view(
        reads=[("agents", "ann")], allowed=[(("agents", "ann"), "own"), (("agents", "ann", "deep"), "more")]
    )
    assert keys(ann.search(())) == ["own"]
    assert keys(agents.view().search(())) == ["own"]
    for change in (
        {"reads": [("team",)]},
        {"writes": [()]},
        {"reads": [()]},
        {"reads": ["agents"]},
        {"reads": [("",)]},
    ):
        with pytest.raises(ConfigError):
            agents.view(**change)  # type: ignore[arg-type]
    with pytest.raises(InvalidItem):
        agents.put(("team",), "x", {"text": "x"})


# -- opening, embedders ---------------------------------------------------------------------------------------------


def test_it_is_exported() -> None:
    assert pancake_langgraph.PancakeStore is PancakeStore


def test_without_an_index_items_are_listed_only(clock: Clock) -> None:
    store = PancakeStore(clock=clock)
    store.put(NS, "a", {"text": ""}, index=["text"])
    store.put(NS, "b", {"text": "red"})
    assert [(item.key, item.score) for item in store.search(NS, query="red")] == [("a", None), ("b", None)]
    store.close()
    assert store.search(NS) == [], "in memory; the next use begins anew"


@pytest.mark.parametrize(
    "settings",
    [
        {"index": {"dims": 3}},
        {"index": {"dims": 3, "embed": len, "field": ["x"]}},
        {"index": {"dims": 3, "embed": len, "fields": "text"}},
        {"index": {"dims": 3, "embed": len, "fields": [""]}},
        {"index": {"dims": 3, "embed": len}, "engine": MemoryVectorEngine(4)},
        {"engine": MemoryVectorEngine(4), "path": "x"},
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: Any) -> None:
    with pytest.raises(ConfigError):
        PancakeStore(**settings)
    with pytest.raises(RetrievalError):
        PancakeStore(index={"dims": 0, "embed": len, "fields": ["text"]})


@pytest.mark.parametrize(
    ("answer", "error"),
    [([[float("nan")] * 16], EmbeddingError), ([], EmbeddingError), ([[1.0] * 15], EmbedderMismatch)],
)
async def test_an_embedder_that_answers_wrongly_stores_nothing(
    make: Callable[..., PancakeStore], answer: Any, error: type[Exception]
) -> None:
    store = make(index={"dims": 16, "embed": BrokenEmbedder(answer=answer), "fields": ["text"]})
    with pytest.raises(error):
        store.put(NS, "a", {"text": "x"})
    with pytest.raises(error):
        await store.aput(NS, "a", {"text": "x"})
    store.put(NS, "b", {"text": "x"}, index=False)
    assert keys(store.search(NS)) == ["b"]
    with pytest.raises(error):
        store.search(NS, query="x")


async def test_functions_may_embed_also_async_ones(make: Callable[..., PancakeStore]) -> None:
    def embed(texts: list[str]) -> list[list[float]]:
        return [text_vector(text, 16) for text in texts]

    async def aembed(texts: list[str]) -> list[list[float]]:
        return embed(texts)

    for function in (embed, aembed):
        store = make(index={"dims": 16, "embed": function, "fields": ["text"]})
        await store.aput(NS, "a", {"text": "red"})
        await store.aput(NS, "b", {"text": "blue"})
        assert keys(await store.asearch(NS, query="blue", limit=1)) == ["b"]
    with pytest.raises(EmbeddingError, match="async"):
        store.put(NS, "a", {"text": "red"})
    assert store.get(NS, "a") is not None


# -- async, threads -------------------------------------------------------------------------------------------------


async def test_async_methods_wait_in_own_threads(
    store: PancakeStore, embedder: WordEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, executors = asyncio.get_running_loop(), []
    original = loop.run_in_executor
    monkeypatch.setattr(loop, "run_in_executor", lambda who, *call: (executors.append(who), original(who, *call))[1])
    await asyncio.gather(*(store.aput(NS, str(n), {"text": f"word{n}"}, ttl=5) for n in range(20)))
    found = await asyncio.gather(*(store.asearch(NS, query=f"word{n}", limit=1) for n in range(20)))
    assert [keys(items) for items in found] == [[str(n)] for n in range(20)]
    assert (await store.aget(NS, "3")).value == {"text": "word3"}  # type: ignore[union-attr]
    await store.adelete(NS, "3")
    assert await store.aget(NS, "3") is None
    assert await store.alist_namespaces() == [NS]
    assert None not in executors, "the loop's default executor is the app's"
    assert set(embedder.threads) == {"pancake-embed"}
    await store.aclose()
    assert not [thread for thread in threading.enumerate() if "pancake-memory" in thread.name]


async def test_a_value_that_changes_while_it_is_embedded_is_stored_as_it_was(make: Callable[..., PancakeStore]) -> None:
    class Slow(AsyncWordEmbedder):
        async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
            value["text"] = "changed"
            return await super().aembed_documents(texts)

    value = {"text": "red"}
    store = make(index={"dims": 16, "embed": Slow(), "fields": ["text"]})
    await store.aput(NS, "a", value)
    assert store.get(NS, "a").value == {"text": "red"}  # type: ignore[union-attr]


async def test_a_graph_remembers_with_it(store: PancakeStore) -> None:
    def node(state: MessagesState, *, store: BaseStore) -> dict[str, Any]:
        known = store.search(NS, query="gate", limit=1)
        store.put(NS, "gate", {"text": "the gate opens at nine"})
        return {"messages": [("ai", known[0].value["text"] if known else "no idea")]}

    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    builder.add_edge("node", END)
    graph = builder.compile(store=store)
    answers = [graph.invoke({"messages": []})["messages"][-1].content for _ in range(2)]
    answers.append((await graph.ainvoke({"messages": []}))["messages"][-1].content)
    assert answers == ["no idea", "the gate opens at nine", "the gate opens at nine"]
