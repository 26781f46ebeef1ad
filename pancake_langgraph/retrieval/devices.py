"""Which device coarse searches run on: decided in this one place, by a trial."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache
from typing import Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval import faiss_codes
from pancake_langgraph.retrieval.coarse import CoarseDevice, CoarseSearch, Floats, HeldCentroids, agrees, in_short
from pancake_langgraph.retrieval.device_budget import DeviceBudget, checked_budget
from pancake_langgraph.retrieval.device_memory import free_device_bytes

logger = logging.getLogger(__name__)

#: What may be asked for: `auto` takes the GPU where a trial shows that it finds the same, `gpu` insists on that.
Device = Literal["auto", "cpu", "gpu"]
DEVICES: Final[tuple[Device, ...]] = get_args(Device)

#: What Faiss gets for its own purposes, beside centroids, and what is left to others.
_SPARE_BYTES: Final = 2 * faiss_codes.GPU_SCRATCH_BYTES
#: What another process runs first: Faiss ends the process when CUDA fails.
_CHILD: Final = "from pancake_langgraph.retrieval.devices import FaissGpu, probe; probe(FaissGpu())"
_CHILD_LIMIT_S: Final = 60.0
_TRIAL_LISTS, _TRIAL_QUERIES, _TRIAL_DIM, _TRIAL_COUNT = 96, 8, 32, 12
_MEND: Final = 'pip install "pancake-langgraph[retrieval-gpu]" in place of faiss-cpu, see docs/memory.md, or pass auto'


class Gpu(Protocol):
    """What is asked of a GPU before it is used.  Whatever its methods raise counts as a failure of it."""

    def lack(self) -> str | None:
        """Say why there is none to be used; `None` if there is one."""
        ...

    def free_bytes(self) -> int | None:
        """Return how much of its memory is free; `None` if that cannot be told."""
        ...

    def hold(self, centroids: Floats) -> HeldCentroids:
        """Put centroids into its memory."""
        ...


class FaissGpu:
    """The first GPU that Faiss finds."""

    def lack(self) -> str | None:
        """See `Gpu.lack`."""
        return faiss_codes.gpu_lack()

    def free_bytes(self) -> int | None:
        """See `Gpu.free_bytes`."""
        return free_device_bytes()

    def hold(self, centroids: Floats) -> HeldCentroids:
        """See `Gpu.hold`."""
        return faiss_codes.GpuCentroids(centroids)


def coarse_search(asked: Device, budget: DeviceBudget | None = None) -> CoarseSearch:
    """Return the coarse searches of an engine; a GPU that is insisted on is looked for now, otherwise when needed.

    What they put on it counts in `budget`; centroids that it has no room for stay on the CPU, whatever was asked for.

    Raises:
        ConfigError: if `budget` is none.
        RetrievalError: as `coarse_device`.
    """
    checked_budget(budget)
    if asked == "gpu":
        found = coarse_device(asked)
        return CoarseSearch(lambda: found, budget=budget, scratch_bytes=faiss_codes.GPU_SCRATCH_BYTES)
    return CoarseSearch(lambda: coarse_device(asked), budget=budget, scratch_bytes=faiss_codes.GPU_SCRATCH_BYTES)


def coarse_device(asked: Device = "auto", *, gpu: Gpu | None = None) -> CoarseDevice:
    """Return where coarse searches run, and why.

    `gpu` is tried in place of the one that Faiss finds, which is tried once in a process, and in another one before.

    Raises:
        RetrievalError: if `gpu` is asked for, and there is none that can be used; or Faiss is not installed.
    """
    if asked == "cpu":
        return CoarseDevice("cpu", "as it was asked for")
    found = _probed(os.getpid()) if gpu is None else probe(gpu)
    if asked == "gpu" and found.device != "gpu":
        raise RetrievalError(
            f"device: got 'gpu', but coarse searches cannot run on one here: {found.reason}; allowed here are auto and "
            f"cpu. To mend: {_MEND}"
        )
    return found


def probe(gpu: Gpu) -> CoarseDevice:
    """Try a GPU: whether it is there, has room, and finds the partitions that the CPU finds.  Never raises for it."""
    try:
        if (lack := gpu.lack()) is not None:
            return CoarseDevice("cpu", lack)
        problem = _trouble(gpu)
    except RetrievalError:
        raise  # without Faiss there is no index with partitions either
    except Exception as error:  # noqa: BLE001 - drivers fail in their own ways; it is counted, and the CPU always runs
        problem = f"the GPU cannot be used: {in_short(error)}"
    if problem is None:
        return CoarseDevice("gpu", "it finds what the CPU finds", hold=lambda centroids: _held(gpu, centroids))
    return _unusable(problem)


@cache
def _probed(pid: int) -> CoarseDevice:
    """Try Faiss's GPU once in each process: a forked one cannot use what its parent has set up."""
    if faiss_codes.is_gpu_build() and (ended := ended_elsewhere()) is not None:
        return _unusable(f"the GPU cannot be used: {ended}")
    return probe(FaissGpu())


def ended_elsewhere(code: str = _CHILD, *, limit_s: float = _CHILD_LIMIT_S) -> str | None:
    """Run `code` in another process; return how that ended if it did not come through.  Blocks for seconds."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    argv = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"a trial of it in another process failed ({in_short(error)})"
    return None if done.returncode == 0 else f"a trial of it ended its process ({done.returncode})"


def _unusable(problem: str) -> CoarseDevice:
    found = CoarseDevice("cpu", problem, num_failures=1)
    logger.warning("%s", found)
    return found


def _trouble(gpu: Gpu) -> str | None:
    """Return what speaks against a GPU that is there."""
    rng = np.random.default_rng(7)
    centroids = _directions(rng.standard_normal((_TRIAL_LISTS, _TRIAL_DIM)))
    centroids[_TRIAL_LISTS // 2 :][:_TRIAL_COUNT] = centroids[:_TRIAL_COUNT]  # some are equally near
    queries = _directions(rng.standard_normal((_TRIAL_QUERIES, _TRIAL_DIM)))
    near = _held(gpu, centroids).nearest(queries, _TRIAL_COUNT)
    return None if agrees(centroids, queries, _TRIAL_COUNT, near) else "in a trial the GPU found other partitions"


def _held(gpu: Gpu, centroids: Floats) -> HeldCentroids:
    """Put centroids into a GPU's memory, if they leave room for others."""
    free_bytes, wanted_bytes = gpu.free_bytes(), centroids.nbytes + _SPARE_BYTES
    if free_bytes is not None and free_bytes < wanted_bytes:
        raise MemoryError(f"{free_bytes:,} bytes of the GPU are free, {wanted_bytes:,} are wanted")
    return gpu.hold(centroids)


def _directions(rows: NDArray[np.float64]) -> Floats:
    directions: Floats = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return directions
