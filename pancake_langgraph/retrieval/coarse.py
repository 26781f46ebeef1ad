"""The coarse search: which partitions are nearest to queries, on the CPU or on a GPU that finds the same.

On the CPU the products are numpy's, whose BLAS knows the processor.  A GPU is used as long as nothing goes wrong with
it: after its first failure everything is done on the CPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import DeviceFull
from pancake_langgraph.retrieval.device_budget import DeviceBudget

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
#: For each query some partitions, in no order, and its products with their centroids.
Near = tuple[Rows, Floats]
#: What products of vectors of length one may differ by between devices: single precision does, TF32 and halves do not.
TOLERANCE: Final = 1e-4
#: The GPU, as torch names it.
GPU: Final = "cuda:0"
#: As what they count in a budget.
CENTROIDS: Final = "centroids of partitions"
SCRATCH: Final = "memory of Faiss"


class Partitioned(Protocol):
    """Codes in partitions."""

    @property
    def centroids(self) -> Floats:
        """One row for each partition."""
        ...


class HeldCentroids(Protocol):
    """Centroids in the memory of a GPU.  Thread-safe."""

    @property
    def max_count(self) -> int:
        """How many partitions can be asked for at once."""
        ...

    def nearest(self, queries: Floats, count: int) -> Near:
        """Return for each query the `count` partitions of the largest products.  May raise whatever a driver does."""
        ...


@dataclass(frozen=True, slots=True)
class CoarseDevice:
    """Where coarse searches run, and why.

    `hold` puts centroids into the memory of the GPU, and is `None` on the CPU.  `num_failures` counts how often a GPU
    that is there could not be used; the first time is the last one.  `num_refused` counts segments that were searched
    on the CPU because a budget had no room for their centroids.
    """

    device: Literal["cpu", "gpu"]
    reason: str
    num_failures: int = 0
    num_refused: int = 0
    hold: Callable[[Floats], HeldCentroids] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return it in words."""
        refused = f"; {self.num_refused} segments had no room there" if self.num_refused else ""
        return f"coarse search on {self.device} ({self.reason}{refused})"


class _Process:
    """Stands for what all indexes of a process share on a GPU."""


_SCRATCH_OWNER: Final = _Process()


class CoarseSearch:
    """The coarse searches of one engine.  Thread-safe.

    The device is chosen when the first search needs it, because looking for one means to load Faiss.
    """

    def __init__(
        self, choose: Callable[[], CoarseDevice], *, budget: DeviceBudget | None = None, scratch_bytes: int = 0
    ) -> None:
        """Ask `choose` once; as long as `budget` has no room for centroids they stay on the CPU.

        Besides centroids `scratch_bytes` count, once for all that share a budget.
        """
        self._choose = choose
        self._budget = budget
        self._scratch_bytes = scratch_bytes
        self._chosen: CoarseDevice | None = None
        self._lock = threading.Lock()
        self._held: weakref.WeakKeyDictionary[Partitioned, HeldCentroids] = weakref.WeakKeyDictionary()
        #: Those that there was no room for, and what was left then.
        self._refused: weakref.WeakKeyDictionary[Partitioned, int] = weakref.WeakKeyDictionary()

    @property
    def device(self) -> CoarseDevice:
        """Where it runs now; the first call chooses, which raises what `choose` raises."""
        chosen = self._chosen
        if chosen is None:
            with self._lock:
                if self._chosen is None:
                    self._chosen = self._choose()
                chosen = self._chosen
        return chosen

    def nearest(self, codes: Partitioned, queries: Floats, count: int) -> Near:
        """Return for each query the `count` nearest partitions, of which there have to be as many."""
        hold = self.device.hold
        if hold is not None:
            try:
                held = self._of(codes, hold)
                if held is not None and count <= held.max_count:
                    return _usable(held.nearest(queries, count), (len(queries), count), len(codes.centroids))
            except Exception as error:  # noqa: BLE001 - drivers fail in their own ways; counted, and the CPU does it
                self._failed(error)
        return nearest_on_cpu(codes.centroids, queries, count)

    def _of(self, codes: Partitioned, hold: Callable[[Floats], HeldCentroids]) -> HeldCentroids | None:
        """Return centroids on the GPU; `None` where it has failed meanwhile, or the budget has no room for them."""
        with self._lock:
            if self._chosen is None or self._chosen.hold is None:
                return None
            if (known := self._held.get(codes)) is not None:
                return known
            if self._left_bytes() <= self._refused.get(codes, -1):
                return None  # no more is left than when it was refused: a refusal is slow, it asks the collector
            try:
                self._take_room(codes)
                held = self._held[codes] = hold(codes.centroids)
            except DeviceFull as error:
                refusal, is_first = error, not self._chosen.num_refused
                if codes not in self._refused:
                    self._chosen = replace(self._chosen, num_refused=self._chosen.num_refused + 1)
                self._refused[codes] = self._left_bytes()
            except BaseException:
                self._give_back(codes)
                raise
            else:
                return held
        if is_first:
            logger.warning("searches for partitions of a segment stay on the CPU: %s", refusal)
        return None

    def _left_bytes(self) -> int:
        return 0 if self._budget is None else self._budget.left_bytes(GPU) or 0

    def _take_room(self, codes: Partitioned) -> None:
        if self._budget is not None:
            self._budget.take(_SCRATCH_OWNER, SCRATCH, {GPU: self._scratch_bytes})
            self._budget.take(codes, CENTROIDS, {GPU: codes.centroids.nbytes})

    def _give_back(self, codes: Partitioned) -> None:
        if self._budget is not None:
            self._budget.give_back(codes, CENTROIDS)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            for codes in tuple(self._held):
                self._give_back(codes)
            self._held.clear()
            if self._chosen is None or self._chosen.hold is None:
                return  # another search met it first
            self._chosen = CoarseDevice("cpu", f"the GPU failed: {in_short(error)}", num_failures=1)
        logger.warning("%s; searches go on", self._chosen)


