"""Brings the partitions of the next queries up while the model still writes these queries."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final

from pancake_langgraph.retrieval.base import Hit, MarksChanges, Query, Vector, VectorEngine, View
from pancake_langgraph.retrieval.draft import DraftSettings, Outlook, WarmPlan, waiting_drafts
from pancake_langgraph.retrieval.partitions import Partition, PrefetchesPartitions
from pancake_langgraph.retrieval.rehearsals import MAX_HITS, Rehearsals, key_of

logger = logging.getLogger(__name__)

#: What is read at once; in between it is looked whether that is still wanted.
_CHUNK_BYTES: Final = 1 << 20
_MAX_SEARCHES: Final = 1024
_MAX_HINTS: Final = 256
#: Hints between two looks for partitions that are gone.
_CHECK_EVERY: Final = 64
_JOIN_S: Final = 30.0
#: What a search tells is looked at this much later, when it has its answer: it must not wait for the book-keeping.
_SETTLE_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class PrefetchStats:
    """Counts since the start, in partitions where nothing else is said.

    `late` are needed ones that were planned and not there in time; `overtaken` are hints whose search came before they
    were looked at; `dropped` hints and searches were too many at once; `failures` are what went wrong and was passed
    over.  `read_bytes` were read from disk ahead of searches.  `rehearsed` are searches that were made for drafts, and
    `answered` those of agents that one of these had the answer of; they count as searches all the same.
    """

    searches: int = 0
    hints: int = 0
    overtaken: int = 0
    needed: int = 0
    needed_bytes: int = 0
    hits: int = 0
    hit_bytes: int = 0
    late: int = 0
    fetched: int = 0
    useful: int = 0
    rehearsed: int = 0
    answered: int = 0
    read_bytes: int = 0
    warm_bytes: int = 0
    dropped: int = 0
    failures: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the bytes that searches needed which were warm when they came; 0 before the first."""
        return self.hit_bytes / self.needed_bytes if self.needed_bytes else 0.0

    @property
    def precision(self) -> float:
        """Share of what was brought up for a query that it needed; 0 before the first."""
        return self.useful / self.fetched if self.fetched else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    agent: str
    vector: Vector
    moment: int
    due_s: float


