"""Threads in which async methods wait, so that neither the loop nor its default executor does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
#: Engines take calls in turns or release the interpreter; more threads would only wait.
_WORKERS = 2


class WorkerThreads:
    """A few threads, made when first needed.  Thread safe; a forked child gets its own."""

    def __init__(self, name: str, *, num_threads: int = _WORKERS) -> None:
        """Start nothing; threads are called `name` and a number."""
        self._name = name
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    async def run(self, call: Callable[..., _T], *args: Any) -> _T:
        """Return what `call` returns in one of the threads; context variables are those of the caller."""
        context = contextvars.copy_context()
        bound = functools.partial(context.run, call, *args)
        return await asyncio.get_running_loop().run_in_executor(self._running(), bound)

    def begin(self, call: Callable[..., object], *args: Any) -> None:
        """Have a call made in one of the threads that nobody waits for; what it raises is lost.

        Raises:
            RuntimeError: if no thread can be started.
        """
        self._running().submit(call, *args)

    def stop(self) -> None:
        """Finish what is queued and end the threads; a later call starts new ones."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown(wait=True)

    def _running(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._name)
                self._pid = os.getpid()
            return self._executor
