"""Threads for one kind of an adapter's tasks, with results that LMCache polls for."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

from lmcache.v1.platform import create_event_notifier

from pancake_lmcache.counts import Counts

_Result = TypeVar("_Result")


class Lane(Generic[_Result]):
    """One kind of task: its threads, its finished results, and the descriptor that says so.  Thread-safe."""

    def __init__(self, name: str, num_workers: int, counts: Counts) -> None:
        """Make threads, which start when there is work.

        Args:
            name: Part of the threads' names.
            num_workers: How many.
            counts: Where jobs that raise are counted.
        """
        self._counts = counts
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix=f"pancake-{name}", initializer=_calm)
        self._notifier = create_event_notifier()
        self._lock = threading.Lock()
        self._next_id = 0
        self._finished: dict[int, _Result] = {}

    def fileno(self) -> int:
        """Return the descriptor that says that a task ended."""
        return int(self._notifier.fileno())

    def submit(
        self,
        jobs: Sequence[Callable[[], Any]],
        result_of: Callable[[list[Any]], _Result],
        *,
        default: Any,
        tell: Callable[[list[Any]], None] = lambda results: None,
    ) -> int:
        """Run jobs side by side; a job that raises gives `default`.  Then tell listeners, then say that it is done."""
        with self._lock:
            task_id, self._next_id = self._next_id, self._next_id + 1
        results, left = [default] * len(jobs), len(jobs)

        def run(index: int, job: Callable[[], Any]) -> None:
            nonlocal left
            results[index] = self._guarded(job, default)
            with self._lock:
                left -= 1
                is_last = left == 0
            if is_last:
                self._guarded(partial(tell, results), None)
                self._complete(task_id, self._guarded(partial(result_of, results), nothing))

        nothing = result_of([default] * len(jobs))  # in the caller's thread, who hears of it if that cannot be told
        for index, job in enumerate(jobs):
            self._pool.submit(run, index, job)
        if not jobs:
            self._complete(task_id, result_of(results))
        return task_id

    def take(self, task_id: int) -> _Result | None:
        """Return a task's result, once; `None` while it runs."""
        with self._lock:
            return self._finished.pop(task_id, None)

    def take_all(self) -> dict[int, _Result]:
        """Return all results since the last call."""
        with self._lock:
            finished, self._finished = self._finished, {}
        return finished

    def close(self) -> None:
        """End: tasks that run are waited for, since they use the caller's memory."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._notifier.close()

    def _guarded(self, call: Callable[[], Any], default: Any) -> Any:
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - the server must go on; a miss is always a right answer; counted
            self._counts.add("failed_task", detail=repr(error))
            return default

    def _complete(self, task_id: int, result: _Result) -> None:
        with self._lock:
            self._finished[task_id] = result
        self._notifier.notify()


def _calm() -> None:
    """Have torch use this one thread: packing is not to take the cores from the engine's step."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
