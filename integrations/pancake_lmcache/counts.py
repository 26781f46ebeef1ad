"""Counters of one adapter, with one log line for the first event of each kind."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

#: A name of its own with a handler where LMCache runs; see `logger` in the adapters.
LOGGER_NAME: Final = "pancake_lmcache"


class Counts:
    """What went wrong, and what was done about it, by kind.  Thread-safe."""

    def __init__(self, place: str) -> None:
        """Start at zero.

        Args:
            place: How the store is named in the log.
        """
        self._place = place
        self._lock = threading.Lock()
        self._by_kind: Counter[str] = Counter()

    def add(self, kind: str, amount: int = 1, *, detail: str = "") -> None:
        """Count; the first of a kind is logged with `detail`, which names no content."""
        if amount <= 0:
            return
        with self._lock:
            is_first = kind not in self._by_kind
            self._by_kind[kind] += amount
        if is_first:
            suffix = f" ({detail})" if detail else ""
            logging.getLogger(LOGGER_NAME).warning(
                "%s: first %s%s; further ones are only counted", self._place, kind.replace("_", " "), suffix
            )

    def __getitem__(self, kind: str) -> int:
        """Return how many of one kind there were."""
        with self._lock:
            return self._by_kind[kind]

    def snapshot(self) -> dict[str, int]:
        """Return all that is not zero."""
        with self._lock:
            return dict(sorted(self._by_kind.items()))
