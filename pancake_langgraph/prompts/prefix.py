"""Arithmetic on token prefixes."""

from __future__ import annotations

from collections.abc import Sequence


def cut_at_block_edge(num_tokens: int, block_size_tokens: int) -> int:
    """Return the largest multiple of `block_size_tokens` that is not above `num_tokens`."""
    return num_tokens // block_size_tokens * block_size_tokens


def common_prefix_tokens(left: Sequence[int] | str, right: Sequence[int] | str) -> int:
    """Return how many leading tokens (of two texts: characters) the two sequences share."""
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    low, high = 0, limit
    while low < high:  # binary search: slices compare in C
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
