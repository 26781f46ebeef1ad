"""The one writer of an index: logs and applies operations, flushes deltas into segments, merges segments."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval import log
from pancake_langgraph.retrieval.base import ItemId
from pancake_langgraph.retrieval.delta import DeltaView
from pancake_langgraph.retrieval.disk import Disk, write_trouble
from pancake_langgraph.retrieval.index_state import Change, Index, State, named_in
from pancake_langgraph.retrieval.loading import Damage, current_manifest, healed, open_segments, replay
from pancake_langgraph.retrieval.log import Ack, LogWriter, Operation
from pancake_langgraph.retrieval.manifest import (
    CURRENT,
    LOGS,
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    SegmentEntry,
    check_embedder,
    exists,
    log_path,
    newest_whole,
    publish,
)
from pancake_langgraph.retrieval.planner import SegmentSize, choose_merge
from pancake_langgraph.retrieval.segment import Segment
from pancake_langgraph.retrieval.segment_build import (
    BuildPlan,
    BuildStopped,
    Built,
    Feed,
    SegmentBuild,
    feed_of_delta,
    feed_of_segment,
    still_live,
)
from pancake_langgraph.retrieval.segment_view import SegmentView
from pancake_langgraph.retrieval.write_lock import WriteLock

_T = TypeVar("_T")
logger = logging.getLogger(__name__)

#: With so many flushes waiting because none succeeds, writes are refused.
_MAX_WAITING_FLUSHES: Final = 16


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an index is written."""

    ack: Ack
    flush_rows: int
    build: BuildPlan
    in_background: bool


