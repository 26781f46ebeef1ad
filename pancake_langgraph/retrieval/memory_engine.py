"""The exact engine in memory: what the others are compared with, and enough for some ten thousand items."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
    checked_expiries,
    checked_ids,
    checked_items,
    checked_query,
    checked_view,
    is_as_read,
    json_value,
    latest_first,
    one_of_each,
)
from pancake_langgraph.retrieval.memory_rows import MemoryRows

#: What float32 may lose at each step of a product, in lengths of both vectors.
_ROUNDING = 2.0**-24
#: Products beyond this may overflow in float32.
_LARGEST = 1e37


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
        self._rows = MemoryRows(self._dim)
        self._expiries: list[tuple[float, Namespace, str]] = []
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
            self._rows.make_room(sum(len(item.vectors) for item in accepted))
            for item in accepted:
                self._rows.remove(item.id)
                self._rows.add(item)
                self._watch(item)

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Delete items and return how many there were."""
        wanted = one_of_each(checked_ids(ids))
        with self._lock:
            self._enter()
            return sum(self._rows.remove(item_id) for item_id in wanted)

    def touch(
        self, expiries: Mapping[ItemId, float | None], *, updated_at_s: Mapping[ItemId, float] | None = None
    ) -> int:
        """Set when items expire and nothing else of them; return of how many.  See the port."""
        wanted = checked_expiries(expiries)
        with self._lock:
            self._enter()
            found = [item for item_id in wanted if (item := self._rows.find(item_id)) is not None]
            touched = [
                replace(item, expires_at_s=expiries[item.id]) for item in found if is_as_read(item, updated_at_s)
            ]
            for item in touched:
                self._rows.replace(item)
                self._watch(item)
            return len(touched)

    # -- reading --------------------------------------------------------------------------------------------------

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        """Return items in the order of `ids`, with their vectors; `None` for those that are not there."""
        wanted = checked_ids(ids)
        with self._lock:
            self._enter()
            return [None if (item := self._rows.find(item_id)) is None else _handed_out(item) for item_id in wanted]

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """Return for each query its hits, best first, equal scores by id; a batch sees one state of the engine.

        Raises:
            InvalidQuery: see the port.
        """
        asked = [(query, *checked_query(query, self._dim)) for query in queries]
        with self._lock:
            self._enter()
            return [self._search(query, vector, view) for query, vector, view in asked]

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        """Return items of a view, last updated first, equal times by id."""
        checked_count(offset, "offset")
        end = None if limit is None else offset + checked_count(limit, "limit")
        checked = checked_view(view)
        with self._lock:
            self._enter()
            found = sorted(self._rows.items_of(view, checked), key=latest_first)
            return [_handed_out(item) for item in found[offset:end]]

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have live items, sorted."""
        with self._lock:
            self._enter()
            return self._rows.namespaces

    def stats(self) -> EngineStats:
        """Return sizes; memory counts vectors only."""
        with self._lock:
            self._enter()
            return EngineStats(
                num_items=len(self._rows),
                num_vectors=self._rows.num_rows,
                memory_bytes=self._rows.num_bytes,
            )

    def close(self) -> None:
        """Let go of everything.  Idempotent; later calls raise `RetrievalError`."""
        with self._lock:
            self._closed = True
            self._rows, self._expiries = MemoryRows(self._dim), []

    # -- inside, with the lock held -------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Refuse when closed; forget what has expired."""
        if self._closed:
            raise RetrievalError("the memory engine is closed and has forgotten its items; make a new one")
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, namespace, key = heapq.heappop(self._expiries)
            item = self._rows.find(ItemId(namespace, key))
            # It may have been replaced or touched since, and is then watched by a later entry, or by none.
            if item is not None and item.expires_at_s is not None and item.expires_at_s <= now_s:
                self._rows.remove(item.id)

    def _watch(self, item: Item) -> None:
        if item.expires_at_s is not None:
            heapq.heappush(self._expiries, (item.expires_at_s, item.id.namespace, item.id.key))

    def _search(self, query: Query, vector: Vector, view: CheckedView) -> list[Hit]:
        wanted = query.offset + query.limit
        rows = self._rows.rows_of(query.view, view)
        if not len(rows) or not query.limit:
            return []
        scored = [
            (self._rows.item(number), _rounded(self._rows.exact(number, vector)))
            for number in self._best(rows, vector, wanted).tolist()
        ]
        scored.sort(key=lambda pair: best_first(pair[1], pair[0].id))
        # Last of all, and again: what leaves the engine is on the list, whatever happened above.
        return [
            Hit(_handed_out(item), score)
            for item, score in scored[query.offset : wanted]
            if view.allowed is None or item.id in view.allowed
        ]

    def _best(self, rows: NDArray[np.int64], vector: Vector, wanted: int) -> NDArray[np.int64]:
        """Return the numbers of the best `wanted` items and those that float32 cannot tell from them."""
        owners = self._rows.owners(rows)
        # The rows of an item lie one after the other.
        begins = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))
        numbers = owners[begins]
        reach = self._rows.longest * float(np.linalg.norm(vector.astype(np.float64)))
        if len(numbers) <= wanted or reach > _LARGEST:
            return numbers
        nearest = np.maximum.reduceat(self._rows.products(rows, vector), begins)
        threshold = np.partition(nearest, len(nearest) - wanted)[len(nearest) - wanted]
        best: NDArray[np.int64] = numbers[nearest >= threshold - 2 * _ROUNDING * self._dim * reach]
        return best


def _rounded(score: float) -> float:
    """Return a score in single precision, so that equal vectors have equal ones, unless it is too large for it."""
    return float(np.float32(score)) if abs(score) < _LARGEST else score


def _handed_out(item: Item) -> Item:
    """Return a copy that may be changed; vectors are read-only and shared."""
    value: dict[str, Any] = json_value(item.value, "stored value")
    return replace(item, value=value)
