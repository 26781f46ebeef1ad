"""How engines end that nobody closed: when they are garbage collected, and with the process."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """An engine as its user holds it."""

    def close(self) -> None:
        """Release everything; twice is fine."""


class Droppable(Protocol):
    """What an engine is made of, and what its threads hold; it must not refer to the engine."""

    def abandon(self) -> None:
        """Release everything without waiting for threads; called in the middle of anything, in any thread."""


#: What is open when the process ends is closed, so that a damaged end of its log is told from that of a crash.
_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def end_when_dropped(engine: Closable, core: Droppable) -> weakref.finalize[[Droppable, int], Any]:
    """Have `core` abandoned when nobody has the engine any more, and the engine closed when the process ends.

    The caller detaches what is returned when the engine is closed.
    """
    ending = weakref.finalize(engine, _abandon, core, os.getpid())
    ending.atexit = False  # then there is time for more than `abandon` does
    _open.add(engine)
    return ending


def _abandon(core: Droppable, pid: int) -> None:
    if os.getpid() == pid:
        core.abandon()


@atexit.register
def _close_all() -> None:
    for engine in list(_open):
        try:
            engine.close()
        except Exception as error:  # noqa: BLE001 - the process ends, and the others are to be closed as well
            logger.warning("an engine could not be closed at the end of the process: %s", error)
