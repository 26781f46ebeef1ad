"""`PancakeStore`: long-term memory for LangGraph, searched by meaning, with views for several agents."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from langgraph.store.base import BaseStore, IndexConfig, Op, Result, TTLConfig
from langgraph.store.base.embed import ensure_embeddings

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval.base import Namespace, Vector, VectorEngine
from pancake_langgraph.retrieval.opening import LateEngine
from pancake_langgraph.retrieval.scopes import Scope
from pancake_langgraph.retrieval.store_batch import StoreBatch
from pancake_langgraph.retrieval.store_plan import StorePlan, checked_index, make_plan
from pancake_langgraph.retrieval.vectorizer import Vectorizer
from pancake_langgraph.retrieval.worker_threads import WorkerThreads

__all__ = ["PancakeStore"]


class PancakeStore(BaseStore):
    """Keeps JSON values under namespaces and keys, in memory or on disk, and finds them by meaning.

        store = PancakeStore(index={"dims": 384, "embed": embeddings, "fields": ["text"]}, path="memory/")
        graph = builder.compile(store=store)

    It does what LangGraph's `InMemoryStore` documents.  In a batch, reads see what was there before it, and of several
    writes to one id the last counts; a batch is embedded by one call, and stored whole or not at all.  Listed items
    come last updated first.  Expired items never come back.  Filters are those of
    `pancake_langgraph.retrieval.filters`.

    Sync and async methods may be mixed freely, from any number of threads and loops.  The constructor opens nothing;
    the first call does.  Async methods wait in threads of the store, never on the loop.
    """

    supports_ttl = True

    def __init__(
        self,
        *,
        index: IndexConfig | None = None,
        engine: VectorEngine | None = None,
        path: str | os.PathLike[str] | None = None,
        ttl: TTLConfig | None = None,
        fingerprint: Callable[[], str | None] | str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Describe a store.

        Args:
            index: `dims`, `embed` and `fields` as LangGraph has them; without it items are listed and not searched.
            engine: An engine that is open, for example one that other stores use too; it stays open.
            path: A folder that holds the items; it is made when it is missing.  Without an engine and a path they are
                kept in memory, and gone when the store is.
            ttl: `default_ttl` in minutes and `refresh_on_read`, as LangGraph has them.
            fingerprint: What tells the embedder from others, or what computes it; kept with items on disk.
            clock: Seconds since the epoch.

        Raises:
            ConfigError: if `index` is not usable, or an engine and a path are given.
        """
        super().__init__()
        self.ttl_config = ttl
        self._core = _Core(index, engine, path, fingerprint, clock)
        self._scope = Scope()

    # -- life and views -------------------------------------------------------------------------------------------

    def view(
        self,
        *,
        reads: Iterable[Namespace] | None = None,
        writes: Iterable[Namespace] | None = None,
        allowed: Collection[tuple[Namespace, str]] | None = None,
    ) -> PancakeStore:
        """Return the same store as one of several agents may see it.

            ann = store.view(reads=[("team",), ("agents", "ann")], writes=[("agents", "ann")])

        Namespaces stay what they are.  What may not be read is not there: not for `get`, `search` nor
        `list_namespaces`.  A view of a view can only be narrower.  All share one engine; close one of them.

        Args:
            reads: Branches of namespaces that are seen.
            writes: Branches that may be written; by default all that are seen.
            allowed: Namespace and key of the only items that are seen, checked last, whatever an index returned.

        Raises:
            ConfigError: if a branch lies outside of what this view has.
        """
        narrowed = PancakeStore.__new__(PancakeStore)
        BaseStore.__init__(narrowed)
        narrowed.ttl_config = self.ttl_config
        narrowed._core = self._core
        narrowed._scope = self._scope.narrowed(reads, writes, allowed)
        return narrowed

    def close(self) -> None:
        """Finish what is under way and close what the store has opened.  Idempotent; a later call opens it again."""
        self._core.workers.stop()
        self._core.late.close()

    async def aclose(self) -> None:
        """Do what `close` does."""
        await asyncio.to_thread(self.close)

    # -- operations -----------------------------------------------------------------------------------------------

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """Do several operations; results are in their order.

        Raises:
            InvalidItem: if a value may not be stored, an indexed text is empty, or the view may not write there.
            InvalidQuery: if a search cannot be answered.
            EmbeddingError: if the embedder's answer cannot be used.
            EmbedderMismatch: if its vectors do not fit the index.
        """
        core = self._core
        plan = make_plan(ops, self._scope, core.fields)
        vectors: list[Vector] = []
        queries: dict[str, Vector] = {}
        if core.vectorizer is not None:
            queries = {query: core.vectorizer.query(query) for query in plan.queries}
            vectors = core.vectorizer.documents(plan.texts)
        return core.carry_out(self._scope, plan, vectors, queries)

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Do what `batch` does."""
        core = self._core
        plan = make_plan(ops, self._scope, core.fields)
        vectors: list[Vector] = []
        queries: dict[str, Vector] = {}
        if core.vectorizer is not None:
            wanted = plan.queries
            found = await asyncio.gather(*(core.vectorizer.aquery(query) for query in wanted))
            queries = dict(zip(wanted, found, strict=True))
            vectors = await core.vectorizer.adocuments(plan.texts)
        return await core.workers.run(core.carry_out, self._scope, plan, vectors, queries)


class _Core:
    """What a store and its views share."""

    def __init__(
        self,
        index: IndexConfig | None,
        engine: VectorEngine | None,
        path: str | os.PathLike[str] | None,
        fingerprint: Callable[[], str | None] | str | None,
        clock: Callable[[], float],
    ) -> None:
        self.fields = checked_index(index)
        self.workers = WorkerThreads("pancake-memory")
        self._clock = clock
        self._write_lock = threading.Lock()
        self.vectorizer: Vectorizer | None = None
        dim = None if engine is None else engine.dim
        if index is not None:
            dims = index.get("dims")
            if dim is not None and dims is not None and dim != dims:
                raise ConfigError(
                    f"index: dims got {dims}, but the engine holds vectors of {dim} numbers; leave it out"
                )
            self.vectorizer = Vectorizer(ensure_embeddings(index.get("embed")), self.workers, dim=dim or dims)
        learn_dim = None if self.vectorizer is None else self.vectorizer.learn_dim
        self.late = LateEngine(engine, path, learn_dim, fingerprint, clock)

    def carry_out(
        self, scope: Scope, plan: StorePlan, vectors: Sequence[Vector], queries: Mapping[str, Vector]
    ) -> list[Result]:
        """Do a batch; blocks."""
        return StoreBatch(self.late.get(), scope, plan, vectors, queries, self._clock, self._write_lock).run()
