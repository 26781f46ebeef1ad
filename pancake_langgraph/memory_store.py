"""`PancakeStore`: long-term memory for LangGraph, searched by meaning, with views for several agents."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from langgraph.store.base import BaseStore, IndexConfig, Op, Result, TTLConfig
from langgraph.store.base.embed import ensure_embeddings

from pancake_langgraph.retrieval.base import Namespace, Vector, VectorEngine
from pancake_langgraph.retrieval.desk import Desk
from pancake_langgraph.retrieval.device_budget import DeviceBudget
from pancake_langgraph.retrieval.opening import Access, OnCorrupt
from pancake_langgraph.retrieval.scopes import Scope
from pancake_langgraph.retrieval.store_batch import StoreBatch
from pancake_langgraph.retrieval.store_core import OverCore, StoreCore, asking_agent
from pancake_langgraph.retrieval.store_plan import StorePlan, checked_index, make_plan

__all__ = ["PancakeStore"]


class PancakeStore(OverCore, BaseStore):
    """Keeps JSON values under namespaces and keys, in memory or on disk, and finds them by meaning.

        store = PancakeStore(index={"dims": 384, "embed": embeddings, "fields": ["text"]}, path="memory/")
        graph = builder.compile(store=store)

    It does what LangGraph's `InMemoryStore` documents.  In a batch, reads see what was there before it, and of several
    writes to one id the last counts; a batch is embedded by one call, and stored whole or not at all.  Listed items
    come last updated first.  Expired items never come back.  Filters are those of
    `pancake_langgraph.retrieval.filters`.

    Sync and async methods may be mixed freely, from any number of threads and loops.  The constructor opens nothing;
    the first call does.  Searches of all stores over one engine go together.  Async methods wait for threads of the
    store, never on the loop.
    """

    supports_ttl = True

    def __init__(
        self,
        *,
        index: IndexConfig | None = None,
        engine: VectorEngine | None = None,
        path: str | os.PathLike[str] | None = None,
        read_only: bool = False,
        on_corrupt: OnCorrupt = "raise",
        ttl: TTLConfig | None = None,
        fingerprint: Callable[[], str | None] | str | None = None,
        cache_s: float | None = None,
        device_budget: DeviceBudget | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Describe a store.

        Args:
            index: `dims`, `embed` and `fields` as LangGraph has them; without it items are listed and not searched.
            engine: An engine that is open, for example one that other stores use too; it stays open.
            path: A folder that holds the items; it is made when it is missing.  Without an engine and a path they are
                kept in memory, and gone when the store is.
            read_only: Whether the index at `path` is only read, beside a process that writes it; it has to be there.
            on_corrupt: What damaged parts of the index at `path` do: `raise` an error, or `skip` them, which in a store
                that writes gives them up.
            ttl: `default_ttl` in minutes and `refresh_on_read`, as LangGraph has them.
            fingerprint: What tells the embedder from others, or what computes it; kept with items on disk, and taken
                from what the embedder answers by default.
            cache_s: Results are given again for so many seconds, unless something was written that may change them;
                `None` keeps none.
            device_budget: Counts what the embedder's weights and the index at `path` take of devices; the first call
                raises `DeviceFull` where there is no room for the weights.  An engine that is given has its own.
            clock: Seconds since the epoch.

        Raises:
            ConfigError: if `index`, `engine` or `cache_s` is not usable, or what is given does not go together.
        """
        super().__init__()
        self.ttl_config = ttl
        self._fields = checked_index(index)
        dims = None if index is None else index.get("dims")
        self._core = StoreCore(
            "pancake-memory",
            None if index is None else ensure_embeddings(index.get("embed")),
            engine=engine,
            path=path,
            access=Access(read_only, on_corrupt),
            dim=dims,
            fingerprint=fingerprint,
            cache_s=cache_s,
            device_budget=device_budget,
            clock=clock,
        )
        self._write_lock = threading.Lock()
        self._scope = Scope()
        self._agent: str | None = None

    # -- views -------------------------------------------------------------------------------------------

    def view(
        self,
        *,
        reads: Iterable[Namespace] | None = None,
        writes: Iterable[Namespace] | None = None,
        allowed: Collection[tuple[Namespace, str]] | None = None,
        agent: str | None = None,
    ) -> PancakeStore:
        """Return the same store as one of several agents may see it.

            ann = store.view(reads=[("team",), ("agents", "ann")], writes=[("agents", "ann")])

        Namespaces stay what they are.  What may not be read is not there: not for `get`, `search` nor
        `list_namespaces`.  A view of a view can only be narrower.  All share one engine; close one of them.

        Args:
            reads: Branches of namespaces that are seen.
            writes: Branches that may be written; by default all that are seen.
            allowed: Namespace and key of the only items that are seen, checked last, whatever an index returned.
            agent: Whose drafts and searches belong together; by default those of one thread of a graph do, and outside
                of graphs those of one namespace.

        Raises:
            ConfigError: if a branch lies outside of what this view has.
        """
        narrowed = PancakeStore.__new__(PancakeStore)
        BaseStore.__init__(narrowed)
        narrowed.ttl_config = self.ttl_config
        narrowed._fields, narrowed._core, narrowed._write_lock = self._fields, self._core, self._write_lock
        narrowed._agent = agent or self._agent
        narrowed._scope = self._scope.narrowed(reads, writes, allowed)
        return narrowed

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
        plan = make_plan(ops, self._scope, self._fields)
        vectors: list[Vector] = []
        queries: dict[str, Vector] = {}
        if core.vectorizer is not None:
            queries = dict(zip(plan.queries, core.vectorizer.queries(plan.queries), strict=True))
            vectors = core.vectorizer.documents(plan.texts)
        batch = self._batch(core.engine(), plan, vectors, queries)
        return batch.run(core.search(batch.questions, self._agents(batch)))

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        """Do what `batch` does."""
        core = self._core
        plan = make_plan(ops, self._scope, self._fields)
        vectors: list[Vector] = []
        queries: dict[str, Vector] = {}
        if core.vectorizer is not None:
            queries = dict(zip(plan.queries, await core.vectorizer.aqueries(plan.queries), strict=True))
            vectors = await core.vectorizer.adocuments(plan.texts)
        batch = self._batch(await core.aengine(), plan, vectors, queries)
        hits = await core.asearch(batch.questions, self._agents(batch))
        if batch.is_done(hits):
            return batch.run(hits)
        return await (core.writers if plan.writes else core.readers).run(batch.run, hits)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _batch(
        self, engine: Desk, plan: StorePlan, vectors: Sequence[Vector], queries: Mapping[str, Vector]
    ) -> StoreBatch:
        return StoreBatch(engine, self._scope, plan, vectors, queries, self._core.clock, self._write_lock)

    def _agents(self, batch: StoreBatch) -> list[str]:
        return [asking_agent(self._agent, prefix) for prefix in batch.prefixes]
