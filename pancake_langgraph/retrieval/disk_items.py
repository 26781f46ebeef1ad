"""Items of a state: found by id, listed by view, and what of them an allow-list lets through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import Item, ItemId, View
from pancake_langgraph.retrieval.checks import CheckedView, checked_view, latest_first
from pancake_langgraph.retrieval.delta import DeltaView
from pancake_langgraph.retrieval.index_state import State
from pancake_langgraph.retrieval.log import LogItem
from pancake_langgraph.retrieval.masks import ViewKey, bits_at
from pancake_langgraph.retrieval.segment import hash_of
from pancake_langgraph.retrieval.segment_view import SegmentView, view_mask

Floats = NDArray[np.float32]
Ordinals = NDArray[np.int64]
Source = DeltaView | SegmentView


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """An item without its value and vectors; `value` is JSON."""

    id: ItemId
    created_at_s: float
    updated_at_s: float
    expires_at_s: float | None
    value: bytes

    def item(self, vectors: tuple[Floats, ...] = ()) -> Item:
        """Return the item, which shares nothing with others."""
        return Item(
            self.id, msgspec.json.decode(self.value), vectors, self.created_at_s, self.updated_at_s, self.expires_at_s
        )


def entry_of(source: Source, ordinal: int) -> Entry:
    """Read an item.

    Raises:
        DamagedPart: if it is damaged.
    """
    if isinstance(source, DeltaView):
        kept = source.delta.items[ordinal]
        item_id = ItemId(kept.namespace, kept.key)
        return Entry(item_id, kept.created_at_s, kept.updated_at_s, kept.expires_at_s, kept.value)
    document = source.segment.document(ordinal)
    return Entry(
        ItemId(source.segment.namespace_of(ordinal), document.key),
        document.created_at_s,
        document.updated_at_s,
        document.expires_at_s,
        document.value,
    )


def vectors_of(source: Source, ordinal: int) -> tuple[Floats, ...]:
    """Return copies of an item's vectors, which cannot be written to.

    Raises:
        DamagedPart: if they are damaged.
    """
    if isinstance(source, DeltaView):
        block = source.rows_of(ordinal).copy()
    else:
        block = source.segment.vectors(source.segment.rows_of(ordinal))
    block.setflags(write=False)
    return tuple(block)


def get(state: State, ids: Sequence[ItemId]) -> list[Item | None]:
    """Return items with their vectors."""
    found: list[Item | None] = []
    for item_id in ids:
        place = state.locate(item_id)
        found.append(None if place is None else entry_of(*place).item(vectors_of(*place)))
    return found


def items(state: State, view: View, *, limit: int | None, offset: int, few: int) -> list[Item]:
    """Return items of a view, last updated first, equal times by id; `few` is what `view_mask` takes."""
    checked = checked_view(view)
    key = ViewKey.of(view, checked)
    hashes = hashes_of_allowed(checked, state)
    places: list[tuple[float, Source, int]] = []
    for delta in state.deltas:
        visible = delta.visible(checked, key)
        if checked.allowed is not None:
            visible = visible & allowed_in_delta(checked.allowed, delta)
        places += [(delta.delta.items[at].updated_at_s, delta, at) for at in np.flatnonzero(visible).tolist()]
    for segment in state.segments:
        ordinals = _visible_items(segment, checked, key, hashes, few)
        times = segment.segment.updated[ordinals].tolist()
        places += [(time, segment, at) for time, at in zip(times, ordinals.tolist(), strict=True)]
    places.sort(key=lambda place: -place[0])
    end = None if limit is None else offset + limit
    if end is not None and end < len(places):
        last = places[end - 1][0] if end else np.inf
        places = [place for place in places if place[0] >= last]
    entries = [entry_of(source, ordinal) for _, source, ordinal in places]
    found = [entry.item() for entry in sorted(entries, key=latest_first)[offset:end]]  # type: ignore[arg-type]
    return [item for item in found if checked.allowed is None or item.id in checked.allowed]


def _visible_items(
    source: SegmentView, view: CheckedView, key: ViewKey, hashes: NDArray[np.uint64] | None, few: int
) -> Ordinals:
    if hashes is not None:
        ordinals = np.unique(source.segment.all_candidates(hashes))
        ordinals = ordinals[~bits_at(source.dead_items, ordinals)]
    else:
        ordinals = source.live_items()
    if not key.shows_all:
        ordinals = ordinals[bits_at(view_mask(view, key, source.segment, few=few).items, ordinals)]
    allowed = view.allowed
    if allowed is None:
        return ordinals
    exact = [at for at in ordinals.tolist() if entry_of(source, at).id in allowed]  # different ids may share a hash
    return np.array(exact, np.int64)


# -- allow-lists ----------------------------------------------------------------------------------------------------


def hashes_of_allowed(view: CheckedView, state: State) -> NDArray[np.uint64] | None:
    """Return the hashes of what is allowed, `None` where everything is."""
    if view.allowed is None:
        return None
    ids = view.allowed if state.segments else ()
    return np.fromiter((hash_of(item_id) for item_id in ids), np.uint64, len(ids))


def allowed_in_delta(allowed: frozenset[ItemId], source: DeltaView) -> NDArray[np.bool_]:
    """Return for each item of a delta whether it is there and allowed."""
    mask = np.zeros(source.num_items, np.bool_)
    for item_id in allowed:
        if (ordinal := source.find(item_id)) >= 0:
            mask[ordinal] = True
    return mask


def allowed_rows(hashes: NDArray[np.uint64] | None, source: SegmentView) -> Ordinals:
    """Return the live rows of what is allowed, ascending; a stranger with the same hash may be among them."""
    ordinals = np.empty(0, np.int64) if hashes is None else np.unique(source.segment.all_candidates(hashes))
    ordinals = ordinals[~bits_at(source.dead_items, ordinals)]
    return np.sort(source.segment.rows_of_all(ordinals))


def log_item(item: Item) -> LogItem:
    """Return an item as the log holds it."""
    return LogItem(
        item.id.namespace,
        item.id.key,
        item.created_at_s,
        item.updated_at_s,
        item.expires_at_s,
        msgspec.json.encode(item.value),
        b"".join([vector.tobytes() for vector in item.vectors]),
    )
