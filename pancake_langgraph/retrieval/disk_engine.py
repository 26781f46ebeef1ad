"""The engine on disk: Faiss codes in memory, vectors and documents in immutable files, a log for what is new.

One process writes, any number read and see what was acknowledged.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeVar

import numpy as np

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval import disk_items, disk_search, warming
from pancake_langgraph.retrieval.base import EngineStats, Hit, Item, ItemId, Namespace, Query, Vector, View
from pancake_langgraph.retrieval.checks import (
    checked_count,
    checked_dim,
    checked_expiries,
    checked_ids,
    checked_items,
    checked_query,
    checked_seconds,
    is_as_read,
    one_of_each,
)
from pancake_langgraph.retrieval.coarse import CoarseDevice
from pancake_langgraph.retrieval.device_budget import DeviceBudget
from pancake_langgraph.retrieval.devices import DEVICES, Device, coarse_search
from pancake_langgraph.retrieval.disk import Disk, size_of
from pancake_langgraph.retrieval.disk_search import Asked, Settings
from pancake_langgraph.retrieval.endings import end_when_dropped
from pancake_langgraph.retrieval.faiss_codes import CODE_KINDS, CodeKind
from pancake_langgraph.retrieval.index_reader import IndexReader
from pancake_langgraph.retrieval.index_state import State
from pancake_langgraph.retrieval.index_writer import IndexWriter, WriteOptions
from pancake_langgraph.retrieval.inspection import describe, verify
from pancake_langgraph.retrieval.loading import Damage, OnCorrupt, healed
from pancake_langgraph.retrieval.log import Ack, Operation
from pancake_langgraph.retrieval.manifest import LOGS
from pancake_langgraph.retrieval.partitions import Partition, PartitionId
from pancake_langgraph.retrieval.planner import EXACT_ROWS, RECALLS, Recall
from pancake_langgraph.retrieval.segment_build import BuildPlan
from pancake_langgraph.retrieval.warming import Warmth

__all__ = ["DiskVectorEngine", "describe", "verify"]

_FLUSH_ROWS: Final = 4096
_CODED_ROWS: Final = 16384
_T = TypeVar("_T")
_ACKS: Final = ("sync", "group", "none")


class DiskVectorEngine:
    """The port `VectorEngine` over a folder.  Thread-safe; a forked child has to open its own.

    One that is dropped without `close` ends when it is garbage collected, or with the process.

    Views of up to `exact_rows` vectors (in each segment) are compared exactly; in larger ones `recall` says how much
    is looked at.  All matching items come back when fewer than asked for exist.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dim: int | None = None,
        fingerprint: str | None = None,
        read_only: bool = False,
        ack: Ack = "group",
        recall: Recall = "balanced",
        codes: CodeKind = "pq",
        merge: Literal["background", "manual"] = "background",
        on_corrupt: OnCorrupt = "raise",
        flush_rows: int = _FLUSH_ROWS,
        coded_rows: int = _CODED_ROWS,
        exact_rows: int = EXACT_ROWS,
        device: Device = "auto",
        device_budget: DeviceBudget | None = None,
        flush_after_s: float | None = 300.0,
        clock: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        """Open an index, or make one, which needs `dim`.

        `fingerprint` names the embedder; an index without one takes it over.  `ack` says when a write returns (see
        `retrieval.log`).  `codes` is what segments from `coded_rows` vectors on get when they are merged; `flush_rows`
        is how many items or vectors wait in memory, `flush_after_s` how many seconds of `clock` the first of them does
        at most, so that whoever opens the index later reads no long log; `None` sets no limit.  With `merge="manual"`
        nothing goes on in the background: flushes happen in the write that finds them due, merges in `settle` and
        `compact`.  `on_corrupt="skip"` leaves damaged parts out and names them in `damaged`; a writer gives them up
        then.  `device` is where searches look for the nearest partitions of large segments; `auto` is a GPU where a
        trial shows that it finds the same; what is put there counts in `device_budget`.

        Raises:
            ConfigError: if `device_budget` is none.
            IndexLocked: if another process, or another engine of this one, writes to the index.
            EmbedderMismatch: if it holds vectors of another length, or of another embedder.
            CorruptIndex: if part of it is not what was written; the message names the file.
            RetrievalError: if there is none, it cannot be written, a later version made it, or `device` is not there.
        """
        _check_choice("ack", ack, _ACKS)
        _check_choice("recall", recall, RECALLS)
        _check_choice("codes", codes, CODE_KINDS)
        _check_choice("merge", merge, ("background", "manual"))
        _check_choice("on_corrupt", on_corrupt, ("raise", "skip"))
        _check_choice("device", device, DEVICES)
        for name, number in (("flush_rows", flush_rows), ("coded_rows", coded_rows), ("exact_rows", exact_rows)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise RetrievalError(f"{name}: got {number!r}, allowed are integers from 1 on")
        if flush_after_s is not None:
            checked_seconds(flush_after_s, "flush_after_s")
        self._root, self._clock, self._pid = Path(path), clock, os.getpid()
        self._damage = Damage(on_corrupt)
        self._settings = Settings(recall, exact_rows, coarse_search(device, device_budget))
        self._warmth = Warmth()
        self._closed = False
        dim = None if dim is None else checked_dim(dim)
        self._core: IndexReader | IndexWriter
        if read_only:
            self._core = IndexReader(self._root, dim=dim, fingerprint=fingerprint, damage=self._damage)
        else:
            build = BuildPlan(codes, coded_rows, exact_rows)
            options = WriteOptions(ack, flush_rows, build, merge == "background", flush_after_s, clock)
            self._core = IndexWriter(
                self._root,
                dim=dim,
                fingerprint=fingerprint,
                options=options,
                damage=self._damage,
                disk=disk or Disk(),
            )
        self._end = end_when_dropped(self, self._core)

    @property
    def dim(self) -> int:
        """Length of every vector."""
        return self._core.manifest.dim

    @property
    def fingerprint(self) -> str | None:
        """Name of the embedder whose vectors it holds, if it was said."""
        return self._core.manifest.fingerprint

    @property
    def damaged(self) -> tuple[str, ...]:
        """What was found damaged and left out."""
        return tuple(self._damage.found)

    @property
    def coarse_device(self) -> CoarseDevice:
        """Where searches look for the nearest partitions, and why; loads Faiss."""
        return self._settings.coarse.device

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written."""
        return isinstance(self._core, IndexReader)

    def name_embedder(self, fingerprint: str) -> None:
        """Check that the vectors are of this embedder, and note it where none is noted; see `KnowsEmbedder`."""
        self._state()  # a reader takes in what was named since
        self._core.name_embedder(fingerprint)

    # -- writing --------------------------------------------------------------------------------------------------

    def put(self, items: Sequence[Item]) -> None:
        """Store items, replacing those of the same id: all or none of them.

        Raises:
            InvalidItem: see the port.
            RetrievalError: if they could not be logged (no room, say), or the engine only reads, or is closed.
        """
        writer = self._writer()
        accepted = checked_items(items, self.dim)
        if accepted:
            writer.write(Operation(puts=[disk_items.log_item(item) for item in accepted]))

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Delete items and return how many there were.

        Raises:
            RetrievalError: as `put`.
        """
        writer = self._writer()
        wanted = one_of_each(checked_ids(ids))
        self._expire()
        return writer.delete(wanted)

    def touch(
        self, expiries: Mapping[ItemId, float | None], *, updated_at_s: Mapping[ItemId, float] | None = None
    ) -> int:
        """Set when items expire and nothing else of them; return of how many.  See the port.

        Raises:
            RetrievalError: as `put`.
        """
        writer = self._writer()
        wanted = checked_expiries(expiries)
        self._expire()

        def decide(state: State) -> Operation:
            found = [item for item in disk_items.get(state, wanted) if item is not None]
            touched = [item for item in found if is_as_read(item, updated_at_s)]
            return Operation(
                puts=[disk_items.log_item(replace(item, expires_at_s=expiries[item.id])) for item in touched]
            )

        return len(writer.write_from(decide).puts)

    # -- reading --------------------------------------------------------------------------------------------------

    def mark(self) -> object | None:
        """Return what tells one state of the index from another; see `MarksChanges`.

        `None` for one that only reads, which has to look at files for that, and as long as something has just expired.
        """
        if self._closed or os.getpid() != self._pid or isinstance(self._core, IndexReader):
            return None
        state = self._core.index.state
        return state.mark if self._clock() < state.next_expiry_s else None

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        """Return items in the order of `ids`, with their vectors; `None` for those that are not there.

        Raises:
            CorruptIndex: if one is damaged.
        """
        wanted = checked_ids(ids)
        return self._read(lambda state: disk_items.get(state, wanted))

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """Return for each query its hits, best first, equal scores by id; all see one state of the index.

        Raises:
            InvalidQuery: see the port.
            CorruptIndex: if something that has to be read is damaged.
        """
        self._enter()
        asked = [Asked.of(query, self.dim) for query in queries]
        return self._read(lambda state: disk_search.search(state, asked, self._settings))

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        """Return items of a view, last updated first, equal times by id, without vectors.

        Raises:
            CorruptIndex: if something that has to be read is damaged.
        """
        checked_count(offset, "offset")
        if limit is not None:
            checked_count(limit, "limit")
        return self._read(
            lambda state: disk_items.items(state, view, limit=limit, offset=offset, few=self._settings.exact_rows)
        )

    def namespaces(self) -> list[Namespace]:
        """Return the namespaces that have live items, sorted."""
        state = self._state()
        found: set[Namespace] = set()
        for delta in state.deltas:
            numbers = np.unique(delta.item_namespaces[: delta.num_items][delta.alive()])
            found.update(delta.delta.namespaces[number] for number in numbers.tolist())
        for view in state.segments:
            numbers = np.unique(view.segment.item_namespaces[view.live_items()])
            found.update(view.segment.namespaces[number] for number in numbers.tolist())
        return sorted(found)

    def prefetch(self, queries: Sequence[Query]) -> int:
        """Have the system read what these searches would compare with exactly; return its bytes.

        It does not wait for the disk, changes no answer, and reads nothing of small views.

        Raises:
            InvalidQuery: as `search`.
        """
        self._enter()
        asked = [Asked.of(query, self.dim) for query in queries]
        return self._read(lambda state: disk_search.prefetch(state, asked, self._settings))

    def partitions(self, vector: Vector, n: int) -> list[Partition]:
        """Return the `n` partitions nearest to `vector`; small segments have none.

        Raises:
            InvalidQuery: for a vector of another length or with NaN or infinity.
        """
        self._enter()
        checked_count(n, "n")
        usable, _ = checked_query(Query(vector), self.dim)
        return warming.nearest(self._core.index.state, usable, n) if n else []

    def warm(self, ids: Sequence[PartitionId]) -> int:
        """Read the vectors of partitions into the system's page cache; return the bytes of those not yet read.

        Raises:
            RetrievalError: if the device fails.
        """
        self._enter()
        return self._warmth.warm(self._core.index.state, ids)

    def cool(self, ids: Sequence[PartitionId]) -> None:
        """Tell the system that partitions are not needed."""
        self._enter()
        self._warmth.cool(self._core.index.state, ids)

    def is_warm(self, ids: Sequence[PartitionId]) -> list[bool]:
        """Return for each partition whether it was read; the system may have dropped it without saying so."""
        self._enter()
        return self._warmth.is_warm(self._core.index.state, ids)

    def stats(self) -> EngineStats:
        """Return sizes; memory counts codes, bitmaps and what waits for a flush, disk the files of the index."""
        state = self._state()
        delta_rows = [int(np.count_nonzero(one.alive()[one.row_items[: one.num_rows]])) for one in state.deltas]
        delta_items = sum(int(np.count_nonzero(one.alive())) for one in state.deltas)
        dead = sum(one.num_rows for one in state.deltas) - sum(delta_rows)
        return EngineStats(
            num_items=delta_items + sum(view.num_items for view in state.segments),
            num_vectors=sum(delta_rows) + sum(view.num_rows for view in state.segments),
            delta_vectors=sum(delta_rows),
            dead_vectors=dead + sum(view.num_dead_rows for view in state.segments),
            memory_bytes=sum(one.num_bytes for one in state.deltas)
            + sum(view.segment.num_bytes + view.dead_items.nbytes + view.dead_rows.nbytes for view in state.segments),
            disk_bytes=sum(view.segment.entry.num_bytes for view in state.segments) + self._log_bytes(),
        )

    # -- upkeep ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Flush what waits, and do all merges that are due.

        Raises:
            RetrievalError: if something could not be written; the index is what it was.
        """
        self._expire()
        self._writer().settle()

    def compact(self) -> None:
        """Write everything into one segment, without what was deleted.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        self._expire()
        self._writer().compact()

    def sync(self) -> None:
        """Return when everything that was written is on the device, whatever `ack` is.

        Raises:
            RetrievalError: if the device failed.
        """
        self._writer().wait_synced()

    def close(self) -> None:
        """End background work and release files and lock.  May be called twice; later calls raise `RetrievalError`.

        Raises:
            RetrievalError: if the log could not be synced.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._end.detach()
        self._core.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._closed:
            raise RetrievalError(f"{self._root}: the engine is closed; open another one")
        if os.getpid() != self._pid:
            raise RetrievalError(
                f"{self._root}: the engine was opened by process {self._pid} and cannot be used in its "
                f"child {os.getpid()}; open one there, read-only beside a writer"
            )

    def _writer(self) -> IndexWriter:
        self._enter()
        if not isinstance(self._core, IndexWriter):
            raise RetrievalError(f"{self._root}: the engine was opened with read_only=True; open it for writing")
        return self._core

    def _state(self) -> State:
        """Return the state of now: what the writer did, and without what has expired."""
        self._enter()
        if isinstance(self._core, IndexReader):
            self._core.refresh()
        self._expire()
        state = self._core.index.state
        self._enter()  # what is closed meanwhile holds nothing any more, which must not look like an empty index
        return state

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s >= self._core.index.state.next_expiry_s:
            with self._core.lock:
                self._core.index.expire(now_s)

    def _read(self, work: Callable[[State], _T]) -> _T:
        """Read from the state; where damage may be skipped, the damaged items are taken out and it is done again."""
        state = self._state()
        try:
            return work(state)
        except CorruptIndex:
            # A reader may get another index meanwhile, so that it is asked for each time.
            core = self._core
            return healed(lambda: work(self._state()), lambda *bad: core.index.drop(*bad), self._damage, core.lock)

    def _log_bytes(self) -> int:
        return sum(map(size_of, (self._root / LOGS).glob("*.log")))


def _check_choice(name: str, got: object, allowed: Sequence[str]) -> None:
    if got not in allowed:
        raise RetrievalError(f"{name}: got {got!r}, allowed are {', '.join(allowed)}")
