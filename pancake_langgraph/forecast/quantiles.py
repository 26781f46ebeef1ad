"""Durations: quantiles over the last samples per key, in bounded memory."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.forecast.declared import stand_ins


@dataclass(slots=True)
class _Ring:
    """The last samples of one key, as they came and in order of size."""

    samples: deque[float] = field(default_factory=deque)
    ordered: list[float] = field(default_factory=list)

    def add(self, elapsed_s: float, window: int) -> None:
        """Take in one sample; the oldest goes where there are more than `window`."""
        self.samples.append(elapsed_s)
        insort(self.ordered, elapsed_s)
        if len(self.samples) > window:
            del self.ordered[bisect_left(self.ordered, self.samples.popleft())]


class Durations:
    """Keeps the last `window` durations for each of at most `max_keys` keys, forgetting the key unused for longest.

    Not thread-safe; the owner locks.
    """

    def __init__(self, *, max_keys: int = 1024, window: int = 64) -> None:
        """Start empty.

        Raises:
            ValueError: if a bound is under 1.
        """
        if max_keys < 1 or window < 1:
            raise ValueError(f"bounds must be at least 1: got max_keys={max_keys}, window={window}")
        self._max_keys = max_keys
        self._window = window
        self._rings: OrderedDict[str, _Ring] = OrderedDict()
        self._answers: dict[str, tuple[float | None, Quantiles | None]] = {}

    def __len__(self) -> int:
        return len(self._rings)

    def add(self, key: str, elapsed_s: float) -> bool:
        """Record one duration; return whether another key had to go for it.

        Negative and non-finite values are measuring faults and are dropped.
        """
        if not math.isfinite(elapsed_s) or elapsed_s < 0:
            return False
        ring = self._rings.get(key)
        is_full = False
        if ring is None:
            ring = self._rings[key] = _Ring()
            is_full = len(self._rings) > self._max_keys
            if is_full:
                self._answers.pop(self._rings.popitem(last=False)[0], None)
        self._rings.move_to_end(key)
        ring.add(elapsed_s, self._window)
        self._answers.pop(key, None)
        return is_full

    def quantiles(self, key: str, *, expect_s: float | None = None) -> Quantiles | None:
        """Return p10, p50 and p90 with linear interpolation, or `None` for a key never seen.

        `expect_s` is what was declared: it counts until enough was measured.  `num_samples` counts measurements only.
        """
        known = self._answers.get(key)
        if known is None or known[0] != expect_s:
            if len(self._answers) >= self._max_keys:
                self._answers.clear()
            known = self._answers[key] = expect_s, self._measure(key, expect_s)
        return known[1]

    def _measure(self, key: str, expect_s: float | None) -> Quantiles | None:
        ring = self._rings.get(key)
        ordered = ring.ordered if ring is not None else []
        num_samples = len(ordered)
        if declared := stand_ins(expect_s, num_samples):
            ordered = sorted((*ordered, *declared))
        if not ordered:
            return None
        return Quantiles(_at(ordered, 0.1), _at(ordered, 0.5), _at(ordered, 0.9), num_samples)

    def to_rows(self) -> list[list[object]]:
        """Return the samples as JSON-able rows, least recently used key first."""
        return [[key, list(ring.samples)] for key, ring in self._rings.items()]

    def load_rows(self, rows: Iterable[tuple[str, Iterable[float]]]) -> None:
        """Replace all samples by rows of `to_rows`; the bounds hold."""
        self._rings.clear()
        self._answers.clear()
        self.add_rows(rows)

    def add_rows(self, rows: Iterable[tuple[str, Iterable[float]]]) -> None:
        """Add samples of another table, rows of its `to_rows`; they count as older than those here."""
        for key, samples in rows:
            known = self._rings.get(key)
            own = tuple(known.samples) if known is not None else ()
            if known is not None:
                known.samples.clear()
                known.ordered.clear()
            for elapsed_s in samples:
                self.add(key, float(elapsed_s))
            for elapsed_s in own:
                self.add(key, elapsed_s)


def _at(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    below = int(position)
    if below == position:
        return ordered[below]
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (position - below)
