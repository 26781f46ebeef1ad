"""The one writer of an index: logs and applies operations, and has flushes and merges done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval import log
from pancake_langgraph.retrieval.base import ItemId
from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.index_core import IndexCore
from pancake_langgraph.retrieval.index_state import Change, Index, State, named_in
from pancake_langgraph.retrieval.loading import Damage, healed
from pancake_langgraph.retrieval.log import Ack, LogWriter, Operation
from pancake_langgraph.retrieval.manifest import Manifest, check_embedder
from pancake_langgraph.retrieval.merge import Merger
from pancake_langgraph.retrieval.planner import is_rotten
from pancake_langgraph.retrieval.segment_build import BuildPlan

logger = logging.getLogger(__name__)

#: With so many flushes waiting because none succeeds, writes are refused.
_MAX_WAITING_FLUSHES: Final = 16
#: A log of this size is flushed, however few items it holds.
_MAX_LOG_BYTES: Final = 64 << 20
#: The clock is looked at so often at least, as it may have been set.
_MAX_NAP_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an index is written.

    What waits in the log is flushed from `flush_rows` items on, and `flush_after_s` seconds of `clock` after the first
    of it was written, unless that is `None`.
    """

    ack: Ack
    flush_rows: int
    build: BuildPlan
    in_background: bool
    flush_after_s: float | None = None
    clock: Callable[[], float] = time.time


