"""Closes what belonged to objects that were dropped without being closed.

The garbage collector may call in the middle of anything, with any lock held: all it does is to start a thread.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

from pancake_langgraph._errors import RetrievalError

logger = logging.getLogger(__name__)

_JOIN_S: Final = 30.0


class Ending:
    """The end of an owner that is dropped: whether it has begun, and whether everything is closed."""

    __slots__ = ("has_begun", "is_over")

    def __init__(self) -> None:
        """Begin with an owner that somebody holds."""
        self.has_begun = False
        self.is_over = threading.Event()


#: One for each close that is under way.
_under_way: set[Ending] = set()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)


def close_when_dropped(owner: object, close: Callable[[], None], ending: Ending) -> None:
    """Have `close` called in a thread when nobody holds `owner` any more; it must not hold `owner` itself.

    `ending` tells when.  Nothing is called at the end of the process, nor in a forked one.
    """
    weakref.finalize(owner, _begin, close, ending, os.getpid()).atexit = False


def wait_for_dropped(own: Ending | None = None) -> None:
    """Wait until what was dropped before is closed; `own` is the end of whoever waits.

    Raises:
        RetrievalError: if that has begun: closing waits for whoever waits here.
    """
    before = _under_way.copy()
    # Looked at behind the copy: of those who wait for each other the last one to be dropped sees it and gives up.
    if own is not None and own.has_begun:
        raise RetrievalError(
            "the index was not opened: got a store that nobody holds any more, allowed is one that is held until its "
            "calls have returned; keep a reference to it"
        )
    for ending in before:
        ending.is_over.wait(_JOIN_S)


def _begin(close: Callable[[], None], ending: Ending, pid: int) -> None:
    if pid != os.getpid():
        return
    ending.has_begun = True
    _under_way.add(ending)
    try:
        threading.Thread(target=_run, args=(close, ending), name="pancake-dropped", daemon=True).start()
    except RuntimeError:  # no more threads, or the process ends, which lets go of everything
        _over(ending)


def _over(ending: Ending) -> None:
    _under_way.discard(ending)
    ending.is_over.set()


def _run(close: Callable[[], None], ending: Ending) -> None:
    try:
        close()
    except Exception as exc:  # noqa: BLE001 - there is nobody to tell but the log
        logger.warning("a store that was dropped could not be closed; call its close(): %s", exc)
    finally:
        _over(ending)
