"""Quantised codes in memory: which rows are likely to be the best ones.  The only module that imports Faiss.

Nothing here changes a saved index: codes are built once, saved, and read.  Faiss is only asked to scan lists that were
chosen outside (`search_preassigned`), because the BLAS in its wheel takes this generation of CPUs for an old one; on a
GPU it may choose them itself.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval.coarse import CoarseSearch, Near, nearest_on_cpu
from pancake_langgraph.retrieval.extra import INSTALL
from pancake_langgraph.retrieval.masks import Bits

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
#: `pq`: a byte for 8 numbers; `rabitq`: a bit for each number; `sq8`: a byte for each number; `hnsw`: a graph over the
#: vectors themselves, in memory.
CodeKind = Literal["pq", "sq8", "rabitq", "hnsw"]
CODE_KINDS: Final[tuple[CodeKind, ...]] = get_args(CodeKind)

_TRAIN_ROWS: Final = 40_000
_TRAIN_ROUNDS: Final = 12
_HNSW_LINKS: Final = 32
#: Where the largest number of a query is below it, or above its inverse, products are not trusted to float32.
_SMALL: Final = np.float32(1e-9)
_HNSW_BUILD: Final = 100
#: Faiss may answer with places in lists instead of rows.
_WITHOUT_PAIRS: Final = False
#: What Faiss may take of a GPU's memory for its own purposes; left to itself it takes a large part of it.
GPU_SCRATCH_BYTES: Final = 32 << 20
#: Faiss's selection on GPUs keeps no more of the best.
_GPU_MAX_COUNT: Final = 2048


class Codes(Protocol):
    """Codes of one segment.  Searches may run at the same time."""

    @property
    def num_lists(self) -> int:
        """Partitions; 1 where there are none."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        ...

    def best(self, queries: Floats, *, count: int, probes: int, bits: Bits | None, coarse: CoarseSearch) -> Rows:
        """Return for each query up to `count` rows that are likely to be the best, -1 where there are fewer.

        `bits` says which rows count, `coarse` finds the partitions to look into.
        """
        ...

    def save(self, path: Path) -> None:
        """Write them to a file.  Raises `OSError` if that fails."""
        ...


@cache
def _faiss() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its wrapper generator warns about itself
        try:
            import faiss
        except ImportError as error:
            raise RetrievalError(
                f"Faiss cannot be imported ({error}), and large segments need it; {INSTALL}"
            ) from error
    return faiss


def supported(kind: CodeKind, dim: int) -> CodeKind:
    """Return the kind to use for vectors of `dim` numbers: `pq` cuts them into pieces of equal length."""
    return "sq8" if kind == "pq" and _pieces(dim) == 0 else kind


def scaled(queries: Floats) -> Floats:
    """Return queries that order rows in the same way and whose products stay within float32."""
    largest = np.abs(queries).max(axis=-1, keepdims=True)
    if ((largest >= _SMALL) & (largest <= 1 / _SMALL)).all():
        return queries  # as nearly all are
    strange = (largest > 0) & ((largest > 1 / _SMALL) | (largest < _SMALL))
    return np.where(strange, queries / np.where(strange, largest, 1), queries) if strange.any() else queries


def _pieces(dim: int) -> int:
    """Return into how many pieces vectors are cut: 8 numbers each, or as near to that as it goes; 0 if it does not."""
    for size in (8, 6, 4, 10, 5, 3):
        if dim % size == 0 and dim // size >= 2:
            return dim // size
    return 0


# -- inverted lists -------------------------------------------------------------------------------------------------


