"""Remembers what was stored last, so that the next step encodes only what is new."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pancake_langgraph.checkpoint.chunks import CHUNK, OPAQUE, Chunk
from pancake_langgraph.checkpoint.elements import Ref
from pancake_langgraph.checkpoint.moulds import IMMUTABLE
from pancake_langgraph.checkpoint.rows import Spot

MAX_NAMESPACES: Final = 256
MAX_ITEMS: Final = 200_000


@dataclass(frozen=True, slots=True)
class Remembered:
    """One channel as it was stored: a list in `chunks`, or a single `value`."""

    version: object
    ref: Ref
    value: object = OPAQUE
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_items(self) -> int:
        """Number of list items."""
        return (len(self.chunks) - 1) * CHUNK + len(self.chunks[-1].items) if self.chunks else 0

    def entries(self) -> Iterator[bytes]:
        """Iterate over the entries of a list's items, in order."""
        return (entry for chunk in self.chunks for entry in chunk.entries)


@dataclass(frozen=True, slots=True)
class Latest:
    """What a namespace held at `spot`."""

    spot: Spot
    channels: Mapping[str, Remembered] = field(default_factory=dict)

    @property
    def num_items(self) -> int:
        """Number of list items kept alive."""
        return sum(channel.num_items for channel in self.channels.values())


class Memory:
    """The latest stored values by thread and namespace, bounded, the longest unused forgotten first.  Thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, str], Latest] = OrderedDict()
        self._num_items = 0

    def get(self, thread_id: str, checkpoint_ns: str) -> Latest | None:
        """Return what is remembered."""
        with self._lock:
            found = self._latest.get((thread_id, checkpoint_ns))
            if found is not None:
                self._latest.move_to_end((thread_id, checkpoint_ns))
            return found

    def put(self, thread_id: str, latest: Latest) -> None:
        """Remember."""
        key = (thread_id, latest.spot.checkpoint_ns)
        with self._lock:
            self._drop(key)
            self._latest[key] = latest
            self._num_items += latest.num_items
            while len(self._latest) > MAX_NAMESPACES or (self._num_items > MAX_ITEMS and len(self._latest) > 1):
                self._drop(next(iter(self._latest)))

    def forget(self, thread_id: str) -> None:
        """Forget a thread."""
        with self._lock:
            for key in [key for key in self._latest if key[0] == thread_id]:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        gone = self._latest.pop(key, None)
        if gone is not None:
            self._num_items -= gone.num_items


def remember_single(version: object, ref: Ref, value: object) -> Remembered:
    """Remember a stored value that is no list."""
    return Remembered(version, ref, value if type(value) in IMMUTABLE else OPAQUE)
