"""What an index holds at one moment, and how operations change it.  Writer and readers go through the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pancake_langgraph.retrieval.base import ItemId
from pancake_langgraph.retrieval.delta import Delta, DeltaView
from pancake_langgraph.retrieval.log import Operation
from pancake_langgraph.retrieval.segment import Ordinals, hash_of
from pancake_langgraph.retrieval.segment_view import SegmentView


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Everything after change `seq`.  Immutable; an item is alive in one of the sources at most.

    `mark` is no other state's, and may be held without holding all that a state holds.
    """

    seq: int
    segments: tuple[SegmentView, ...] = ()
    deltas: tuple[DeltaView, ...] = ()
    next_expiry_s: float = np.inf
    mark: object = field(default_factory=object)

    def locate(self, item_id: ItemId) -> tuple[DeltaView | SegmentView, int] | None:
        """Return where a live item is.

        Raises:
            DamagedPart: if its document cannot be read.
        """
        for delta in reversed(self.deltas):
            ordinal = delta.find(item_id)
            if ordinal >= 0:
                return delta, ordinal
        if self.segments:
            hashed = hash_of(item_id)
            for segment in reversed(self.segments):
                ordinal = segment.find(item_id, hashed)
                if ordinal >= 0:
                    return segment, ordinal
        return None


@dataclass(frozen=True, slots=True)
class Change:
    """What an operation takes out: the ids of what is there, and where that is."""

    there: list[ItemId] = field(default_factory=list)
    in_deltas: list[tuple[Delta, int]] = field(default_factory=list)
    in_segments: dict[str, list[int]] = field(default_factory=dict)


def named_in(operation: Operation) -> list[ItemId]:
    """Return the ids of what an operation puts or deletes."""
    ids = [ItemId(item.namespace, item.key) for item in operation.puts]
    return ids + [ItemId(namespace, key) for namespace, key in operation.deletes]


class Index:
    """The mutable side: whoever calls a method that changes something holds a lock; `state` may be read at any time."""

    def __init__(self, dim: int, segments: Iterable[SegmentView] = ()) -> None:
        """Begin with segments and an empty delta."""
        self._dim = dim
        self._segments = {view.segment.entry.name: view for view in segments}
        self._deltas = [Delta(dim)]
        self._seq = 0
        self.state = State(0)
        self._publish()

    # -- operations -----------------------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Carry out one operation, as `prepare` and `commit` do.

        Raises:
            DamagedPart: see `prepare`.
        """
        self.commit(operation, self.prepare(named_in(operation)))

    def prepare(self, ids: Sequence[ItemId]) -> Change:
        """Look up items that are to be replaced or deleted; nothing is changed.

        Raises:
            DamagedPart: if an item that may be meant cannot be read.
        """
        change = Change()
        found: set[ItemId] = set()
        for item_id in ids:
            for delta in self._deltas:
                ordinal = delta.live(item_id)
                if ordinal >= 0:
                    change.in_deltas.append((delta, ordinal))
                    found.add(item_id)
        if self._segments:
            found |= self._prepare_in_segments(ids, change)
        change.there.extend(item_id for item_id in ids if item_id in found)
        return change

    def _prepare_in_segments(self, ids: Sequence[ItemId], change: Change) -> set[ItemId]:
        """Look in all of them: a damaged one that was restored may hold an item that was replaced meanwhile."""
        hashes = np.array([hash_of(item_id) for item_id in ids], np.uint64)
        found: set[ItemId] = set()
        for name, view in self._segments.items():
            for at in view.segment.which_may_hold(hashes).tolist():
                ordinal = view.find(ids[at], int(hashes[at]))
                if ordinal >= 0:
                    change.in_segments.setdefault(name, []).append(ordinal)
                    found.add(ids[at])
        return found

    def commit(self, operation: Operation, change: Change) -> None:
        """Carry out what was prepared under the same lock; searches see all of it or nothing."""
        self._seq += 1
        for delta, ordinal in change.in_deltas:
            delta.kill(ordinal, self._seq)
        self._kill_in_segments(change.in_segments)
        for item in operation.puts:
            self._deltas[-1].add(item)
        self._publish()

    def _kill_in_segments(self, hits: Mapping[str, Sequence[int] | Ordinals]) -> None:
        for name, ordinals in hits.items():
            self._segments[name] = self._segments[name].without(np.asarray(ordinals, np.int64))

    def drop(self, name: str, ordinals: Ordinals) -> None:
        """Take items of a segment out that cannot be read."""
        if name in self._segments:
            self._segments[name].segment.ignore(ordinals)
            self._kill_in_segments({name: ordinals})
            self._publish()

    def expire(self, now_s: float) -> None:
        """Take out what has expired."""
        if now_s < self.state.next_expiry_s:
            return
        self._seq += 1
        for delta in self._deltas:
            delta.expire(now_s, self._seq)
        for name, view in self._segments.items():
            if view.next_expiry_s <= now_s:
                self._segments[name] = view.expired(now_s)
        self._publish()

    # -- flush and merge ------------------------------------------------------------------------------------------

    def freeze(self) -> tuple[DeltaView, ...]:
        """Begin a new delta and return those before, which change by deaths only from now on."""
        if self._deltas[-1].items:
            self._deltas.append(Delta(self._dim))
            self._publish()
        return self.state.deltas[:-1]

    def replace(self, gone: Sequence[str], deltas: Sequence[Delta], new: SegmentView | None) -> None:
        """Put a segment in the place of others and of deltas."""
        for name in gone:
            del self._segments[name]
        self._deltas = [delta for delta in self._deltas if delta not in deltas]
        if new is not None:
            self._segments[new.segment.entry.name] = new
        self._publish()

    @property
    def num_waiting(self) -> int:
        """Items or vectors, whichever are more, in all deltas, dead ones too."""
        return sum(max(len(delta.items), delta.num_rows) for delta in self._deltas)

    @property
    def has_rows(self) -> bool:
        """Whether a delta has vectors, dead ones too."""
        return any(delta.num_rows for delta in self._deltas)

    @property
    def segments(self) -> Mapping[str, SegmentView]:
        """The segments by name."""
        return self._segments

    def _publish(self) -> None:
        expiries = [delta.next_expiry_s for delta in self._deltas]
        expiries += [view.next_expiry_s for view in self._segments.values()]
        self.state = State(
            self._seq,
            tuple(self._segments.values()),
            tuple(delta.view(self._seq) for delta in self._deltas),
            min(expiries),
        )
