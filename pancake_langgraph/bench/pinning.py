"""One thread on one core, for benches that compare libraries within one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Read by numeric libraries when they are first imported.
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def limit_threads() -> None:
    """Tell numeric libraries that are not imported yet to use one thread, unless the environment says otherwise."""
    for name in _THREAD_VARIABLES:
        os.environ.setdefault(name, "1")


@contextlib.contextmanager
def one_core() -> Iterator[int | None]:
    """Hold all threads of this process, and those that they start, on one core; yield its number.

    Where the system cannot do that, `None` is yielded, and `limit_threads` is all that was done.
    """
    limit_threads()
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    core = max(before)  # the first one is where most interrupts go
    _pin({core})
    try:
        yield core
    finally:
        _pin(before)


def _pin(cores: set[int]) -> None:
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(task.name), cores)
