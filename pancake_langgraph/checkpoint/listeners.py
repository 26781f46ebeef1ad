"""Who hears of what a saver stored, and what became of telling them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pancake_langgraph.checkpoint.memory import Latest
from pancake_langgraph.checkpoint.rows import Spot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """What listeners are told after a write was acknowledged.

    `channels` names the channels that a task wrote, or that a checkpoint holds; `next_nodes` those nodes that certainly
    come next (`routes.py`).  `latest` is the checkpoint as it was stored, with the content hash of every list item;
    `None` for pending writes, and where another saver stores.
    """

    thread_id: str
    spot: Spot
    channels: tuple[str, ...]
    next_nodes: tuple[str, ...]
    latest: Latest | None = None


Listener = Callable[[Stored], None]


@dataclass(frozen=True, slots=True)
class SaverStatistics:
    """One snapshot of a saver and all its clones.

    `listeners` are subscribed now.  `failed_tellings` counts since the start how often a listener raised; nothing of
    what was stored was lost by it, but that listener missed it.
    """

    listeners: int
    failed_tellings: int


@dataclass(slots=True, eq=False)
class _Subscription:
    listener: Listener
    has_failed: bool = False


class Listeners:
    """Those who are told of a saver's writes.  Thread-safe; all clones of a saver share one."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._lock = threading.Lock()
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._num_failed = 0

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` from now on; return what ends that, which may be called more than once."""
        subscription = _Subscription(listener)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)

        def end() -> None:
            with self._lock:
                self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)

        return end

    def tell(self, stored: Stored) -> None:
        """Tell everybody; one that fails is counted, and logged the first time, and costs the others nothing."""
        for subscription in self._subscriptions:
            try:
                subscription.listener(stored)
            except Exception:  # fails open: the write is done, and a listener cannot undo it
                if self._is_first_failure(subscription):
                    logger.warning(
                        "a listener of the saver failed; what was stored is safe. Only counted from now on "
                        "(`statistics().failed_tellings`)",
                        exc_info=True,
                    )

    def statistics(self) -> SaverStatistics:
        """Return one snapshot."""
        with self._lock:
            return SaverStatistics(len(self._subscriptions), self._num_failed)

    def _is_first_failure(self, subscription: _Subscription) -> bool:
        with self._lock:
            is_first = not subscription.has_failed
            subscription.has_failed = True
            self._num_failed += 1
            return is_first