class IvfCodes:
    """Codes in inverted lists, one list for each partition."""

    def __init__(self, index: Any) -> None:
        """Take over a Faiss index whose quantizer is flat."""
        faiss = _faiss()
        self._index = index
        self._quantizer = faiss.downcast_index(index.quantizer)
        count = self._quantizer.ntotal * index.d
        self.centroids: Floats = faiss.rev_swig_ptr(self._quantizer.get_xb(), count).reshape(-1, index.d)
        self._is_rabitq = isinstance(index, faiss.IndexIVFRaBitQ)
        self._lists: Any = None
        #: Those of the last search without a selector; they point at nothing, and making them takes time.
        self._settings: Any = None

    @classmethod
    def train(cls, kind: CodeKind, centroids: Floats, sample: Floats, lists: Rows) -> IvfCodes:
        """Return codes that hold no rows yet; `lists` are the partitions of the `sample`."""
        faiss = _faiss()
        count, dim = centroids.shape
        quantizer = faiss.IndexFlatIP(dim)
        quantizer.add(centroids)
        metric = faiss.METRIC_INNER_PRODUCT
        sample, lists = sample[:_TRAIN_ROWS], lists[:_TRAIN_ROWS]
        residuals = np.ascontiguousarray(sample - centroids[lists])
        if kind == "pq":
            pieces = _pieces(dim)
            index = faiss.IndexIVFPQ(quantizer, dim, count, pieces, min(8, int(np.log2(max(2, len(sample))))), metric)
            index.pq.cp.niter = _TRAIN_ROUNDS
            index.pq.cp.min_points_per_centroid = 1
            index.pq.train(residuals)
        elif kind == "sq8":
            quality = faiss.ScalarQuantizer.QT_8bit
            index = faiss.IndexIVFScalarQuantizer(quantizer, dim, count, quality, metric)
            index.sq.train(residuals)
        else:
            index = faiss.IndexIVFRaBitQ(quantizer, dim, count, metric)
        index.own_fields = False
        index.is_trained = True
        codes = cls(index)
        codes._quantizer = quantizer
        return codes

    def empty(self) -> IvfCodes:
        """Return codes trained in the same way that hold no rows."""
        index = _faiss().clone_index(self._index)
        index.reset()
        return IvfCodes(index)

    def over(self, centroids: Floats) -> IvfCodes:
        """Return codes trained in the same way over other partitions, of which there may be more; without rows."""
        faiss = _faiss()
        index = faiss.clone_index(self._index)
        index.reset()
        quantizer = faiss.downcast_index(index.quantizer)
        quantizer.reset()
        quantizer.add(np.ascontiguousarray(centroids, np.float32))
        index.nlist = len(centroids)
        lists = faiss.ArrayInvertedLists(len(centroids), index.code_size)
        index.replace_invlists(lists)
        codes = IvfCodes(index)
        codes._lists = lists  # the index only points at them
        return codes

    def add(self, vectors: Floats, rows: Rows, lists: Rows) -> None:
        """Encode rows into their partitions."""
        faiss = _faiss()
        vectors = np.ascontiguousarray(vectors, np.float32)
        rows, lists = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(lists, np.int64)
        pointer = faiss.swig_ptr
        self._index.add_core(len(rows), pointer(vectors), pointer(rows), pointer(lists))

    @property
    def num_lists(self) -> int:
        """See `Codes.num_lists`."""
        return int(self._index.nlist)

    @property
    def num_bytes(self) -> int:
        """See `Codes.num_bytes`."""
        return int(self._index.ntotal) * (int(self._index.code_size) + 8) + self.centroids.nbytes

    def best(self, queries: Floats, *, count: int, probes: int, bits: Bits | None, coarse: CoarseSearch) -> Rows:
        """See `Codes.best`."""
        faiss = _faiss()
        probes, queries = min(probes, self.num_lists), scaled(queries)
        lists, near = coarse.nearest(self, queries, probes)
        found = np.empty((len(queries), count), np.int64)
        scores = np.empty((len(queries), count), np.float32)
        settings = self._settings_for(probes)
        if bits is not None:
            # The selector and the parameters only point at what they are made from: it lives until the call is over.
            selector = faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
            settings = self._new_settings(probes)
            settings.sel = selector
        pointer = faiss.swig_ptr
        self._index.search_preassigned_c(
            *(len(queries), pointer(queries), count, pointer(lists), pointer(near), pointer(scores), pointer(found)),
            *(_WITHOUT_PAIRS, settings),
        )
        return found

    def _settings_for(self, probes: int) -> Any:
        settings = self._settings
        if settings is None or settings.nprobe != probes:
            settings = self._settings = self._new_settings(probes)
        return settings

    def _new_settings(self, probes: int) -> Any:
        faiss = _faiss()
        settings = faiss.IVFRaBitQSearchParameters() if self._is_rabitq else faiss.SearchParametersIVF()
        settings.nprobe = probes
        return settings

    def nearest_lists(self, query: Floats, count: int) -> Rows:
        """Return the partitions that a search would look into, nearest first."""
        nearest: Rows = nearest_on_cpu(self.centroids, scaled(query[None]), min(count, self.num_lists))[0][0]
        return nearest

    def num_rows_in(self, number: int) -> int:
        """Return how many rows a partition has."""
        return int(self._index.invlists.list_size(number))

    def rows_in(self, number: int) -> Rows:
        """Return the rows of a partition."""
        lists = self._index.invlists
        size = lists.list_size(number)
        if not size:
            return np.empty(0, np.int64)
        ids: Rows = _faiss().rev_swig_ptr(lists.get_ids(number), size).copy()
        return ids

    def save(self, path: Path) -> None:
        """See `Codes.save`."""
        _save(self._index, path)


# -- graphs ---------------------------------------------------------------------------------------------------------


