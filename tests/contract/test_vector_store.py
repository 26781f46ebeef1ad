"""`PancakeVectorStore`: LangChain's own suites, and what they do not ask."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests.vectorstores import VectorStoreIntegrationTests

import pancake_langgraph
from pancake_langgraph._errors import ConfigError, EmbedderMismatch, EmbeddingError, InvalidItem, InvalidQuery
from pancake_langgraph.retrieval.base import Item, ItemId
from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine
from pancake_langgraph.vector_store import PancakeVectorStore
from tests.embedders import AsyncWordEmbedder, BrokenEmbedder, WordEmbedder, text_vector


class TestStandard(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:
        store = PancakeVectorStore(self.get_embeddings())
        yield store
        store.close()


@pytest.fixture
def embedder() -> WordEmbedder:
    return WordEmbedder()


@pytest.fixture
def store(embedder: WordEmbedder) -> Iterator[PancakeVectorStore]:
    store = PancakeVectorStore(embedder)
    yield store
    store.close()


def texts(documents: list[Document]) -> list[str]:
    return [document.page_content for document in documents]


def cosine(one: str, other: str) -> float:
    left, right = np.array(text_vector(one, 16)), np.array(text_vector(other, 16))
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))


# -- opening --------------------------------------------------------------------------------------------------------


def test_it_is_exported() -> None:
    assert pancake_langgraph.PancakeVectorStore is PancakeVectorStore


def test_the_constructor_opens_and_embeds_nothing(embedder: WordEmbedder, tmp_path: Path) -> None:
    store = PancakeVectorStore(embedder, path=tmp_path / "index")
    assert store.embeddings is embedder
    store.close()
    assert (embedder.documents, embedder.queries, list(tmp_path.iterdir())) == ([], [], [])


def test_an_engine_and_a_path_exclude_each_other(embedder: WordEmbedder) -> None:
    with pytest.raises(ConfigError, match="both"):
        PancakeVectorStore(embedder, engine=MemoryVectorEngine(16), path="x")


def test_an_index_is_opened_at_first_use_and_again_after_close(
    embedder: WordEmbedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class Engine(MemoryVectorEngine):
        def __init__(self, path: str, *, dim: int, fingerprint: str | None, **_: Any) -> None:
            opened.append((path, dim, fingerprint))
            super().__init__(dim)

    module = ModuleType("pancake_langgraph.retrieval.disk_engine")
    module.DiskVectorEngine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    store = PancakeVectorStore(embedder, path=tmp_path / "index", fingerprint=lambda: "print")
    assert store.get_by_ids(["none"]) == []
    store.add_texts(["one"])
    assert opened == [(str(tmp_path / "index"), 16, "print")]
    store.close()
    store.close()
    assert store.similarity_search("one") == []
    assert len(opened) == 2


def test_an_engine_that_was_given_stays_open(embedder: WordEmbedder) -> None:
    engine = MemoryVectorEngine(16)
    store = PancakeVectorStore(embedder, engine=engine)
    store.add_texts(["one"])
    store.close()
    assert engine.stats().num_items == 1
    assert embedder.queries == [], "the engine says how long vectors are"


# -- writing --------------------------------------------------------------------------------------------------------


def test_ids_that_stand_twice_are_refused_and_nothing_is_stored_or_embedded(
    store: PancakeVectorStore, embedder: WordEmbedder
) -> None:
    with pytest.raises(InvalidItem, match="more than once"):
        store.add_texts(["one", "two", "three"], ids=["a", "b", "a"])
    assert embedder.documents == []
    assert store.similarity_search("one") == []


def test_after_a_refused_call_every_text_is_still_found_by_itself(store: PancakeVectorStore) -> None:
    words = [f"word{number}" for number in range(45)]
    store.add_texts(words[:20], ids=words[:20])
    with pytest.raises(InvalidItem):
        store.add_texts(["x", "y"], ids=["word0", "word0"])
    for word in words[20:]:
        store.add_texts([word], ids=[word])
    assert [texts(store.similarity_search(word, k=1)) for word in words] == [[word] for word in words]


def test_an_id_that_exists_is_replaced_with_its_metadata(store: PancakeVectorStore) -> None:
    store.add_texts(["old text"], [{"v": 1}], ids=["a"])
    assert store.add_texts(["new words"], ids=["a"]) == ["a"]
    assert store.get_by_ids(["a"]) == [Document(id="a", page_content="new words", metadata={})]
    assert len(store.similarity_search("old", k=10)) == 1


def test_documents_without_ids_get_some_and_equal_texts_are_embedded_once(
    store: PancakeVectorStore, embedder: WordEmbedder
) -> None:
    ids = store.add_texts(["same", "same", "other"], [{"n": 1}, {"n": 2}, {"n": 3}])
    assert len(set(ids)) == 3
    assert embedder.documents == [["same", "other"]]
    assert sorted(found.metadata["n"] for found in store.similarity_search("same", k=2)) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"texts": ["one", " \n"]}, "text 1: got an empty text"),
        ({"texts": ["one", 2]}, "text 1: got int"),
        ({"texts": ["one"], "metadatas": [{}, {}]}, "metadatas: got 2 for 1"),
        ({"texts": ["one"], "ids": []}, "ids: got 0 for 1"),
        ({"texts": ["one"], "metadatas": [{"when": {1}}]}, "metadata.when: got set"),
        ({"texts": ["one"], "metadatas": [{"n": float("inf")}]}, "infinity"),
    ],
)
def test_what_cannot_be_stored_is_refused_whole(store: PancakeVectorStore, arguments: Any, said: str) -> None:
    with pytest.raises(InvalidItem, match=said):
        store.add_texts(**arguments)
    assert store.similarity_search("one") == []


def test_delete_without_ids_deletes_all_of_its_own_namespace(store: PancakeVectorStore) -> None:
    other, below = store.view(("elsewhere",)), store.view(("documents", "below"))
    store.add_texts(["one", "two"])
    other.add_texts(["one"])
    below.add_texts(["deep one"])
    assert store.delete() is True
    assert texts(store.similarity_search("one")) == ["deep one"], "found from above, and not its to delete"
    assert texts(other.similarity_search("one")) == ["one"]


# -- searching ------------------------------------------------------------------------------------------------------


def test_scores_are_cosines_and_relevance_is_from_0_to_1(store: PancakeVectorStore) -> None:
    words = ["red apple", "red car", "blue sea", "deep blue sea", "nothing"]
    store.add_texts(words)
    found = store.similarity_search_with_score("red apple", k=5)
    assert [document.page_content for document, _ in found] == sorted(words, key=lambda w: -cosine("red apple", w))
    assert [score for _, score in found] == pytest.approx(
        sorted((cosine("red apple", w) for w in words), reverse=True), abs=1e-6
    )
    relevance = [score for _, score in store.similarity_search_with_relevance_scores("red apple", k=5)]
    assert relevance == pytest.approx([max(0.0, score) for _, score in found])
    assert relevance[0] == pytest.approx(1.0)


def test_questions_are_embedded_as_questions(store: PancakeVectorStore, embedder: WordEmbedder) -> None:
    store.add_texts(["one"])
    store.similarity_search("what")
    assert (embedder.documents, embedder.queries[-1]) == ([["one"]], "what")


def test_all_that_match_a_filter_come_back(store: PancakeVectorStore) -> None:
    store.add_texts([f"red apple {n}" for n in range(100)], [{"agent": "you"}] * 100)
    store.add_texts(["blue sea", "green sea"], [{"agent": "me", "n": 1}, {"agent": "me", "n": 10}])
    assert sorted(texts(store.similarity_search("red apple", k=5, filter={"agent": "me"}))) == ["blue sea", "green sea"]
    assert texts(store.similarity_search("red", filter={"n": {"$gt": 9}})) == ["green sea"]
    assert texts(store.similarity_search("red", filter={"$or": [{"n": 1}, {"n": 2}]})) == ["blue sea"]
    assert len(store.similarity_search("red apple", k=200, filter={})) == 102


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": ""},
        {"query": "  "},
        {"query": None},
        {"query": "x", "k": -1},
        {"query": "x", "filter": {"a": {"$regex": "x"}}},
        {"query": "x", "filter": {"$eq": "x"}},
        {"query": "x", "filter": lambda document: True},
        {"query": "x", "fetch_k": 60},
    ],
)
def test_what_cannot_be_answered_is_refused(store: PancakeVectorStore, arguments: Any) -> None:
    store.add_texts(["one"])
    with pytest.raises(InvalidQuery):
        store.similarity_search(**arguments)


def test_a_vector_is_searched_for_whatever_its_length(store: PancakeVectorStore) -> None:
    store.add_texts(["red apple", "blue sea"])
    vector = [number * 1e30 for number in text_vector("blue sea", 16)]
    assert texts(store.similarity_search_by_vector(vector, k=1)) == ["blue sea"]
    for bad in (vector[:-1], [float("nan")] * 16, "text", [[1.0]]):
        with pytest.raises(InvalidQuery):
            store.similarity_search_by_vector(bad)  # type: ignore[arg-type]


def test_diverse_results_leave_out_what_says_the_same(store: PancakeVectorStore) -> None:
    store.add_texts(["red apple pie", "red apple pie", "red apple pie", "red apple", "blue sea"])
    near = store.max_marginal_relevance_search("red apple pie", k=2, lambda_mult=1.0)
    assert texts(near) == ["red apple pie", "red apple pie"]
    mixed = store.max_marginal_relevance_search("red apple pie", k=2, lambda_mult=0.3)
    assert mixed[0].page_content == "red apple pie" != mixed[1].page_content
    by_vector = store.max_marginal_relevance_search_by_vector(text_vector("red apple pie", 16), k=2, lambda_mult=0.3)
    assert texts(by_vector) == texts(mixed)
    assert store.max_marginal_relevance_search("red", k=0) == []
    assert len(store.max_marginal_relevance_search("red", k=99, fetch_k=1)) == 5
    with pytest.raises(InvalidQuery, match="lambda_mult"):
        store.max_marginal_relevance_search("red", lambda_mult=1.5)


async def test_it_is_a_retriever_of_every_kind(store: PancakeVectorStore) -> None:
    store.add_texts(["red apple", "blue sea"], [{"n": 1}, {"n": 2}])
    for search_type, more in (
        ("similarity", {}),
        ("mmr", {"fetch_k": 5}),
        ("similarity_score_threshold", {"score_threshold": 0.9}),
    ):
        retriever = store.as_retriever(search_type=search_type, search_kwargs={"k": 1, "filter": {"n": 2}, **more})
        assert texts(retriever.invoke("blue sea")) == texts(await retriever.ainvoke("blue sea")) == ["blue sea"]


# -- several agents -------------------------------------------------------------------------------------------------


def test_views_share_one_engine_and_see_what_they_may(embedder: WordEmbedder) -> None:
    team = PancakeVectorStore(embedder, namespace=("team",))
    ann = team.view(("agents", "ann"), shared=[("team",)])
    bob = team.view(("agents", "bob"), shared=[("team",)])
    team.add_texts(["the gate opens at nine"], ids=["gate"])
    ann.add_texts(["ann likes tea"], ids=["own"])
    bob.add_texts(["bob likes tea"], ids=["own"])
    assert sorted(texts(ann.similarity_search("tea", k=9))) == ["ann likes tea", "the gate opens at nine"]
    assert sorted(texts(bob.similarity_search("tea", k=9))) == ["bob likes tea", "the gate opens at nine"]
    assert ann.get_by_ids(["own", "gate"])[0].page_content == "ann likes tea"
    ann.delete(["gate", "own"])
    assert texts(ann.similarity_search("tea", k=9)) == ["the gate opens at nine"], "what is shared is not its to delete"
    assert embedder.documents.count(["the gate opens at nine"]) == 1


def test_an_allow_list_holds_for_every_way_to_read(embedder: WordEmbedder) -> None:
    store = PancakeVectorStore(embedder)
    store.add_texts(["red", "red", "red"], ids=["a", "b", "c"])
    some = store.view(("documents",), allowed=["b", "none"])
    assert [found.id for found in some.similarity_search("red")] == ["b"]
    assert [found.id for found in some.max_marginal_relevance_search("red")] == ["b"]
    assert [found.id for found in some.get_by_ids(["a", "b"])] == ["b"]
    assert store.view(("documents",), allowed=[]).similarity_search("red") == []


def test_items_of_another_layout_do_not_break_a_search(embedder: WordEmbedder) -> None:
    engine = MemoryVectorEngine(16)
    engine.put([Item(ItemId(("documents",), "odd"), {"text": 5}, (np.ones(16, np.float32),))])
    [found] = PancakeVectorStore(embedder, engine=engine).similarity_search("x")
    assert found == Document(id="odd", page_content="")


# -- embedders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, EmbeddingError),
        ([], EmbeddingError),
        ([[float("nan")] * 16], EmbeddingError),
        ([[1.0] * 16, [1.0] * 16], EmbeddingError),
        ([["a"] * 16], EmbeddingError),
        ([[[1.0]] * 16], EmbeddingError),
        ([[1.0] * 15], EmbedderMismatch),
    ],
)
async def test_an_embedder_that_answers_wrongly_is_named(answer: Any, error: type[Exception]) -> None:
    engine = MemoryVectorEngine(16)
    store = PancakeVectorStore(BrokenEmbedder(answer=answer), engine=engine)
    with pytest.raises(error, match="BrokenEmbedder"):
        store.add_texts(["one"])
    with pytest.raises(error, match="BrokenEmbedder"):
        await store.aadd_texts(["one"])
    assert engine.stats().num_items == 0


def test_a_vector_of_zeros_is_like_nothing() -> None:
    store = PancakeVectorStore(BrokenEmbedder(answer=[[0.0] * 4]))
    store.add_texts(["one"])
    assert [score for _, score in store.similarity_search_with_score("one")] == [0.0]


# -- async ----------------------------------------------------------------------------------------------------------


async def test_async_methods_wait_in_own_threads_and_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = WordEmbedder()
    store = PancakeVectorStore(embedder)

    before = {thread.name.partition("_")[0] for thread in threading.enumerate()} - {"pancake-documents"}
    loop, executors = asyncio.get_running_loop(), []
    original = loop.run_in_executor
    monkeypatch.setattr(loop, "run_in_executor", lambda who, *call: (executors.append(who), original(who, *call))[1])
    await store.aadd_texts(["red apple", "blue sea"], [{"n": 1}, {"n": 2}], ids=["a", "b"])
    assert texts(await store.asimilarity_search("blue", k=1)) == ["blue sea"]
    assert await store.asimilarity_search_with_score("blue") == store.similarity_search_with_score("blue")
    vector = text_vector("red", 16)
    assert texts(await store.asimilarity_search_by_vector(vector, k=1)) == ["red apple"]
    assert len(await store.amax_marginal_relevance_search("red", filter={"n": 2})) == 1
    assert len(await store.amax_marginal_relevance_search_by_vector(vector)) == 2
    assert texts(await store.aget_by_ids(["b"])) == ["blue sea"]
    await store.adelete(["a"])
    assert texts(await store.asimilarity_search("red apple")) == ["blue sea"]
    assert executors
    assert None not in executors, "the loop's default executor is the app's"
    assert set(embedder.threads) == {"pancake-embed"}
    await store.aclose()
    other = await PancakeVectorStore.afrom_texts(["one"], embedder, ids=["x"])
    assert texts(other.get_by_ids(["x"])) == ["one"]
    await other.aclose()
    names = {thread.name.partition("_")[0] for thread in threading.enumerate()} - before
    assert not [name for name in names if name.startswith("pancake")]


async def test_an_embedder_with_async_methods_of_its_own_is_asked_on_the_loop() -> None:
    embedder = AsyncWordEmbedder()
    store = await PancakeVectorStore.afrom_texts(["one"], embedder)
    await store.asimilarity_search("one")
    assert embedder.threads == ["MainThread"] * 2
    await store.aclose()