class IndexWriter:
    """Thread-safe.  `index` is changed under `lock`; flushes and merges go on beside it, one at a time."""

    def __init__(
        self, root: Path, *, dim: int | None, fingerprint: str | None, options: WriteOptions, damage: Damage, disk: Disk
    ) -> None:
        """Open an index, or make one.

        Raises:
            IndexLocked: if another writes to it.
            EmbedderMismatch: if it holds vectors of another length or fingerprint.
            CorruptIndex: if it is damaged.
            RetrievalError: if it cannot be made or written.
        """
        self._root, self._options, self._disk, self._damage = root, options, disk, damage
        self.lock = threading.RLock()
        self._maintenance = threading.Lock()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._flush_at = options.flush_rows
        self.num_failures = 0
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock_file = WriteLock(root)
        except OSError as error:
            raise write_trouble(error, f"{root}: the index cannot be opened for writing") from error
        try:
            self._open(dim, fingerprint)
        except OSError as error:
            self._lock_file.release()
            raise write_trouble(error, f"{root}: the index cannot be opened for writing") from error
        except BaseException:
            self._lock_file.release()
            raise

    # -- opening --------------------------------------------------------------------------------------------------

    def _open(self, dim: int | None, fingerprint: str | None) -> None:
        for folder in (SEGMENTS, LOGS, TOMBSTONES):
            (self._root / folder).mkdir(exist_ok=True)
        if not exists(self._root):
            self._make(dim, fingerprint)
        self.manifest = current_manifest(self._root, self._damage)
        check_embedder(self._root, self.manifest, dim, fingerprint)
        self.index = Index(self.manifest.dim, open_segments(self._root, self.manifest, self._damage, {}))
        end = replay(self._root, self.manifest.log_floor, self._damage, self.index)
        self._log_number = end.number
        self._log = LogWriter(log_path(self._root, end.number), self._disk, end=end.end)
        self._log_seq = self.manifest.seq
        if fingerprint is not None and self.manifest.fingerprint is None:
            self._publish(self.manifest.next(fingerprint=fingerprint))
        self._tidy()
        self._wake_if_full()

    def _make(self, dim: int | None, fingerprint: str | None) -> None:
        left = newest_whole(self._root)
        if left is not None and (left.segments or left.number > 1):
            raise CorruptIndex(
                f"{self._root / CURRENT} is missing, but {left.file_name} is there; restore it, or write "
                "the manifest's name into it with verify's help"
            )
        if dim is None:
            raise RetrievalError(f"{self._root}: there is no index here, and a new one needs `dim`, got None; pass it")
        LogWriter(log_path(self._root, 1), self._disk).close()
        self._publish(Manifest(1, dim, fingerprint, log_floor=1, seq=0, next_segment=1))

    def _tidy(self) -> None:
        """Remove what no manifest names: what was begun before a crash, and what was replaced."""
        kept = {entry.name for entry in self.manifest.segments}
        for path in (self._root / SEGMENTS).iterdir():
            if path.name not in kept:
                self._disk.remove(path)
        bits = {entry.dead.name for entry in self.manifest.segments if entry.dead}
        for path in (self._root / TOMBSTONES).iterdir():
            if path.name not in bits:
                self._disk.remove(path)
        for path in (self._root / LOGS).glob("*.log"):
            if path.stem.isdigit() and int(path.stem) < self.manifest.log_floor:
                self._disk.remove(path)
        for path in self._root.glob("MANIFEST-*.json"):
            if path.name != self.manifest.file_name:
                self._disk.remove(path)

    # -- operations -----------------------------------------------------------------------------------------------

    def write(self, operation: Operation) -> None:
        """Log and apply one operation; when this returns, it is as durable as was chosen.

        Raises:
            RetrievalError: if it could not be logged; nothing of it is there then, unless the sync itself failed.
        """
        payload = log.encode(operation)
        with self.lock:
            writer, end = self._write(operation, payload)
        self._acknowledge(writer, end)

    def delete(self, ids: Sequence[ItemId]) -> int:
        """Log and apply the deletion of those of some items that are there; return their number.

        Raises:
            RetrievalError: as `write`.
        """
        with self.lock:
            change = healed(lambda: self.index.prepare(ids), self.index, self._damage)
            if not change.there:
                return 0
            operation = Operation(deletes=[(item_id.namespace, item_id.key) for item_id in change.there])
            writer, end = self._commit(operation, log.encode(operation), change)
        self._acknowledge(writer, end)
        return len(change.there)

    def write_from(self, decide: Callable[[State], Operation]) -> Operation:
        """Write what `decide` makes out of the state, with nothing between."""
        with self.lock:
            operation = healed(lambda: decide(self.index.state), self.index, self._damage)
            if not operation.puts and not operation.deletes:
                return operation
            writer, end = self._write(operation, log.encode(operation))
        self._acknowledge(writer, end)
        return operation

    def _acknowledge(self, writer: LogWriter, end: int) -> None:
        if self._options.ack == "group":
            writer.wait(end)
        self._wake_if_full()

    def _write(self, operation: Operation, payload: bytes) -> tuple[LogWriter, int]:
        ids = named_in(operation)
        return self._commit(operation, payload, healed(lambda: self.index.prepare(ids), self.index, self._damage))

    def _commit(self, operation: Operation, payload: bytes, change: Change) -> tuple[LogWriter, int]:
        if self._failure and self.index.num_waiting > _MAX_WAITING_FLUSHES * self._options.flush_rows:
            raise RetrievalError(
                f"{self._root}: {self.index.num_waiting} items wait for a flush, and none succeeds: {self._failure}"
            )
        end = self._log.append(self._log_seq + 1, payload)
        self._log_seq += 1
        if self._options.ack == "sync":
            self._log.wait(end)
        self.index.commit(operation, change)
        return self._log, end

    # -- in the background ----------------------------------------------------------------------------------------

    def _wake_if_full(self) -> None:
        if self.index.num_waiting < self._flush_at:
            return
        if not self._options.in_background:
            self._try(self.flush)
        elif not self._wake.is_set():
            self._wake.set()
            with self.lock:
                if self._thread is None and not self._closing.is_set():
                    self._thread = threading.Thread(target=self._maintain, name="pancake-index-merge", daemon=True)
                    self._thread.start()

    def _maintain(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._wake.clear()
            if not self._closing.is_set() and self.index.num_waiting >= self._flush_at:
                self._try(self.settle)

    def _try(self, work: Callable[[], None]) -> None:
        """Do what nobody waits for: what was written is in the log, so that failing loses nothing."""
        try:
            work()
        except BuildStopped:
            logger.debug("a flush or merge of %s was given up, because the index closes", self._root)
        except (RetrievalError, MemoryError) as error:
            self.num_failures += 1
            self._flush_at = self.index.num_waiting + self._options.flush_rows
            logger.warning("a flush or merge failed and will be tried again: %s", error)
        else:
            self._flush_at = self._options.flush_rows

    def settle(self) -> None:
        """Flush, and do all merges that are due.

        Raises:
            RetrievalError: if something could not be written; the index is what it was.
        """
        self.flush()
        while not self._closing.is_set() and self.merge_once():
            pass

    def close(self) -> None:
        """End background work, sync the log and let go of the lock.  May be called twice.

        Raises:
            RetrievalError: if the log could not be synced.
        """
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        try:
            with self._maintenance, self.lock:
                self._log.close()
        finally:
            self._lock_file.release()

    def wait_synced(self) -> None:
        """Return when everything that was written is on the device."""
        with self.lock:
            writer, end = self._log, self._log.end
        writer.wait(end)

    # -- flush and merge ------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Turn what waits in memory and in the logs into a segment.

        Raises:
            RetrievalError: if it could not be written; it waits on, and nothing is lost.
        """
        with self._maintenance:
            self._guarded(self._flush)

    def merge_once(self) -> bool:
        """Merge the segments that should be merged next; return whether there were any.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        with self._maintenance:
            return self._guarded(self._merge_next)

    def compact(self) -> None:
        """Flush, and write everything into one segment without tombstones.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        with self._maintenance:
            self._guarded(self._flush)
            self._guarded(self._merge_all)

    def _guarded(self, work: Callable[[], _T]) -> _T:
        try:
            done = healed(work, self.index, self._damage)
        except OSError as error:
            self._failure = str(write_trouble(error, f"{self._root}: flush or merge failed"))
            raise RetrievalError(self._failure) from error
        self._failure = None
        return done

    def _flush(self) -> None:
        with self.lock:
            if self.index.state.deltas[-1].num_items:
                self._rotate()
            frozen, floor = self.index.freeze(), self._log_number
        if not frozen:
            return
        self._disk.point("flush:frozen")
        feeds = [feed for feed in map(feed_of_delta, frozen) if len(feed.ordinals)]
        # What was flushed is scanned, and merged soon: codes would be made for nothing.
        plan = replace(self._options.build, coded_rows=1 << 62)
        built = self._build(feeds, plan) if feeds else None
        self._swap((), frozen, built, floor)

    def _rotate(self) -> None:
        """Begin a new log.  The old one is whole on the device before anything is written to the new one."""
        new = LogWriter(log_path(self._root, self._log_number + 1), self._disk)
        try:
            self._log.close()
        except BaseException:
            new.close()
            raise
        self._log, self._log_number = new, self._log_number + 1

    def _merge_next(self) -> bool:
        with self.lock:
            sizes = [
                SegmentSize(name, view.segment.entry.num_items, view.num_dead_items)
                for name, view in self.index.segments.items()
            ]
        names = choose_merge(sizes, unit=self._options.flush_rows)
        if names:
            self._merge(names)
        return bool(names)

    def _merge_all(self) -> None:
        with self.lock:
            views = dict(self.index.segments)
        if len(views) == 1:
            [view] = views.values()
            rows = view.num_rows
            wants_codes = rows >= self._options.build.coded_rows and view.segment.codes is None
            if not view.num_dead_items and not wants_codes:
                return
        if views:
            self._merge(tuple(views))

    def _merge(self, names: Sequence[str]) -> None:
        with self.lock:
            views = [self.index.segments[name] for name in names]
        feeds = [feed for feed in map(feed_of_segment, views) if len(feed.ordinals)]
        self._disk.point("merge:begun")
        built = self._build(feeds, self._options.build) if feeds else None
        self._swap(names, (), built, self.manifest.log_floor)

    def _build(self, feeds: Sequence[Feed], plan: BuildPlan) -> tuple[Built, Sequence[Feed]]:
        name = f"{self.manifest.next_segment:06d}"
        self._disk.remove(self._root / SEGMENTS / name)  # left by a swap that failed
        build = SegmentBuild(
            self._root,
            name,
            feeds,
            dim=self.manifest.dim,
            plan=plan,
            disk=self._disk,
            go_on=lambda: not self._closing.is_set(),
        )
        return build.run(), feeds

    def _swap(
        self, gone: Sequence[str], frozen: Sequence[DeltaView], built: tuple[Built, Sequence[Feed]] | None, floor: int
    ) -> None:
        """Publish a manifest with a new segment in the place of others, and search it from now on."""
        segment = Segment(self._root, built[0].entry, self.manifest.dim) if built else None
        with self.lock:
            views = {name: view for name, view in self.index.segments.items() if name not in gone}
            if segment is not None and built is not None:
                views[segment.entry.name] = self._caught_up(segment, built)
            writer, end, seq = self._log, self._log.end, self._log_seq
        # A tombstone must not be kept when the operation that made it is lost with the end of the log.
        writer.wait(end)
        entries = [self._with_tombstones(view) for view in views.values()]
        skipped = [entry for entry in self.manifest.segments if entry.name not in self.index.segments]
        manifest = self.manifest.next(
            segments=tuple(sorted((*skipped, *entries), key=lambda entry: entry.name)),
            log_floor=floor,
            seq=seq,
            next_segment=self.manifest.next_segment + (built is not None),
        )
        self._publish(manifest)
        with self.lock:
            new = self._caught_up(segment, built) if segment is not None and built is not None else None
            self.index.replace(gone, [view.delta for view in frozen], new)
        self._disk.point("swap:done")
        self._tidy()

    def _caught_up(self, segment: Segment, built: tuple[Built, Sequence[Feed]]) -> SegmentView:
        """Return a new segment with tombstones for what died while it was built."""
        view = SegmentView.of(segment)
        for feed, new in zip(built[1], built[0].moves, strict=True):
            view = view.without(new[~still_live(feed, self.index.state)])
        return view

    def _with_tombstones(self, view: SegmentView) -> SegmentEntry:
        entry = view.segment.entry
        published = next((one for one in self.manifest.segments if one.name == entry.name), None)
        if published is not None and published.num_dead == view.num_dead_items:
            return published
        if not view.num_dead_items:
            return entry
        name = f"{entry.name}-{self.manifest.number + 1:06d}.bits"
        mark = self._disk.write(self._root / TOMBSTONES / name, (np.ascontiguousarray(view.dead_items).data,))
        self._disk.sync_folder(self._root / TOMBSTONES)
        return replace(entry, dead=mark, num_dead=view.num_dead_items)

    def _publish(self, manifest: Manifest) -> None:
        publish(self._root, manifest, self._disk)
        self.manifest = manifest
