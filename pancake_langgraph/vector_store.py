"""`PancakeVectorStore`: documents for LangChain, found by similarity, filtered before the best are chosen."""

# ruff: noqa: A002 - `filter` is what LangChain calls it

from __future__ import annotations

import asyncio
import copy
import functools
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from pancake_langgraph._errors import InvalidItem, InvalidQuery
from pancake_langgraph.retrieval.base import Item, ItemId, Namespace, Query, Vector, VectorEngine, View
from pancake_langgraph.retrieval.diversity import diverse
from pancake_langgraph.retrieval.documents import DOCUMENTS, document_value, metadata_filter, metadata_of, text_of
from pancake_langgraph.retrieval.opening import LateEngine
from pancake_langgraph.retrieval.vectorizer import Vectorizer, unit_vector
from pancake_langgraph.retrieval.worker_threads import WorkerThreads

__all__ = ["PancakeVectorStore"]

_T = TypeVar("_T")
_PAGE = 1024
_PAIR = list[tuple[Document, float]]


class PancakeVectorStore(VectorStore):
    """Keeps documents with their vectors, in memory or on disk.

        store = PancakeVectorStore(embedding, path="memory/")
        store.add_texts(["The gate opens at nine."], [{"topic": "gate"}])
        store.similarity_search("When does it open?", k=4, filter={"topic": "gate"})

    Scores are cosines.  Metadata has to be JSON.  Filters are those of `pancake_langgraph.retrieval.filters`, over the
    metadata; all matching documents come back when fewer than `k` match.  An id that exists is replaced; ids that stand
    twice in one call are refused, and nothing of the call is stored.

    Sync and async methods may be mixed freely, from any number of threads and loops.  The constructor opens nothing and
    embeds nothing; the first call does.  Async methods wait in threads of the store, never on the loop.
    """

    def __init__(
        self,
        embedding: Embeddings,
        *,
        engine: VectorEngine | None = None,
        path: str | os.PathLike[str] | None = None,
        namespace: Namespace = DOCUMENTS,
        shared: Sequence[Namespace] = (),
        allowed: Collection[str] | None = None,
        fingerprint: Callable[[], str | None] | str | None = None,
    ) -> None:
        """Describe a store.

        Args:
            embedding: Turns texts into vectors.
            engine: An engine that is open, for example one that other stores use too; it stays open.
            path: A folder that holds the index; it is made when it is missing.  Without an engine and a path the
                documents are kept in memory, and gone when the store is.
            namespace: Where documents are written; those below it are found as well.
            shared: Further namespaces whose documents are found, and not written.
            allowed: Ids of the only documents that may ever come back; `None` allows all.
            fingerprint: What tells the embedder from others, or what computes it; kept with an index on disk.

        Raises:
            ConfigError: if an engine and a path are given.
        """
        self._workers = WorkerThreads("pancake-documents")
        self._vectorizer = Vectorizer(embedding, self._workers, dim=None if engine is None else engine.dim)
        self._late = LateEngine(engine, path, self._vectorizer.learn_dim, fingerprint)
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

    # -- life and views -------------------------------------------------------------------------------------------

    @property
    def embeddings(self) -> Embeddings:
        """The embedder."""
        return self._vectorizer.embeddings

    def view(
        self,
        namespace: Namespace,
        *,
        shared: Sequence[Namespace] = (),
        allowed: Collection[str] | None = None,
    ) -> PancakeVectorStore:
        """Return a store over the same engine for another namespace: for one of several agents, say.

        Arguments are those of the constructor.  All of them share threads and engine; close the first one only.
        """
        clone = copy.copy(self)
        clone._limit_to(namespace, shared, allowed)
        return clone

    def close(self) -> None:
        """Finish what is under way and close what the store has opened.  Idempotent; a later call opens it again."""
        self._workers.stop()
        self._late.close()

    async def aclose(self) -> None:
        """Do what `close` does."""
        await asyncio.to_thread(self.close)

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
        documents = _documents(texts, metadatas, ids)
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
        documents = _documents(texts, metadatas, ids)
        vectors = await self._vectorizer.adocuments([document.page_content for document in documents])
        return await self._workers.run(self._store, documents, vectors)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents of this namespace; unknown ids are no error.  `None` deletes all of them.

        Raises:
            InvalidQuery: if an id is no text, or another argument is given.
        """
        _refuse_unknown(kwargs)
        engine = self._late.get()
        if ids is not None:
            engine.delete([self._id(one) for one in ids])
            return True
        view = View((self._namespace,))
        found = [item.id for item in engine.items(view) if item.id.namespace == self._namespace]
        for start in range(0, len(found), _PAGE):
            engine.delete(found[start : start + _PAGE])
        return True

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Do what `delete` does."""
        return await self._run(self.delete, ids, **kwargs)

    # -- reading --------------------------------------------------------------------------------------------------

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents of this namespace that are there, in the order of `ids`, each once."""
        wanted = [self._id(one) for one in dict.fromkeys(ids)]
        visible = [one for one in wanted if self._allowed is None or one.key in self._allowed]
        return [_document(item) for item in self._late.get().get(visible) if item is not None]

    async def aget_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Do what `get_by_ids` does."""
        return await self._workers.run(self.get_by_ids, ids)

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
        return self._search(self._vectorizer.query(query), k, filter, kwargs)

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> _PAIR:
        """Do what `similarity_search_with_score` does."""
        vector = await self._vectorizer.aquery(query)
        return await self._workers.run(self._search, vector, k, filter, kwargs)

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the documents nearest to a vector; raises as `similarity_search`."""
        return _without_scores(self._search(unit_vector(embedding), k, filter, kwargs))

    async def asimilarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Do what `similarity_search_by_vector` does."""
        return await self._run(self.similarity_search_by_vector, embedding, k, filter, **kwargs)

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
        return self._diverse(self._vectorizer.query(query), k, fetch_k, lambda_mult, filter, kwargs)

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
        vector = await self._vectorizer.aquery(query)
        return await self._workers.run(self._diverse, vector, k, fetch_k, lambda_mult, filter, kwargs)

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
        return self._diverse(unit_vector(embedding), k, fetch_k, lambda_mult, filter, kwargs)

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
        call = self.max_marginal_relevance_search_by_vector
        return await self._run(call, embedding, k, fetch_k, lambda_mult, filter, **kwargs)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _limit_to(self, namespace: Namespace, shared: Sequence[Namespace], allowed: Collection[str] | None) -> None:
        self._namespace: Namespace = tuple(namespace)
        self._prefixes = (self._namespace, *(tuple(one) for one in shared))
        self._allowed = None if allowed is None else frozenset(allowed)

    async def _run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        return await self._workers.run(functools.partial(call, *args, **kwargs))

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
            self._late.get().put(items)
        return [item.id.key for item in items]

    def _query(self, vector: Vector, k: int, where: Mapping[str, Any] | None) -> Query:
        allowed = self._allowed
        if allowed is None:
            return Query(vector, View(self._prefixes, metadata_filter(where)), k)
        ids = frozenset(ItemId(prefix, key) for prefix in self._prefixes for key in allowed)
        return Query(vector, View(self._prefixes, metadata_filter(where), ids), k)

    def _search(self, vector: Vector, k: int, where: Mapping[str, Any] | None, unknown: Mapping[str, Any]) -> _PAIR:
        _refuse_unknown(unknown)
        [hits] = self._late.get().search([self._query(vector, k, where)])
        return [(_document(hit.item), hit.score) for hit in hits]

    def _diverse(
        self,
        vector: Vector,
        k: int,
        fetch_k: int,
        lambda_mult: float,
        where: Mapping[str, Any] | None,
        unknown: Mapping[str, Any],
    ) -> list[Document]:
        _refuse_unknown(unknown)
        engine = self._late.get()
        [hits] = engine.search([self._query(vector, max(k, fetch_k), where)])
        # What was deleted since the search is left out; vectors come with `get`, as engines on disk do not read all.
        found = [item for item in engine.get([hit.item.id for hit in hits]) if item is not None and item.vectors]
        chosen = diverse(vector, [item.vectors[0] for item in found], count=k, nearness=lambda_mult)
        return [_document(found[at]) for at in chosen]


