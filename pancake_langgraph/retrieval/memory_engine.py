"""The exact engine in memory: what the others are compared with, and enough for some ten thousand items."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.base import EngineStats, Hit, Item, ItemId, Namespace, Query, Vector, View
from pancake_langgraph.retrieval.checks import (
    CheckedView,
    best_first,
    checked_count,
    checked_dim,
    checked_ids,
    checked_items,
    checked_query,
    checked_time,
    checked_view,
    json_value,
    latest_first,
    named,
    one_of_each,
)

_FIRST_ROWS = 256
#: What float32 may lose at each step of a product, in lengths of both vectors.
_ROUNDING = 2.0**-24
#: Products beyond this may overflow in float32.
_LARGEST = 1e37


@dataclass(slots=True, eq=False)
class _Entry:
    """A stored item, and the rows of its vectors."""

    item: Item
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Listing:
    """Entries that have vectors, their rows one after the other, and where each entry's begin."""

    entries: list[_Entry]
    rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]

    @classmethod
    def of(cls, entries: Iterable[_Entry]) -> _Listing:
        """List entries."""
        found = [entry for entry in entries if len(entry.rows)]
        rows = np.concatenate([entry.rows for entry in found]) if found else np.zeros(0, np.int64)
        return cls(found, rows, np.fromiter((len(entry.rows) for entry in found), np.int64, len(found)))

    @classmethod
    def joined(cls, parts: Sequence[_Listing]) -> _Listing:
        """Put listings one after the other."""
        if len(parts) == 1:
            return parts[0]
        entries = [entry for part in parts for entry in part.entries]
        none = np.zeros(0, np.int64)
        rows = np.concatenate([none, *(part.rows for part in parts)])
        return cls(entries, rows, np.concatenate([none, *(part.num_rows for part in parts)]))


@dataclass(slots=True, eq=False)
class _Bucket:
    """The items of one namespace; `listing` is kept until one of them changes."""

    entries: dict[str, _Entry] = field(default_factory=dict)
    listing: _Listing | None = None

    def listed(self) -> _Listing:
        """Return the listing."""
        if self.listing is None:
            self.listing = _Listing.of(self.entries.values())
        return self.listing