def nearest_on_cpu(centroids: Floats, queries: Floats, count: int) -> Near:
    """Return for each query the `count` partitions of the largest products, nearest first.

    Searches gain by that order: what they meet later is hardly among the best, and need not be put in its place.
    """
    products = queries @ centroids.T
    lists = _top(products, count)
    row = np.arange(len(lists))[:, None]
    near = products[row, lists]
    order = np.argsort(-near, axis=1)
    return lists[row, order], np.ascontiguousarray(near[row, order], np.float32)


def agrees(centroids: Floats, queries: Floats, count: int, near: Near) -> bool:
    """Whether `near` is what the CPU finds, within what single precision allows; all vectors are of length one.

    Of partitions that are equally near, any will do.
    """
    try:
        lists, products = _usable(near, (len(queries), count), len(centroids))
    except ValueError:
        return False
    truth = queries.astype(np.float64) @ centroids.astype(np.float64).T
    own = np.take_along_axis(truth, lists, 1)
    last = -np.partition(-truth, count - 1, axis=1)[:, count - 1 : count]
    are_all_different = (np.diff(np.sort(lists, axis=1), axis=1) > 0).all()
    is_near = (np.abs(products - own) <= TOLERANCE).all() and (own >= last - TOLERANCE).all()
    return bool(are_all_different and is_near)


def in_short(error: Exception) -> str:
    """Return an error in one line: those of drivers and of Faiss are long."""
    first = str(error).partition("\n")[0][:120]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _usable(near: Near, shape: tuple[int, int], num_lists: int) -> Near:
    """Return what a GPU found, in the form that Faiss reads; numbers of lists that are none would be its end."""
    lists, products = np.ascontiguousarray(near[0], np.int64), np.ascontiguousarray(near[1], np.float32)
    if lists.shape != shape or products.shape != shape:
        raise ValueError(f"got {lists.shape} partitions and {products.shape} products, allowed are {shape}")
    if lists.size and not (lists.min() >= 0 and lists.max() < num_lists):
        raise ValueError(f"got partitions {lists.min()} to {lists.max()}, there are {num_lists}")
    return lists, products


def _top(products: Floats, count: int) -> Rows:
    """Return the columns of the `count` largest of each row, in no order."""
    if count >= products.shape[1]:
        return np.ascontiguousarray(np.broadcast_to(np.arange(products.shape[1]), products.shape), np.int64)
    rest = products.shape[1] - count
    return np.ascontiguousarray(np.argpartition(products, rest, axis=1)[:, rest:], np.int64)
