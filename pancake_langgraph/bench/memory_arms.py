"""The memories that `pancake bench agent-memory` compares: shared items, and each agent's own, searched as one view.

Rows count as in the set: those of `base` first, then those of `inserts`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.other_stores import chroma_collection, langchain_faiss, langgraph_store, put_langgraph
from pancake_langgraph.bench.search_arms import K, OpenEngine, fill_engine, missing_package
from pancake_langgraph.bench.vector_sets import VectorSet
from pancake_langgraph.retrieval.base import Item, ItemId, Namespace, Query, VectorEngine, View
from pancake_langgraph.retrieval.log import Ack

#: How many langchain fetches before it filters, as one has to set it by hand.
FETCH_K: Final = 60
#: ef of hnswlib: recall of 0.98 on the real set.
_EF: Final = 64
_CHROMA_ROWS: Final = 5_000


class MemoryArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    LANGCHAIN_FAISS = "langchain-faiss"
    LANGCHAIN_FAISS_DURABLE = "langchain-faiss-durable"
    LANGGRAPH_MEMORY = "langgraph-memory"
    CHROMA = "chroma"
    HNSWLIB = "hnswlib"
    PANCAKE = "pancake"
    PANCAKE_DURABLE = "pancake-durable"


MEMORY_ARM_TEXT: Final[Mapping[MemoryArm, str]] = {
    MemoryArm.LANGCHAIN_FAISS: f"FAISS of langchain-community, filter function, fetch_k {FETCH_K}, not on disk",
    MemoryArm.LANGCHAIN_FAISS_DURABLE: "the same, save_local after each insert",
    MemoryArm.LANGGRAPH_MEMORY: "InMemoryStore, one search of the shared and one of the own namespace",
    MemoryArm.CHROMA: "chroma, PersistentClient, filter `$in` over shared and own, on disk",
    MemoryArm.HNSWLIB: f"hnswlib, ef {_EF}, filter function, not on disk; fewer found than asked for is an error there",
    MemoryArm.PANCAKE: "DiskVectorEngine, shared and own namespace in one view, inserts left to the system to write",
    MemoryArm.PANCAKE_DURABLE: "the same, each insert on disk when it returns",
}
_NEEDED: Final[Mapping[MemoryArm, Sequence[tuple[str, str]]]] = {
    MemoryArm.LANGCHAIN_FAISS: (("faiss", "faiss-cpu"), ("langchain_community.vectorstores", "langchain-community")),
    MemoryArm.LANGCHAIN_FAISS_DURABLE: (
        ("faiss", "faiss-cpu"),
        ("langchain_community.vectorstores", "langchain-community"),
    ),
    MemoryArm.CHROMA: (("chromadb", "chromadb"),),
    MemoryArm.HNSWLIB: (("hnswlib", "hnswlib"),),
    MemoryArm.PANCAKE: (("faiss", "faiss-cpu"),),
    MemoryArm.PANCAKE_DURABLE: (("faiss", "faiss-cpu"),),
}
#: Arms that answer a search while another thread inserts; the others are called by one thread at a time.
CONCURRENT_ARMS: Final = frozenset({MemoryArm.PANCAKE, MemoryArm.PANCAKE_DURABLE})


def missing_for(arm: MemoryArm) -> str | None:
    """Return the distribution that an arm needs and that is not there; `None` when it can run."""
    return missing_package(_NEEDED.get(arm, ()))


class AgentMemory(Protocol):
    """One memory of all agents; `query` is the number of a query, rows come back best first."""

    def search(self, agent: int, query: int) -> Sequence[int]:
        """Return the nearest rows of what is shared and of what the agent inserted."""
        ...

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        """Return the nearest rows of what the agent inserted."""
        ...

    def insert(self, agent: int, row: int) -> None:
        """Insert a row for an agent."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


def open_memory(
    arm: MemoryArm, vectors: VectorSet, folder: Path, on_progress: Progress, open_engine: Callable[[Ack], OpenEngine]
) -> AgentMemory:
    """Return an arm's memory with all of `base` shared; `open_engine(ack)` opens ours."""
    on_progress(f"{vectors.name}: building {arm} over {len(vectors.base):,} vectors")
    if arm is MemoryArm.LANGCHAIN_FAISS:
        return _LangchainFaiss(vectors, None)
    if arm is MemoryArm.LANGCHAIN_FAISS_DURABLE:
        return _LangchainFaiss(vectors, folder / arm)
    if arm is MemoryArm.LANGGRAPH_MEMORY:
        return _LanggraphMemory(vectors, on_progress)
    if arm is MemoryArm.CHROMA:
        return _Chroma(vectors, folder / arm, on_progress)
    if arm is MemoryArm.HNSWLIB:
        return _Hnswlib(vectors)
    engine = open_engine("group" if arm is MemoryArm.PANCAKE_DURABLE else "none")(folder / arm, vectors.dim)
    fill_engine(engine, vectors, on_progress)
    return PancakeMemory(engine, vectors)


def vector_of(vectors: VectorSet, row: int) -> Any:
    """Return the vector of a row of the base or, behind it, of the inserts."""
    base = len(vectors.base)
    return vectors.base[row] if row < base else vectors.inserts[row - base]


