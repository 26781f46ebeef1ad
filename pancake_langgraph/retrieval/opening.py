"""Opens an engine when it is first used: by then it is known how long the embedder's vectors are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.retrieval.base import VectorEngine
from pancake_langgraph.retrieval.desk import Desk, desk_of
from pancake_langgraph.retrieval.partitions import PrefetchesPartitions
from pancake_langgraph.retrieval.result_cache import ResultCache


class LateEngine:
    """An engine that was given, or one that is made when first asked for.  Thread safe.

    What was given belongs to whoever gave it and is never closed here.
    """

    def __init__(
        self,
        engine: VectorEngine | None,
        path: str | os.PathLike[str] | None,
        *,
        learn_dim: Callable[[], int] | None,
        fingerprint: Callable[[], str | None] | str | None,
        clock: Callable[[], float] = time.time,
        cache: ResultCache | None = None,
    ) -> None:
        """Use `engine`, or the index at `path`, or one in memory; open nothing yet.

        `learn_dim` gives the length of vectors, `None` says that there will be none; `fingerprint` tells the embedder
        from others, and may be computed when it is needed; items expire by `clock`; `cache` hears of writes.

        Raises:
            ConfigError: if both an engine and a path are given.
        """
        if engine is not None and path is not None:
            raise ConfigError("engine and path: got both, allowed is one of them; an engine knows its own path")
        self._given = engine
        self._path = None if path is None else os.fspath(path)
        self._learn_dim = learn_dim
        self._fingerprint = fingerprint
        self._clock = clock
        self._cache = cache
        self._lock = threading.Lock()
        self._opened: Desk | None = None

    @property
    def opened(self) -> Desk | None:
        """The engine, if it is open."""
        return self._opened

    @property
    def may_prefetch(self) -> bool:
        """Whether the engine is, or will be, one that can bring partitions up."""
        return self._path is not None or isinstance(self._given, PrefetchesPartitions)

    def get(self) -> Desk:
        """Return the engine; the first call opens it and may have a text embedded, so never call it on a loop.

        Raises:
            EmbeddingError: if the embedder's answer is no vector.
            EmbedderMismatch: if the index holds vectors of another embedder.
            RetrievalError: if the index cannot be opened.
        """
        with self._lock:
            if self._opened is None:
                self._opened = desk_of(self._open())
                if self._cache is not None:
                    self._opened.add_cache(self._cache)
            return self._opened

    def close(self) -> None:
        """Close what was opened here; a later `get` opens it again.  Idempotent."""
        with self._lock:
            desk, self._opened = self._opened, None
        if desk is None:
            return
        desk.leave()
        if desk.engine is not self._given:
            desk.engine.close()
        if self._cache is not None:
            self._cache.clear()  # of what others write until it is opened again nobody tells

    def _open(self) -> VectorEngine:
        if self._given is not None:
            return self._given
        if self._path is None:
            from pancake_langgraph.retrieval.memory_engine import MemoryVectorEngine

            return MemoryVectorEngine(self._dim() or 1, clock=self._clock)
        from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
        from pancake_langgraph.retrieval.manifest import exists

        fingerprint = self._fingerprint() if callable(self._fingerprint) else self._fingerprint
        dim = self._dim()
        if dim is None and not exists(Path(self._path)):
            dim = 1  # nothing will be embedded, and yet an index has a length
        return DiskVectorEngine(self._path, dim=dim, fingerprint=fingerprint, clock=self._clock)

    def _dim(self) -> int | None:
        return None if self._learn_dim is None else self._learn_dim()
