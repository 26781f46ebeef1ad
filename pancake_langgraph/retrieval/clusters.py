"""Partitions of vectors by direction: each vector is with the centroid, of length one, of the largest product.

The products are numpy's, whose BLAS knows the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
_ROUNDS: Final = 8
_CHUNK: Final = 4096
#: Smaller parts of the mean are not worth a partition.
_LEAST_SHARE: Final = 1 / 8


def num_partitions(num_rows: int) -> int:
    """Return how many partitions suit so many rows: about four times the root, a power of two."""
    return int(1 << round(math.log2(4 * math.sqrt(max(1, num_rows)))))


def train(sample: Floats, count: int, *, between: Callable[[], None] = lambda: None) -> Floats:
    """Return `count` centroids for the rows of `sample`, fewer if it has fewer rows.

    The same sample gives the same centroids.  `between` is called between rounds, and may end it by raising.
    """
    rng = np.random.default_rng(0)
    count = min(count, len(sample))
    centroids = _directions(sample[rng.choice(len(sample), count, replace=False)])
    for _ in range(_ROUNDS):
        between()
        nearest, scores = assign(sample, centroids)
        order = np.argsort(nearest, kind="stable")
        sizes = np.bincount(nearest, minlength=count)
        starts = np.cumsum(sizes) - sizes
        full = np.flatnonzero(sizes)
        sums = np.add.reduceat(sample[order], starts[full], axis=0)
        centroids[full] = sums
        empty = np.flatnonzero(sizes == 0)
        if len(empty):  # they start anew at the rows that fit worst where they are
            centroids[empty] = sample[np.argsort(scores, kind="stable")[: len(empty)]]
        centroids = _directions(centroids)
    return centroids


def parts(sample: Floats, count: int, *, between: Callable[[], None] = lambda: None) -> Floats:
    """Return up to `count` centroids that part the rows of `sample`: fewer where that would leave some with hardly any.

    Rows that are all alike have one.  `between` is as for `train`.
    """
    centroids = train(sample, count, between=between)
    sizes = np.bincount(assign(sample, centroids)[0], minlength=len(centroids))
    return centroids[sizes > _LEAST_SHARE * len(sample) / len(centroids)]


def assign(vectors: Floats, centroids: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return for each vector its partition and the product with its centroid."""
    nearest = np.empty(len(vectors), np.int64)
    scores = np.empty(len(vectors), np.float32)
    turned = np.ascontiguousarray(centroids.T)
    for start in range(0, len(vectors), _CHUNK):
        products = vectors[start : start + _CHUNK] @ turned
        best = products.argmax(1)
        nearest[start : start + len(best)] = best
        scores[start : start + len(best)] = products[np.arange(len(best)), best]
    return nearest, scores


def _directions(vectors: Floats) -> Floats:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions: Floats = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return directions
