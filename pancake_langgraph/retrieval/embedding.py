"""Embedding for many at once: what comes together is one call of the model, and no text is embedded twice.

On a CPU embedding a question takes ten times as long as searching for it, so this is where the time is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, cast

from langchain_core.embeddings import Embeddings

from pancake_langgraph._clock import Clock
from pancake_langgraph._errors import InvalidItem, InvalidQuery
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.embedder_calls import EmbedderCalls
from pancake_langgraph.retrieval.fingerprint import Fingerprint, fingerprint
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.vector_cache import Text, TextKind, VectorCache
from pancake_langgraph.retrieval.worker import BatchWorker, Failed, WorkerStats

EmptyText = Literal["refuse", "zero"]

#: Up to so many texts somebody waits for, an agent that notes something; more are an import.
MAX_INTERACTIVE_TEXTS: Final = 32


@dataclass(frozen=True, slots=True)
class EmbeddingStats:
    """Counts: jobs and batches, texts that the model embedded, look-ups that found a vector, calls of the model.

    `num_cached` is how many vectors are kept now.
    """

    worker: WorkerStats
    embedded_texts: int
    cache_hits: int
    model_calls: int
    num_cached: int


class BatchedEmbeddings(Embeddings):
    """A LangChain embedder that batches and remembers what another one does.

    All methods are thread-safe, and async ones may be used from several loops.  The other embedder is called from one
    thread only, by its synchronous methods.  Questions are embedded as questions: together when it has a method
    `embed_queries(texts)`, or when a trial shows that it does the same with questions and documents, else one by one.
    Vectors are float32 and read-only, and as long as the embedder makes them.
    """

    def __init__(
        self,
        embedder: Embeddings,
        *,
        dim: int | None = None,
        empty_text: EmptyText = "refuse",
        max_cached: int = 65_536,
        settings: LaneSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start nothing yet: the thread comes with the first text.

        Args:
            embedder: whose answers these are.
            dim: how long vectors have to be; by default as long as the first one.
            empty_text: what happens to a text of nothing but white space, which embedders make something arbitrary of:
                `refuse` it, or give it `zero`, a vector that is like nothing.
            max_cached: vectors that are kept; questions and documents count alike.
            settings: sizes of the queue and of the model's batches.
            clock: for deadlines.
        """
        self._embedder = embedder
        self._calls = EmbedderCalls(embedder, dim=dim)
        self._empty_text = empty_text
        self._cache = VectorCache(max_vectors=max_cached)
        self._fingerprint: Fingerprint | None = None
        self._num_embedded = 0
        self._worker: BatchWorker[Text, Vector] = BatchWorker(
            "pancake-embed", self._embed, settings=settings, clock=clock
        )

    @property
    def embedder(self) -> Embeddings:
        """Whose answers these are."""
        return self._embedder

    @property
    def dim(self) -> int | None:
        """Length of the vectors; `None` as long as it is not known."""
        return self._calls.dim

    # -- vectors --------------------------------------------------------------------------------------------------

    def query_vector(
        self, text: str, *, priority: Priority = Priority.INTERACTIVE, timeout_s: float | None = None
    ) -> Vector:
        """Return the vector of a question; blocks, so never call it on an event loop.

        Raises:
            InvalidQuery: for an empty text, unless these get a zero vector.
            EmbeddingError: if what the embedder answers is no usable vector.
            EmbedderMismatch: if its vectors are not as long as they have to be.
            RetrievalTimeout: if `timeout_s` passed first.
            RetrievalOverloaded: if too much of this priority waits already; bulk waits for room instead.
            RetrievalError: after `close`, and in a forked process.
        """
        return self.query_vectors((text,), priority=priority, timeout_s=timeout_s)[0]

    def query_vectors(
        self, texts: Sequence[str], *, priority: Priority | None = None, timeout_s: float | None = None
    ) -> list[Vector]:
        """Return the vectors of several questions, in their order; blocks.

        By default few are urgent, and many are bulk, as documents are.  Raises as `query_vector`.
        """
        asked = [self._query(text) for text in texts]
        if (known := self._known(asked)) is not None:
            return known
        return self._worker.run(asked, priority=_urgency(asked, priority), timeout_s=timeout_s)

    async def aquery_vector(
        self, text: str, *, priority: Priority = Priority.INTERACTIVE, timeout_s: float | None = None
    ) -> Vector:
        """Like `query_vector`, awaited; what was not begun when the task is cancelled leaves the queue."""
        return (await self.aquery_vectors((text,), priority=priority, timeout_s=timeout_s))[0]

    async def aquery_vectors(
        self, texts: Sequence[str], *, priority: Priority | None = None, timeout_s: float | None = None
    ) -> list[Vector]:
        """Like `query_vectors`, awaited."""
        asked = [self._query(text) for text in texts]
        if (known := self._known(asked)) is not None:
            return known
        return await self._worker.arun(asked, priority=_urgency(asked, priority), timeout_s=timeout_s)

    def document_vectors(
        self, texts: Sequence[str], *, priority: Priority | None = None, timeout_s: float | None = None
    ) -> list[Vector]:
        """Return the vectors of texts that are to be found, in their order; blocks.

        By default up to `MAX_INTERACTIVE_TEXTS` texts are urgent, and more are bulk.

        Raises:
            InvalidItem: for an empty text, unless these get a zero vector.  Others as `query_vector`.
        """
        asked = [self._document(text, position) for position, text in enumerate(texts)]
        if (known := self._known(asked)) is not None:
            return known
        return self._worker.run(asked, priority=_urgency(asked, priority), timeout_s=timeout_s)

    async def adocument_vectors(
        self, texts: Sequence[str], *, priority: Priority | None = None, timeout_s: float | None = None
    ) -> list[Vector]:
        """Like `document_vectors`, awaited."""
        asked = [self._document(text, position) for position, text in enumerate(texts)]
        if (known := self._known(asked)) is not None:
            return known
        return await self._worker.arun(asked, priority=_urgency(asked, priority), timeout_s=timeout_s)

    async def avectors_on_loop(self, kind: TextKind, texts: Sequence[str]) -> list[Vector]:
        """Return vectors from the embedder's own async methods, on the caller's loop: no batches, but what is known.

        Raises as `query_vector` and `document_vectors`.
        """
        is_query = kind is TextKind.QUERY
        asked = [self._query(text) if is_query else self._document(text, at) for at, text in enumerate(texts)]
        found = {text: vector for text in dict.fromkeys(asked) if (vector := self._cache.get(text)) is not None}
        new = [text for text in dict.fromkeys(asked) if text not in found]
        contents = [text.content for text in new]
        answers: Sequence[Any] = ()
        if new and is_query:
            answers = await asyncio.gather(*(self._embedder.aembed_query(content) for content in contents))
        elif new:
            answers = self._calls.one_each(await self._embedder.aembed_documents(contents), contents)
        for text, answer in zip(new, answers, strict=True):
            checked = self._calls.checked(answer)
            if isinstance(checked, Failed):
                raise checked.error
            self._cache.put(text, checked)
            found[text] = checked
        return [found[text] for text in asked]

    # -- as LangChain has it --------------------------------------------------------------------------------------

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a question as a list; raises as `query_vector`."""
        return cast("list[float]", self.query_vector(text).tolist())

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of texts as lists; raises as `document_vectors`."""
        return [vector.tolist() for vector in self.document_vectors(texts)]

    async def aembed_query(self, text: str) -> list[float]:
        """Like `embed_query`, awaited."""
        return cast("list[float]", (await self.aquery_vector(text)).tolist())

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Like `embed_documents`, awaited."""
        return [vector.tolist() for vector in await self.adocument_vectors(texts)]

    # -- the rest -------------------------------------------------------------------------------------------------

    def fingerprint(self) -> Fingerprint:
        """Return what tells this embedder from others; embeds a few texts the first time, and blocks for it.

        Raises:
            EmbeddingError: if the embedder's answers are no usable vectors.
        """
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self)
        return self._fingerprint

    def stats(self) -> EmbeddingStats:
        """Return counts."""
        return EmbeddingStats(
            self._worker.stats(), self._num_embedded, self._cache.hits, self._calls.num_calls, len(self._cache)
        )

    def close(self) -> None:
        """Fail what waits, let the running call finish, end the thread.  Idempotent."""
        self._worker.close()

    def __enter__(self) -> BatchedEmbeddings:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # -- in the caller's thread -----------------------------------------------------------------------------------

    def _query(self, text: str) -> Text:
        if problem := self._problem(text):
            raise InvalidQuery(f"cannot embed a question: {problem}. Ask something, or search without a text.")
        return Text(TextKind.QUERY, text)

    def _document(self, text: str, position: int) -> Text:
        if problem := self._problem(text):
            raise InvalidItem(f"cannot embed text {position}: {problem}. Leave it out, or store it unindexed.")
        return Text(TextKind.DOCUMENT, text)

    def _problem(self, text: object) -> str:
        if not isinstance(text, str):
            return f"got {type(text).__name__}, allowed is a text"
        return "got an empty text" if self._empty_text == "refuse" and not text.strip() else ""

    def _known(self, asked: Sequence[Text]) -> list[Vector] | None:
        """Return the vectors if all are known, without a way through the thread."""
        found: list[Vector] = []
        for text in asked:
            if (vector := self._cache.get(text)) is None:
                return None
            found.append(vector)
        return found

    # -- on the thread --------------------------------------------------------------------------------------------

    def _embed(self, batch: Sequence[Text]) -> list[Vector | Failed]:
        """Embed a batch, each text of it once; one that cannot be embedded fails alone."""
        found: dict[Text, Vector | Failed] = {}
        for kind in TextKind:
            texts = dict.fromkeys(text for text in batch if text.kind is kind)
            known = {text: vector for text in texts if (vector := self._cache.get(text)) is not None}
            found |= known
            if empty := [text for text in texts if not text.content.strip()]:
                found |= dict.fromkeys(empty, self._calls.zero())
            new = [text for text in texts if text not in found]
            self._num_embedded += len(new)
            for text, answer in zip(new, self._calls.embed(kind, [text.content for text in new]), strict=True):
                found[text] = answer
                if not isinstance(answer, Failed):
                    self._cache.put(text, answer)
        return [found[text] for text in batch]


def _urgency(texts: Sequence[Text], wanted: Priority | None) -> Priority:
    if wanted is not None:
        return wanted
    return Priority.INTERACTIVE if len(texts) <= MAX_INTERACTIVE_TEXTS else Priority.BULK
