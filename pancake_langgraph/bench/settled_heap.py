"""Keeps the garbage collector away from what a bench holds while something short is timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def settled_heap() -> Iterator[None]:
    """Collect once, and let the collector pass over all that is there already until the block ends.

    What is made in the block is collected as ever.  With the libraries that a bench loads, one full pass stops all
    threads for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
