"""Forgetting counts in bounded memory: the table that transitions are learnt in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

Key = tuple[str, ...]

_NEGLIGIBLE = 1e-3
_EMPTY: Mapping[str, float] = {}


class CountTable:
    """Decayed counts of targets per key.

    Each observation multiplies the other counts of its key by `decay` first, so a key remembers about
    `1 / (1 - decay)` observations.  At most `max_keys` keys (the one unused for longest goes) and `max_targets` targets
    per key (the rarest goes, never the one just seen).  Not thread-safe; the owner locks.
    """

    def __init__(self, *, decay: float, max_keys: int, max_targets: int) -> None:
        """Start empty.

        Raises:
            ValueError: if `decay` is outside (0, 1] or a bound is under 1.
        """
        if not 0.0 < decay <= 1.0 or max_keys < 1 or max_targets < 1:
            raise ValueError(
                f"decay must be in (0, 1] and bounds at least 1: got {decay}, max_keys={max_keys}, "
                f"max_targets={max_targets}"
            )
        self._decay = decay
        self._max_keys = max_keys
        self._max_targets = max_targets
        self._rows: OrderedDict[Key, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def observe(self, key: Key, target: str) -> bool:
        """Count one transition; return whether another key had to go for it.  Costs O(targets of the key)."""
        row = self._rows.get(key)
        is_full = False
        if row is None:
            row = self._rows[key] = {}
            # The new key is the youngest, so that the table keeps learning at its bound.
            is_full = len(self._rows) > self._max_keys
            if is_full:
                self._rows.popitem(last=False)
        self._rows.move_to_end(key)
        if len(row) == 1 and target in row:  # as mostly: nothing else gets smaller
            row[target] = row[target] * self._decay + 1.0
            return False
        for other in row:
            row[other] *= self._decay
        row[target] = row.get(target, 0.0) + 1.0
        if len(row) > 1:
            for other in [t for t, count in row.items() if count < _NEGLIGIBLE]:
                del row[other]
            if len(row) > self._max_targets:
                del row[min((t for t in row if t != target), key=lambda t: (row[t], t))]
        return is_full

    def row(self, key: Key) -> Mapping[str, float]:
        """Return the counts of one key; empty for a key never seen."""
        return self._rows.get(key, _EMPTY)

    def rows(self, keys: Iterable[Key]) -> list[Mapping[str, float]]:
        """Return the counts of several keys."""
        return [self._rows.get(key, _EMPTY) for key in keys]

    def to_rows(self) -> list[list[object]]:
        """Return JSON-able rows, least recently used key first."""
        return [[list(key), dict(row)] for key, row in self._rows.items()]

    def load_rows(self, rows: Iterable[tuple[Iterable[str], Mapping[str, float]]]) -> None:
        """Replace all counts by rows of `to_rows`; the youngest rows that fit are kept."""
        self._rows = OrderedDict((tuple(key), {str(t): float(c) for t, c in row.items()}) for key, row in rows)
        while len(self._rows) > self._max_keys:
            self._rows.popitem(last=False)

    def add_rows(self, rows: Iterable[tuple[Iterable[str], Mapping[str, float]]]) -> None:
        """Add the counts of another table, rows of its `to_rows`, to these.

        A key then has at most the weight that a table of its own would give it, so that the sum still forgets.
        """
        for key, row in rows:
            own = self._rows.setdefault(tuple(key), {})
            self._rows.move_to_end(tuple(key))
            for target, count in row.items():
                own[str(target)] = own.get(str(target), 0.0) + float(count)
            while len(own) > self._max_targets:
                del own[min(own, key=lambda t: (own[t], t))]
            total = sum(own.values())
            if self._decay < 1.0 and total * (1.0 - self._decay) > 1.0:
                scale = 1.0 / (total * (1.0 - self._decay))
                own.update({target: count * scale for target, count in own.items()})
        while len(self._rows) > self._max_keys:
            self._rows.popitem(last=False)


def smooth(row: Mapping[str, float], below: Mapping[str, float], strength: float) -> Mapping[str, float]:
    """Blend counts with a prior distribution worth `strength` observations, or one per target seen if that is more.

    A route with many targets may well have more of them (Witten and Bell), so it gives the prior more room.
    """
    if not row:
        return below
    if len(row) > strength:
        strength = float(len(row))
    total = sum(row.values()) + strength
    blended = {target: strength * p / total for target, p in below.items()}
    for target, count in row.items():
        blended[target] = blended.get(target, 0.0) + count / total
    return blended
