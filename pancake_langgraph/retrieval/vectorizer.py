"""From texts to vectors that an engine can hold: checked, of length one, every text embedded once a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langgraph.store.base.embed import EmbeddingsLambda

from pancake_langgraph._errors import EmbedderMismatch, EmbeddingError, InvalidItem, InvalidQuery
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.checks import checked_dim
from pancake_langgraph.retrieval.worker_threads import WorkerThreads

#: What is embedded to learn how long an embedder's vectors are.
_PROBE = "How long are the vectors of this embedder?"


class Vectorizer:
    """Asks an embedder.  Thread safe as far as the embedder is.

    Texts to store go through `embed_documents`, texts to search for through `embed_query`, which many embedders treat
    differently.  Products of what comes back are cosines.  A vector of zeros stays one: it is like nothing.
    """

    def __init__(self, embeddings: Embeddings, workers: WorkerThreads, *, dim: int | None = None) -> None:
        """Ask `embeddings` for vectors of `dim` numbers; `None` takes the length of the first answer.

        `workers` run the embedder for async methods when it has none of its own.
        """
        self.embeddings = embeddings
        self._workers = workers
        self._lock = threading.Lock()
        self._dim = None if dim is None else checked_dim(dim)

    @property
    def dim(self) -> int | None:
        """Length of the vectors; `None` until it is known."""
        return self._dim

    def learn_dim(self) -> int:
        """Return the length of the vectors, asking for one if no text was embedded yet.

        Raises:
            EmbeddingError: if the embedder's answer is no vector.
        """
        return self._dim or len(self.query(_PROBE))

    def documents(self, texts: Sequence[str]) -> list[Vector]:
        """Return a vector for each text, in order.

        Raises:
            InvalidItem: if a text is empty.
            EmbeddingError: if the answer is not one vector for each text, or has NaN.
            EmbedderMismatch: if vectors have another length than before.
        """
        wanted = _wanted(texts)
        answer = self._asked(self.embeddings.embed_documents, wanted) if wanted else []
        return self._each(texts, wanted, answer)

    async def adocuments(self, texts: Sequence[str]) -> list[Vector]:
        """Do what `documents` does."""
        wanted = _wanted(texts)
        if not wanted:
            return []
        if not self._is_async("aembed_documents"):
            return await self._workers.run(self.documents, texts)
        return self._each(texts, wanted, await self.embeddings.aembed_documents(wanted))

    def query(self, text: str) -> Vector:
        """Return the vector of what is searched for.

        Raises:
            InvalidQuery: if the text is empty.
            EmbeddingError: if the answer is no vector, or has NaN.
            EmbedderMismatch: if it has another length than before.
        """
        return self._checked([self._asked(self.embeddings.embed_query, _asked_for(text))])[0]

    async def aquery(self, text: str) -> Vector:
        """Do what `query` does."""
        if not self._is_async("aembed_query"):
            return await self._workers.run(self.query, text)
        return self._checked([await self.embeddings.aembed_query(_asked_for(text))])[0]

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_async(self, name: str) -> bool:
        """Return whether the embedder's async method is more than its other one in the default executor."""
        if isinstance(self.embeddings, EmbeddingsLambda):
            return hasattr(self.embeddings, "afunc")
        return getattr(type(self.embeddings), name, None) is not getattr(Embeddings, name)

    def _asked(self, method: Callable[[Any], Any], texts: Any) -> Any:
        if isinstance(self.embeddings, EmbeddingsLambda) and hasattr(self.embeddings, "afunc"):
            raise EmbeddingError(
                "cannot embed: the store was given an async function, and a synchronous method was called; "
                "use the async methods (`aput`, `asearch`, ...), or give it a function that is not async"
            )
        return method(texts)

    def _each(self, texts: Sequence[str], wanted: Sequence[str], answer: Any) -> list[Vector]:
        """Return for each text its vector; equal texts share one."""
        vectors = dict(zip(wanted, self._checked(answer, len(wanted)), strict=True))
        return [vectors[text] for text in texts]

    def _checked(self, answer: Any, num_texts: int = 1) -> list[Vector]:
        """Return the answer as vectors of length one."""
        name = type(self.embeddings).__name__
        try:
            rows = [np.asarray(row, np.float64) for row in answer]
        except (TypeError, ValueError) as error:
            raise EmbeddingError(f"{name} answered with what is no list of vectors; look at the embedder") from error
        if len(rows) != num_texts:
            raise EmbeddingError(f"{name} answered with {len(rows)} vectors for {num_texts} texts; allowed is one each")
        for row in rows:
            if row.ndim != 1 or not len(row):
                raise EmbeddingError(
                    f"{name} answered with a vector of shape {row.shape}; allowed are lists of numbers"
                )
            if not np.isfinite(row).all():
                raise EmbeddingError(f"{name} answered with NaN or infinity; look at the embedder and its numbers")
            with self._lock:
                self._dim = self._dim or checked_dim(len(row))
            if len(row) != self._dim:
                raise EmbedderMismatch(
                    f"{name} answered with a vector of {len(row)} numbers, allowed are {self._dim}, as in the index; "
                    "use the embedder that the index was made with"
                )
        return [_unit(row) for row in rows]


def unit_vector(vector: Any) -> Vector:
    """Return a vector that somebody gives instead of a text, with length one; an engine checks how long it is.

    Raises:
        InvalidQuery: if it is no list of finite numbers.
    """
    try:
        row = np.asarray(vector, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidQuery(f"vector: got {type(vector).__name__}, allowed is a list of numbers") from error
    if row.ndim != 1 or not len(row) or not np.isfinite(row).all():
        raise InvalidQuery(f"vector: got the shape {row.shape} or NaN, allowed is one list of finite numbers")
    return _unit(row)


def _unit(row: Any) -> Vector:
    """Return a vector of length one in the same direction; scaled first, so that no square overflows or vanishes."""
    if largest := np.abs(row).max():
        row = row / largest
        row = row / np.linalg.norm(row)
    unit: Vector = row.astype(np.float32)
    return unit


def _wanted(texts: Sequence[str]) -> list[str]:
    """Return the texts to embed, each once."""
    for position, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            got = "an empty text" if isinstance(text, str) else type(text).__name__
            raise InvalidItem(
                f"text {position}: got {got}, which has no meaning to search for; nothing was stored; "
                "leave it out, or store the item without an index"
            )
    return list(dict.fromkeys(texts))


def _asked_for(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        got = "an empty text" if isinstance(text, str) else type(text).__name__
        raise InvalidQuery(f"query: got {got}, allowed is a text with something in it; to list items, give no query")
    return text
