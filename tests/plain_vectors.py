"""A vector engine of a few lines and an embedder without a model, for tests of what is built on them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import EngineStats, Hit, Item, ItemId, Namespace, Query, View

DIM = 16


def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return a vector of length one per text, near for texts that share words."""
    vectors = np.zeros((len(texts), DIM), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            vectors[row] += _word(word)
        vectors[row, 0] += 1e-3  # a text without words
        vectors[row] /= np.linalg.norm(vectors[row])
    return vectors


@functools.cache
def _word(word: str) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big")
    return np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)


class HashedEmbeddings(Embeddings):
    """`hashed` as an embedder."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return hashed(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class PlainEngine:
    """Exact, slow, without filters."""

    def __init__(self, dim: int = DIM) -> None:
        self.dim = dim
        self.kept: dict[ItemId, Item] = {}
        self.is_closed = False
        self.compacted = 0

    def put(self, items: Sequence[Item]) -> None:
        self.kept.update({item.id: item for item in items})

    def delete(self, ids: Sequence[ItemId]) -> int:
        return sum(self.kept.pop(name, None) is not None for name in ids)

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        return [self.kept.get(name) for name in ids]

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        return [self._search(query) for query in queries]

    def _search(self, query: Query) -> list[Hit]:
        hits = [
            Hit(item, max(float(vector @ query.vector) for vector in item.vectors))
            for item in self.items(query.view)
            if item.vectors
        ]
        hits.sort(key=lambda hit: -hit.score)
        return hits[query.offset : query.offset + query.limit]

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        found = [
            item
            for item in self.kept.values()
            if any(item.id.namespace[: len(prefix)] == prefix for prefix in view.prefixes)
        ]
        return found[offset:] if limit is None else found[offset : offset + limit]

    def namespaces(self) -> list[Namespace]:
        return sorted({name.namespace for name in self.kept})

    def stats(self) -> EngineStats:
        return EngineStats(len(self.kept), sum(len(item.vectors) for item in self.kept.values()), memory_bytes=4_096)

    def compact(self) -> None:
        self.compacted += 1

    def close(self) -> None:
        self.is_closed = True
