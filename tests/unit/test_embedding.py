"""Embedding for many: one call for what comes together, no text twice, wrong answers named."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings

from pancake_langgraph._errors import (
    EmbedderMismatch,
    EmbeddingError,
    InvalidItem,
    InvalidQuery,
    RetrievalError,
    RetrievalTimeout,
)
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from pancake_langgraph.retrieval.lanes import Priority

DIM = 6
LIMIT_S = 30.0


class Recorder(Embeddings):
    """Answers with numbers made of the text; records calls; can be held up; `spoil` changes answers."""

    prefix = ""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.asked_queries: list[str] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.spoil: Callable[[str, list[float]], Any] = lambda text, vector: vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.calls.append(list(texts))
        self.began.release()
        assert self.gate.wait(LIMIT_S)
        return [self.spoil(text, self._vector(text)) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.asked_queries.append(text)
        self.began.release()
        assert self.gate.wait(LIMIT_S)
        return self.spoil(text, self._vector(self.prefix + text))

    def _vector(self, text: str) -> list[float]:
        return DeterministicFakeEmbedding(size=DIM).embed_query(text)


class Asymmetric(Recorder):
    prefix = "query: "


class Together(Asymmetric):
    def embed_queries(self, texts: list[str]) -> list[list[float]]:
        return [self._vector(self.prefix + text) for text in self.embed_documents(texts) and texts]


@pytest.fixture
def model() -> Recorder:
    return Recorder()


@pytest.fixture
def embeddings(model: Recorder) -> Iterator[BatchedEmbeddings]:
    with BatchedEmbeddings(model) as made:
        yield made
        model.gate.set()


async def ask_together(embeddings: BatchedEmbeddings, model: Recorder, texts: list[str]) -> list[list[float]]:
    """Ask for all texts, one task each, while the model is busy with another one."""
    model.gate.clear()
    busy = asyncio.create_task(embeddings.aquery_vector("busy"))
    assert await asyncio.to_thread(model.began.acquire, timeout=LIMIT_S)
    tasks = [asyncio.create_task(embeddings.aembed_query(text)) for text in texts]
    while embeddings.stats().worker.queued_items < len(texts):
        await asyncio.sleep(0)
    model.gate.set()
    await busy
    return await asyncio.gather(*tasks)


def expected(text: str, prefix: str = "") -> list[float]:
    vector = np.array(DeterministicFakeEmbedding(size=DIM).embed_query(prefix + text), np.float32)
    return vector.tolist()


# -- batches --------------------------------------------------------------------------------------------------------


async def test_questions_that_come_together_are_one_call(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    texts = [f"question {n % 10}" for n in range(30)]
    assert await ask_together(embeddings, model, texts) == [expected(text) for text in texts]
    assert model.calls[1:] == [texts[:10]]  # after the trial; equal texts once
    assert not set(model.asked_queries) & set(texts)


async def test_questions_are_embedded_as_questions() -> None:
    model = Asymmetric()
    with BatchedEmbeddings(model) as embeddings:
        assert await ask_together(embeddings, model, ["a", "b", "a"]) == [expected(t, "query: ") for t in "aba"]
        assert embeddings.embed_documents(["a"]) == [expected("a")]
        assert model.asked_queries.count("a") == 1


async def test_an_embedder_that_takes_many_questions_is_given_them() -> None:
    model = Together()
    with BatchedEmbeddings(model) as embeddings:
        assert await ask_together(embeddings, model, ["a", "b", "a"]) == [expected(t, "query: ") for t in "aba"]
        assert model.calls == [["busy"], ["a", "b"]]
        assert model.asked_queries == []


async def test_a_question_overtakes_an_import(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    model.gate.clear()
    many = asyncio.create_task(embeddings.adocument_vectors([f"chunk {n}" for n in range(100)]))
    assert await asyncio.to_thread(model.began.acquire, timeout=LIMIT_S)
    asked = asyncio.create_task(embeddings.aquery_vector("now"))
    while not embeddings.stats().worker.queued_items > 68:
        await asyncio.sleep(0)
    model.gate.set()
    await asked
    assert len(await many) == 100
    assert embeddings.stats().worker.batches == 5
    assert [len(call) for call in model.calls] == [32, 32, 32, 4]
    assert model.asked_queries == ["now"]


def test_a_few_documents_go_together_and_may_be_bulk(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    assert embeddings.embed_documents(["a", "b", "a"]) == [expected(text) for text in "aba"]
    assert embeddings.document_vectors(["c"], priority=Priority.BULK)[0].tolist() == expected("c")
    assert model.calls == [["a", "b"], ["c"]]
    assert embeddings.embed_documents([]) == []


def test_vectors_are_float32_and_cannot_be_changed(embeddings: BatchedEmbeddings) -> None:
    vector = embeddings.query_vector("a")
    assert vector.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        vector[0] = 1
    assert embeddings.dim == DIM


# -- the cache ------------------------------------------------------------------------------------------------------


async def test_what_was_embedded_is_not_embedded_again(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    first = embeddings.query_vector("a")
    assert embeddings.query_vector("a") is first
    assert await embeddings.aquery_vector("a") is first
    assert model.asked_queries == ["a"]
    stats = embeddings.stats()
    assert (stats.embedded_texts, stats.cache_hits, stats.num_cached, stats.model_calls) == (1, 2, 1, 1)


def test_only_what_is_new_in_a_batch_is_embedded(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    embeddings.embed_documents(["a"])
    assert embeddings.embed_documents(["a", "b"]) == [expected("a"), expected("b")]
    assert model.calls == [["a"], ["b"]]


def test_questions_and_documents_are_remembered_apart() -> None:
    with BatchedEmbeddings(Asymmetric()) as embeddings:
        assert embeddings.embed_documents(["a"]) == [expected("a")]
        assert embeddings.embed_query("a") == expected("a", "query: ")


def test_the_least_recently_used_vector_goes(model: Recorder) -> None:
    with BatchedEmbeddings(model, max_cached=2) as embeddings:
        for text in "abac":
            embeddings.query_vector(text)
        embeddings.query_vector("a")
        embeddings.query_vector("b")
    assert model.asked_queries == ["a", "b", "c", "b"]
    assert embeddings.stats().num_cached == 2


def test_nothing_is_remembered_where_nothing_may_be(model: Recorder) -> None:
    with BatchedEmbeddings(model, max_cached=0) as embeddings:
        embeddings.query_vector("a")
        embeddings.query_vector("a")
    assert model.asked_queries == ["a", "a"]


def test_a_text_that_is_no_unicode_is_embedded(embeddings: BatchedEmbeddings) -> None:
    assert embeddings.dim is None
    with pytest.raises(UnicodeEncodeError):  # the fake's own; the cache and the queue took it
        embeddings.query_vector("\ud800")


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, math.nan, 2.0], "1 of 3 numbers NaN"),
        ([1.0, math.inf], "1 of 2 numbers"),
        ([1e300, 0.0], "1 of 2 numbers"),
        ([], r"shape \(0,\)"),
        ([[1.0], [2.0]], r"shape \(2, 1\)"),
        (["a"], "list: could not convert"),
        (None, r"got an array of shape \(\)|NoneType"),
    ],
)
def test_an_answer_that_is_no_vector_is_named(
    model: Recorder, embeddings: BatchedEmbeddings, answer: Any, message: str
) -> None:
    model.spoil = lambda text, vector: answer
    with pytest.raises(EmbeddingError, match=message):
        embeddings.query_vector("a")
    model.spoil = lambda text, vector: vector
    assert embeddings.embed_query("a") == expected("a")  # the failure is not remembered


async def test_a_wrong_answer_hurts_only_its_own_text(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    embeddings.query_vector("first")
    model.spoil = lambda text, vector: [math.nan] if text == "bad" else vector
    model.gate.clear()
    busy = asyncio.create_task(embeddings.aquery_vector("busy"))
    await asyncio.to_thread(model.began.acquire, timeout=LIMIT_S)
    tasks = [asyncio.create_task(embeddings.aembed_documents([text])) for text in ("a", "bad", "b")]
    while embeddings.stats().worker.queued_items < 3:
        await asyncio.sleep(0)
    model.gate.set()
    found = await asyncio.gather(busy, *tasks, return_exceptions=True)
    assert [found[1], found[3]] == [[expected("a")], [expected("b")]]
    assert isinstance(found[2], EmbeddingError)


def test_a_text_that_breaks_the_model_fails_alone(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    def refuse(text: str, vector: list[float]) -> list[float]:
        if text == "too long":
            raise ConnectionError("413")
        return vector

    model.spoil = refuse
    found = embeddings._embed([embeddings._document(text, 0) for text in ("a", "too long", "b")])
    assert [getattr(answer, "error", None).__class__ for answer in found] == [type(None), ConnectionError, type(None)]
    with pytest.raises(ConnectionError):
        embeddings.embed_documents(["c", "too long"])


def test_a_model_that_is_down_is_not_asked_for_each_text(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    def fail(text: str, vector: list[float]) -> list[float]:
        raise ConnectionError("down")

    model.spoil = fail
    with pytest.raises(ConnectionError):
        embeddings.document_vectors([str(n) for n in range(30)])
    assert [len(call) for call in model.calls] == [30, 1, 1, 1, 1]


def test_a_wrong_count_is_named(
    model: Recorder, embeddings: BatchedEmbeddings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "embed_documents", lambda texts: [])
    with pytest.raises(EmbeddingError, match="got 0 vectors for 1 texts"):
        embeddings.embed_documents(["a", "b"])


def test_vectors_of_another_size_are_another_embedder(model: Recorder) -> None:
    with (
        BatchedEmbeddings(model, dim=7) as embeddings,
        pytest.raises(EmbedderMismatch, match="got a vector of 6"),
    ):
        embeddings.query_vector("a")


def test_vectors_of_several_sizes_are_named(model: Recorder, embeddings: BatchedEmbeddings) -> None:
    embeddings.query_vector("a")
    model.spoil = lambda text, vector: [*vector, 1.0]
    with pytest.raises(EmbeddingError, match="vectors of 6 and of 7"):
        embeddings.query_vector("b")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(model: Recorder, embeddings: BatchedEmbeddings, text: str) -> None:
    with pytest.raises(InvalidQuery, match="got an empty text"):
        embeddings.query_vector(text)
    with pytest.raises(InvalidItem, match="text 1: got an empty text"):
        embeddings.document_vectors(["a", text])
    assert model.calls == []


def test_an_empty_text_may_be_like_nothing(model: Recorder) -> None:
    with BatchedEmbeddings(model, empty_text="zero") as embeddings:
        assert embeddings.embed_query(" ") == [0.0] * DIM
        assert embeddings.embed_documents(["", "a"]) == [[0.0] * DIM, expected("a")]
    assert "" not in {text for call in model.calls for text in call}


@pytest.mark.parametrize("text", [None, 3, b"bytes"])
def test_what_is_no_text_is_refused(embeddings: BatchedEmbeddings, text: Any) -> None:
    with pytest.raises(InvalidQuery, match="allowed is a text"):
        embeddings.query_vector(text)
    with pytest.raises(InvalidItem, match="allowed is a text"):
        embeddings.document_vectors([text])


async def test_deadlines_and_ends_are_typed(model: Recorder) -> None:
    embeddings = BatchedEmbeddings(model)
    model.gate.clear()
    with pytest.raises(RetrievalTimeout):
        await embeddings.aquery_vector("a", timeout_s=0.01)
    model.gate.set()
    embeddings.close()
    with pytest.raises(RetrievalError, match="closed"):
        embeddings.query_vector("b")
