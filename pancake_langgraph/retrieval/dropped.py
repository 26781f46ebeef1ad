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

logger = logging.getLogger(__name__)

_JOIN_S: Final = 30.0
#: One for each close that is under way.
_under_way: set[threading.Event] = set()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)


def close_when_dropped(owner: object, close: Callable[[], None]) -> None:
    """Have `close` called in a thread when nobody holds `owner` any more; it must not hold `owner` itself.

    Nothing is called at the end of the process, nor in a forked one.
    """
    weakref.finalize(owner, _begin, close, os.getpid()).atexit = False


def wait_for_dropped() -> None:
    """Wait until what was dropped before is closed."""
    for done in _under_way.copy():
        done.wait(_JOIN_S)


def _begin(close: Callable[[], None], pid: int) -> None:
    if pid != os.getpid():
        return
    done = threading.Event()
    _under_way.add(done)
    try:
        threading.Thread(target=_run, args=(close, done), name="pancake-dropped", daemon=True).start()
    except RuntimeError:  # no more threads, or the process ends, which lets go of everything
        _under_way.discard(done)
        done.set()


def _run(close: Callable[[], None], done: threading.Event) -> None:
    try:
        close()
    except Exception as exc:  # noqa: BLE001 - there is nobody to tell but the log
        logger.warning("a store that was dropped could not be closed; call its close(): %s", exc)
    finally:
        _under_way.discard(done)
        done.set()
