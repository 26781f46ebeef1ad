"""One background thread with one event loop, started when first needed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from pancake_langgraph._errors import RuntimeClosed

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 5.0


class BackgroundLoop:
    """Runs coroutines and callbacks off the caller's thread.  All methods are thread-safe; `stop` is idempotent.

    A process forked while the loop runs inherits no thread: there the loop counts as stopped, and the parent's, which
    the child's copy shares its wake-up socket with, is left alone.
    """

    def __init__(self, name: str) -> None:
        """Remember the thread's name; nothing is started."""
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._stopped = False

    @property
    def is_running(self) -> bool:
        """Whether the thread runs, in this process."""
        return self._loop is not None and not self._forked

    @property
    def _forked(self) -> bool:
        return self._pid is not None and self._pid != os.getpid()

    def call(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Schedule a plain callback; return false when the loop was stopped."""
        loop = self._ensure()
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # stopped between the check and the call
            return False
        return True

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine; the future belongs to the caller's thread.

        Raises:
            RuntimeClosed: if the loop was stopped.
        """
        loop = self._ensure()
        if loop is None:
            coroutine.close()
            raise RuntimeClosed("the runtime is closed (or was started before a fork); make a new one, or attach again")
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def stop(self) -> None:
        """Cancel what runs, end the thread, wait a bounded time."""
        if self._forked:
            return
        with self._lock:
            self._stopped = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT_S)

    def _ensure(self) -> asyncio.AbstractEventLoop | None:
        if self._forked:  # before the lock, which another thread may have held at the fork
            return None
        with self._lock:
            if self._stopped:
                return None
            if self._loop is None:
                self._pid = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=_STOP_TIMEOUT_S / 2))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
