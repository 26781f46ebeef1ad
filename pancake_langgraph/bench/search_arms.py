"""What `pancake bench retrieval` compares: arms over one set of vectors, searched by the number of a query."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.other_stores import chroma_collection, langchain_faiss, langgraph_store, put_langgraph
from pancake_langgraph.bench.partition_cache import PartitionCache
from pancake_langgraph.bench.vector_sets import VectorSet, nearest
from pancake_langgraph.retrieval.base import Item, ItemId, Query, VectorEngine
from pancake_langgraph.retrieval.partitions import PartitionId, PrefetchesPartitions
from pancake_langgraph.retrieval.segment import MAPPED_BYTES
from pancake_langgraph.weights._folder import file_sha256

K: Final = 10
#: The namespace of a whole set.
SHARED: Final = ("shared",)
#: Asks for all partitions of an index: more than any has.
ALL_PARTITIONS: Final = 1 << 24
#: Recall that arms with a knob are set to, on queries of their own.
TARGET_RECALL: Final = 0.95
_TUNING_QUERIES: Final = 200
_KNOBS: Final = (8, 16, 32, 64, 128, 256)
#: Searches before an arm's memory is weighed.
_FIRST_SEARCHES: Final = 20
#: How partitions are trained: more takes tens of minutes for a million vectors and changes little.
_TRAIN_ROUNDS, _TRAIN_POINTS = 8, 40
_ADD_ROWS: Final = 20_000
_PUT_ROWS: Final = 2_000
_CHROMA_ROWS: Final = 5_000
_READ_BYTES: Final = 1 << 24


class SearchArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    FLAT = "flat"
    IVF = "ivf"
    HNSWLIB = "hnswlib"
    LANGCHAIN_FAISS = "langchain-faiss"
    LANGGRAPH_MEMORY = "langgraph-memory"
    CHROMA = "chroma"
    LRU = "lru-partitions"
    PANCAKE = "pancake"
    PANCAKE_COLD = "pancake-cold"


SEARCH_ARM_TEXT: Final[Mapping[SearchArm, str]] = {
    SearchArm.FLAT: "Faiss IndexFlatIP, exact, in memory",
    SearchArm.IVF: "Faiss IVF with whole vectors in memory",
    SearchArm.HNSWLIB: "hnswlib, M 16, ef_construction 200, in memory",
    SearchArm.LANGCHAIN_FAISS: "FAISS of langchain-community as from_embeddings makes it, in memory",
    SearchArm.LANGGRAPH_MEMORY: "InMemoryStore of LangGraph with an index, in memory",
    SearchArm.CHROMA: "chroma, PersistentClient",
    SearchArm.LRU: "partitions of whole vectors on disk, an LRU cache as large as what pancake holds, cold",
    SearchArm.PANCAKE: "DiskVectorEngine, everything merged, the pages of its files in the system's cache",
    SearchArm.PANCAKE_COLD: "the same engine, its pages dropped from the system's cache before each search",
}
#: Arms that run on the large set too.
LARGE_ARMS: Final = frozenset(
    {SearchArm.FLAT, SearchArm.IVF, SearchArm.HNSWLIB, SearchArm.LRU, SearchArm.PANCAKE, SearchArm.PANCAKE_COLD}
)
#: Arms that run on the large set only: on a small one the cache of a few percent holds next to nothing.
ONLY_LARGE_ARMS: Final = frozenset({SearchArm.LRU, SearchArm.PANCAKE_COLD})
_OUR_ARMS: Final = frozenset({SearchArm.LRU, SearchArm.PANCAKE, SearchArm.PANCAKE_COLD})
#: Module and distribution that an arm needs.
_NEEDED: Final[Mapping[SearchArm, Sequence[tuple[str, str]]]] = {
    SearchArm.FLAT: (("faiss", "faiss-cpu"),),
    SearchArm.IVF: (("faiss", "faiss-cpu"),),
    SearchArm.LRU: (("faiss", "faiss-cpu"),),
    SearchArm.HNSWLIB: (("hnswlib", "hnswlib"),),
    SearchArm.LANGCHAIN_FAISS: (("faiss", "faiss-cpu"), ("langchain_community.vectorstores", "langchain-community")),
    SearchArm.CHROMA: (("chromadb", "chromadb"),),
    SearchArm.PANCAKE: (("faiss", "faiss-cpu"),),
    SearchArm.PANCAKE_COLD: (("faiss", "faiss-cpu"),),
}

Neighbors = NDArray[np.int64]
OpenEngine = Callable[[Path, int], VectorEngine]


@dataclass(frozen=True, slots=True)
class OpenedArm:
    """`search` takes the number of a query and returns rows, best first; `prepare` runs before it, outside the clock.

    `begin` runs once before the searches of a repeat, `memory_bytes` is how much the process grew when the arm was
    opened; `setting` says how its knob was set.
    """

    search: Callable[[int], Sequence[int]]
    prepare: Callable[[], None] | None = None
    begin: Callable[[], None] | None = None
    memory_bytes: int = 0
    setting: str = ""


def missing_package(needed: Sequence[tuple[str, str]]) -> str | None:
    """Return the first distribution of (module, distribution) that is not installed or does not load."""
    for module, distribution in needed:
        try:
            importlib.import_module(module)
        except ImportError:
            return distribution
    return None


def missing_for(arm: SearchArm) -> str | None:
    """Return the distribution that an arm needs and that is not there; `None` when it can run."""
    return missing_package(_NEEDED.get(arm, ()))


class SearchArms:
    """Opens arms over one set; they share what they can and are closed together.  For one thread."""

    def __init__(
        self, vectors: VectorSet, folder: Path, keep: Path, on_progress: Progress, open_engine: OpenEngine
    ) -> None:
        """Open nothing yet; `folder` is for files of the arms, `keep` for those that the next run may take again."""
        self._set, self._folder, self._keep = vectors, folder, keep
        self._say, self._open_engine = on_progress, open_engine
        self._stack = ExitStack()
        self._engine: VectorEngine | None = None
        self._is_made = False
        self._ivf: Any = None
        self._tuning = np.arange(len(vectors.queries))[-_TUNING_QUERIES:]
        self._truth = nearest(vectors.base, vectors.queries[self._tuning], K, on_progress)

    def close(self) -> None:
        """Close all arms."""
        self._stack.close()

    def open(self, arm: SearchArm) -> OpenedArm:
        """Open an arm and measure how much memory that takes."""
        self._say(f"{self._set.name}: building {arm} over {len(self._set.base):,} vectors")
        if arm in _OUR_ARMS:
            self._made_engine()
        before = _resident_bytes()
        opener: Mapping[SearchArm, Callable[[], OpenedArm]] = {
            SearchArm.FLAT: self._flat,
            SearchArm.IVF: self._ivf_flat,
            SearchArm.HNSWLIB: self._hnswlib,
            SearchArm.LANGCHAIN_FAISS: self._langchain_faiss,
            SearchArm.LANGGRAPH_MEMORY: self._langgraph_memory,
            SearchArm.CHROMA: self._chroma,
            SearchArm.LRU: self._lru,
            SearchArm.PANCAKE: self._pancake,
            SearchArm.PANCAKE_COLD: self._pancake_cold,
        }
        opened = opener[arm]()
        for query in self._tuning[:_FIRST_SEARCHES]:  # what is mapped counts when it was read
            opened.search(int(query))
        grown = max(0, _resident_bytes() - before)
        return replace(opened, memory_bytes=opened.memory_bytes or grown)

    @property
    def engine(self) -> VectorEngine:
        """The engine of our arms, built and opened when first asked for."""
        if self._engine is None:
            self._made_engine()
            self._engine = self._open_engine(self._folder / "pancake", self._set.dim)
            self._stack.callback(self._engine.close)
        return self._engine

    def _made_engine(self) -> None:
        """Build our index and close it again, so that opening it can be weighed."""
        if not self._is_made:
            self._is_made = True
            with closing(self._open_engine(self._folder / "pancake", self._set.dim)) as engine:
                fill_engine(engine, self._set, self._say)

    # -- the arms ---------------------------------------------------------------------------------------------------

    def _flat(self) -> OpenedArm:
        index = importlib.import_module("faiss").IndexFlatIP(self._set.dim)
        index.add(self._set.base)
        return OpenedArm(lambda query: index.search(self._set.queries[query : query + 1], K)[1][0])

    def _ivf_flat(self) -> OpenedArm:
        index = self._ivf_index()

        def search(query: int) -> Sequence[int]:
            return index.search(self._set.queries[query : query + 1], K)[1][0]  # type: ignore[no-any-return]

        def turn(knob: int) -> None:
            index.nprobe = knob

        return OpenedArm(search, setting=f"{index.nlist} lists, nprobe {self._tuned(search, turn)}")

    def _ivf_index(self) -> Any:
        if self._ivf is None:
            faiss = importlib.import_module("faiss")
            rows = len(self._set.base)
            lists = max(1, min(4096, 2 ** round(np.log2(max(4, 4 * rows**0.5))), rows // 40))

            def make() -> Any:
                index = faiss.index_factory(self._set.dim, f"IVF{lists},Flat", faiss.METRIC_INNER_PRODUCT)
                index.cp.niter, index.cp.max_points_per_centroid = _TRAIN_ROUNDS, _TRAIN_POINTS
                self._say(f"ivf: training {lists:,} lists")
                index.train(self._set.base)
                for start in range(0, rows, _ADD_ROWS):
                    index.add(self._set.base[start : start + _ADD_ROWS])
                    self._say(f"ivf: {min(start + _ADD_ROWS, rows):,} of {rows:,}")
                return index

            self._ivf = self._kept(f"ivf-{lists}", make, faiss.write_index, faiss.read_index)
        return self._ivf

    def _hnswlib(self) -> OpenedArm:
        hnswlib, rows = importlib.import_module("hnswlib"), len(self._set.base)

        def make() -> Any:
            index = hnswlib.Index(space="ip", dim=self._set.dim)
            index.init_index(max_elements=rows, M=16, ef_construction=200)
            for start in range(0, rows, _ADD_ROWS):
                stop = min(start + _ADD_ROWS, rows)
                index.add_items(self._set.base[start:stop], np.arange(start, stop), num_threads=1)
                self._say(f"hnswlib: {stop:,} of {rows:,}")
            return index

        def load(path: str) -> Any:
            index = hnswlib.Index(space="ip", dim=self._set.dim)
            index.load_index(path)
            index.set_num_threads(1)
            return index

        index = self._kept("hnswlib-16-200", make, lambda made, path: made.save_index(path), load)

        def search(query: int) -> Sequence[int]:
            return index.knn_query(self._set.queries[query], k=K)[0][0]  # type: ignore[no-any-return]

        return OpenedArm(search, setting=f"ef {self._tuned(search, lambda knob: index.set_ef(max(K, knob)))}")

    def _langchain_faiss(self) -> OpenedArm:
        store = langchain_faiss(self._set.base, self._set.dim)

        def search(query: int) -> Sequence[int]:
            found = store.similarity_search_with_score_by_vector(self._set.queries[query].tolist(), k=K)
            return [document.metadata["row"] for document, _ in found]

        return OpenedArm(search, setting="exact")

    def _langgraph_memory(self) -> OpenedArm:
        store = langgraph_store(self._set)
        put_langgraph(store, ("shared",), range(len(self._set.base)), self._say)

        def search(query: int) -> Sequence[int]:
            return [item.value["row"] for item in store.search(("shared",), query=f"q{query}", limit=K)]

        return OpenedArm(search, setting="exact")

    def _chroma(self) -> OpenedArm:
        collection = chroma_collection(self._folder / "chroma")
        rows = len(self._set.base)
        for start in range(0, rows, _CHROMA_ROWS):
            chosen = range(start, min(start + _CHROMA_ROWS, rows))
            collection.add(ids=[str(row) for row in chosen], embeddings=self._set.base[chosen.start : chosen.stop])
            self._say(f"chroma: {chosen.stop:,} of {rows:,}")

        def search(query: int) -> Sequence[int]:
            found = collection.query(query_embeddings=self._set.queries[query : query + 1], n_results=K, include=[])
            return [int(name) for name in found["ids"][0]]

        return OpenedArm(search, setting="its defaults")

    def _lru(self) -> OpenedArm:
        budget = self.engine.stats().memory_bytes
        cache = PartitionCache(self._ivf_index(), self._set.base, self._folder / "partitions.f32", budget)
        self._stack.callback(cache.close)
        knob = self._tuned(lambda query: cache.search(self._set.queries[query], K), cache.set_nprobe)
        return OpenedArm(
            lambda query: cache.search(self._set.queries[query], K),
            prepare=cache.drop_pages,
            memory_bytes=budget,
            setting=f"nprobe {knob}, {budget:,} bytes",
        )

    def _pancake(self) -> OpenedArm:
        engine = self.engine
        return OpenedArm(
            lambda query: _search_engine(engine, self._set.queries[query]),
            begin=lambda: read_pages(self._folder / "pancake"),
            setting="its defaults",
        )

    def _pancake_cold(self) -> OpenedArm:
        engine, folder = self.engine, self._folder / "pancake"
        every: list[PartitionId] = []
        if isinstance(engine, PrefetchesPartitions) and self._set.base.nbytes <= MAPPED_BYTES:
            # What it has mapped of them the system does not forget; of a larger set it maps nothing that codes found.
            every = [one.id for one in engine.partitions(self._set.queries[0], ALL_PARTITIONS)]

        def cool() -> None:
            if isinstance(engine, PrefetchesPartitions):
                engine.cool(every)
            drop_pages(folder)

        return OpenedArm(
            lambda query: _search_engine(engine, self._set.queries[query]),
            prepare=cool,
            memory_bytes=engine.stats().memory_bytes,
        )

    def _kept(
        self, name: str, make: Callable[[], Any], save: Callable[[Any, str], None], load: Callable[[str], Any]
    ) -> Any:
        """Return an index as loaded from the cache folder; make it, which takes long, if it is not there or damaged."""
        path = self._keep / f"{self._set.key}-{name}.index"
        path.parent.mkdir(parents=True, exist_ok=True)
        record = path.with_suffix(".sha256")
        if not path.is_file() or not record.is_file() or record.read_text() != file_sha256(path):
            save(make(), str(path))
            record.write_text(file_sha256(path))
        return load(str(path))

    def _tuned(self, search: Callable[[int], Sequence[int]], turn: Callable[[int], None]) -> int:
        """Turn a knob to its first place that reaches the wanted recall, or to its last one; return it."""
        for knob in _KNOBS:
            turn(knob)
            found = [recall(search(int(query)), row) for query, row in zip(self._tuning, self._truth, strict=True)]
            if sum(found) / len(found) >= TARGET_RECALL:
                break
        return knob


# -- what the arms share --------------------------------------------------------------------------------------------


def recall(found: Sequence[int], truth: Neighbors) -> float:
    """Return the share of the true neighbors that was found; 1 if there are none."""
    return len({int(row) for row in found} & {int(row) for row in truth}) / len(truth) if len(truth) else 1.0


def fill_engine(
    engine: VectorEngine,
    vectors: VectorSet,
    on_progress: Progress,
    value: Callable[[int], Mapping[str, Any]] = lambda row: {"row": row},
) -> None:
    """Put a whole set into an empty engine, row `r` as key `r` in the namespace `shared`, and merge it if it can."""
    rows = len(vectors.base)
    for start in range(0, rows, _PUT_ROWS):
        chosen = range(start, min(start + _PUT_ROWS, rows))
        engine.put([Item(ItemId(SHARED, str(row)), value(row), (vectors.base[row],)) for row in chosen])
        if chosen.stop % 50_000 < _PUT_ROWS:
            on_progress(f"pancake: {chosen.stop:,} of {rows:,}")
    if (compact := getattr(engine, "compact", None)) is not None:
        on_progress("pancake: merging")
        compact()


def _search_engine(engine: VectorEngine, vector: NDArray[np.float32]) -> Sequence[int]:
    [hits] = engine.search([Query(vector, limit=K)])
    return [int(hit.item.id.key) for hit in hits]


def drop_pages(folder: Path) -> None:
    """Ask the system to forget what it has cached of all files below a folder, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def read_pages(folder: Path) -> None:
    """Have the system cache all files below a folder, as far as its memory goes: what other arms dropped comes back."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                while stream.read(_READ_BYTES):
                    pass


def _resident_bytes() -> int:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # else what an earlier arm freed is taken again and not counted
    return int(psutil.Process().memory_info().rss)
