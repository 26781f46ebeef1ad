"""How a search goes about a segment, and which segments to merge: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

#: How much a search looks at: about 0.90, 0.95 and all of the best ten in a large index.
Recall = Literal["fast", "balanced", "exact"]
RECALLS: Final[tuple[Recall, ...]] = get_args(Recall)

#: Views of fewer rows are compared with every row: that is as fast, and exact.
EXACT_ROWS: Final = 8192
#: In an index of `_USUAL_LISTS` partitions; smaller ones have smaller partitions, and can look into more of them.
_PROBES: Final = {"fast": 24, "balanced": 48}
#: Rows that a walk through a graph remembers.
_WALK: Final = {"fast": 24, "balanced": 64}
_USUAL_LISTS: Final = 4096
_CANDIDATES: Final = {"fast": 8, "balanced": 16}
_MIN_CANDIDATES: Final = 64
#: Segments of sizes within this factor are of one tier.
_TIER: Final = 4
_DEAD_SHARE: Final = 0.20


@dataclass(frozen=True, slots=True)
class Scan:
    """Compare with every row that is visible."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Look into `probes` partitions, and compare exactly with the `candidates` likeliest rows."""

    probes: int
    candidates: int


def plan(
    *, visible: int, rows: int, wanted: int, lists: int, recall: Recall, exact_rows: int = EXACT_ROWS
) -> Scan | Probe:
    """Decide how to find the best `wanted` of the `visible` among `rows` rows in `lists` partitions.

    The fewer of the rows are visible, the more partitions it takes to meet as many of them.  A segment with a graph
    counts as one partition, `probes` is then how many rows the walk remembers; one without codes has none.
    """
    if recall == "exact" or visible <= exact_rows or lists == 0:
        return Scan()
    if lists == 1:
        walk = max(math.ceil(_WALK[recall] * math.sqrt(rows / visible)), 2 * wanted)
        return Probe(walk, walk) if walk * 4 < visible else Scan()
    probes = math.ceil(_PROBES[recall] * math.sqrt(rows / visible * max(1, _USUAL_LISTS / lists)))
    candidates = max(_MIN_CANDIDATES, _CANDIDATES[recall] * wanted)
    if candidates * 4 >= visible:
        return Scan()
    # Deep searches need as many partitions as hold a few times what they ask for.
    probes = max(probes, math.ceil(4 * candidates * lists / visible))
    return Probe(min(probes, lists), candidates)


@dataclass(frozen=True, slots=True)
class SegmentSize:
    """Size of a segment as the merge sees it."""

    name: str
    items: int
    dead_items: int

    @property
    def live(self) -> int:
        """Items that are there."""
        return self.items - self.dead_items


def choose_merge(sizes: Sequence[SegmentSize], *, unit: int) -> tuple[str, ...]:
    """Return the segments to merge into one next; none if all is well.

    Four segments of one tier become one of the next; a segment with too many tombstones is written anew.  `unit` is
    the size of a flush.
    """
    tiers: dict[int, list[str]] = {}
    for size in sizes:
        tiers.setdefault(tier(size.live, unit), []).append(size.name)
    for _, names in sorted(tiers.items()):
        if len(names) >= _TIER:
            return tuple(names)
    return next(((size.name,) for size in sizes if is_rotten(size)), ())


def is_rotten(size: SegmentSize) -> bool:
    """Return whether so much of a segment is dead that it should be written anew."""
    return 0 < size.dead_items >= _DEAD_SHARE * size.items


def tier(items: int, unit: int) -> int:
    """Return the tier of a segment of so many items."""
    return max(0, math.floor(math.log(max(1, items) / unit, _TIER) + 0.5))
