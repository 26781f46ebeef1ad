"""A segment with its tombstones at one moment, and what a view shows of it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import ItemId, Namespace
from pancake_langgraph.retrieval.checks import CheckedView
from pancake_langgraph.retrieval.masks import Bits, ViewKey, ViewMask, bits_at, num_set, packed, unpacked, with_bits
from pancake_langgraph.retrieval.segment import Segment

Ordinals = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SegmentView:
    """A segment and its tombstones at one moment.  Immutable."""

    segment: Segment
    dead_items: Bits
    dead_rows: Bits
    num_dead_items: int = 0
    num_dead_rows: int = 0
    #: Nothing of it expires earlier; a deleted item may still count.
    next_expiry_s: float = np.inf

    @classmethod
    def of(cls, segment: Segment, dead_items: Bits | None = None) -> SegmentView:
        """Return a segment with tombstones, or without."""
        entry = segment.entry
        view = cls(
            segment,
            np.zeros(-(-entry.num_items // 8), np.uint8),
            np.zeros(-(-entry.num_rows // 8), np.uint8),
            next_expiry_s=np.inf if segment.expires is None else float(segment.expires.min()),
        )
        if dead_items is not None:
            view = view.without(np.flatnonzero(unpacked(dead_items, entry.num_items)))
        # What was found damaged once is not looked at again, and must not come back with another state.
        return view.without(np.array(sorted(segment.ignored), np.int64)) if segment.ignored else view

    def expired(self, now_s: float) -> SegmentView:
        """Return the segment without what has expired."""
        expires = self.segment.expires
        if expires is None:
            return self
        left = expires[expires > now_s]
        view = self.without(np.flatnonzero(expires <= now_s))
        return replace(view, next_expiry_s=float(left.min()) if len(left) else np.inf)

    def without(self, ordinals: Ordinals) -> SegmentView:
        """Return the segment with tombstones for some more items."""
        ordinals = np.unique(ordinals)
        ordinals = ordinals[~bits_at(self.dead_items, ordinals)]
        if not len(ordinals):
            return self
        rows = self.segment.rows_of_all(ordinals)
        return SegmentView(
            self.segment,
            with_bits(self.dead_items, ordinals),
            with_bits(self.dead_rows, rows),
            self.num_dead_items + len(ordinals),
            self.num_dead_rows + len(rows),
            self.next_expiry_s,
        )

    @property
    def num_items(self) -> int:
        """Live items."""
        return self.segment.entry.num_items - self.num_dead_items

    @property
    def num_rows(self) -> int:
        """Live rows."""
        return self.segment.entry.num_rows - self.num_dead_rows

    def live_items(self) -> Ordinals:
        """Return the items that are there."""
        return np.flatnonzero(~unpacked(self.dead_items, self.segment.entry.num_items))

    def is_live(self, ordinal: int) -> bool:
        """Return whether an item is there."""
        return not self.dead_items[ordinal >> 3] >> (ordinal & 7) & 1

    def find(self, item_id: ItemId, hashed: int) -> int:
        """Return the ordinal of a live item, or -1.

        Raises:
            CorruptIndex: if the only document it could be is damaged.
        """
        for ordinal in self.segment.candidates(hashed).tolist():
            if (
                self.is_live(ordinal)
                and self.segment.namespace_of(ordinal) == item_id.namespace
                and self.segment.document(ordinal).key == item_id.key
            ):
                return int(ordinal)
        return -1


def view_mask(view: CheckedView, key: ViewKey, segment: Segment, *, few: int) -> ViewMask:
    """Return what a view shows of a segment, tombstones and allow-list left out; up to `few` rows are listed.

    Raises:
        CorruptIndex: if a document that a filter has to look at is damaged.
    """
    known = segment.masks.get(key)
    if known is not None:
        return known
    covered = covered_by(view, segment.namespaces)
    items = covered[segment.item_namespaces] if len(covered) else np.zeros(0, np.bool_)
    if view.passes is not None:
        for ordinal in np.flatnonzero(items).tolist():
            items[ordinal] = ordinal not in segment.ignored and view.passes(
                msgspec.json.decode(segment.document(ordinal).value)
            )
    rows = items[: len(segment.raw)] if segment.row_items is None else items[segment.row_items]
    count = int(np.count_nonzero(rows))
    mask = ViewMask(packed(items), packed(rows), np.flatnonzero(rows) if count <= few else None)
    segment.masks.put(key, mask)
    return mask


def covered_by(view: CheckedView, namespaces: Sequence[Namespace]) -> NDArray[np.bool_]:
    """Return which of some sorted namespaces a view covers: those below one prefix lie side by side."""
    covered = np.zeros(len(namespaces), np.bool_)
    for prefix in view.prefixes:
        depth = len(prefix)
        first = bisect_left(namespaces, prefix)
        covered[first : bisect_right(namespaces, prefix, lo=first, key=lambda one: one[:depth])] = True
    return covered


def live_rows(mask: ViewMask, view: SegmentView) -> tuple[Bits, int]:
    """Return the bits of the rows that a view shows and that are there, and their number."""
    bits = mask.rows & ~view.dead_rows if view.num_dead_rows else mask.rows
    return bits, num_set(bits)
