"""A circuit breaker: stop asking a part that does not answer, try again later."""

from __future__ import annotations

from collections.abc import Callable

from pancake_langgraph._clock import Clock
from pancake_langgraph.ledger import BreakerChanged, Event


class Breaker:
    """Guards one part.  Not thread-safe.

        closed --`failures` in a row--> open --after `open_s`--> half-open --success--> closed
                                          ^------------- failure ------'

    Every change between open and closed is recorded once, and that it is locked with the reason for that.
    """

    def __init__(
        self, part: str, *, clock: Clock, record: Callable[[Event], None], failures: int, open_s: float
    ) -> None:
        """Start closed."""
        self._part = part
        self._clock = clock
        self._record = record
        self._max_failures = failures
        self._open_s = open_s
        self._failures = 0
        self._opened_at_s: float | None = None
        self._is_locked = False

    @property
    def is_open(self) -> bool:
        """Whether the part is being left alone (also while half-open, until a try succeeds)."""
        return self._opened_at_s is not None

    @property
    def is_locked(self) -> bool:
        """Whether the part was found to answer wrongly."""
        return self._is_locked

    def may_try(self) -> bool:
        """Say whether a request may be sent now: closed, or open for long enough to try again."""
        if self._is_locked:
            return False
        return self._opened_at_s is None or self._clock.now_s() - self._opened_at_s >= self._open_s

    def succeeded(self) -> None:
        """Tell that the part answered."""
        if self._is_locked:
            return
        self._failures = 0
        if self._opened_at_s is not None:
            self._opened_at_s = None
            self._record(BreakerChanged(self._clock.now_s(), self._part, is_open=False, reason="answers again"))

    def failed(self, reason: str) -> None:
        """Tell that the part did not answer; `reason` is one phrase without prompt text."""
        self._failures += 1
        now_s = self._clock.now_s()
        if self._opened_at_s is not None:
            self._opened_at_s = now_s
        elif self._failures >= self._max_failures:
            self._opened_at_s = now_s
            self._record(BreakerChanged(now_s, self._part, is_open=True, reason=reason))

    def lock(self, reason: str) -> None:
        """Open for good: the part answers, and wrongly.  Only `unlock` ends that."""
        is_new = not self._is_locked
        self._is_locked, self._opened_at_s = True, self._clock.now_s()
        if is_new:
            self._record(BreakerChanged(self._opened_at_s, self._part, is_open=True, reason=reason))

    def unlock(self) -> None:
        """Close again after `lock`: the part was proven right.  Does nothing otherwise."""
        if self._is_locked:
            self._is_locked = False
            self.succeeded()
