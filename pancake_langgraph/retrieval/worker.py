"""One thread that does what many ask for, in batches: what came while it worked is the next batch.

No time is waited for a batch to fill: under load batches fill by themselves, and without load nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

from pancake_langgraph._clock import Clock, MonotonicClock
from pancake_langgraph._errors import RetrievalError, RetrievalOverloaded, RetrievalTimeout
from pancake_langgraph.retrieval.lanes import Job, Lanes, LaneSettings, Priority, Share

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")
_JOIN_S: Final = 30.0
#: A thread with nothing to do for so long ends, so that what was forgotten without `close` leaves nothing behind.
_IDLE_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Failed:
    """What stands in the place of an answer that there is none of."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counts since the start: batches and items that were done, jobs by how they ended, items that wait now."""

    batches: int = 0
    items: int = 0
    finished_jobs: int = 0
    failed_jobs: int = 0
    late_jobs: int = 0
    cancelled_jobs: int = 0
    refused_jobs: int = 0
    queued_items: int = 0


_Outcome: TypeAlias = list[Any] | Failed


class _Waiting(Job[Any]):
    """A job with the future of whoever waits for it, and the loop that this belongs to, if it does to one."""

    __slots__ = ("answers", "future", "has_expired", "loop")

    def __init__(
        self,
        items: Sequence[Any],
        priority: Priority,
        deadline_s: float | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        super().__init__(items, priority, deadline_s)
        self.loop = loop
        self.future: Future[Any] | asyncio.Future[Any] = Future() if loop is None else loop.create_future()
        self.answers: list[Any] = []
        self.has_expired = False


class BatchWorker(Generic[_T, _R]):
    """Does items of jobs in one thread.  All methods are thread-safe, and async ones may be used from several loops.

    What comes to a full lane is refused, unless it is bulk and its caller waits for it anyway: such jobs wait for room
    in the order they came, so that imports side by side hold each other up and do not fail.

    The thread starts with the first job and ends with `close`, or when nothing was to be done for a while; the next job
    starts another one.  In a process that was forked since, everything but
    `close` raises `RetrievalError`.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Sequence[_T]], Sequence[_R | Failed]],
        *,
        settings: LaneSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Call `serve` with each batch, in a thread called `name`; it returns one answer or `Failed` for each item.

        What it raises is what every item of the batch gets.
        """
        self._name = name
        self._serve = serve
        self._settings = settings or LaneSettings()
        self._clock = clock or MonotonicClock()
        self._lanes: Lanes[_Waiting] = Lanes(self._settings)
        #: Bulk jobs for which there was no room yet.
        self._outside: OrderedDict[int, _Waiting] = OrderedDict()
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closed = False
        self._stats = WorkerStats()

    # -- the outside ----------------------------------------------------------------------------------------------

    def submit(self, items: Sequence[_T], *, priority: Priority, timeout_s: float | None = None) -> Future[list[_R]]:
        """Queue a job; the future has the answers in the order of `items`, or the error of the first that failed.

        Cancelling the future takes out of the queue what was not begun.  After `timeout_s` nothing more of it is begun.

        Raises:
            RetrievalOverloaded: if too much of this priority waits already.
            RetrievalError: after `close`, and in a forked process.
        """
        job = self._job(items, priority, timeout_s, None)
        return cast("Future[list[_R]]", self._submit(job, may_wait=False).future)

    def run(self, items: Sequence[_T], *, priority: Priority, timeout_s: float | None = None) -> list[_R]:
        """Wait for the answers; never call it on an event loop.

        Raises:
            RetrievalTimeout: if `timeout_s` passed first.
            RetrievalOverloaded: if too much of this priority waits already; bulk waits for room instead.
            RetrievalError: after `close`, and in a forked process.
        """
        if threading.current_thread() is self._thread:
            raise RetrievalError(f"{self._name} cannot wait for itself: its own work asked it. Ask what it wraps.")
        waiting = self._submit(self._job(items, priority, timeout_s, None), may_wait=priority is Priority.BULK)
        future = cast("Future[list[_R]]", waiting.future)
        try:
            return future.result(timeout_s)
        except TimeoutError:  # the wait's, or the work's own
            waiting.has_expired = True
            if not future.cancel():
                return future.result()
            raise self._late(timeout_s) from None
        except BaseException:
            future.cancel()
            raise

    async def arun(self, items: Sequence[_T], *, priority: Priority, timeout_s: float | None = None) -> list[_R]:
        """Await the answers; cancelling the task takes out of the queue what was not begun.

        Raises:
            RetrievalTimeout: if `timeout_s` passed first.
            RetrievalOverloaded: if too much of this priority waits already; bulk waits for room instead.
            RetrievalError: after `close`, and in a forked process.
        """
        loop = asyncio.get_running_loop()
        waiting = self._submit(self._job(items, priority, timeout_s, loop), may_wait=priority is Priority.BULK)
        future = cast("asyncio.Future[list[_R]]", waiting.future)
        if timeout_s is None:
            return await future
        timer = loop.call_later(max(0.0, timeout_s), self._expire, waiting, timeout_s)
        try:
            return await future
        finally:
            timer.cancel()

    def stats(self) -> WorkerStats:
        """Return counts."""
        self._check_process()
        with self._changed:
            outside = sum(job.num_left for job in self._outside.values())
            return replace(self._stats, queued_items=len(self._lanes) + outside)

    def close(self) -> None:
        """Fail what waits, let the running batch finish, end the thread.  Idempotent; a forked copy does nothing."""
        if self._pid != os.getpid():
            return
        with self._changed:
            self._closed = True
            waiting = [*self._lanes.clear(), *self._outside.values()]
            self._outside.clear()
            thread = self._thread
            self._changed.notify_all()
        self._settle([(job, Failed(self._gone())) for job in waiting])
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.warning("%s did not end within %.0f s; its thread is left behind", self._name, _JOIN_S)

    def __enter__(self) -> BatchWorker[_T, _R]:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _job(
        self,
        items: Sequence[_T],
        priority: Priority,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> _Waiting:
        self._check_process()
        deadline_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        return _Waiting(tuple(items), priority, deadline_s, loop)

    def _submit(self, job: _Waiting, *, may_wait: bool) -> _Waiting:
        if not job.items:
            job.future.set_result([])
            return job
        with self._changed:
            if self._closed:
                raise self._gone()
            if may_wait and (self._outside or not self._lanes.has_room(job)):
                self._outside[id(job)] = job
            elif not self._lanes.add(job):
                self._count(refused_jobs=1)
                raise self._overloaded(job)
            if self._thread is None:
                self._start()
            self._changed.notify()
        job.future.add_done_callback(lambda future: self._withdrawn(job) if future.cancelled() else None)
        return job

    def _forget(self, job: _Waiting) -> None:
        """Take out what is left of a job, wherever it waits.  Under the lock."""
        self._lanes.discard(job)
        self._outside.pop(id(job), None)

    def _admit(self) -> None:
        """Queue the bulk jobs that there is room for now.  Under the lock."""
        while self._outside:
            key, job = next(iter(self._outside.items()))
            if not self._lanes.add(job):
                return
            del self._outside[key]

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: nothing is begun, and nobody may wait for it
            self._lanes.clear()
            self._outside.clear()
            raise
        self._thread = thread

    def _withdrawn(self, job: _Waiting) -> None:
        with self._changed:
            self._forget(job)
            if job.has_expired:
                self._count(late_jobs=1)
            else:
                self._count(cancelled_jobs=1)

    def _expire(self, job: _Waiting, timeout_s: float) -> None:
        with self._changed:
            self._forget(job)
        if not job.future.done():
            job.future.set_exception(self._late(timeout_s))
            with self._changed:
                self._count(late_jobs=1)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._lanes) or self._outside, _IDLE_S)
                self._admit()
                if self._closed or not len(self._lanes):
                    self._thread = None
                    return
                shares, late = self._lanes.take(self._clock.now_s())
            outcomes: list[tuple[_Waiting, _Outcome]] = [(job, Failed(self._late(None))) for job in late]
            if shares:
                outcomes += self._done(shares)
            self._settle(outcomes)
            with self._changed:
                self._count(late_jobs=len(late))

    def _done(self, shares: Sequence[Share[_Waiting]]) -> list[tuple[_Waiting, _Outcome]]:
        """Do a batch; return the jobs that are over with it."""
        batch = [item for share in shares for item in share.job.items[share.start : share.stop]]
        answers = self._answers(batch)
        over: list[tuple[_Waiting, _Outcome]] = []
        position = failed = 0
        for share in shares:
            part = answers[position : position + share.stop - share.start]
            position += len(part)
            job = share.job
            if (error := next((answer for answer in part if isinstance(answer, Failed)), None)) is not None:
                failed += 1
                over.append((job, error))
                with self._changed:
                    self._lanes.discard(job)
                continue
            job.answers += part
            if len(job.answers) == len(job.items):
                over.append((job, job.answers))
        with self._changed:
            self._count(batches=1, items=len(batch), failed_jobs=failed, finished_jobs=len(over) - failed)
        return over

    def _answers(self, batch: list[_T]) -> Sequence[_R | Failed]:
        try:
            answers = self._serve(batch)
        except BaseException as exc:  # noqa: BLE001 - it is the callers', who would wait for ever if the thread ended
            return [Failed(exc)] * len(batch)
        if len(answers) != len(batch):
            wrong = RetrievalError(
                f"{self._name} got {len(answers)} answers for {len(batch)} questions. This is a bug in what it wraps."
            )
            return [Failed(wrong)] * len(batch)
        return answers

    def _settle(self, outcomes: Sequence[tuple[_Waiting, _Outcome]]) -> None:
        """Hand out results: to threads one by one, to each loop all of its own with one wake-up."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Waiting, _Outcome]]] = defaultdict(list)
        for job, outcome in outcomes:
            if job.loop is not None:
                by_loop[job.loop].append((job, outcome))
            elif not job.future.done() and cast("Future[Any]", job.future).set_running_or_notify_cancel():
                _set(job.future, outcome)  # done: closed meanwhile, while a part of it was still served
        for loop, own in by_loop.items():
            try:
                loop.call_soon_threadsafe(_set_all, own)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits there any more
                logger.debug("%s: %d answers were for a loop that is closed", self._name, len(own))

    # -- errors ---------------------------------------------------------------------------------------------------

    def _count(self, **more: int) -> None:
        """Add to the counts.  Under the lock."""
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + num for name, num in more.items()})

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # before the lock, which another thread may have held at the fork
            raise RetrievalError(
                f"{self._name} was made before this process was forked, and its thread is not here. Open the index "
                f"again in the child."
            )

    def _gone(self) -> RetrievalError:
        return RetrievalError(f"{self._name} is closed. Open the index again.")

    def _overloaded(self, job: _Waiting) -> RetrievalOverloaded:
        waiting = f"{self._lanes.num_queued(job.priority)} {job.priority.name.lower()} items wait"
        return RetrievalOverloaded(
            f"{self._name} has too much to do: {waiting}, {self._settings.max_queued} are allowed, got "
            f"{len(job.items)} more. Try again later, ask for less at once, or raise max_queued."
        )

    def _late(self, timeout_s: float | None) -> RetrievalTimeout:
        waited = "its deadline" if timeout_s is None else f"{timeout_s:g} s"
        return RetrievalTimeout(f"{self._name} gave no answer within {waited}. Allow more time, or ask for less.")


def _set_all(outcomes: Sequence[tuple[_Waiting, _Outcome]]) -> None:
    for job, outcome in outcomes:
        if not job.future.done():
            _set(job.future, outcome)


def _set(future: Future[Any] | asyncio.Future[Any], outcome: _Outcome) -> None:
    if isinstance(outcome, Failed):
        future.set_exception(outcome.error)
    else:
        future.set_result(outcome)
