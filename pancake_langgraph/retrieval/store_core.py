"""What a store and its views share: the embedder, the engine, results that are kept, and threads to wait in."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

from langchain_core.embeddings import Embeddings
from langchain_core.runnables.config import var_child_runnable_config

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval.base import Hit, Namespace, Query, Vector, VectorEngine
from pancake_langgraph.retrieval.desk import Desk
from pancake_langgraph.retrieval.device_budget import DeviceBudget, checked_budget
from pancake_langgraph.retrieval.draft import waiting_drafts
from pancake_langgraph.retrieval.dropped import close_when_dropped
from pancake_langgraph.retrieval.embedder_weights import count_weights
from pancake_langgraph.retrieval.lanes import Priority
from pancake_langgraph.retrieval.opening import Access, LateEngine
from pancake_langgraph.retrieval.prefetch import PrefetchStats
from pancake_langgraph.retrieval.result_cache import ResultCache, ResultCacheStats
from pancake_langgraph.retrieval.vectorizer import Vectorizer
from pancake_langgraph.retrieval.worker_threads import WorkerThreads

logger = logging.getLogger(__name__)

#: Agents whose last drafts wait for an index to be opened; those of further ones are lost.
_MAX_OPENING_DRAFTS = 256


class StoreCore:
    """Opens nothing until it is needed.  Thread safe; may be used again after `close`; closed when it is dropped."""

    def __init__(
        self,
        name: str,
        embeddings: Embeddings | None,
        *,
        engine: VectorEngine | None,
        path: str | os.PathLike[str] | None,
        access: Access = Access(),  # noqa: B008 - frozen
        dim: int | None = None,
        fingerprint: Callable[[], str | None] | str | None = None,
        cache_s: float | None = None,
        clock: Callable[[], float] = time.time,
        device_budget: DeviceBudget | None = None,
    ) -> None:
        """Describe what a store needs; its threads are called `name`, and arguments are those of the stores.

        Raises:
            ConfigError: if these do not go together, or `cache_s` is not over 0.
        """
        if isinstance(engine, VectorEngine):  # what else it may be, is refused below
            if dim not in (None, engine.dim):
                raise ConfigError(
                    f"index: dims got {dim}, but the engine holds vectors of {engine.dim} numbers; leave it out"
                )
            dim = engine.dim
        self.clock = clock
        self.cache = _cache(cache_s, clock)
        #: For reads, and for writes, so that no read waits for an import.
        self.readers, self.writers = WorkerThreads(name), WorkerThreads(f"{name}-write")
        before = _counting(embeddings, checked_budget(device_budget))
        self.vectorizer = None if embeddings is None else Vectorizer(embeddings, dim=dim, before=before)
        if fingerprint is None and self.vectorizer is not None:
            fingerprint = self.vectorizer.fingerprint
        learn_dim = None if self.vectorizer is None else self.vectorizer.learn_dim
        self._late = LateEngine(
            engine,
            path,
            learn_dim=learn_dim,
            fingerprint=fingerprint,
            access=access,
            clock=clock,
            cache=self.cache,
            before=before,
            device_budget=device_budget,
        )
        self._close = functools.partial(_close_all, self.readers, self.writers, self._late, self.vectorizer)
        self._num_lost_drafts = 0
        self._drafts_lock = threading.Lock()
        self._waiting_drafts: dict[str, list[str]] = {}
        self._is_opening = False
        close_when_dropped(self, self._close, self._late.ending)

    def engine(self) -> Desk:
        """Return the engine; the first call opens it, so never call it on a loop.

        Raises:
            RetrievalError: if it cannot be opened.
        """
        desk = self._late.opened
        return self._late.get() if desk is None else desk

    async def aengine(self) -> Desk:
        """Do what `engine` does."""
        desk = self._late.opened
        return await self.readers.run(self._late.get) if desk is None else desk

    def search(self, queries: Sequence[Query], agents: Sequence[str]) -> list[list[Hit]]:
        """Return for each query its hits; `agents` says who asks."""
        return self.engine().search(queries, agents=agents, cache=self.cache)

    async def asearch(self, queries: Sequence[Query], agents: Sequence[str]) -> list[list[Hit]]:
        """Do what `search` does."""
        return await (await self.aengine()).asearch(queries, agents=agents, cache=self.cache)

    def draft(self, agent: str, text: str) -> None:
        """Bring up what an agent will likely search for; returns at once and never raises."""
        if self.vectorizer is None or not self._late.may_prefetch:
            return
        try:
            if (desk := self._late.opened) is not None:
                desk.draft(agent, text, _draft_embedder(self.vectorizer))
            elif text.strip():
                self._draft_later(agent, text, _draft_embedder(self.vectorizer))
        except RuntimeError as exc:  # no more threads; nothing depends on a draft
            self._lost(exc)

    def prefetch_stats(self) -> PrefetchStats:
        """Return what drafts were worth, over all stores of the engine; all is 0 where nothing is brought up."""
        desk = self._late.opened
        found = PrefetchStats() if desk is None else desk.prefetch_stats()
        return replace(found, failures=found.failures + self._num_lost_drafts)

    def cache_stats(self) -> ResultCacheStats:
        """Return counts of the cache; all is 0 without one."""
        return ResultCacheStats() if self.cache is None else self.cache.stats()

    def close(self) -> None:
        """Finish what was begun in threads, then close engine and embedder.  Idempotent; searches that wait fail."""
        self._close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _draft_later(self, agent: str, text: str, embed: Callable[[str], Vector]) -> None:
        """Have the index opened, once; of each agent only the last drafts wait for that."""
        with self._drafts_lock:
            if agent not in self._waiting_drafts and len(self._waiting_drafts) >= _MAX_OPENING_DRAFTS:
                self._num_lost_drafts += 1
                return
            self._waiting_drafts[agent] = waiting_drafts(self._waiting_drafts.get(agent, ()), text)
            if self._is_opening:
                return
            self._is_opening = True
        try:
            self.readers.begin(self._open_for_drafts, embed)
        except RuntimeError:
            self._take_drafts()
            raise

    def _open_for_drafts(self, embed: Callable[[str], Vector]) -> None:
        drafts: dict[str, list[str]] = {}
        try:
            desk = self._late.get()
            drafts = self._take_drafts()
            for agent, texts in drafts.items():
                for text in texts:
                    desk.draft(agent, text, embed)
        except Exception as exc:  # noqa: BLE001 - hints fail open; whoever searches sees the same error
            self._lost(exc, num_drafts=len(drafts or self._take_drafts()))

    def _take_drafts(self) -> dict[str, list[str]]:
        with self._drafts_lock:
            drafts, self._waiting_drafts, self._is_opening = self._waiting_drafts, {}, False
        return drafts

    def _lost(self, exc: Exception, *, num_drafts: int = 1) -> None:
        with self._drafts_lock:
            self._num_lost_drafts += num_drafts
        logger.debug("a draft could not be followed: %s", type(exc).__name__)


class OverCore:
    """What both stores have of their core: an end, hints, and counts.

    A store, and all views of it, that nobody holds any more is closed in the background.
    """

    __slots__ = ()
    _core: StoreCore
    _agent: str | None

    def close(self) -> None:
        """Close what the store has opened, after what was begun; searches that still wait fail.

        Idempotent; a later call opens it again.
        """
        self._core.close()

    async def aclose(self) -> None:
        """Do what `close` does."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        """Return the store; it opens at its first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the store; it opens at its first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    def draft(self, agent: str, text: str) -> None:
        """Take in the likely words of an agent's next search, so that an index on disk reads ahead what it will need.

        Returns at once and never raises.  `@phase(retrieves=store)` has the runtime call it with a thread's id.  A view
        that was made for an agent takes drafts as that agent's.
        """
        self._core.draft(self._agent or agent, text)

    def prefetch_stats(self) -> PrefetchStats:
        """Return what drafts were worth, over all stores of the engine."""
        return self._core.prefetch_stats()

    def cache_stats(self) -> ResultCacheStats:
        """Return counts of the results that are kept."""
        return self._core.cache_stats()


