"""From texts to vectors that an engine can hold: of length one, embedded together with what others ask for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from langchain_core.embeddings import Embeddings
from langgraph.store.base.embed import EmbeddingsLambda

from pancake_langgraph._errors import EmbeddingError, InvalidQuery
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.checks import checked_dim
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from pancake_langgraph.retrieval.lanes import Priority
from pancake_langgraph.retrieval.vector_cache import TextKind

#: What is embedded to learn how long an embedder's vectors are.
_PROBE = "How long are the vectors of this embedder?"


class Vectorizer:
    """Asks an embedder through `BatchedEmbeddings`, and on the loop where it has async methods of its own.

    Thread safe.  Products of what comes back are cosines; a vector of zeros stays one: it is like nothing.  After
    `close`, and in a forked process, the next call begins anew.
    """

    def __init__(
        self, embeddings: Embeddings, *, dim: int | None = None, before: Callable[[], None] = lambda: None
    ) -> None:
        """Ask `embeddings` for vectors of `dim` numbers; `None` takes the length of the first answer.

        `BatchedEmbeddings` are used as they are, and stay open.  `before` is called before the first text is embedded,
        and again for each one until it has come through.
        """
        self.embeddings = embeddings
        self._before: Callable[[], None] | None = before
        self._given = embeddings if isinstance(embeddings, BatchedEmbeddings) else None
        self._dim = None if dim is None else checked_dim(dim)
        self._lock = threading.Lock()
        self._batched: BatchedEmbeddings | None = None
        self._pid = os.getpid()

    @property
    def dim(self) -> int | None:
        """Length of the vectors; `None` until it is known."""
        batched = self._given or self._batched
        return self._dim or (None if batched is None else batched.dim)

    def learn_dim(self) -> int:
        """Return the length of the vectors, asking for one if no text was embedded yet.

        Raises:
            EmbeddingError: if the embedder's answer is no vector.
        """
        return self.dim or len(self.query(_PROBE))

    def fingerprint(self) -> str | None:
        """Return what tells this embedder from others; `None` for an async function, which cannot be asked here.

        Raises:
            EmbeddingError: if the embedder's answers are no usable vectors.
        """
        return None if self._is_async_only else str(self._asking().fingerprint())

    def documents(self, texts: Sequence[str]) -> list[Vector]:
        """Return a vector for each text, in order.

        Raises:
            InvalidItem: if a text is empty.
            EmbeddingError: if the answer is not one vector for each text, or has NaN.
            EmbedderMismatch: if vectors have another length than before.
        """
        return _units(self._asking().document_vectors(texts)) if texts else []

    async def adocuments(self, texts: Sequence[str]) -> list[Vector]:
        """Do what `documents` does."""
        if not texts:
            return []
        if self._is_async("aembed_documents"):
            return _units(await self._here().avectors_on_loop(TextKind.DOCUMENT, texts))
        return _units(await self._here().adocument_vectors(texts))

    def query(self, text: str, *, priority: Priority | None = None) -> Vector:
        """Return the vector of what is searched for.

        Raises:
            InvalidQuery: if the text is empty.
            EmbeddingError: if the answer is no vector, or has NaN.
            EmbedderMismatch: if it has another length than before.
        """
        return self.queries((text,), priority=priority)[0]

    async def aquery(self, text: str) -> Vector:
        """Do what `query` does."""
        return (await self.aqueries((text,)))[0]

    def queries(self, texts: Sequence[str], *, priority: Priority | None = None) -> list[Vector]:
        """Return the vectors of several texts to search for; raises as `query`."""
        return _units(self._asking().query_vectors(texts, priority=priority)) if texts else []

    async def aqueries(self, texts: Sequence[str]) -> list[Vector]:
        """Do what `queries` does."""
        if not texts:
            return []
        if self._is_async("aembed_query"):
            return _units(await self._here().avectors_on_loop(TextKind.QUERY, texts))
        return _units(await self._here().aquery_vectors(texts))

    def close(self) -> None:
        """End the embedder's thread; what waits for it fails.  Idempotent."""
        batched, self._batched = self._batched, None
        if batched is not None:
            self._dim = self._dim or batched.dim
            batched.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    @property
    def _is_async_only(self) -> bool:
        return isinstance(self.embeddings, EmbeddingsLambda) and hasattr(self.embeddings, "afunc")

    def _is_async(self, name: str) -> bool:
        """Return whether the embedder's async method is more than its other one in the default executor."""
        if isinstance(self.embeddings, EmbeddingsLambda):
            return self._is_async_only
        return self._given is None and getattr(type(self.embeddings), name, None) is not getattr(Embeddings, name)

    def _asking(self) -> BatchedEmbeddings:
        if self._is_async_only:
            raise EmbeddingError(
                "cannot embed: the store was given an async function, and a synchronous method was called; "
                "use the async methods (`aput`, `asearch`, ...), or give it a function that is not async"
            )
        return self._here()

    def _here(self) -> BatchedEmbeddings:
        """Return what embeds in this process."""
        if (before := self._before) is not None:
            before()
            self._before = None
        if self._given is not None:
            return self._given
        if self._pid != os.getpid():  # another thread may have held the lock at the fork
            self._lock, self._batched, self._pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._batched is None:
                self._batched = BatchedEmbeddings(self.embeddings, dim=self._dim)
            return self._batched


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


def _units(vectors: Sequence[Vector]) -> list[Vector]:
    return [_unit(vector.astype(np.float64)) for vector in vectors]


def _unit(row: Any) -> Vector:
    """Return a vector of length one in the same direction; scaled first, so that no square overflows or vanishes."""
    if largest := np.abs(row).max():
        row = row / largest
        row = row / np.linalg.norm(row)
    unit: Vector = row.astype(np.float32)
    return unit
