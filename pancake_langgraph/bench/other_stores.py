"""The stores of other libraries that both benches of vectors compare, filled the way their users fill them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.vector_sets import VectorSet

_PUT_ROWS: Final = 2_000


def langchain_faiss(base: NDArray[np.float32], dim: int) -> Any:
    """Return langchain's FAISS store over `base`, with the row of each in its metadata."""
    community = importlib.import_module("langchain_community.vectorstores")
    names = [f"b{row}" for row in range(len(base))]
    return community.FAISS.from_embeddings(
        zip(names, base, strict=True),
        TableEmbeddings({}, dim),
        metadatas=[{"row": row, "agent": "shared"} for row in range(len(base))],
        ids=names,
    )


def langgraph_store(vectors: VectorSet) -> Any:
    """Return an empty `InMemoryStore` whose embedder knows the set: `b5` is a row, `q5` a query, `i5` an insert."""
    from langgraph.store.memory import InMemoryStore

    table = {"b": vectors.base, "q": vectors.queries, "i": vectors.inserts}
    return InMemoryStore(index={"dims": vectors.dim, "embed": TableEmbeddings(table, vectors.dim), "fields": ["text"]})


def put_langgraph(store: Any, namespace: tuple[str, ...], rows: range, on_progress: Progress) -> None:
    """Put rows into the store, some at a time."""
    from langgraph.store.base import PutOp

    for start in range(rows.start, rows.stop, _PUT_ROWS):
        chosen = range(start, min(start + _PUT_ROWS, rows.stop))
        store.batch([PutOp(namespace, str(row), {"row": row, "text": f"b{row}"}) for row in chosen])
        if chosen.stop % 50_000 < _PUT_ROWS:
            on_progress(f"langgraph-memory: {chosen.stop:,} of {rows.stop:,}")


def chroma_collection(folder: Path) -> Any:
    """Return an empty collection in a new database below `folder`, compared by inner product."""
    chromadb = importlib.import_module("chromadb")
    settings = chromadb.Settings(anonymized_telemetry=False)
    client = chromadb.PersistentClient(path=str(folder), settings=settings)
    return client.create_collection("bench", configuration={"hnsw": {"space": "ip"}}, embedding_function=None)


class TableEmbeddings(Embeddings):
    """Looks vectors up by the name of a row, so that embedding costs next to nothing."""

    def __init__(self, table: Mapping[str, NDArray[np.float32]], dim: int) -> None:
        """Take the arrays by the letter that names of their rows begin with."""
        self._table, self._dim = table, dim

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of rows."""
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a row."""
        return self._table[text[0]][int(text[1:])].tolist()  # type: ignore[no-any-return] # numpy says Any