class PancakeMemory:
    """Our engine: rows are keys, `shared` and `agent, NUMBER` the namespaces."""

    def __init__(self, engine: VectorEngine, vectors: VectorSet) -> None:
        """Take an engine that holds the base in the namespace `shared`."""
        self.engine, self._set = engine, vectors

    def search(self, agent: int, query: int) -> Sequence[int]:
        """Search both namespaces as one view."""
        return self._search(query, (("shared",), _own(agent)))

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        """Search the agent's namespace."""
        return self._search(query, (_own(agent),))

    def insert(self, agent: int, row: int) -> None:
        """Put one item."""
        self.engine.put([Item(ItemId(_own(agent), str(row)), {"row": row}, (vector_of(self._set, row),))])

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _search(self, query: int, prefixes: tuple[Namespace, ...]) -> Sequence[int]:
        [hits] = self.engine.search([Query(self._set.queries[query], View(prefixes), K)])
        return [int(hit.item.id.key) for hit in hits]


def _own(agent: int) -> Namespace:
    return ("agent", str(agent))


class _LangchainFaiss:
    """One store of all; whose a document is stands in its metadata."""

    def __init__(self, vectors: VectorSet, folder: Path | None) -> None:
        self._set, self._folder = vectors, folder
        self._store = langchain_faiss(vectors.base, vectors.dim)

    def search(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, ("shared", str(agent)))

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, (str(agent),))

    def insert(self, agent: int, row: int) -> None:
        vector = vector_of(self._set, row).tolist()
        self._store.add_embeddings([(f"i{row}", vector)], [{"row": row, "agent": str(agent)}], ids=[f"i{row}"])
        if self._folder is not None:
            self._store.save_local(str(self._folder))

    def close(self) -> None:
        del self._store

    def _search(self, query: int, agents: tuple[str, ...]) -> Sequence[int]:
        found = self._store.similarity_search_with_score_by_vector(
            self._set.queries[query].tolist(),
            k=K,
            filter=lambda metadata: metadata["agent"] in agents,
            fetch_k=FETCH_K,
        )
        return [document.metadata["row"] for document, _ in found]


class _LanggraphMemory:
    """A namespace for what is shared and one for each agent; a search of several is one for each, merged by score."""

    def __init__(self, vectors: VectorSet, on_progress: Progress) -> None:
        self._store, self._base = langgraph_store(vectors), len(vectors.base)
        put_langgraph(self._store, ("shared",), range(self._base), on_progress)

    def search(self, agent: int, query: int) -> Sequence[int]:
        found = [
            *self._store.search(("shared",), query=f"q{query}", limit=K),
            *self._store.search(_own(agent), query=f"q{query}", limit=K),
        ]
        return [item.value["row"] for item in sorted(found, key=lambda item: -item.score)[:K]]

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        return [item.value["row"] for item in self._store.search(_own(agent), query=f"q{query}", limit=K)]

    def insert(self, agent: int, row: int) -> None:
        self._store.put(_own(agent), str(row), {"row": row, "text": f"i{row - self._base}"})

    def close(self) -> None:
        del self._store


class _Chroma:
    """One collection; whose an entry is stands in its metadata."""

    def __init__(self, vectors: VectorSet, folder: Path, on_progress: Progress) -> None:
        self._set, self._collection = vectors, chroma_collection(folder)
        rows = len(vectors.base)
        for start in range(0, rows, _CHROMA_ROWS):
            chosen = range(start, min(start + _CHROMA_ROWS, rows))
            self._collection.add(
                ids=[str(row) for row in chosen],
                embeddings=vectors.base[chosen.start : chosen.stop],
                metadatas=[{"agent": "shared"}] * len(chosen),
            )
            on_progress(f"chroma: {chosen.stop:,} of {rows:,}")

    def search(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, ["shared", str(agent)])

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, [str(agent)])

    def insert(self, agent: int, row: int) -> None:
        vector = vector_of(self._set, row)
        self._collection.add(ids=[str(row)], embeddings=vector[None], metadatas=[{"agent": str(agent)}])

    def close(self) -> None:
        del self._collection

    def _search(self, query: int, agents: list[str]) -> Sequence[int]:
        found = self._collection.query(
            query_embeddings=self._set.queries[query : query + 1],
            n_results=K,
            where={"agent": {"$in": agents}},
            include=[],
        )
        return [int(name) for name in found["ids"][0]]


class _Hnswlib:
    """One graph; whose a row is stands in an array that its filter function reads."""

    def __init__(self, vectors: VectorSet) -> None:
        self._set = vectors
        rows = len(vectors.base)
        self._owner = np.full(rows + len(vectors.inserts), -1)
        self._index = importlib.import_module("hnswlib").Index(space="ip", dim=vectors.dim)
        self._index.init_index(max_elements=len(self._owner), M=16, ef_construction=200)
        self._index.set_num_threads(1)
        self._index.add_items(vectors.base, np.arange(rows))
        self._index.set_ef(_EF)

    def search(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, lambda row: self._owner[row] in (-1, agent))

    def search_own(self, agent: int, query: int) -> Sequence[int]:
        return self._search(query, lambda row: bool(self._owner[row] == agent))

    def insert(self, agent: int, row: int) -> None:
        self._owner[row] = agent
        self._index.add_items(vector_of(self._set, row)[None], np.array([row]))

    def close(self) -> None:
        del self._index

    def _search(self, query: int, allowed: Callable[[int], bool]) -> Sequence[int]:
        try:
            return self._index.knn_query(self._set.queries[query], k=K, filter=allowed)[0][0]  # type: ignore[no-any-return]
        except RuntimeError:  # it found fewer than K and then gives none at all
            return []
