"""Keeps what was learnt about each graph in a folder, so that a new process does not start from nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast import Forecaster

logger = logging.getLogger(__name__)

#: Seconds between two writes of one graph while it runs; what is learnt is also written when the runtime closes.
SAVE_EVERY_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.5
MAX_FILES: Final = 256
MAX_BYTES: Final = 16 * 1024 * 1024
_FORMAT: Final = "pancake forecast"
_VERSION: Final = 1
_GRAPH_ID = re.compile(r"[0-9a-f]{8,64}\Z")


class ForecastFolder:
    """One JSON file per graph.  A file appears whole or not at all; at most 256, those unwritten for longest go.

    Its files name nodes, tools and fields of answers; they hold no text of a prompt or an answer.  Two processes that
    write the same graph do not add up: the last one wins.  Thread-safe.
    """

    def __init__(self, folder: Path) -> None:
        """Use `folder`; it is created with the first write."""
        self._folder = folder

    def read(self, graph_id: str) -> Mapping[str, Any] | None:
        """Return the snapshot of a graph; `None` when there is none.

        Raises:
            OSError: if the file cannot be read.
            ConfigError: if it is no whole file of this version.
        """
        path = self._path(graph_id)
        if path is None or not path.exists():
            return None
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"a stored forecast has over {MAX_BYTES} bytes; delete it, it is learnt again")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as exc:
            raise ConfigError("a stored forecast is no JSON; delete it, it is learnt again") from exc
        if not isinstance(stored, dict) or (stored.get("format"), stored.get("version")) != (_FORMAT, _VERSION):
            raise ConfigError(
                f"a stored forecast is not of version {_VERSION}, the only one allowed; delete it, it is learnt again"
            )
        snapshot = stored.get("snapshot")
        if stored.get("graph_id") != graph_id or not isinstance(snapshot, dict):
            raise ConfigError("a stored forecast is of another graph or has no snapshot; delete it, it is learnt again")
        return snapshot

    def write(self, graph_id: str, snapshot: Mapping[str, Any]) -> None:
        """Store the snapshot of a graph; graphs without a fingerprint are not stored.

        Raises:
            OSError: if that fails; what was stored before is then still there.
        """
        path = self._path(graph_id)
        if path is None:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "graph_id": graph_id, "snapshot": snapshot})
        beside = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.chmod(0o600)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        self._trim()

    def _path(self, graph_id: str) -> Path | None:
        return self._folder / f"{graph_id}.json" if _GRAPH_ID.match(graph_id) else None

    def _trim(self) -> None:
        """Delete the oldest files over the bound; another process may do the same at the same time."""
        found = [path for path in self._folder.glob("*.json") if _GRAPH_ID.match(path.stem)]
        if len(found) <= MAX_FILES:
            return
        ages: list[tuple[float, Path]] = []
        for path in found:
            with contextlib.suppress(OSError):
                ages.append((path.stat().st_mtime, path))
        for _, path in sorted(ages)[: len(found) - MAX_FILES]:
            path.unlink(missing_ok=True)


class Knowledge:
    """Loads what is stored about a graph once, and stores again what has been learnt since.

    `want` and `touch` are quick and may be called from any thread; `load` and `save` belong to the runtime's loop and
    leave the reading and writing to other threads.  A failure costs the stored knowledge only: it is counted, and said
    once.
    """

    def __init__(self, folder: ForecastFolder, forecaster: Forecaster) -> None:
        """Keep what `forecaster` learns in `folder`."""
        self.failures = 0
        self._folder = folder
        self._forecaster = forecaster
        self._lock = threading.Lock()
        self._wanted: dict[str, None] = {}
        self._loaded: set[str] = set()
        self._touched: set[str] = set()

    @classmethod
    def of(cls, folder: str | None, forecaster: Forecaster) -> Knowledge | None:
        """Keep what `forecaster` learns in the folder of that name; nothing where there is none."""
        return None if folder is None else cls(ForecastFolder(Path(folder).expanduser()), forecaster)

    def want(self, graph_id: str) -> None:
        """Load what is stored about a graph next time; once per graph."""
        with self._lock:
            if graph_id not in self._loaded:
                self._loaded.add(graph_id)
                self._wanted[graph_id] = None

    def touch(self, graph_id: str) -> None:
        """Say that something may have been learnt about a graph."""
        with self._lock:
            if graph_id in self._loaded:
                self._touched.add(graph_id)

    async def load(self) -> None:
        """Add what is stored about the graphs that are wanted to what is known."""
        with self._lock:
            wanted, self._wanted = self._wanted, {}
        for graph_id in wanted:
            await asyncio.to_thread(self._load, graph_id)

    async def save(self) -> None:
        """Store what was learnt about the graphs that ran since the last time."""
        with self._lock:
            touched, self._touched = sorted(self._touched - self._wanted.keys()), set()
        for graph_id in touched:
            await asyncio.to_thread(self._save, graph_id)

    async def keep(self) -> None:
        """Load what is stored as soon as a graph is attached, and store what is learnt every now and then."""
        saved_s = time.monotonic()
        while True:
            await self.load()
            await asyncio.sleep(_LOOK_EVERY_S)
            if time.monotonic() - saved_s >= SAVE_EVERY_S:
                await self.save()
                saved_s = time.monotonic()

    def _load(self, graph_id: str) -> None:
        try:
            snapshot = self._folder.read(graph_id)
            if snapshot is not None:
                self._forecaster.merge(snapshot)
        except (OSError, ConfigError) as exc:
            self._failed("read", exc)

    def _save(self, graph_id: str) -> None:
        try:
            self._folder.write(graph_id, self._forecaster.snapshot(graph_id))
        except (OSError, ValueError) as exc:
            self._failed("written", exc)

    def _failed(self, done: str, exc: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            reason = str(exc) if isinstance(exc, ConfigError) else type(exc).__name__
            logger.warning("a stored forecast could not be %s, it is learnt anew: %s", done, reason)
