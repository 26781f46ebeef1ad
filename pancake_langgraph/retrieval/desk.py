"""An engine as stores use it: searches of all of them together, and results and partitions kept ready.

There is one desk for each engine, whoever opens it: what one store writes, the caches of the others forget.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

from pancake_langgraph.retrieval.base import (
    EngineStats,
    Hit,
    Item,
    ItemId,
    Namespace,
    Query,
    TouchesItems,
    Vector,
    VectorEngine,
    View,
)
from pancake_langgraph.retrieval.checks import is_as_read
from pancake_langgraph.retrieval.draft import DraftSettings
from pancake_langgraph.retrieval.lanes import Priority
from pancake_langgraph.retrieval.partitions import PrefetchesPartitions
from pancake_langgraph.retrieval.prefetch import PartitionPrefetcher, PrefetchStats
from pancake_langgraph.retrieval.result_cache import Missed, Question, ResultCache
from pancake_langgraph.retrieval.scheduler import SearchScheduler

#: What partitions that were brought up for drafts may take.
PREFETCH_BYTES: Final = 256 << 20
#: Up to so many queries of one call somebody waits for; more are bulk.
_MAX_INTERACTIVE: Final = 32

_lock = threading.Lock()
_desks: weakref.WeakValueDictionary[int, Desk] = weakref.WeakValueDictionary()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Desk:
    """The port `VectorEngine` over an engine.  Thread safe; in a forked process it has a thread of its own.

    Searches that were not made before go through one `SearchScheduler`, with up to 32 queries a call as interactive;
    all else goes straight to the engine.
    """

    def __init__(self, engine: VectorEngine) -> None:
        """Begin nothing; use `desk_of`, so that there is one for each engine."""
        self.engine = engine
        self.num_users = 0
        self._scheduler: SearchScheduler | None = None
        self._prefetcher: PartitionPrefetcher | None = None
        #: The last search before there was a prefetcher, which takes the first agents to search like that.
        self._last_asked: Query | None = None
        self._pid = os.getpid()
        self._caches: weakref.WeakSet[ResultCache] = weakref.WeakSet()
        #: Held by writes to an engine that cannot change an item in one step.
        self._storing: AbstractContextManager[object] = (
            nullcontext() if isinstance(engine, TouchesItems) else threading.Lock()
        )

    @property
    def dim(self) -> int:
        """Length of every vector."""
        return self.engine.dim

    @property
    def read_only(self) -> bool:
        """Whether the engine can only be read."""
        return getattr(self.engine, "read_only", False) is True

    def add_cache(self, cache: ResultCache) -> None:
        """Have a cache hear of all writes from now on."""
        with _lock:
            self._caches.add(cache)

    def leave(self) -> None:
        """Say that one user less is here; the last one ends the threads.  The engine stays open."""
        with _lock:
            self.num_users -= 1
            if self.num_users > 0 or self._pid != os.getpid():
                return
            prefetcher, self._prefetcher = self._prefetcher, None
            scheduler, self._scheduler = self._scheduler, None
        if prefetcher is not None:
            prefetcher.close()
        if scheduler is not None:
            scheduler.close()

    # -- searching ------------------------------------------------------------------------------------------------

    def search(
        self, queries: Sequence[Query], *, agents: Sequence[str] = (), cache: ResultCache | None = None
    ) -> list[list[Hit]]:
        """Return for each query its hits; `agents` says who asks each of them, for the prefetcher.

        Raises:
            InvalidQuery: see the port.
            RetrievalOverloaded: if too many searches wait that are urgent as well.
            RetrievalError: if the engine fails or was closed meanwhile.
        """
        found, missed = self._begin(queries, agents, cache)
        asked = [queries[place] for place in missed]
        hits = self._searches().search_many(asked, priority=_priority(asked))
        return _together(found, missed, hits, cache)

    async def asearch(
        self, queries: Sequence[Query], *, agents: Sequence[str] = (), cache: ResultCache | None = None
    ) -> list[list[Hit]]:
        """Do what `search` does."""
        found, missed = self._begin(queries, agents, cache)
        asked = [queries[place] for place in missed]
        hits = await self._searches().asearch_many(asked, priority=_priority(asked))
        return _together(found, missed, hits, cache)

    def draft(self, agent: str, text: str, embed: Callable[[str], Vector]) -> None:
        """Bring up what an agent will likely search for; the first embedder that is given embeds all drafts."""
        if not isinstance(self.engine, PrefetchesPartitions):
            return
        with _lock:
            if self.num_users <= 0:
                return  # the last one has just left: nobody would end the thread
            if self._prefetcher is None:
                settings = DraftSettings(budget_bytes=PREFETCH_BYTES)
                self._prefetcher = PartitionPrefetcher(self.engine, settings, embed=embed, like=self._last_asked)
                self._last_asked = None
            prefetcher = self._prefetcher
        prefetcher.draft(agent, text)

    def prefetch_stats(self) -> PrefetchStats:
        """Return what drafts were worth."""
        prefetcher = self._prefetcher
        return PrefetchStats() if prefetcher is None else prefetcher.stats()

    # -- the rest of the port -------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> None:
        """Store items: all or none; caches forget what that may change."""
        try:
            with self._storing:
                self.engine.put(items)
        finally:
            self._wrote({item.id.namespace for item in items})

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Delete items and return how many there were; caches forget what that may change."""
        try:
            with self._storing:
                return self.engine.delete(ids)
        finally:
            self._wrote({item_id.namespace for item_id in ids})

    def refresh(self, expiries: Mapping[ItemId, float], updated_at_s: Mapping[ItemId, float]) -> None:
        """Set when items expire that are still as they were read; `updated_at_s` says when they were stored then.

        What anybody stored since, through whatever store over this engine, stays as it is.
        """
        try:
            if isinstance(self.engine, TouchesItems):
                self.engine.touch(expiries, updated_at_s=updated_at_s)
                return
            with self._storing:
                found = [item for item in self.engine.get(list(expiries)) if item is not None]
                touched = [item for item in found if is_as_read(item, updated_at_s)]
                if touched:
                    self.engine.put([replace(item, expires_at_s=expiries[item.id]) for item in touched])
        finally:
            self._wrote({item_id.namespace for item_id in expiries})

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        """Return items in the order of `ids`."""
        return self.engine.get(ids)

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        """Return items of a view, last updated first."""
        return self.engine.items(view, limit=limit, offset=offset)

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have live items."""
        return self.engine.namespaces()

    def stats(self) -> EngineStats:
        """Return sizes."""
        return self.engine.stats()

    def close(self) -> None:
        """Leave; who opened the engine closes it."""
        self.leave()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _searches(self) -> SearchScheduler:
        with _lock:
            if self._pid != os.getpid():
                self._scheduler, self._prefetcher, self._pid = None, None, os.getpid()
            if self._scheduler is None:
                self._scheduler = SearchScheduler(self.engine)
            return self._scheduler

    def _begin(
        self, queries: Sequence[Query], agents: Sequence[str], cache: ResultCache | None
    ) -> tuple[list[list[Hit]], dict[int, Missed | None]]:
        """Return what is known, and the places of what has to be searched for."""
        # The cache is asked first: of a write that comes between both it then hears before it is told an older answer.
        known = [None if cache is None else cache.look_up(Question.of(query)) for query in queries]
        rehearsed = self._rehearsed(queries, agents, [isinstance(one, list) for one in known])
        found: list[list[Hit]] = [[] for _ in queries]
        missed: dict[int, Missed | None] = {}
        for place, one in enumerate(known):
            if isinstance(one, list):
                found[place] = one
            elif (answer := rehearsed.get(place)) is None:
                missed[place] = one
            else:
                found[place] = answer
                if cache is not None and one is not None:
                    cache.store(one, answer)
        return found, missed

    def _rehearsed(
        self, queries: Sequence[Query], agents: Sequence[str], are_answered: Sequence[bool]
    ) -> dict[int, list[Hit]]:
        """Tell the prefetcher who searches for what, and return what it has the answer of, by place."""
        if (prefetcher := self._prefetcher) is None:
            if queries and agents and isinstance(self.engine, PrefetchesPartitions):
                self._last_asked = queries[-1]
            return {}
        answers = [
            prefetcher.searched(agent, query.vector, query=query, is_answered=is_answered)
            for agent, query, is_answered in zip(agents, queries, are_answered, strict=False)
        ]
        return {place: answer for place, answer in enumerate(answers) if answer is not None}

    def _wrote(self, namespaces: set[Namespace]) -> None:
        with _lock:
            caches = list(self._caches)
        for cache in caches:
            cache.invalidate(namespaces)


def desk_of(engine: VectorEngine) -> Desk:
    """Return the desk of an engine, with one user more; `leave` when done."""
    with _lock:
        desk = _desks.get(id(engine))  # no other engine has its number while the desk holds it
        if desk is None:
            desk = _desks[id(engine)] = Desk(engine)
        desk.num_users += 1
        return desk


def _priority(queries: Sequence[Query]) -> Priority:
    return Priority.INTERACTIVE if len(queries) <= _MAX_INTERACTIVE else Priority.BULK


def _together(
    found: list[list[Hit]], missed: Mapping[int, Missed | None], hits: Sequence[list[Hit]], cache: ResultCache | None
) -> list[list[Hit]]:
    """Put what was searched for to what was known, and remember it."""
    for (place, miss), new in zip(missed.items(), hits, strict=True):
        found[place] = new
        if cache is not None and miss is not None:
            cache.store(miss, new)
    return found
