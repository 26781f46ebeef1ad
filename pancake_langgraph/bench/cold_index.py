"""An index on disk behind a store, which can be made as cold as after a start of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from langchain_core.embeddings import Embeddings
from langgraph.store.base import IndexConfig, SearchItem

from pancake_langgraph.bench.search_arms import ALL_PARTITIONS, SHARED, K, drop_pages
from pancake_langgraph.memory_store import PancakeStore
from pancake_langgraph.retrieval.base import Vector, VectorEngine
from pancake_langgraph.retrieval.partitions import PrefetchesPartitions
from pancake_langgraph.retrieval.prefetch import PrefetchStats

_SETTLE_S: Final = 2.0
_LOOK_S: Final = 0.005


class KnownEmbeddings(Embeddings):
    """Knows the vectors of some texts beforehand, so that no embedder is in what is measured.

    Any other text, such as what a model answers, lies in the middle of the known ones.
    """

    def __init__(self, vectors: Mapping[str, Vector]) -> None:
        """Take vectors of length one by their text."""
        self._vectors = vectors
        middle = np.mean([*vectors.values()], axis=0)
        self._middle: Vector = (middle / max(float(np.linalg.norm(middle)), 1e-9)).astype(np.float32)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of texts."""
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a text."""
        return self._vectors.get(text, self._middle).tolist()  # type: ignore[no-any-return] # numpy says Any


class ColdIndex:
    """A store over an engine whose files lie below a folder.  For one task at a time."""

    def __init__(self, engine: VectorEngine, folder: Path, known: Mapping[str, Vector]) -> None:
        """Search a filled engine by texts whose vectors are `known`; it stays open."""
        self._engine, self._folder = engine, folder
        self._any_text, self._any_vector = next(iter(known.items()))
        index = IndexConfig(dims=engine.dim, embed=KnownEmbeddings(known), fields=["text"])
        self.store = PancakeStore(index=index, engine=engine, fingerprint="known vectors")

    async def search(self, text: str) -> Sequence[SearchItem]:
        """Return what is nearest to a text, read from disk where memory does not hold it."""
        return await self.store.asearch(SHARED, query=text, limit=K)

    async def cool(self) -> None:
        """Have nothing in memory of what a search reads: neither read ahead by the store nor cached by the system.

        The store is open afterwards, and its threads run.  What is mapped into memory stays: the arrays that every
        search touches.
        """
        await self.store.aclose()  # with it goes what it knows of drafts, and what it has brought up
        await self.search(self._any_text)
        await asyncio.to_thread(self._drop)

    async def warm(self, text: str) -> None:
        """Have all in memory that the search for a text reads."""
        await self.cool()
        await self.search(text)

    async def settled(self) -> PrefetchStats:
        """Return what drafts since `cool` were worth, once the search that followed them has been counted."""
        waited_s = 0.0
        while not (stats := self.store.prefetch_stats()).searches and waited_s < _SETTLE_S:
            await asyncio.sleep(_LOOK_S)
            waited_s += _LOOK_S
        return stats

    async def close(self) -> None:
        """Close the store; the engine stays open."""
        await self.store.aclose()

    def _drop(self) -> None:
        if isinstance(self._engine, PrefetchesPartitions):
            every = self._engine.partitions(self._any_vector, ALL_PARTITIONS)
            self._engine.cool([partition.id for partition in every])
        drop_pages(self._folder)