class HnswCodes:
    """A graph over the vectors themselves, all in memory: for whoever has it and reads much more than they write."""

    def __init__(self, index: Any) -> None:
        """Take over a Faiss index."""
        self._index = index

    @classmethod
    def train(cls, dim: int) -> HnswCodes:
        """Return a graph without rows."""
        faiss = _faiss()
        index = faiss.IndexHNSWFlat(dim, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _HNSW_BUILD
        return cls(index)

    def add(self, vectors: Floats, rows: Rows, lists: Rows) -> None:
        """Add rows, which have to come in order."""
        self._index.add(np.ascontiguousarray(vectors, np.float32))

    @property
    def num_lists(self) -> int:
        """See `Codes.num_lists`."""
        return 1

    @property
    def num_bytes(self) -> int:
        """See `Codes.num_bytes`."""
        return int(self._index.ntotal) * (4 * int(self._index.d) + 4 * 2 * _HNSW_LINKS + 16)

    def best(self, queries: Floats, *, count: int, probes: int, bits: Bits | None, coarse: CoarseSearch) -> Rows:
        """See `Codes.best`; `probes` is how many candidates the walk keeps, and there are no partitions."""
        faiss = _faiss()
        selector = None if bits is None else faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
        settings = faiss.SearchParametersHNSW(efSearch=max(probes, count))
        if selector is not None:
            settings.sel = selector
        rows: Rows = self._index.search(scaled(queries), count, params=settings)[1]
        return rows

    def save(self, path: Path) -> None:
        """See `Codes.save`."""
        _save(self._index, path)


# -- on a GPU -------------------------------------------------------------------------------------------------------

#: Faiss's side of a GPU is not thread-safe, not even for searches.
_gpu_lock = threading.Lock()
#: What nobody holds any more is freed by the next call, since freeing has to take its turn as well.
_gpu_gone: deque[Any] = deque()
#: The process that has set the GPU up; a forked one cannot use it.
_gpu_pid: int | None = None


def is_gpu_build() -> bool:
    """Return whether Faiss was built for GPUs.

    Raises:
        RetrievalError: if Faiss is not installed.
    """
    return hasattr(_faiss(), "StandardGpuResources")


def gpu_lack() -> str | None:
    """Say why Faiss has no GPU here; `None` if it has one.  Ends the process where the driver is broken.

    Raises:
        RetrievalError: if Faiss is not installed.
    """
    if not is_gpu_build():
        return "no GPU build of faiss"
    if _gpu_pid not in (None, os.getpid()):
        return "the GPU belongs to the process that this one was forked from"
    return None if _faiss().get_num_gpus() > 0 else "faiss finds no GPU"


class GpuCentroids:
    """Centroids in the memory of the first GPU.  Thread-safe: calls take turns.  Faiss raises when something fails."""

    max_count: Final = _GPU_MAX_COUNT

    def __init__(self, centroids: Floats) -> None:
        """Copy centroids."""
        faiss = _faiss()
        with _gpu_lock:
            _gpu_gone.clear()
            resources = _gpu_resources()
            self._index = faiss.GpuIndexFlat(resources, centroids.shape[1], faiss.METRIC_INNER_PRODUCT)
            self._index.add(np.ascontiguousarray(centroids))

    def __del__(self) -> None:
        if (index := getattr(self, "_index", None)) is not None:
            _gpu_gone.append(index)

    def nearest(self, queries: Floats, count: int) -> Near:
        """Return for each query its nearest partitions, and the products with their centroids."""
        with _gpu_lock:
            _gpu_gone.clear()
            products, lists = self._index.search(np.ascontiguousarray(queries), count)
        return lists, products


@cache
def _gpu_resources() -> Any:
    """Return what all indexes on the GPU share, under the lock."""
    global _gpu_pid
    _gpu_pid = os.getpid()
    resources = _faiss().StandardGpuResources()
    resources.setTempMemory(GPU_SCRATCH_BYTES)
    return resources


# -- files ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> IvfCodes | HnswCodes:
    """Read codes whose checksum was found right.

    Raises:
        CorruptIndex: if Faiss cannot read them.
        FileNotFoundError: if they are gone.
    """
    faiss = _faiss()
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        if not path.exists():
            raise FileNotFoundError(path) from error
        first = str(error).partition("\n")[0]
        raise CorruptIndex(f"{path}: Faiss cannot read it ({first}); it may be of another version") from error
    return HnswCodes(index) if isinstance(index, faiss.IndexHNSW) else IvfCodes(index)


def _save(index: Any, path: Path) -> None:
    try:
        _faiss().write_index(index, str(path))
    except RuntimeError as error:
        # Faiss tells what the system said as text only; that there is no room is the usual cause.
        first = str(error).partition("\n")[0]
        raise OSError(28, f"Faiss could not write {path.name}: {first}") from error