def _draft_embedder(vectorizer: Vectorizer) -> Callable[[str], Vector]:
    """Return what embeds drafts; it does not hold the core, which could never be dropped then."""
    return functools.partial(vectorizer.query, priority=Priority.PREFETCH)


def _close_all(readers: WorkerThreads, writers: WorkerThreads, late: LateEngine, vectorizer: Vectorizer | None) -> None:
    readers.stop()
    writers.stop()
    try:
        late.close()
    finally:
        if vectorizer is not None:
            vectorizer.close()


def asking_agent(name: str | None, namespace: Namespace) -> str:
    """Return who searches: the name that was given, else the thread of the graph that runs, else the namespace."""
    if name is not None:
        return name
    config = var_child_runnable_config.get()
    thread_id = None if config is None else config.get("configurable", {}).get("thread_id")
    return "/".join(namespace) if thread_id is None else str(thread_id)


def _counting(embeddings: Embeddings | None, budget: DeviceBudget | None) -> Callable[[], None]:
    """Return what counts the embedder's weights in the budget, if there are both."""
    if embeddings is None or budget is None:
        return lambda: None
    return functools.partial(count_weights, embeddings, budget)


def _cache(cache_s: float | None, clock: Callable[[], float]) -> ResultCache | None:
    if cache_s is None:
        return None
    if isinstance(cache_s, bool) or not isinstance(cache_s, int | float) or not cache_s > 0 or math.isinf(cache_s):
        raise ConfigError(f"cache_s: got {cache_s!r}, allowed are seconds above 0, or None to keep no results")
    return ResultCache(ttl_s=float(cache_s), epoch_s=clock)
