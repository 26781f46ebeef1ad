"""What goes into a new segment: the live items of deltas and of other segments, all read in one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import Namespace
from pancake_langgraph.retrieval.delta import Delta, DeltaView, ids_of
from pancake_langgraph.retrieval.index_state import State
from pancake_langgraph.retrieval.masks import bits_at, unpacked
from pancake_langgraph.retrieval.segment import Segment, hash_of
from pancake_langgraph.retrieval.segment_files import Document, sealed
from pancake_langgraph.retrieval.segment_view import SegmentView

Ordinals = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Items that go into a segment: live ones of one source.

    `ordinals` are their numbers in the source; `row_items` says for each row which of the feed's items it belongs to,
    counted from 0; `vectors` and `documents` read by the feed's own numbers.
    """

    ordinals: Ordinals
    namespaces: Sequence[Namespace]
    item_namespaces: NDArray[np.int32]
    updated: NDArray[np.float64]
    expires: NDArray[np.float64]
    hashes: NDArray[np.uint64]
    row_items: Ordinals
    vectors: Callable[[Ordinals], Floats]
    document: Callable[[int], bytes]
    origin: Segment | Delta


def feed_of_delta(view: DeltaView) -> Feed:
    """Return the live items of a delta."""
    delta = view.delta
    ordinals = np.flatnonzero(view.alive())
    items = [delta.items[at] for at in ordinals.tolist()]
    rows = (
        np.flatnonzero(np.isin(view.row_items[: view.num_rows], ordinals)) if view.num_rows else np.empty(0, np.int64)
    )
    number = np.full(view.num_items, -1, np.int64)
    number[ordinals] = np.arange(len(ordinals))

    def document(at: int) -> bytes:
        item = items[at]
        return sealed(Document(item.key, item.created_at_s, item.updated_at_s, item.expires_at_s, item.value))

    return Feed(
        ordinals,
        delta.namespaces,
        view.item_namespaces[ordinals],
        np.array([item.updated_at_s for item in items], np.float64),
        np.array([np.inf if item.expires_at_s is None else item.expires_at_s for item in items], np.float64),
        np.array([hash_of(item_id) for item_id in ids_of(items)], np.uint64),
        number[view.row_items[rows]],
        lambda wanted: view.vectors[rows[wanted]],
        document,
        delta,
    )


def feed_of_segment(view: SegmentView) -> Feed:
    """Return the live items of a segment."""
    segment = view.segment
    count = segment.entry.num_items
    ordinals = view.live_items()
    hashes = np.empty(count, np.uint64)
    hashes[segment.hash_items] = segment.hashes
    rows = np.flatnonzero(~unpacked(view.dead_rows, segment.entry.num_rows))
    number = np.full(count, -1, np.int64)
    number[ordinals] = np.arange(len(ordinals))
    expires = np.full(count, np.inf) if segment.expires is None else segment.expires

    def document(at: int) -> bytes:
        return segment.sealed_document(int(ordinals[at]))

    def vectors(wanted: Ordinals) -> Floats:
        return segment.gathered(rows[wanted])

    return Feed(
        ordinals,
        segment.namespaces,
        segment.item_namespaces[ordinals],
        segment.updated[ordinals],
        expires[ordinals],
        hashes[ordinals],
        number[rows if segment.row_items is None else segment.row_items[rows]],
        vectors,
        document,
        segment,
    )


def still_live(feed: Feed, state: State) -> NDArray[np.bool_]:
    """Return for each item of a feed whether it is still there."""
    for delta in state.deltas:
        if delta.delta is feed.origin:
            return delta.alive()[feed.ordinals]
    for view in state.segments:
        if view.segment is feed.origin:
            return ~bits_at(view.dead_items, feed.ordinals)
    return np.zeros(len(feed.ordinals), np.bool_)
