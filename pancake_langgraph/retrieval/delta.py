"""What was written since the last flush: append-only arrays in memory, scanned exactly.

One thread at a time writes.  Readers hold a `DeltaView`: everything up to an operation's number, and nothing after it,
without a lock, because rows behind their counts and deaths after their number do not concern them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import ItemId, Namespace
from pancake_langgraph.retrieval.checks import CheckedView
from pancake_langgraph.retrieval.log import LogItem
from pancake_langgraph.retrieval.masks import MaskCache, ViewKey

_ALIVE: Final = np.iinfo(np.int64).max
_FIRST: Final = 64
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Delta:
    """Items and rows in the order in which they came.  Not thread-safe, except through views."""

    def __init__(self, dim: int) -> None:
        """Hold nothing yet.  `item_rows[n]` is where the rows of item `n` begin."""
        self.dim = dim
        self.items: list[LogItem] = []
        self.num_rows = 0
        self.longest = 0.0
        self.next_expiry_s = np.inf
        self.namespaces: list[Namespace] = []
        self.masks: MaskCache[NDArray[np.bool_]] = MaskCache()
        self._namespace_numbers: dict[Namespace, int] = {}
        self._latest: dict[tuple[Namespace, str], int] = {}
        self._before: list[int] = []
        self._vectors: NDArray[np.float32] = np.empty((_FIRST, dim), np.float32)
        self._row_items: NDArray[np.int32] = np.empty(_FIRST, np.int32)
        self._item_rows: NDArray[np.int32] = np.zeros(_FIRST, np.int32)
        self._dead_at: NDArray[np.int64] = np.full(_FIRST, _ALIVE, np.int64)
        self._item_namespaces: NDArray[np.int32] = np.empty(_FIRST, np.int32)
        self._expires: NDArray[np.float64] = np.full(_FIRST, np.inf)

    def add(self, item: LogItem) -> None:
        """Append an item; an earlier one of the same id has to be dead."""
        ordinal = len(self.items)
        if ordinal + 1 == len(self._dead_at):
            self._dead_at = _grown(self._dead_at, _ALIVE)
            self._item_namespaces = _grown(self._item_namespaces, 0)
            self._item_rows = _grown(self._item_rows, 0)
            self._expires = _grown(self._expires, np.inf)
        number = self._namespace_numbers.get(item.namespace)
        if number is None:
            number = self._namespace_numbers[item.namespace] = len(self.namespaces)
            self.namespaces.append(item.namespace)
        self._item_namespaces[ordinal] = number
        if item.expires_at_s is not None:
            self._expires[ordinal] = item.expires_at_s
            self.next_expiry_s = min(self.next_expiry_s, item.expires_at_s)
        if item.vectors:
            self._add_rows(np.frombuffer(item.vectors, np.float32).reshape(-1, self.dim), ordinal)
        name = (item.namespace, item.key)
        self._before.append(self._latest.get(name, -1))
        self._item_rows[ordinal + 1] = self.num_rows
        self.items.append(msgspec.structs.replace(item, vectors=b"") if item.vectors else item)
        self._latest[name] = ordinal

    def _add_rows(self, vectors: NDArray[np.float32], ordinal: int) -> None:
        end = self.num_rows + len(vectors)
        while end > len(self._vectors):
            self._vectors = _grown(self._vectors, 0)
            self._row_items = _grown(self._row_items, 0)
        self._vectors[self.num_rows : end] = vectors
        self._row_items[self.num_rows : end] = ordinal
        self.longest = max(self.longest, longest(vectors))
        self.num_rows = end

    def live(self, item_id: ItemId) -> int:
        """Return the ordinal of an item that is there now, or -1."""
        ordinal = self._latest.get((item_id.namespace, item_id.key), -1)
        return ordinal if ordinal >= 0 and self._dead_at[ordinal] == _ALIVE else -1

    def kill(self, ordinal: int, seq: int) -> None:
        """Mark an item as dead from operation `seq` on."""
        self._dead_at[ordinal] = seq

    def expire(self, now_s: float, seq: int) -> bool:
        """Mark as dead what has expired; return whether there was any."""
        if now_s < self.next_expiry_s:
            return False
        count = len(self.items)
        alive = self._dead_at[:count] == _ALIVE
        gone = alive & (self._expires[:count] <= now_s)
        self._dead_at[:count][gone] = seq
        left = self._expires[:count][alive & ~gone]
        self.next_expiry_s = float(left.min()) if len(left) else np.inf
        return bool(gone.any())

    def find(self, item_id: ItemId, view: DeltaView) -> int:
        """Return the ordinal of an item that `view` shows, or -1."""
        ordinal = self._latest.get((item_id.namespace, item_id.key), -1)
        while ordinal >= view.num_items:
            ordinal = self._before[ordinal]
        return ordinal if ordinal >= 0 and view.dead_at[ordinal] > view.seq else -1

    def view(self, seq: int) -> DeltaView:
        """Return what there is after operation `seq`."""
        return DeltaView(
            self,
            seq,
            len(self.items),
            self.num_rows,
            self._vectors,
            self._row_items,
            self._item_rows,
            self._dead_at,
            self._item_namespaces,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DeltaView:
    """A delta as it was after operation `seq`.  Immutable to whoever looks through it."""

    delta: Delta
    seq: int
    num_items: int
    num_rows: int
    vectors: NDArray[np.float32]
    row_items: NDArray[np.int32]
    item_rows: NDArray[np.int32]
    dead_at: NDArray[np.int64]
    item_namespaces: NDArray[np.int32]

    def alive(self) -> NDArray[np.bool_]:
        """Return for each item whether it is there."""
        return self.dead_at[: self.num_items] > self.seq

    def visible(self, view: CheckedView, key: ViewKey) -> NDArray[np.bool_]:
        """Return for each item whether a view shows it, without looking at the view's allow-list."""
        alive = self.alive()
        if key.shows_all:
            return alive
        known = self.delta.masks.get(key)
        start = 0 if known is None else min(len(known), self.num_items)
        if known is not None and start == self.num_items:
            return alive & known[:start]
        fresh = self._shown(view, start)
        mask = fresh if known is None else np.concatenate((known[:start], fresh))
        self.delta.masks.put(key, mask)
        return alive & mask

    def _shown(self, view: CheckedView, start: int) -> NDArray[np.bool_]:
        numbers, which = np.unique(self.item_namespaces[start : self.num_items], return_inverse=True)
        namespaces = self.delta.namespaces
        covered = np.fromiter((view.covers(namespaces[number]) for number in numbers), np.bool_, len(numbers))
        mask = covered[which]
        if view.passes is not None:
            for at in np.flatnonzero(mask):
                mask[at] = view.passes(self.value(start + int(at)))
        return mask

    def find(self, item_id: ItemId) -> int:
        """Return the ordinal of a live item, or -1."""
        return self.delta.find(item_id, self)

    def value(self, ordinal: int) -> Mapping[str, object]:
        """Return an item's value, a new one each time."""
        found: Mapping[str, object] = msgspec.json.decode(self.delta.items[ordinal].value)
        return found

    def rows_of(self, ordinal: int) -> NDArray[np.float32]:
        """Return the vectors of an item."""
        return self.vectors[self.item_rows[ordinal] : self.item_rows[ordinal + 1]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.vectors.nbytes + self.dead_at.nbytes + self.row_items.nbytes


def longest(vectors: NDArray[np.float32]) -> float:
    """Return the length of the longest of some vectors."""
    if not len(vectors):
        return 0.0
    wide = vectors.astype(np.float64)
    return float(np.sqrt(np.einsum("ij,ij->i", wide, wide).max()))


def ids_of(items: Sequence[LogItem]) -> list[ItemId]:
    """Return the ids of some items."""
    return [ItemId(item.namespace, item.key) for item in items]


def _grown(array: NDArray[_Scalar], fill: float) -> NDArray[_Scalar]:
    """Return a copy of twice the length; whoever holds the old one keeps it."""
    grown = np.full((2 * len(array), *array.shape[1:]), fill, array.dtype)
    grown[: len(array)] = array
    return grown