class IndexWriter:
    """Thread-safe."""

    def __init__(
        self, root: Path, *, dim: int | None, fingerprint: str | None, options: WriteOptions, damage: Damage, disk: Disk
    ) -> None:
        """Open an index, or make one.

        Raises:
            RetrievalError: as `IndexCore` does.
        """
        self._options, self._damage = options, damage
        self._core = IndexCore(root, dim=dim, fingerprint=fingerprint, damage=damage, disk=disk)
        self._merger = Merger(self._core, flush_rows=options.flush_rows, plan=options.build)
        self.lock = self._core.lock
        self._wake = threading.Event()
        self._flush_at = options.flush_rows
        self._is_rotten = self._is_abandoned = False
        self._thread: threading.Thread | None = None
        self.num_failures = 0
        #: When the first of what stands in the log was written.
        self._waiting_since_s: float | None = None
        self._has_new_deadline = False
        if self._core.log_written_at_s is not None:
            self._begin_waiting(min(options.clock(), self._core.log_written_at_s))
        self._wake_if_due()

    @property
    def manifest(self) -> Manifest:
        """What the index consists of now."""
        return self._core.manifest

    @property
    def index(self) -> Index:
        """What it holds now; changed under `lock`."""
        return self._core.index

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
            self._core.check()
            change = healed(lambda: self.index.prepare(ids), self.index.drop, self._damage, self.lock)
            if not change.there:
                return 0
            operation = Operation(deletes=[(item_id.namespace, item_id.key) for item_id in change.there])
            writer, end = self._commit(operation, log.encode(operation), change)
        self._acknowledge(writer, end)
        return len(change.there)

    def write_from(self, decide: Callable[[State], Operation]) -> Operation:
        """Write what `decide` makes out of the state, with nothing between."""
        with self.lock:
            self._core.check()
            operation = healed(lambda: decide(self.index.state), self.index.drop, self._damage, self.lock)
            if not operation.puts and not operation.deletes:
                return operation
            writer, end = self._write(operation, log.encode(operation))
        self._acknowledge(writer, end)
        return operation

    def _acknowledge(self, writer: LogWriter, end: int) -> None:
        if self._options.ack == "group":
            writer.wait(end)
        self._wake_if_due()

    def _write(self, operation: Operation, payload: bytes) -> tuple[LogWriter, int]:
        ids = named_in(operation)
        return self._commit(
            operation, payload, healed(lambda: self.index.prepare(ids), self.index.drop, self._damage, self.lock)
        )

    def _commit(self, operation: Operation, payload: bytes, change: Change) -> tuple[LogWriter, int]:
        if self._merger.failure and self.index.num_waiting > _MAX_WAITING_FLUSHES * self._options.flush_rows:
            waiting = f"{self._core.root}: {self.index.num_waiting} items wait for a flush, and none succeeds"
            raise RetrievalError(f"{waiting}: {self._merger.failure}")
        end = self._core.commit(operation, payload, change, sync_first=self._options.ack == "sync")
        if self._waiting_since_s is None:
            self._begin_waiting(self._options.clock())
        if change.in_segments and any(is_rotten(size) for size in self._merger.sizes()):
            self._is_rotten = True
        return self._core.log, end

    def name_embedder(self, fingerprint: str) -> None:
        """Check the embedder of the index, and note it if there is none yet.

        Raises:
            EmbedderMismatch: if it is another one.
            RetrievalError: if it could not be written.
        """
        check_embedder(self._core.root, self.manifest, None, fingerprint)
        if self.manifest.fingerprint is None:
            self._merger.name_embedder(fingerprint)

    # -- in the background ----------------------------------------------------------------------------------------

    def _begin_waiting(self, since_s: float) -> None:
        self._waiting_since_s = since_s
        self._has_new_deadline = self._options.flush_after_s is not None

    def _due_in_s(self) -> float | None:
        """Return in how many seconds what waits is old enough to be flushed; `None` if it never is."""
        since_s, after_s = self._waiting_since_s, self._options.flush_after_s
        if since_s is None or after_s is None:
            return None
        return max(0.0, since_s + after_s - self._options.clock())

    def _is_flush_due(self) -> bool:
        return (
            self.index.num_waiting >= self._flush_at
            or (not self._merger.failure and self._core.log.end >= _MAX_LOG_BYTES)
            or self._due_in_s() == 0
        )

    def _wake_if_due(self) -> None:
        if not self._options.in_background:
            if self._is_flush_due():
                self._try(self._flush)
        elif (self._has_new_deadline or self._is_rotten or self._is_flush_due()) and not self._wake.is_set():
            self._wake.set()
            with self.lock:
                if self._thread is None and not self._core.closing.is_set():
                    self._start()

    def _start(self) -> None:
        thread = threading.Thread(target=self._maintain, name="pancake-index-merge", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # at the end of the process, or where there are too many: the next write tries
            self._wake.clear()
            self._failed(error)
            self._has_new_deadline = False  # not at each write: when a flush is due
        else:
            self._thread = thread

    def _maintain(self) -> None:
        while not self._core.closing.is_set():
            self._has_new_deadline = False
            due_in_s = self._due_in_s()
            self._wake.wait(None if due_in_s is None else min(due_in_s, _MAX_NAP_S))
            self._wake.clear()
            if not self._core.closing.is_set() and (self._is_rotten or self._is_flush_due()):
                self._is_rotten = False
                self._try(self.settle)
        if self._is_abandoned:
            self._end_quietly()

    def _try(self, work: Callable[[], None]) -> None:
        """Do what nobody waits for: what was written is in the log, so that failing loses nothing."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - Faiss has types of its own; the thread lives on, and it is counted
            if self._core.closing.is_set():
                return
            self._failed(error)
        else:
            self._flush_at = self._options.flush_rows

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        self._flush_at = self.index.num_waiting + self._options.flush_rows
        if self._waiting_since_s is not None:
            self._begin_waiting(self._options.clock())
        logger.warning("a flush or merge failed and will be tried again: %s", error)

    def _flush(self, flush: Callable[[], None] | None = None) -> None:
        """Flush alone, or do what begins with a flush."""
        since_s, self._waiting_since_s = self._waiting_since_s, None  # what comes from now on may wait anew
        try:
            (flush or self._merger.flush)()
        except BaseException:
            self._waiting_since_s = since_s
            raise

    def settle(self) -> None:
        """Flush, and do all merges that are due.

        Raises:
            RetrievalError: if something could not be written; the index is what it was.
        """
        self._flush()
        while not self._core.closing.is_set() and self._merger.merge_once():
            pass

    def compact(self) -> None:
        """Write everything into one segment without tombstones.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        self._flush(self._merger.compact)

    def rewrite(self) -> None:
        """Write everything that can be read anew, and give up what cannot.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        self._merger.rewrite()

    def close(self) -> None:
        """End background work, sync the log and let go of the lock.  May be called twice.

        Raises:
            RetrievalError: if the log could not be synced.
        """
        self._core.closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._merger.close()
        self._core.close()

    def abandon(self) -> None:
        """Close without anybody who waits or hears of trouble: the engine is gone.

        It may run in the middle of anything, in the thread that merges too, so that this thread does it where there
        is one.
        """
        self._is_abandoned = True
        self._core.begin_ending()
        self._wake.set()
        if self._thread is None or not self._thread.is_alive():
            self._end_quietly()

    def _end_quietly(self) -> None:
        try:
            self._merger.close()
            self._core.close()
        except RetrievalError as error:
            logger.warning("an engine that was dropped without close() could not end well: %s", error)

    def wait_synced(self) -> None:
        """Return when everything that was written is on the device."""
        with self.lock:
            writer, end = self._core.log, self._core.log.end
        writer.wait(end)
