"""Partitions of an index on disk: which are near, and their vectors read before a search needs them.

The memory is the system's page cache, which may give them up again; what was asked for is remembered here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.faiss_codes import IvfCodes, scaled
from pancake_langgraph.retrieval.index_state import State
from pancake_langgraph.retrieval.partitions import Partition, PartitionId
from pancake_langgraph.retrieval.segment import Segment


class Warmth:
    """Which partitions were read.  Thread-safe."""

    def __init__(self) -> None:
        """Remember nothing."""
        self._lock = threading.Lock()
        self._warm: set[PartitionId] = set()

    def warm(self, state: State, ids: Sequence[PartitionId]) -> int:
        """Read partitions that were not read yet, in order; return their bytes.

        Raises:
            RetrievalError: if one cannot be read.
        """
        segments = _segments(state)
        with self._lock:
            self._warm = {one for one in self._warm if one[0] in segments}
            cold = [one for one in dict.fromkeys(ids) if one not in self._warm]
        num_bytes = 0
        for name, number in cold:
            found = _codes(segments, name, number)
            if found is not None:
                segment, codes = found
                num_bytes += segment.read_through(np.sort(codes.rows_in(number)))
                with self._lock:
                    self._warm.add((name, number))
        return num_bytes

    def cool(self, state: State, ids: Sequence[PartitionId]) -> None:
        """Tell the system that partitions are not needed, whoever had them read."""
        segments = _segments(state)
        with self._lock:
            self._warm.difference_update(ids)
        for name, number in dict.fromkeys(ids):
            found = _codes(segments, name, number)
            if found is not None:
                found[0].forget(np.sort(found[1].rows_in(number)))

    def is_warm(self, state: State, ids: Sequence[PartitionId]) -> list[bool]:
        """Return for each partition whether it was read, and its segment is still there."""
        segments = _segments(state)
        with self._lock:
            return [one in self._warm and one[0] in segments for one in ids]


def nearest(state: State, vector: Vector, count: int) -> list[Partition]:
    """Return the nearest partitions over all segments that have some."""
    found: list[tuple[float, Partition]] = []
    vector = scaled(vector)
    for view in state.segments:
        codes = view.segment.codes
        if not isinstance(codes, IvfCodes):
            continue
        lists = codes.nearest_lists(vector, count)
        for number, product in zip(lists.tolist(), (codes.centroids[lists] @ vector).tolist(), strict=True):
            num_bytes = 4 * view.segment.dim * codes.num_rows_in(number)
            found.append((product, Partition((view.segment.entry.name, number), num_bytes)))
    found.sort(key=lambda pair: (-pair[0], pair[1].id))
    return [partition for _, partition in found[:count]]


def _segments(state: State) -> dict[str, Segment]:
    return {view.segment.entry.name: view.segment for view in state.segments}


def _codes(segments: dict[str, Segment], name: str, number: int) -> tuple[Segment, IvfCodes] | None:
    segment = segments.get(name)
    if segment is None or not isinstance(segment.codes, IvfCodes) or not 0 <= number < segment.codes.num_lists:
        return None
    return segment, segment.codes
