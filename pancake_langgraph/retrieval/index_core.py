"""What the writer of an index holds: lock, manifest, log and state; whoever writes, flushes or merges works on it."""

from __future__ import annotations

import threading
from pathlib import Path

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.disk import Disk, write_trouble
from pancake_langgraph.retrieval.index_state import Change, Index
from pancake_langgraph.retrieval.loading import (
    Damage,
    LogEnd,
    adapted,
    check_folder,
    current_manifest,
    make,
    open_segments,
    replay,
    tidy,
)
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, LogWriter, Operation
from pancake_langgraph.retrieval.log_sizes import note_sizes, put_aside
from pancake_langgraph.retrieval.manifest import (
    LOGS,
    SEGMENTS,
    TOMBSTONES,
    Manifest,
    check_embedder,
    exists,
    log_path,
    publish,
    read_current,
)
from pancake_langgraph.retrieval.write_lock import WriteLock


class IndexCore:
    """`index` and the log are changed under `lock`; the manifest only by the one flush or merge that is under way."""

    def __init__(self, root: Path, *, dim: int | None, fingerprint: str | None, damage: Damage, disk: Disk) -> None:
        """Open an index, or make one.

        Raises:
            IndexLocked: if another writes to it.
            EmbedderMismatch: if it holds vectors of another length or fingerprint.
            CorruptIndex: if it is damaged.
            RetrievalError: if it cannot be made or written.
        """
        self.root, self.damage, self.disk = root, damage, disk
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.manifest: Manifest
        self.index: Index
        self.log: LogWriter
        #: When the log was written to before it was opened here, in seconds since 1970; `None` if it held nothing.
        self.log_written_at_s: float | None = None
        self.log_seq = 0
        self._log_number = 0
        self._broken: str | None = None
        check_folder(root)
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

    def _open(self, dim: int | None, fingerprint: str | None) -> None:
        for folder in (SEGMENTS, LOGS, TOMBSTONES):
            (self.root / folder).mkdir(exist_ok=True)
        if not exists(self.root):
            make(self.root, dim, fingerprint, self.disk, self.damage)
        self.manifest = current_manifest(self.root, self.damage)
        end = self._load()
        if (adopted := adapted(self.manifest, self.index, dim, fingerprint)) != self.manifest:
            self.publish(self.manifest.next(dim=adopted.dim, fingerprint=adopted.fingerprint))
            end = self._load()
        check_embedder(self.root, self.manifest, dim, fingerprint)
        self._log_number = end.number
        self.log_written_at_s = self._last_write(end)
        put_aside(log_path(self.root, end.number), end.end, self.disk)
        self.log = LogWriter(log_path(self.root, end.number), self.disk, end=end.end)
        self.log_seq = self.manifest.seq
        try:
            tidy(self.root, self.manifest, self.disk)
        except BaseException:
            self.log.close()
            raise

    def _load(self) -> LogEnd:
        self.index = Index(self.manifest.dim, open_segments(self.root, self.manifest, self.damage, {}))
        return replay(self.root, self.manifest, self.damage, self.index)

    def _last_write(self, end: LogEnd) -> float | None:
        if not self.index.num_waiting and end.end <= EMPTY_LOG_BYTES:
            return None
        path = log_path(self.root, end.number)
        if not path.exists():  # a new one follows a damaged one
            path = log_path(self.root, self.manifest.log_floor)
        return path.stat().st_mtime

    def check(self) -> None:
        """Refuse to go on after `close`, and where nobody knows any more what is on the device.

        What is written after `close` could hit the files of the next writer, which may be at work already.

        Raises:
            RetrievalError: if it is so.
        """
        if self.closing.is_set():
            raise RetrievalError(f"{self.root}: the engine is closed; open another one")
        if self._broken:
            raise RetrievalError(self._broken)

    def commit(self, operation: Operation, payload: bytes, change: Change, *, sync_first: bool) -> int:
        """Log an operation and apply it, under the lock; return where the log ends then.

        Raises:
            RetrievalError: if it could not be logged, or synced where that is asked for first; it is not applied then.
        """
        self.check()
        end = self.log.append(self.log_seq + 1, payload)
        self.log_seq += 1
        if sync_first:
            self.log.wait(end)
        self.index.commit(operation, change)
        return end

    def rotate(self) -> int:
        """Begin a new log if the old one holds anything, under the lock; return the number of the one in use.

        The old one is whole on the device before anything is written to the new one.

        Raises:
            OSError: if the new one cannot be made; the old one is used on.
            RetrievalError: if the old one cannot be synced, or broke before.
        """
        self.log.check()
        if self.log.end > EMPTY_LOG_BYTES:
            new = LogWriter(log_path(self.root, self._log_number + 1), self.disk)
            try:
                self.log.close()
            except BaseException:
                new.close()
                raise
            self.log, self._log_number = new, self._log_number + 1
        return self._log_number

    def publish(self, manifest: Manifest) -> None:
        """Make a manifest the index.

        Raises:
            OSError: if it could not be written.
        """
        try:
            publish(self.root, manifest, self.disk)
        except BaseException:
            # Before the rename nothing has happened.  After it nobody knows which of both a crash would leave, so
            # that neither's files may be touched.
            if not self._is_published(self.manifest):
                self._broken = f"{self.root}: a new manifest could not be synced; close the index and open it anew"
            raise
        self.manifest = manifest

    def _is_published(self, manifest: Manifest) -> bool:
        try:
            return read_current(self.root).number == manifest.number
        except (OSError, RetrievalError):
            return False

    def begin_ending(self) -> None:
        """Have what is under way stop; the lock will be let go of soon."""
        self._lock_file.is_ending = True
        self.closing.set()

    def close(self) -> None:
        """Sync the log and let go of the lock.  May be called twice.

        Raises:
            RetrievalError: if the log could not be synced.
        """
        self.closing.set()
        try:
            with self.lock:
                self.index = Index(self.manifest.dim)  # searches under way hold what they look at
                self.log.close()
                if self._lock_file.is_held and not self.log.is_broken:
                    logs = range(self.manifest.log_floor, self._log_number + 1)
                    note_sizes(self.root, [log_path(self.root, number) for number in logs], self.disk)
        finally:
            self._lock_file.release()
