"""Opens an engine when it is first used: by then it is known how long the embedder's vectors are."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pancake_langgraph._errors import ConfigError, IndexLocked
from pancake_langgraph.retrieval.base import KnowsEmbedder, VectorEngine
from pancake_langgraph.retrieval.desk import Desk, desk_of
from pancake_langgraph.retrieval.device_budget import DeviceBudget
from pancake_langgraph.retrieval.dropped import Ending, wait_for_dropped
from pancake_langgraph.retrieval.extra import require_retrieval
from pancake_langgraph.retrieval.partitions import PrefetchesPartitions
from pancake_langgraph.retrieval.result_cache import ResultCache

OnCorrupt = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class Access:
    """How the index at a path is opened: beside a writer, and with or without its damaged parts."""

    read_only: bool = False
    on_corrupt: OnCorrupt = "raise"


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
        access: Access = Access(),
        clock: Callable[[], float] = time.time,
        cache: ResultCache | None = None,
        before: Callable[[], None] = lambda: None,
        device_budget: DeviceBudget | None = None,
    ) -> None:
        """Use `engine`, or the index at `path` as `access` says, or one in memory; open nothing yet.

        `learn_dim` gives the length of vectors, `None` says that there will be none; `fingerprint` tells the embedder
        from others, and may be computed when it is needed; items expire by `clock`; `cache` hears of writes;
        `before` is called before the engine is made, `device_budget` counts what that puts on devices.

        Raises:
            ConfigError: if both an engine and a path are given, the engine is none, or `access` is not usable.
        """
        if engine is not None and not isinstance(engine, VectorEngine):
            raise ConfigError(
                f"engine: got {type(engine).__name__}, allowed is a VectorEngine such as DiskVectorEngine"
            )
        if engine is not None and path is not None:
            raise ConfigError("engine and path: got both, allowed is one of them; an engine knows its own path")
        _check_access(access, path)
        self._access = access
        self._given = engine
        self._path = None if path is None else os.fspath(path)
        self._learn_dim = learn_dim
        self._fingerprint = fingerprint
        self._clock = clock
        self._cache = cache
        self._before = before
        self._device_budget = device_budget
        self._lock = threading.Lock()
        self._opened: Desk | None = None
        #: Of the store whose engine this is.
        self.ending = Ending()

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
            ConfigError: if a package is not installed.
            DeviceFull: if the embedder's weights pass a limit of the device budget.
            RetrievalError: if the index cannot be opened.
        """
        with self._lock:
            if self._opened is None:
                self._before()
                engine = self._open()
                self._check_embedder(engine)
                self._opened = desk_of(engine)
                if self._cache is not None:
                    self._opened.add_cache(self._cache)
            return self._opened

    def close(self) -> None:
        """Close what was opened here; a later `get` opens it again, and waits for the end of this.  Idempotent."""
        with self._lock:
            desk, self._opened = self._opened, None
            if desk is None:
                return
            try:
                desk.leave()
                if desk.engine is not self._given:
                    desk.engine.close()
            finally:
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

        require_retrieval()
        fingerprint = self._named_embedder()
        dim = self._dim()
        if dim is None and not self._access.read_only and not exists(Path(self._path)):
            dim = 1  # nothing will be embedded, and yet an index has a length
        path, access = self._path, self._access

        def open_index() -> VectorEngine:
            wait_for_dropped(self.ending)
            return DiskVectorEngine(
                path,
                dim=dim,
                fingerprint=fingerprint,
                read_only=access.read_only,
                on_corrupt=access.on_corrupt,
                clock=self._clock,
                device_budget=self._device_budget,
            )

        try:
            return open_index()
        except IndexLocked:
            gc.collect()  # the other one may be a store that nobody can reach any more, held by a cycle: a graph, say
            return open_index()

    def _check_embedder(self, engine: VectorEngine) -> None:
        """Hold an engine that was given to one embedder; what is opened here has been told when it was opened."""
        if engine is self._given and isinstance(engine, KnowsEmbedder):
            fingerprint = self._named_embedder()
            if fingerprint is not None:
                engine.name_embedder(fingerprint)

    def _named_embedder(self) -> str | None:
        return self._fingerprint() if callable(self._fingerprint) else self._fingerprint

    def _dim(self) -> int | None:
        return None if self._learn_dim is None else self._learn_dim()


def _check_access(access: Access, path: str | os.PathLike[str] | None) -> None:
    if access.on_corrupt not in get_args(OnCorrupt):
        raise ConfigError(f"on_corrupt: got {access.on_corrupt!r}, allowed are {', '.join(get_args(OnCorrupt))}")
    if not isinstance(access.read_only, bool):
        raise ConfigError(f"read_only: got {access.read_only!r}, allowed are True and False")
    if path is None and access != Access():
        raise ConfigError(
            "read_only and on_corrupt: got one of them without a path, allowed are both beside `path=`; an engine that "
            "is given was opened with its own"
        )
