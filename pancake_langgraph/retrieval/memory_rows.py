"""What the engine in memory holds, as arrays: a number for each item in the order they came, and its vectors' rows.

Nothing that is there is changed: what is replaced or deleted is marked as dead, and what came since is looked at alone.
So what a view shows is worked out once for each item.  When most is dead, the rest moves together.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.base import Item, ItemId, Namespace, Vector, View
from pancake_langgraph.retrieval.checks import CheckedView
from pancake_langgraph.retrieval.masks import MaskCache, ViewKey

_FIRST_ROWS = 256


class _Shown:
    """Which of the first `num_seen` items a view shows; what has died since is still marked."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.numbers: list[int] = []
        self.mask: NDArray[np.bool_] = np.zeros(_FIRST_ROWS, np.bool_)


class MemoryRows:
    """Items and the rows of their vectors.  Not thread safe."""

    def __init__(self, dim: int) -> None:
        """Hold nothing yet; vectors have `dim` numbers."""
        self._dim = dim
        self._items: list[Item | None] = []
        self._starts: list[int] = [0]
        self._numbers: dict[ItemId, int] = {}
        self._num_in: dict[Namespace, int] = {}
        self._matrix: NDArray[np.float32] = np.zeros((0, dim), np.float32)
        self._owners: NDArray[np.int64] = np.zeros(0, np.int64)
        self._alive: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._shown: MaskCache[_Shown] = MaskCache()
        self._num_dead_rows = 0
        #: Length of the longest vector that was ever added.
        self.longest = 0.0

    # -- sizes and look-ups ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self._numbers)

    @property
    def num_rows(self) -> int:
        """How many vectors there are."""
        return self._starts[-1] - self._num_dead_rows

    @property
    def num_bytes(self) -> int:
        """Bytes of the vectors, with the room for more."""
        return self._matrix.nbytes

    @property
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have items, sorted."""
        return sorted(self._num_in)

    def find(self, item_id: ItemId) -> Item | None:
        """Return an item."""
        number = self._numbers.get(item_id)
        return None if number is None else self._items[number]

    def item(self, number: int) -> Item:
        """Return the item of a number that is alive."""
        item = self._items[number]
        if item is None:
            raise KeyError(number)
        return item

    # -- changes --------------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int) -> None:
        """Have room for more vectors, by moving what is alive together, or by doubling.

        Raises:
            RetrievalError: if there is no memory for it; everything is as it was.
        """
        if 2 * self._num_dead_rows > self._starts[-1] or 2 * len(self) + _FIRST_ROWS < len(self._items):
            self._rebuild(max(_FIRST_ROWS, self.num_rows + num_rows, 2 * self.num_rows))
        elif self._starts[-1] + num_rows > len(self._matrix):
            self._rebuild(max(_FIRST_ROWS, 2 * len(self._matrix), self.num_rows + num_rows))

    def add(self, item: Item) -> None:
        """Add an item whose id is not there, and for whose vectors there is room."""
        number, start = len(self._items), self._starts[-1]
        stop = start + len(item.vectors)
        for row, vector in enumerate(item.vectors, start):
            self._matrix[row] = vector
            self.longest = max(self.longest, float(np.linalg.norm(vector.astype(np.float64))))
        self._owners[start:stop] = number
        self._alive[start:stop] = True
        self._items.append(item)
        self._starts.append(stop)
        self._numbers[item.id] = number
        self._num_in[item.id.namespace] = self._num_in.get(item.id.namespace, 0) + 1

    def replace(self, item: Item) -> None:
        """Put another item of the same id, value and vectors in the place of one that is there."""
        self._items[self._numbers[item.id]] = item

    def remove(self, item_id: ItemId) -> bool:
        """Mark an item as dead; return whether it was there."""
        number = self._numbers.pop(item_id, None)
        if number is None:
            return False
        start, stop = self._starts[number : number + 2]
        self._items[number] = None
        self._alive[start:stop] = False
        self._num_dead_rows += stop - start
        self._num_in[item_id.namespace] -= 1
        if not self._num_in[item_id.namespace]:
            del self._num_in[item_id.namespace]
        return True

    # -- views ----------------------------------------------------------------------------------------------------

    def items_of(self, view: View, checked: CheckedView) -> Iterable[Item]:
        """Return the items that a view shows."""
        if checked.allowed is not None:
            found = (self.find(item_id) for item_id in checked.allowed)
            return [item for item in found if item is not None and checked.shows(item)]
        shown = self._seen(view, checked)
        shown.numbers = [number for number in shown.numbers if self._items[number] is not None]
        return [self.item(number) for number in shown.numbers]

    def rows_of(self, view: View, checked: CheckedView) -> NDArray[np.int64]:
        """Return the rows of the items that a view shows, in order."""
        num = self._starts[-1]
        if checked.allowed is not None:
            numbers = sorted(self._numbers[item.id] for item in self.items_of(view, checked))
            spans = [np.arange(self._starts[one], self._starts[one + 1]) for one in numbers]
            return np.concatenate([np.zeros(0, np.int64), *spans])
        if ViewKey.of(view, checked).shows_all:
            return np.flatnonzero(self._alive[:num])
        return np.flatnonzero(self._seen(view, checked).mask[self._owners[:num]] & self._alive[:num])

    def products(self, rows: NDArray[np.int64], vector: Vector) -> NDArray[np.float32]:
        """Return products in single precision."""
        num = self._starts[-1]
        # Products with all rows cost less than copying most of them.
        found: NDArray[np.float32] = (
            (self._matrix[:num] @ vector)[rows] if 2 * len(rows) >= num else self._matrix[rows] @ vector
        )
        return found

    def owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the items whose vectors these are."""
        return self._owners[rows]

    def exact(self, number: int, vector: Vector) -> float:
        """Return the largest product of an item's vectors in double precision."""
        rows = self._matrix[self._starts[number] : self._starts[number + 1]]
        return float((rows.astype(np.float64) @ vector.astype(np.float64)).max())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _seen(self, view: View, checked: CheckedView) -> _Shown:
        """Return what of all items a view shows, after a look at those that came since it was asked for last."""
        key = ViewKey.of(view, checked)
        shown = self._shown.get(key)
        if shown is None:
            shown = _Shown()
            self._shown.put(key, shown)
        num = len(self._items)
        if num > len(shown.mask):
            grown = np.zeros(2 * num, np.bool_)
            grown[: len(shown.mask)] = shown.mask
            shown.mask = grown
        for number in range(shown.num_seen, num):
            item = self._items[number]
            if (
                item is not None
                and checked.covers(item.id.namespace)
                and (checked.passes is None or checked.passes(item.value))
            ):
                shown.mask[number] = True
                shown.numbers.append(number)
        shown.num_seen = num
        return shown

    def _rebuild(self, size: int) -> None:
        """Move what is alive to the beginning of arrays with `size` rows."""
        rows = np.flatnonzero(self._alive[: self._starts[-1]])
        try:
            matrix = np.zeros((size, self._dim), np.float32)
        except MemoryError:
            raise RetrievalError(
                f"no memory for {size} vectors of {self._dim} numbers ({size * self._dim * 4} bytes); "
                "nothing was stored; keep the index on disk, or store less"
            ) from None
        np.take(self._matrix, rows, axis=0, out=matrix[: len(rows)])
        items = [item for item in self._items if item is not None]
        if len(items) < len(self._items):
            self._shown = MaskCache()
        self._matrix = matrix
        self._items = [*items]
        lengths = np.array([len(item.vectors) for item in items], np.int64)
        self._starts = [0, *np.cumsum(lengths).tolist()]
        self._numbers = {item.id: number for number, item in enumerate(items)}
        self._owners = np.zeros(size, np.int64)
        self._owners[: len(rows)] = np.repeat(np.arange(len(items)), lengths)
        self._alive = np.zeros(size, np.bool_)
        self._alive[: len(rows)] = True
        self._num_dead_rows = 0
