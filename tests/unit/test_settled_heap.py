"""The collector passes over what was there before a block, and over nothing else."""

from __future__ import annotations

import gc
import weakref

from pancake_langgraph.bench.settled_heap import settled_heap


class Cycle:
    """Holds itself."""

    def __init__(self) -> None:
        self.me = self


def test_only_what_is_made_inside_is_looked_at() -> None:
    before = gc.get_freeze_count()
    old = Cycle()
    watched = weakref.ref(old)
    with settled_heap():
        assert gc.get_freeze_count() > before
        del old
        new = weakref.ref(Cycle())
        gc.collect()
        assert new() is None
        assert watched() is not None
    gc.collect()
    assert watched() is None
