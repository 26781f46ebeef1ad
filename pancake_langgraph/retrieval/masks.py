"""What a view shows of a source that does not change, remembered: namespaces and filters are looked at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import Namespace, View
from pancake_langgraph.retrieval.checks import CheckedView

#: Bits of a bitmap, the lowest first, as Faiss reads them.
Bits = NDArray[np.uint8]
Mask = TypeVar("Mask")
_MAX_VIEWS: Final = 64


@dataclass(frozen=True, slots=True)
class ViewKey:
    """Names what a view shows by prefixes and filter: equal keys show the same."""

    prefixes: tuple[Namespace, ...]
    where: str

    @property
    def shows_all(self) -> bool:
        """Whether the view shows everything."""
        return not self.where and self.prefixes == ((),)

    @classmethod
    def of(cls, view: View, checked: CheckedView) -> ViewKey:
        """Return the key of a view that was checked."""
        return cls(checked.prefixes, repr(_plain(view.where)) if checked.passes is not None else "")


def _plain(wanted: object) -> object:
    """Return part of a filter in the one form that shows kind and value: JSON has no infinity, and 1 is not 1.0."""
    if isinstance(wanted, Mapping):
        return {str.__str__(key): _plain(one) for key, one in wanted.items()}
    if isinstance(wanted, list | tuple):
        return [_plain(one) for one in wanted]
    if isinstance(wanted, set | frozenset):
        return sorted(repr(_plain(one)) for one in wanted)
    for kind in (str, float):
        if isinstance(wanted, kind):
            return kind.__repr__(wanted)
    return wanted if wanted is None or isinstance(wanted, bool) else int.__repr__(wanted)


@dataclass(frozen=True, slots=True, eq=False)
class ViewMask:
    """What a view shows of a segment: the bits of items and rows, and the rows themselves where they are few."""

    items: Bits
    rows: Bits
    few_rows: NDArray[np.int64] | None


class MaskCache(Generic[Mask]):
    """The masks of the views that were used last.  Thread-safe."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._lock = threading.Lock()
        self._masks: OrderedDict[ViewKey, Mask] = OrderedDict()

    def get(self, key: ViewKey) -> Mask | None:
        """Return a mask that is known."""
        with self._lock:
            found = self._masks.get(key)
            if found is not None:
                self._masks.move_to_end(key)
            return found

    def put(self, key: ViewKey, mask: Mask) -> None:
        """Remember a mask, and forget the one that was not used for longest."""
        with self._lock:
            self._masks[key] = mask
            self._masks.move_to_end(key)
            if len(self._masks) > _MAX_VIEWS:
                self._masks.popitem(last=False)


def packed(mask: NDArray[np.bool_]) -> Bits:
    """Return a mask as bits."""
    return np.packbits(mask, bitorder="little")


def unpacked(bits: Bits, count: int) -> NDArray[np.bool_]:
    """Return bits as a mask of `count`."""
    return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)


def with_bits(bits: Bits, ordinals: NDArray[np.int64]) -> Bits:
    """Return a copy in which some bits are set."""
    copied = bits.copy()
    np.bitwise_or.at(copied, ordinals >> 3, np.left_shift(1, ordinals & 7).astype(np.uint8))
    return copied


def bits_at(bits: Bits, ordinals: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether some bits are set."""
    found: NDArray[np.bool_] = (bits[ordinals >> 3] >> (ordinals & 7).astype(np.uint8)) & 1 != 0
    return found


def num_set(bits: Bits) -> int:
    """Return how many bits are set; those behind the last ordinal are never set."""
    return int(np.bitwise_count(bits).sum(dtype=np.int64))
