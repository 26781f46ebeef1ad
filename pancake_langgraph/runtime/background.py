"""One background thread with one event loop, started when first needed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

from pancake_langgraph._errors import RuntimeClosed

_T = TypeVar("_T")
_Item = TypeVar("_Item")
_STOP_TIMEOUT_S = 5.0
#: How long an item may wait for others, which come right behind it: short beside the pauses and calls that are made use
#: of.  Each look wakes a thread whose data others have driven from the processor's caches.
LOOK_S: Final = 0.008
#: From so many items on that wait, it is asked whether the loop that shall look at them is still there.
MANY_ITEMS: Final = 256
_CLOSED = "the runtime is closed (or was started before a fork); make a new one, or attach again"


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
    def is_gone(self) -> bool:
        """Whether the loop was stopped, or runs in the process that this one was forked from."""
        return self._stopped or self._forked

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
            raise RuntimeClosed(_CLOSED)
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def ask(self, question: Callable[[], _T]) -> Future[_T]:
        """Call a plain function on the loop; the future, with what it returned or raised, is the caller's.

        Raises:
            RuntimeClosed: if the loop was stopped.
        """
        answer: Future[_T] = Future()
        if not self.call(_answer, question, answer):
            raise RuntimeClosed(_CLOSED)
        return answer

    def later(self, delay_s: float, callback: Callable[[], Any]) -> None:
        """Schedule a plain callback in `delay_s` seconds.  On the loop only; it is forgotten where the loop stops."""
        asyncio.get_running_loop().call_later(delay_s, callback)

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
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(loop,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: nothing is begun, the next caller tries again
                    loop.close()
                    raise
                self._loop, self._thread = loop, thread
            return self._loop


class Mailbox(Generic[_Item]):
    """Hands items from any thread to a callback on a background loop, in order, many with one wake-up.

    Waking a loop is a write to its socket, and costs more than most items.  So only the first item after a quiet time
    wakes it, and from then on the loop looks by itself every `LOOK_S`, until a look finds nothing: what comes in one
    burst is taken in together.
    """

    def __init__(
        self, background: BackgroundLoop, receive: Callable[[_Item], None], settle: Callable[[], None] = lambda: None
    ) -> None:
        """Call `receive` on the loop of `background`, which starts with the first item.

        `settle` is called when all items that were there have been received.
        """
        self._background = background
        self._receive = receive
        self._settle = settle
        self._items: deque[_Item] = deque()
        self._is_awake = False

    def put(self, item: _Item) -> None:
        """Hand over one item; returns at once.  Where the loop is gone it is thrown away, if only with later ones."""
        self._items.append(item)
        if self._is_awake and len(self._items) < MANY_ITEMS:
            return
        if self._background.is_gone:  # this asks the system for the process's id: not with every item
            self._items.clear()
        elif not self._is_awake:
            self._is_awake = True
            try:
                self._background.call(self._begin)
            except RuntimeError:  # the thread cannot be started: items are hints, and are not piled up
                self._items.clear()
                self._is_awake = False

    def hurry(self) -> None:
        """Have what was put so far taken in at once."""
        self._background.call(self.drain)

    def drain(self) -> None:
        """Take in what was put so far.  On the loop only.

        Whoever must not overtake an item of his own thread calls it first: the loop may only be about to look.
        """
        for _ in range(len(self._items)):
            self._receive(self._items.popleft())
        self._settle()

    def _begin(self) -> None:
        """Look once what comes right behind the first item is there as well."""
        self._background.later(LOOK_S, self._look)

    def _look(self) -> None:
        """Take in what was put; go on looking until a look finds nothing."""
        if not self._items:
            self._is_awake = False  # before looking once more: whoever puts something after that wakes the loop
            self.drain()
            return
        try:
            self.drain()
        finally:
            self._background.later(LOOK_S, self._look)


def _answer(question: Callable[[], _T], answer: Future[_T]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(question())
    except BaseException as exc:  # it is the asker's, like the answer
        answer.set_exception(exc)
        if not isinstance(exc, Exception):
            raise


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
