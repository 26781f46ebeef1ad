"""`PancakeVectorStore`: documents for LangChain, found by similarity, filtered before the best are chosen."""

# ruff: noqa: A002 - `filter` is what LangChain calls it

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from pancake_langgraph._errors import ConfigError, InvalidQuery
from pancake_langgraph.retrieval.base import Hit, Item, ItemId, Namespace, Query, Vector, VectorEngine, View
from pancake_langgraph.retrieval.device_budget import DeviceBudget
from pancake_langgraph.retrieval.diversity import diverse
from pancake_langgraph.retrieval.documents import DOCUMENTS, document_value, metadata_filter
from pancake_langgraph.retrieval.new_documents import document_of, new_documents
from pancake_langgraph.retrieval.opening import Access, OnCorrupt
from pancake_langgraph.retrieval.store_core import OverCore, StoreCore, asking_agent
from pancake_langgraph.retrieval.vectorizer import Vectorizer, unit_vector

__all__ = ["PancakeVectorStore"]

_PAGE = 1024
_PAIR = list[tuple[Document, float]]


class PancakeVectorStore(OverCore, VectorStore):
    """Keeps documents with their vectors, in memory or on disk.

        store = PancakeVectorStore(embedding, path="memory/")
        store.add_texts(["The gate opens at nine."], [{"topic": "gate"}])
        store.similarity_search("When does it open?", k=4, filter={"topic": "gate"})

    Scores are cosines.  Metadata has to be JSON.  Filters are those of `pancake_langgraph.retrieval.filters`, over the
    metadata; all matching documents come back when fewer than `k` match.  An id that exists is replaced; ids that stand
    twice in one call are refused, and nothing of the call is stored.

    Sync and async methods may be mixed freely, from any number of threads and loops.  The constructor opens nothing and
    embeds nothing; the first call does.  Searches of all stores over one engine go together.  Async methods wait for
    threads of the store, never on the loop.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        engine: VectorEngine | None = None,
        path: str | os.PathLike[str] | None = None,
        read_only: bool = False,
        on_corrupt: OnCorrupt = "raise",
        namespace: Namespace = DOCUMENTS,
        shared: Sequence[Namespace] = (),
        allowed: Collection[str] | None = None,
        fingerprint: Callable[[], str | None] | str | None = None,
        cache_s: float | None = None,
        device_budget: DeviceBudget | None = None,
    ) -> None:
        """Describe a store.

        Args:
            embedding: Turns texts into vectors.
            engine: An engine that is open, for example one that other stores use too; it stays open.
            path: A folder that holds the index; it is made when it is missing.  Without an engine and a path the
                documents are kept in memory, and gone when the store is.
            read_only: Whether the index at `path` is only read, beside a process that writes it; it has to be there.
            on_corrupt: What damaged parts of the index at `path` do: `raise` an error, or `skip` them, which in a store
                that writes gives them up.
            namespace: Where documents are written; those below it are found as well.
            shared: Further namespaces whose documents are found, and not written.
            allowed: Ids of the only documents that may ever come back; `None` allows all.
            fingerprint: What tells the embedder from others, or what computes it; kept with an index on disk, and taken
                from what the embedder answers by default.
            cache_s: Results are given again for so many seconds, unless something was written that may change them;
                `None` keeps none.
            device_budget: Counts what the embedder's weights and the index at `path` take of devices; the first call
                raises `DeviceFull` where there is no room for the weights.  An engine that is given has its own.

        Raises:
            ConfigError: if an argument is not usable, or does not go with another.
        """
        if not (hasattr(embedding, "embed_documents") and hasattr(embedding, "embed_query")):
            raise ConfigError(f"embedding: got {type(embedding).__name__}, allowed is an Embeddings object")
        access = Access(read_only, on_corrupt)
        self._core = StoreCore(
            "pancake-documents",
            embedding,
            engine=engine,
            path=path,
            access=access,
            fingerprint=fingerprint,
            cache_s=cache_s,
            device_budget=device_budget,
        )
        self._embedding = embedding
        self._agent: str | None = None
        self._limit_to(namespace, shared, allowed)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> PancakeVectorStore:
        """Return a store with these texts; other arguments are those of the constructor."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> PancakeVectorStore:
        """Do what `from_texts` does."""
        store = cls(embedding, **kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids)
        return store

    # -- views -------------------------------------------------------------------------------------------

    @property
    def embeddings(self) -> Embeddings:
        """The embedder."""
        return self._embedding

    def view(
        self,
        namespace: Namespace,
        *,
        shared: Sequence[Namespace] = (),
        allowed: Collection[str] | None = None,
        agent: str | None = None,
    ) -> PancakeVectorStore:
        """Return a store over the same engine for another namespace: for one of several agents, say.

        Arguments are those of the constructor; `agent` says whose drafts and searches belong together, by default those
        of one thread of a graph, and outside of graphs those of one namespace.  What this store does not allow no view
        of it does; its namespaces are free to choose, so hand out no more than what may be seen.  All of them share
        threads and engine; close the first one only.
        """
        clone = copy.copy(self)
        clone._agent = agent or self._agent
        if self._allowed is not None:
            allowed = self._allowed if allowed is None else self._allowed.intersection(allowed)
        clone._limit_to(namespace, shared, allowed)
        return clone

    # -- writing --------------------------------------------------------------------------------------------------

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Store texts and return their ids; those without one get a new one.  All or none are stored.

        Raises:
            InvalidItem: if a text is empty, an id stands twice, metadata is no JSON, or the counts differ.
            EmbeddingError: if the embedder's answer cannot be used.
            EmbedderMismatch: if its vectors do not fit the index.
        """
        _refuse_unknown(kwargs)
        documents = new_documents(texts, metadatas, ids)
        return self._store(documents, self._vectorizer.documents([document.page_content for document in documents]))

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: Sequence[str | None] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Do what `add_texts` does."""
        _refuse_unknown(kwargs)
        documents = new_documents(texts, metadatas, ids)
        vectors = await self._vectorizer.adocuments([document.page_content for document in documents])
        return await self._core.writers.run(self._store, documents, vectors)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents of this namespace; unknown ids are no error.  `None` deletes all of them.

        Raises:
            InvalidQuery: if an id is no text, or another argument is given.
        """
        _refuse_unknown(kwargs)
        engine = self._core.engine()
        if ids is not None:
            engine.delete([self._id(one) for one in ids if self._allowed is None or one in self._allowed])
            return True
        view = View((self._namespace,), allowed=self._allowed_ids)
        found = [item.id for item in engine.items(view) if item.id.namespace == self._namespace]
        for start in range(0, len(found), _PAGE):
            engine.delete(found[start : start + _PAGE])
        return True

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Do what `delete` does."""
        return await self._core.writers.run(functools.partial(self.delete, ids, **kwargs))

    # -- reading --------------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents of this namespace that are there, in the order of `ids`, each once."""
        wanted = [self._id(one) for one in dict.fromkeys(ids)]
        visible = [one for one in wanted if self._allowed is None or one.key in self._allowed]
        return [document_of(item) for item in self._core.engine().get(visible) if item is not None]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Do what `get_by_ids` does."""
        return await self._core.readers.run(self.get_by_ids, ids)

    def similarity_search(
        self, query: str, k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the `k` documents nearest to a text, among those whose metadata pass `filter`.

        Raises:
            InvalidQuery: for an empty text, a `k` under 0, an unknown filter, or an unknown argument.
            EmbeddingError: if the embedder's answer cannot be used.
        """
        return _without_scores(self.similarity_search_with_score(query, k, filter, **kwargs))

    async def asimilarity_search(
        self, query: str, k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Do what `similarity_search` does."""
        return _without_scores(await self.asimilarity_search_with_score(query, k, filter, **kwargs))

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> _PAIR:
        """Return documents and their cosines, the highest first; raises as `similarity_search`."""
        _refuse_unknown(kwargs)
        return _scored(self._search(self._query(self._vectorizer.query(query), k, filter)))

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> _PAIR:
        """Do what `similarity_search_with_score` does."""
        _refuse_unknown(kwargs)
        return _scored(await self._asearch(self._query(await self._vectorizer.aquery(query), k, filter)))

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the documents nearest to a vector; raises as `similarity_search`."""
        _refuse_unknown(kwargs)
        return _without_scores(_scored(self._search(self._query(unit_vector(embedding), k, filter))))

    async def asimilarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Do what `similarity_search_by_vector` does."""
        _refuse_unknown(kwargs)
        return _without_scores(_scored(await self._asearch(self._query(unit_vector(embedding), k, filter))))

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return `k` of the `fetch_k` nearest documents that are near to the text and unlike each other.

        `lambda_mult` is from 0, as different as possible, to 1, as near as possible.  Raises as `similarity_search`.
        """
        _refuse_unknown(kwargs)
        return self._diverse(self._query(self._vectorizer.query(query), max(k, fetch_k), filter), k, lambda_mult)

    async def amax_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Do what `max_marginal_relevance_search` does."""
        _refuse_unknown(kwargs)
        return await self._adiverse(
            self._query(await self._vectorizer.aquery(query), max(k, fetch_k), filter), k, lambda_mult
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Do what `max_marginal_relevance_search` does, with a vector."""
        _refuse_unknown(kwargs)
        return self._diverse(self._query(unit_vector(embedding), max(k, fetch_k), filter), k, lambda_mult)

    async def amax_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Do what `max_marginal_relevance_search` does, with a vector."""
        _refuse_unknown(kwargs)
        return await self._adiverse(self._query(unit_vector(embedding), max(k, fetch_k), filter), k, lambda_mult)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _limit_to(self, namespace: Namespace, shared: Sequence[Namespace], allowed: Collection[str] | None) -> None:
        self._namespace: Namespace = tuple(namespace)
        self._prefixes = (self._namespace, *(tuple(one) for one in shared))
        self._allowed = None if allowed is None else frozenset(allowed)
        self._allowed_ids = (
            None
            if self._allowed is None
            else frozenset(ItemId(prefix, key) for prefix in self._prefixes for key in self._allowed)
        )

    @property
    def _vectorizer(self) -> Vectorizer:
        if self._core.vectorizer is None:
            raise ConfigError("embedding: got None, allowed is an embedder")
        return self._core.vectorizer

    def _id(self, key: str) -> ItemId:
        return ItemId(self._namespace, key)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        """Return what LangChain calls relevance: the cosine, where 0 says that there is no likeness at all."""
        return lambda cosine: min(1.0, max(0.0, cosine))

    def _store(self, documents: Sequence[Document], vectors: Sequence[Vector]) -> list[str]:
        now_s = time.time()
        items = [
            Item(self._id(str(one.id)), document_value(one.page_content, one.metadata), (vector,), now_s, now_s)
            for one, vector in zip(documents, vectors, strict=True)
        ]
        if items:
            self._core.engine().put(items)
        return [item.id.key for item in items]

    def _query(self, vector: Vector, k: int, where: Mapping[str, Any] | None) -> Query:
        return Query(vector, View(self._prefixes, metadata_filter(where), self._allowed_ids), k)

    def _search(self, query: Query) -> list[Hit]:
        return self._core.search((query,), (asking_agent(self._agent, self._namespace),))[0]

    async def _asearch(self, query: Query) -> list[Hit]:
        return (await self._core.asearch((query,), (asking_agent(self._agent, self._namespace),)))[0]

    def _diverse(self, query: Query, k: int, nearness: float) -> list[Document]:
        return self._chosen(query.vector, self._search(query), k, nearness)

    async def _adiverse(self, query: Query, k: int, nearness: float) -> list[Document]:
        return await self._core.readers.run(self._chosen, query.vector, await self._asearch(query), k, nearness)

    def _chosen(self, vector: Vector, hits: Sequence[Hit], k: int, nearness: float) -> list[Document]:
        # What was deleted since the search is left out; vectors come with `get`, as engines on disk do not read all.
        items = self._core.engine().get([hit.item.id for hit in hits])
        found = [item for item in items if item is not None and item.vectors]
        chosen = diverse(vector, [item.vectors[0] for item in found], count=k, nearness=nearness)
        return [document_of(found[at]) for at in chosen]


def _scored(hits: Sequence[Hit]) -> _PAIR:
    return [(document_of(hit.item), hit.score) for hit in hits]


def _without_scores(pairs: _PAIR) -> list[Document]:
    return [document for document, _ in pairs]


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise InvalidQuery(
            f"got the arguments {', '.join(sorted(kwargs))}; allowed are the text or vector, k, filter, ids, and for "
            "diverse results fetch_k and lambda_mult"
        )