class MemoryVectorEngine:
    """Keeps everything in this process and compares with every vector.  Nothing is kept when it is closed.

    Thread safe: calls take turns.  An item costs its value and `4 * dim` bytes for each vector.
    """

    def __init__(self, dim: int, *, clock: Callable[[], float] = time.time) -> None:
        """Hold vectors of `dim` numbers; `clock` gives seconds since the epoch, by which items expire.

        Raises:
            RetrievalError: if `dim` is not usable.
        """
        self._dim = checked_dim(dim)
        self._clock = clock
        self._lock = threading.RLock()
        self._matrix: NDArray[np.float32] = np.zeros((0, self._dim), np.float32)
        self._free: list[int] = []
        self._longest = 0.0
        self._buckets: dict[Namespace, _Bucket] = {}
        self._expiries: list[tuple[float, Namespace, str]] = []
        self._num_items = 0
        self._closed = False

    @property
    def dim(self) -> int:
        """Length of every vector."""
        return self._dim

    # -- writing --------------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> None:
        """Store items, replacing those of the same id: all or none.

        Raises:
            InvalidItem: see the port.
            RetrievalError: if the engine is closed, or there is no memory for the vectors; nothing is stored then.
        """
        accepted = checked_items(items, self._dim)
        with self._lock:
            self._enter()
            self._make_room(sum(len(item.vectors) for item in accepted))
            for item in accepted:
                self._remove(item.id)
                self._insert(item)

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Delete items and return how many there were."""
        wanted = one_of_each(checked_ids(ids))
        with self._lock:
            self._enter()
            return sum(self._remove(item_id) for item_id in wanted)

    def touch(self, expiries: Mapping[ItemId, float | None]) -> int:
        """Set when items expire and nothing else of them; return how many were there."""
        checked_ids(list(expiries))
        for item_id, expires_at_s in expiries.items():
            if expires_at_s is not None:
                checked_time(expires_at_s, named(item_id))
        with self._lock:
            self._enter()
            found = [(self._find(item_id), expires_at_s) for item_id, expires_at_s in expiries.items()]
            for entry, expires_at_s in found:
                if entry is not None:
                    entry.item = replace(entry.item, expires_at_s=expires_at_s)
                    self._watch(entry.item)
            return sum(entry is not None for entry, _ in found)

    # -- reading --------------------------------------------------------------------------------------------------

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        """Return items in the order of `ids`, with their vectors; `None` for those that are not there."""
        wanted = checked_ids(ids)
        with self._lock:
            self._enter()
            return [None if (entry := self._find(item_id)) is None else _handed_out(entry.item) for item_id in wanted]

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """Return for each query its hits, best first, equal scores by id; a batch sees one state of the engine.

        Raises:
            InvalidQuery: see the port.
        """
        asked = [(query, *checked_query(query, self._dim)) for query in queries]
        with self._lock:
            self._enter()
            return [self._search(vector, view, query.limit, query.offset) for query, vector, view in asked]

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        """Return items of a view, last updated first, equal times by id."""
        checked_count(offset, "offset")
        end = None if limit is None else offset + checked_count(limit, "limit")
        checked = checked_view(view)
        with self._lock:
            self._enter()
            found = sorted((entry.item for entry in self._visible(checked)), key=latest_first)
            return [_handed_out(item) for item in found[offset:end]]

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have live items, sorted."""
        with self._lock:
            self._enter()
            return sorted(self._buckets)

    def stats(self) -> EngineStats:
        """Return sizes; memory counts vectors only."""
        with self._lock:
            self._enter()
            return EngineStats(
                num_items=self._num_items,
                num_vectors=len(self._matrix) - len(self._free),
                memory_bytes=self._matrix.nbytes,
            )

    def close(self) -> None:
        """Let go of everything.  Idempotent; later calls raise `RetrievalError`."""
        with self._lock:
            self._closed = True
            self._buckets, self._expiries, self._free, self._num_items = {}, [], [], 0
            self._matrix = np.zeros((0, self._dim), np.float32)

    # -- inside, with the lock held -------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Refuse when closed; forget what has expired."""
        if self._closed:
            raise RetrievalError("the memory engine is closed and has forgotten its items; make a new one")
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, namespace, key = heapq.heappop(self._expiries)
            entry = self._find(ItemId(namespace, key))
            # It may have been replaced or touched since, and is then watched by a later entry, or by none.
            if entry is not None and entry.item.expires_at_s is not None and entry.item.expires_at_s <= now_s:
                self._remove(entry.item.id)

    def _find(self, item_id: ItemId) -> _Entry | None:
        bucket = self._buckets.get(item_id.namespace)
        return None if bucket is None else bucket.entries.get(item_id.key)

    def _watch(self, item: Item) -> None:
        if item.expires_at_s is not None:
            heapq.heappush(self._expiries, (item.expires_at_s, item.id.namespace, item.id.key))

    def _make_room(self, num_vectors: int) -> None:
        """Grow the matrix by doubling; a failure leaves everything as it was."""
        if num_vectors <= len(self._free):
            return
        old = len(self._matrix)
        size = max(_FIRST_ROWS, 2 * old, old + num_vectors - len(self._free))
        try:
            grown = np.zeros((size, self._dim), np.float32)
        except MemoryError:
            raise RetrievalError(
                f"no memory for {size} vectors of {self._dim} numbers ({size * self._dim * 4} bytes); "
                "nothing was stored; keep the index on disk, or store less"
            ) from None
        grown[:old] = self._matrix
        self._matrix = grown
        self._free.extend(range(size - 1, old - 1, -1))

    def _insert(self, item: Item) -> None:
        rows = np.array([self._free.pop() for _ in item.vectors], np.int64)
        for row, vector in zip(rows, item.vectors, strict=True):
            self._matrix[row] = vector
            self._longest = max(self._longest, float(np.linalg.norm(vector.astype(np.float64))))
        bucket = self._buckets.setdefault(item.id.namespace, _Bucket())
        bucket.entries[item.id.key], bucket.listing = _Entry(item, rows), None
        self._num_items += 1
        self._watch(item)

    def _remove(self, item_id: ItemId) -> bool:
        entry = self._find(item_id)
        if entry is None:
            return False
        bucket = self._buckets[item_id.namespace]
        del bucket.entries[item_id.key]
        bucket.listing = None
        if not bucket.entries:
            del self._buckets[item_id.namespace]
        self._free.extend(entry.rows.tolist())
        self._num_items -= 1
        return True

    def _visible(self, view: CheckedView) -> Iterator[_Entry]:
        """Yield what a view shows."""
        for namespace, bucket in self._buckets.items():
            if view.covers(namespace):
                for entry in bucket.entries.values():
                    if (view.allowed is None or entry.item.id in view.allowed) and (
                        view.passes is None or view.passes(entry.item.value)
                    ):
                        yield entry

    def _listed(self, view: CheckedView) -> _Listing:
        """Return what of a view can be searched."""
        if view.passes is None and view.allowed is None:
            covered = [bucket.listed() for namespace, bucket in self._buckets.items() if view.covers(namespace)]
            return _Listing.joined(covered)
        return _Listing.of(self._visible(view))

    def _search(self, vector: Vector, view: CheckedView, limit: int, offset: int) -> list[Hit]:
        wanted = offset + limit
        listing = self._listed(view)
        if not listing.entries or not limit:
            return []
        scored = [(entry.item, self._exact(entry, vector)) for entry in self._best(listing, vector, wanted)]
        scored.sort(key=lambda pair: best_first(pair[1], pair[0].id))
        # Last of all, and again: what leaves the engine is on the list, whatever happened above.
        return [
            Hit(_handed_out(item), score)
            for item, score in scored[offset:wanted]
            if view.allowed is None or item.id in view.allowed
        ]

    def _best(self, listing: _Listing, vector: Vector, wanted: int) -> list[_Entry]:
        """Return the best `wanted` entries and those that float32 cannot tell from them."""
        reach = self._longest * float(np.linalg.norm(vector.astype(np.float64)))
        entries, rows = listing.entries, listing.rows
        if len(entries) <= wanted or reach > _LARGEST:
            return entries
        # Products with all rows cost less than copying most of them.
        scores = (self._matrix @ vector)[rows] if 2 * len(rows) >= len(self._matrix) else self._matrix[rows] @ vector
        nearest = np.maximum.reduceat(scores, np.cumsum(listing.num_rows) - listing.num_rows)
        threshold = np.partition(nearest, len(nearest) - wanted)[len(nearest) - wanted]
        return [entries[at] for at in np.flatnonzero(nearest >= threshold - 2 * _ROUNDING * self._dim * reach)]

    def _exact(self, entry: _Entry, vector: Vector) -> float:
        """Return the nearest product in double precision, so that equal vectors have equal scores."""
        products = self._matrix[entry.rows].astype(np.float64) @ vector.astype(np.float64)
        best = float(products.max())
        return float(np.float32(best)) if abs(best) < _LARGEST else best


def _handed_out(item: Item) -> Item:
    """Return a copy that may be changed; vectors are read-only and shared."""
    value: dict[str, Any] = json_value(item.value, "stored value")
    return replace(item, value=value)
