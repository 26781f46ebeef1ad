"""The port of vector search: items in namespaces, found by similarity within a view.

An item is a JSON value under a namespace and a key, with any number of vectors (one for each indexed text of it).
Scores are inner products; whoever wants cosine stores vectors of length one.  Engines are `memory` (exact, in this
process, not kept) and `disk` (Faiss, kept); both pass one contract suite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

#: One vector: shape `(dim,)`, float32.
Vector = NDArray[np.float32]
#: A path of labels, from the outermost on.  Compared label by label, never as text.
Namespace = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ItemId:
    """What names an item: unique in an engine."""

    namespace: Namespace
    key: str


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A stored value.

    `value` is JSON.  Without `vectors` an item is found by listing only.  Times are seconds since the epoch;
    `expires_at_s` is when it counts as deleted, `None` never.
    """

    id: ItemId
    value: Mapping[str, Any]
    vectors: tuple[Vector, ...] = ()
    created_at_s: float = 0.0
    updated_at_s: float = 0.0
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What a caller may see: items below any of `prefixes`, whose value passes `where`, and that are in `allowed`.

    `where` is a filter in the words of `pancake_langgraph.retrieval.filters`; it is applied before the best are
    chosen, so that all matching items come back when fewer than asked for exist.  `allowed` is looked at last, in
    whatever a search has found: nothing outside it is ever returned, also if an index is wrong.  `None` allows all.
    """

    prefixes: tuple[Namespace, ...] = ((),)
    where: Mapping[str, Any] = field(default_factory=dict)
    allowed: frozenset[ItemId] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """One search: the `limit` best items for `vector` within `view`, after the first `offset` of them."""

    vector: Vector
    view: View = View()
    limit: int = 10
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """An item that was found; `score` is the inner product of its nearest vector with the query's."""

    item: Item
    score: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Sizes of an engine: live items and vectors, those that wait for a merge, memory and disk in bytes."""

    num_items: int
    num_vectors: int
    delta_vectors: int = 0
    dead_vectors: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


@runtime_checkable
class VectorEngine(Protocol):
    """Stores and searches.  Every method may be called from any thread and blocks it: never call one on a loop."""

    @property
    def dim(self) -> int:
        """Length of every vector."""
        ...

    def put(self, items: Sequence[Item]) -> None:
        """Store items, replacing those of the same id with their vectors: all or none of them.

        When it returns, searches from any thread find them, and a durable engine has them on disk.

        Raises:
            InvalidItem: for a vector of another length or with NaN or infinity, an id that stands twice, a value that
                is no JSON.  Nothing is stored then.
            RetrievalError: if nothing could be stored.
        """
        ...

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Delete items and return how many there were; unknown ids are no error."""
        ...

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        """Return items in the order of `ids`, with their vectors; `None` for those not there or expired."""
        ...

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """Return for each query its hits, best first; equal scores are ordered by id.

        An item with several vectors is found once, by its nearest.  The vectors of found items may be left out.

        Raises:
            InvalidQuery: for a vector of another length or with NaN or infinity, a limit under 0, an unknown filter.
        """
        ...

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        """Return items of a view, last updated first, equal times by id; their vectors may be left out."""
        ...

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have live items, sorted."""
        ...

    def stats(self) -> EngineStats:
        """Return sizes."""
        ...

    def close(self) -> None:
        """End background work and release files; later calls raise `RetrievalError`.  May be called twice."""
        ...


@runtime_checkable
class KnowsEmbedder(Protocol):
    """An engine that keeps whose vectors it holds."""

    def name_embedder(self, fingerprint: str) -> None:
        """Check that the vectors are of this embedder; who has none noted yet notes it, where it may write.

        Raises:
            EmbedderMismatch: if they are of another one.
        """
        ...


@runtime_checkable
class MarksChanges(Protocol):
    """An engine that can say whether its searches could find something else than before."""

    def mark(self) -> object | None:
        """Return what is another object after each change of what searches find; compare by identity.

        Takes no lock and reads nothing, so that it may be called on a loop.  `None` where that cannot be told so.
        """
        ...


@runtime_checkable
class TouchesItems(Protocol):
    """An engine that can move the time at which items expire without storing them again."""

    def touch(
        self, expiries: Mapping[ItemId, float | None], *, updated_at_s: Mapping[ItemId, float] | None = None
    ) -> int:
        """Set `expires_at_s` of items and nothing else of them, in one step; return of how many.

        With `updated_at_s`, when items were stored as somebody has read them, those stored since are left alone, and so
        are those that have no end any more.
        """
        ...