def _documents(
    texts: Iterable[str], metadatas: Sequence[Mapping[str, Any]] | None, ids: Sequence[str | None] | None
) -> list[Document]:
    """Return documents that all have an id of their own."""
    contents = list(texts)
    for name, given in (("metadatas", metadatas), ("ids", ids)):
        if given is not None and len(given) != len(contents):
            raise InvalidItem(f"{name}: got {len(given)} for {len(contents)} texts, allowed is one for each")
    for position, text in enumerate(contents):
        if not isinstance(text, str):
            raise InvalidItem(f"text {position}: got {type(text).__name__}, allowed are texts; nothing was stored")
    given_ids = [one for one in ids or () if one]
    if len(set(given_ids)) < len(given_ids):
        raise InvalidItem(
            f"ids: got {len(given_ids) - len(set(given_ids))} that stand more than once in one call, "
            "allowed is each once; nothing was stored"
        )
    return [
        Document(id=given or str(uuid.uuid4()), page_content=text, metadata=dict(metadata or {}))
        for text, metadata, given in zip(
            contents, metadatas or [{}] * len(contents), ids or [None] * len(contents), strict=True
        )
    ]


def _document(item: Item) -> Document:
    return Document(id=item.id.key, page_content=text_of(item), metadata=metadata_of(item))


def _without_scores(pairs: _PAIR) -> list[Document]:
    return [document for document, _ in pairs]


def _refuse_unknown(kwargs: Mapping[str, Any]) -> None:
    if kwargs:
        raise InvalidQuery(
            f"got the arguments {', '.join(sorted(kwargs))}; allowed are the text or vector, k, filter, ids, and for "
            "diverse results fetch_k and lambda_mult"
        )
