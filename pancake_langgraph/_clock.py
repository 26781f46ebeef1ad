"""Clocks that can be injected, so that no test sleeps."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of monotonic time."""

    def now_s(self) -> float:
        """Return seconds on a clock that never goes back; only differences mean anything."""
        ...


class MonotonicClock:
    """The process's monotonic clock.  Thread-safe."""

    def now_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to.  Not thread-safe."""

    def __init__(self, start_s: float = 0.0) -> None:
        """Start at `start_s`."""
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the current virtual time in seconds."""
        return self._now_s

    def advance(self, delta_s: float) -> None:
        """Move forward by `delta_s` seconds.

        Raises:
            ValueError: if `delta_s` is negative.
        """
        if delta_s < 0:
            raise ValueError(f"a clock cannot go back: got {delta_s} s")
        self._now_s += delta_s
