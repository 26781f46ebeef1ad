"""Chooses among found vectors so that they are near to a query and unlike each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pancake_langgraph._errors import InvalidQuery
from pancake_langgraph.retrieval.base import Vector


def diverse(query: Vector, found: Sequence[Vector], *, count: int, nearness: float) -> list[int]:
    """Return positions of up to `count` vectors, in the order in which they were chosen (maximal marginal relevance).

    All vectors are of length one.  The first is the nearest; each next one is best in `nearness` times its product
    with the query, less the rest of 1 times its highest product with one that was chosen.  Equal ones: the first.

    Raises:
        InvalidQuery: if `nearness` is not from 0 to 1.
    """
    if isinstance(nearness, bool) or not isinstance(nearness, int | float) or not 0 <= nearness <= 1:
        raise InvalidQuery(f"lambda_mult: got {nearness!r}, allowed are numbers from 0 (different) to 1 (near)")
    if not found or count <= 0:
        return []
    rows = np.stack(found).astype(np.float64)
    relevance = rows @ query.astype(np.float64)
    chosen = [int(np.argmax(relevance))]
    likeness = np.full(len(rows), -math.inf)
    while len(chosen) < min(count, len(rows)):
        likeness = np.maximum(likeness, rows @ rows[chosen[-1]])
        worth = nearness * relevance - (1 - nearness) * likeness
        worth[chosen] = -math.inf
        chosen.append(int(np.argmax(worth)))
    return chosen
