"""The port of engines whose index is cut into partitions that can be brought up before a search needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pancake_langgraph.retrieval.base import Vector

#: Names a partition for as long as its segment lives: the segment's name and the partition's number in it.
PartitionId = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Partition:
    """A part of an index that is read as a whole; `num_bytes` is what it takes when it is warm."""

    id: PartitionId
    num_bytes: int


@runtime_checkable
class PrefetchesPartitions(Protocol):
    """An engine that can say which partitions a query reads, and bring them up early.

    Answers of searches do not depend on what is warm.  Every method may be called from any thread, at the same time as
    searches and writes, and may block it.  Ids of segments that are gone by now are no error: they are skipped, and are
    not warm.
    """

    def partitions(self, vector: Vector, n: int) -> list[Partition]:
        """Return the `n` partitions nearest to `vector` over all segments, nearest first; fewer if there are fewer.

        It reads nothing from disk.  The partitions that a search with its usual settings reads come first.

        Raises:
            InvalidQuery: for a vector of another length or with NaN or infinity.
        """
        ...

    def warm(self, ids: Sequence[PartitionId]) -> int:
        """Read partitions into memory in the order of `ids` and return the bytes that were read from disk for it.

        When it returns they are warm, and stay so until `cool` or until their segment is gone; an engine that leaves
        them to the system's page cache may lose them earlier, and says so in `is_warm` if it can know.
        """
        ...

    def cool(self, ids: Sequence[PartitionId]) -> None:
        """Give up the memory of partitions; a search that needs one reads it again."""
        ...

    def is_warm(self, ids: Sequence[PartitionId]) -> list[bool]:
        """Return for each partition whether a search would find it in memory."""
        ...
