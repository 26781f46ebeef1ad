"""A reader of an index that another process may write: follows its manifests and its logs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval.disk import size_of
from pancake_langgraph.retrieval.index_state import Index
from pancake_langgraph.retrieval.loading import Damage, adapted, current_manifest, healed, open_segments, replay
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, read_log
from pancake_langgraph.retrieval.manifest import CURRENT, REPAIR, Manifest, check_embedder, log_path

_TRIES: Final = 50


class IndexReader:
    """Thread-safe.  `refresh` before each use makes it see what was acknowledged before."""

    def __init__(self, root: Path, *, dim: int | None, fingerprint: str | None, damage: Damage) -> None:
        """Open an index.

        Raises:
            EmbedderMismatch: if it holds vectors of another length or fingerprint.
            CorruptIndex: if it is damaged.
            RetrievalError: if there is none.
        """
        self._root, self._damage = root, damage
        self._dim, self._fingerprint = dim, fingerprint
        self.lock = threading.RLock()
        self._stamp: tuple[bytes, int, int] | None = None
        self._closed = False
        self.manifest: Manifest
        self.index: Index
        with self._typed():
            self._load()

    def name_embedder(self, fingerprint: str) -> None:
        """Check the embedder of the index, as it was read last.

        Raises:
            EmbedderMismatch: if it is another one.
        """
        check_embedder(self._root, self.manifest, None, fingerprint)

    def refresh(self) -> None:
        """Take in what the writer did since the last time.

        Raises:
            CorruptIndex: if what it wrote is damaged.
            EmbedderMismatch: if it has taken over another embedder than this one.
            RetrievalError: if it cannot be read, or the reader is closed.
        """
        with self.lock, self._typed():
            if self._closed:
                raise RetrievalError(f"{self._root}: the engine is closed; open another one")
            if self._stamp_now() != self._stamp or not self._follow():
                self._load()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """Say in our words what the system refuses."""
        try:
            yield
        except OSError as error:
            raise RetrievalError(
                f"{self._root}: {error.filename or 'a file of it'} cannot be read ({error.strerror or error})"
            ) from error

    def _stamp_now(self) -> tuple[bytes, int, int] | None:
        """Return what tells one publication from another: times alone are too coarse, and clocks are set back."""
        try:
            with (self._root / CURRENT).open("rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                return file.readall(), found.st_ino, found.st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _load(self) -> None:
        """Open what is published now; what is published meanwhile makes it begin anew."""
        known = {} if self._stamp is None else {n: view.segment for n, view in self.index.segments.items()}
        for _ in range(_TRIES):
            stamp = self._stamp_now()
            self.manifest = current_manifest(self._root, self._damage)
            try:
                views = open_segments(self._root, self.manifest, self._damage, known)
                index = Index(self.manifest.dim, views)
                end = replay(self._root, self.manifest, self._damage, index)
            except FileNotFoundError as error:
                missing = error
                continue
            if self._stamp_now() == stamp:
                # Without any vector it holds none of another length, until the writer has an embedder.
                self.manifest = adapted(self.manifest, index, self._dim, None)
                check_embedder(self._root, self.manifest, self._dim, self._fingerprint)
                self.index, self._stamp = index, stamp
                self._log_number, self._log_end = end.number, end.end
                return
        raise CorruptIndex(
            f"{self._root / self.manifest.file_name} names what is missing ({missing.filename}); {REPAIR}"
        )

    def _follow(self) -> bool:
        """Apply what was logged since the last time; return false where the log is gone."""
        while True:
            path = log_path(self._root, self._log_number)
            # The writer does not touch a log any more when the next one has records: that is asked first.
            is_full = size_of(log_path(self._root, self._log_number + 1)) > EMPTY_LOG_BYTES
            try:
                if path.stat().st_size > self._log_end:
                    self._apply(path)
            except FileNotFoundError:
                # A log that is not there yet is one that is still to be made.
                return self._log_end == 0
            if not is_full:
                return True
            self._log_number, self._log_end = self._log_number + 1, 0

    def _apply(self, path: Path) -> None:
        tail = read_log(path, self._log_end)
        if tail.damage is not None:
            tail = read_log(path, self._log_end)  # a record may have been taken back while it was read
        if tail.damage is not None:
            self._damage.met(CorruptIndex(tail.damage))
        for record in tail.records:
            healed(partial(self.index.apply, record.operation), self.index.drop, self._damage, self.lock)
        self._log_end = tail.end

    def abandon(self) -> None:
        """Do nothing: files are closed with the segments that nobody holds any more."""

    def close(self) -> None:
        """Let go of the index; files are closed when the last search is done with them.  May be called twice."""
        with self.lock:
            self._closed = True
            self.index = Index(self.manifest.dim)
