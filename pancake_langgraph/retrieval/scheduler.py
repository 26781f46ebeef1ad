"""Searches of many agents over one engine: together in one call where they come together, urgent ones first."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final

from pancake_langgraph._clock import Clock
from pancake_langgraph._errors import InvalidQuery, RetrievalError
from pancake_langgraph.retrieval.base import Hit, Query, VectorEngine
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.worker import BatchWorker, Failed, WorkerStats

#: Queries asked alone after their batch failed; when all of these fail as well, it is not the queries.
_MAX_PROOFS: Final = 4


class SearchScheduler:
    """Runs an engine's searches in one thread.  All methods are thread-safe; async ones may be used from several loops.

    What is queued when the engine becomes free goes into one call, of one priority; large jobs are cut into pieces.
    The engine stays its owner's: `close` ends the thread only.  Writes do not pass here.
    """

    def __init__(
        self, engine: VectorEngine, *, settings: LaneSettings | None = None, clock: Clock | None = None
    ) -> None:
        """Start nothing yet: the thread comes with the first search."""
        self._engine = engine
        self._worker: BatchWorker[Query, list[Hit]] = BatchWorker(
            "pancake-search", self._search, settings=settings, clock=clock
        )

    @property
    def engine(self) -> VectorEngine:
        """The engine whose searches these are."""
        return self._engine

    def search(
        self, query: Query, *, priority: Priority = Priority.INTERACTIVE, timeout_s: float | None = None
    ) -> list[Hit]:
        """Return the hits of one query, best first; blocks, so never call it on an event loop.

        Raises:
            InvalidQuery: if the engine refuses this query.
            RetrievalTimeout: if `timeout_s` passed first.
            RetrievalOverloaded: if too much of this priority waits already; bulk waits for room instead.
            RetrievalError: if the engine fails, after `close`, and in a forked process.
        """
        return self._worker.run((query,), priority=priority, timeout_s=timeout_s)[0]

    async def asearch(
        self, query: Query, *, priority: Priority = Priority.INTERACTIVE, timeout_s: float | None = None
    ) -> list[Hit]:
        """Like `search`, awaited; a query whose task is cancelled leaves the queue."""
        return (await self._worker.arun((query,), priority=priority, timeout_s=timeout_s))[0]

    def search_many(
        self, queries: Sequence[Query], *, priority: Priority = Priority.BULK, timeout_s: float | None = None
    ) -> list[list[Hit]]:
        """Return the hits of each query in their order; the first error of one is the error of all these.

        Raises as `search` does.
        """
        return self._worker.run(queries, priority=priority, timeout_s=timeout_s)

    async def asearch_many(
        self, queries: Sequence[Query], *, priority: Priority = Priority.BULK, timeout_s: float | None = None
    ) -> list[list[Hit]]:
        """Like `search_many`, awaited; what was not begun when the task is cancelled leaves the queue."""
        return await self._worker.arun(queries, priority=priority, timeout_s=timeout_s)

    def submit(
        self, queries: Sequence[Query], *, priority: Priority = Priority.BULK, timeout_s: float | None = None
    ) -> Future[list[list[Hit]]]:
        """Queue queries and return the future of their hits; cancelling it takes out what was not begun.

        Raises:
            RetrievalOverloaded: if too much of this priority waits already.
            RetrievalError: after `close`, and in a forked process.
        """
        return self._worker.submit(queries, priority=priority, timeout_s=timeout_s)

    def stats(self) -> WorkerStats:
        """Return counts; `batches` are calls of the engine but for those that look for a wrong query in a batch."""
        return self._worker.stats()

    def close(self) -> None:
        """Fail what waits, let the running search finish, end the thread.  Idempotent; does not close the engine."""
        self._worker.close()

    def __enter__(self) -> SearchScheduler:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # -- on the thread --------------------------------------------------------------------------------------------

    def _search(self, queries: Sequence[Query]) -> list[list[Hit] | Failed]:
        """Search a batch; a query that cannot be answered fails alone."""
        try:
            found = self._engine.search(queries)
            if len(found) != len(queries):
                raise RetrievalError(
                    f"the engine gave {len(found)} answers to {len(queries)} queries. This is a bug in the engine."
                )
            return list(found)
        except InvalidQuery as exc:
            if len(queries) == 1:
                return [Failed(exc)]
            # Engines look at all queries before they search: halving finds the wrong ones at little cost.
            middle = len(queries) // 2
            return [*self._search(queries[:middle]), *self._search(queries[middle:])]
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is the callers'
            if len(queries) == 1:
                return [Failed(exc)]
            return self._one_by_one(queries)

    def _one_by_one(self, queries: Sequence[Query]) -> list[list[Hit] | Failed]:
        """Ask each alone, unless the engine turns out to answer nothing at all."""
        answers: list[list[Hit] | Failed] = []
        for query in queries:
            if len(answers) >= _MAX_PROOFS and all(isinstance(answer, Failed) for answer in answers):
                answers.append(answers[-1])
                continue
            answers += self._search((query,))
        return answers