class PartitionPrefetcher:
    """Keeps the partitions that agents will need warm, within a budget.

    `draft`, `expect` and `searched` may be called from any thread, a loop's too: they return at once and never raise,
    as nothing depends on a hint.  One thread does the work; it starts with the first hint and ends with `close`.  Of an
    agent only its last draft counts, and what was drafted before where that is no beginning of it; none counts once its
    search has come.  A forked process does nothing.

    What a search for a draft finds is kept where the engine is one of `MarksChanges`: an agent that then searches for
    just that, while nothing has changed, has its answer from `searched`.
    """

    def __init__(
        self,
        engine: PrefetchesPartitions,
        settings: DraftSettings,
        *,
        embed: Callable[[str], Vector] | None = None,
        like: Query | None = None,
    ) -> None:
        """Bring up partitions of `engine`; `embed` makes vectors of drafts, in the prefetcher's thread.

        Agents of which nothing is known yet are taken to search in the namespaces of the last search of anyone, which
        is `like` at first, and for as many items.
        """
        self._engine = engine
        self._settings = settings
        self._embed = embed
        self._outlook = Outlook(settings)
        self._hints: OrderedDict[str, list[str] | list[Vector | None]] = OrderedDict()
        self._searches: deque[_Search] = deque()
        self._asked: OrderedDict[str, Query] = OrderedDict()
        self._last_asked = like
        self._rehearsals = Rehearsals()
        self._mark: Callable[[], object | None] = engine.mark if isinstance(engine, MarksChanges) else lambda: None
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = self._busy = False
        self._stats = PrefetchStats()

    # -- the outside ----------------------------------------------------------------------------------------------

    def draft(self, agent: str, text: str) -> None:
        """Take in the first words of what an agent will ask."""
        if text.strip():
            self._hint(agent, lambda waiting: waiting_drafts([one for one in waiting if isinstance(one, str)], text))

    def expect(self, agent: str, vector: Vector | None = None) -> None:
        """Take in that an agent will search soon, for something like `vector` where that is known."""
        self._hint(agent, lambda waiting: [vector])

    def searched(
        self, agent: str, vector: Vector, *, query: Query | None = None, is_answered: bool = False
    ) -> list[Hit] | None:
        """Take in what an agent searches for, and return its answer if that is there already; else search.

        In which view its next ones will be, and for how many items, is told by the whole `query`; without it, and for
        one that somebody else has answered, nothing is returned.
        """
        if not self._is_here:
            return None
        with self._changed:
            if query is not None:
                self._note_asked(agent, query)
            answer = None if query is None or is_answered else self._answer(agent, query)
            if agent in self._hints:
                del self._hints[agent]
                self._count(overtaken=1)
            if len(self._searches) >= _MAX_SEARCHES:
                self._searches.popleft()
                self._count(dropped=1)
            due_s = time.monotonic() + _SETTLE_S
            self._searches.append(_Search(agent, vector, self._outlook.moment, due_s))
            self._wake()
        return answer

    def stats(self) -> PrefetchStats:
        """Return counts."""
        with self._changed:
            return replace(self._stats, warm_bytes=self._outlook.warm_bytes)

    def wait_idle(self, timeout_s: float) -> bool:
        """Have all that was taken in done now, and wait for it; return whether that came true."""
        with self._changed:
            self._searches = deque(replace(search, due_s=0.0) for search in self._searches)
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._hints or self._searches or self._busy), timeout_s)

    def close(self) -> None:
        """Give up what is not done yet and all memory, and end the thread.  Idempotent; does not close the engine."""
        if not self._is_here:
            return
        with self._changed:
            self._closed = True
            self._hints.clear()
            self._searches.clear()
            self._rehearsals.clear()
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.warning("the prefetcher did not end within %.0f s; its thread is left behind", _JOIN_S)

    def __enter__(self) -> PartitionPrefetcher:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # -- in the caller's thread -----------------------------------------------------------------------------------

    @property
    def _is_here(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _hint(self, agent: str, with_new: Callable[[Sequence[object]], list[str] | list[Vector | None]]) -> None:
        if not self._is_here:
            return
        with self._changed:
            waiting = self._hints.pop(agent, [])
            if len(self._hints) >= _MAX_HINTS:
                self._hints.popitem(last=False)
                self._count(dropped=1)
            self._hints[agent] = with_new(waiting)
            self._wake()

    def _note_asked(self, agent: str, query: Query) -> None:
        self._asked[agent] = self._last_asked = query
        self._asked.move_to_end(agent)
        if len(self._asked) > self._settings.max_agents:
            self._asked.popitem(last=False)

    def _answer(self, agent: str, query: Query) -> list[Hit] | None:
        """Return what a rehearsal of this very search has found; under the lock."""
        try:
            answer = self._rehearsals.take(agent, query, self._mark())
        except Exception as exc:  # noqa: BLE001 - hints fail open: what is wrong with a query, its search says; counted
            logger.debug("a search could not be compared with drafts: %s", type(exc).__name__)
            self._count(failures=1)
            return None
        if answer is not None:
            self._count(answered=1)
        return answer

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="pancake-prefetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads: hints fail open
                self._hints.clear()
                self._searches.clear()
                self._count(failures=1)
                return
            self._thread = thread
        self._changed.notify_all()

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._next()) is not None:
            try:
                if isinstance(task, _Search):
                    self._settle(task)
                else:
                    self._bring_up(*task)
            except Exception as exc:  # noqa: BLE001 - hints fail open, whatever the engine or embedder does; counted
                logger.debug("a hint could not be followed: %s", type(exc).__name__)
                self._note(failures=1)
        try:
            self._engine.cool(self._outlook.residents())
        except Exception as exc:  # noqa: BLE001 - the engine may be closed by now; then nothing is warm
            logger.debug("warm partitions could not be given up: %s", type(exc).__name__)

    def _next(self) -> _Search | tuple[str, str | Vector | None] | None:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while not (self._closed or self._hints or (left_s := self._left_s()) == 0.0):
                self._changed.wait(left_s)
            if self._closed:
                return None
            self._busy = True
            # Searches tell what hints were worth, and what the next ones are planned with.
            if self._searches:
                return self._searches.popleft()
            agent, waiting = next(iter(self._hints.items()))
            hint = waiting.pop(0)
            if not waiting:
                del self._hints[agent]
            return agent, hint

    def _left_s(self) -> float | None:
        """Return after how many seconds a search is to be looked at; `None` while there is none."""
        return max(self._searches[0].due_s - time.monotonic(), 0.0) if self._searches else None

    def _settle(self, search: _Search) -> None:
        needed = self._engine.partitions(search.vector, self._settings.per_query)
        found = self._outlook.used(search.agent, search.vector, needed, moment=search.moment)
        self._note(
            searches=1,
            needed=found.needed,
            needed_bytes=found.needed_bytes,
            hits=found.hits,
            hit_bytes=found.hit_bytes,
            late=found.late,
            fetched=found.fetched,
            useful=found.useful,
        )
        self._follow(found.plan, None)

    def _bring_up(self, agent: str, hint: str | Vector | None) -> None:
        self._note(hints=1)
        text = hint if isinstance(hint, str) else None
        if self._stats.hints % _CHECK_EVERY == 0:
            self._forget_gone()
        if isinstance(hint, str):
            if self._embed is None:
                return
            hint = self._embed(hint)
        plan = self._outlook.expect(agent, hint, self._engine.partitions, text=text or "")
        self._follow(plan, agent, text)
        if hint is not None and isinstance(self._engine, VectorEngine) and not self._is_over(agent, text):
            self._rehearse(self._engine, agent, hint, text or "")

    def _rehearse(self, engine: VectorEngine, agent: str, vector: Vector, text: str) -> None:
        """Search for what is drafted, so that what a search reads besides partitions is in memory as well.

        That are the documents of what it finds.  The answer is kept for the case that the draft was the whole of it.
        """
        with self._changed:
            own, last = self._asked.get(agent), self._last_asked
        if own is not None:
            query = replace(own, vector=vector, offset=0)
        elif last is not None:  # what another may see, or wants many of, is no guide, and could be dear
            query = Query(vector, View(last.view.prefixes), max(0, min(last.limit, MAX_HITS)))
        else:
            query = Query(vector)
        key, mark = key_of(query), self._mark()
        [hits] = engine.search([query])
        is_same = key == key_of(query)  # a filter is its caller's, who may have changed it meanwhile
        with self._changed:
            self._count(rehearsed=1)
            if self._closed or self._has_searched(agent):
                return
            if is_same and mark is not None and mark is self._mark():
                self._rehearsals.keep(agent, text, key, hits, mark)

    def _follow(self, plan: WarmPlan, agent: str | None, text: str | None = None) -> None:
        """Do what is planned, for as long as the agent it is for has neither searched nor changed its mind."""
        left = list(plan.warm)
        try:
            if plan.cool:
                self._engine.cool(plan.cool)
            for chunk in _chunks(plan.warm):
                if self._is_over(agent, text):
                    break
                names = [partition.id for partition in chunk]
                read_bytes = self._engine.warm(names)
                self._outlook.arrived(names)
                del left[: len(chunk)]
                self._note(read_bytes=read_bytes)
        finally:
            self._outlook.lost([partition.id for partition in left])

    def _is_over(self, agent: str | None, text: str | None) -> bool:
        with self._changed:
            if self._closed or agent is None:
                return self._closed
            newer = self._hints.get(agent, [])
            has_new = any(text is None or not isinstance(one, str) or one.startswith(text) for one in newer)
            return has_new or self._has_searched(agent)

    def _has_searched(self, agent: str) -> bool:
        """Return whether a search of an agent was not looked at yet; under the lock."""
        return any(search.agent == agent for search in self._searches)

    def _forget_gone(self) -> None:
        """Give back the room of partitions whose segments are gone."""
        names = self._outlook.residents()
        is_warm = self._engine.is_warm(names)
        self._outlook.lost([name for name, warm in zip(names, is_warm, strict=True) if not warm])

    def _note(self, **more: int) -> None:
        with self._changed:
            self._count(**more)

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})


def _chunks(partitions: Sequence[Partition]) -> Iterator[Sequence[Partition]]:
    chunk: list[Partition] = []
    for partition in partitions:
        chunk.append(partition)
        if sum(inside.num_bytes for inside in chunk) >= _CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
