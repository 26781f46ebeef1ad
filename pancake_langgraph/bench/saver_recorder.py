"""Times every call that a graph makes to its saver, whatever saver it is, and beside it a write that never changes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)

from pancake_langgraph.checkpoint.delegating import DelegatingSaver


class SaverOperation(StrEnum):
    """What is timed; the values are the names of the metrics."""

    PUT = "put_s"
    PUT_WRITES = "put_writes_s"
    GET_TUPLE = "get_tuple_s"


#: The name of the bare write among the figures for flatness.
BARE_WRITE: Final = "bare_write_s"
#: In one of so many turns a bare write is timed where a put would be.
BARE_EVERY_TURNS: Final = 5
_BARE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class SaverCall:
    """One call: the turn it belongs to, counted from 1, and its wall time as the graph saw it."""

    operation: SaverOperation
    turn: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class BareWrite:
    """One bare write: the turn it was timed in, and its wall time."""

    turn: int
    elapsed_s: float


@contextmanager
def bare_writer(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that commits one row of 1 KB to a SQLite file of its own, with nothing of a saver around it.

    What it has to do never changes.  When it takes longer late in a conversation, the surroundings do that: the graph
    has handled the whole history just before, and its data are gone from the processor's caches.
    """
    connection = sqlite3.connect(folder / "bare.db", isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE bare (number INTEGER PRIMARY KEY, body BLOB)")
        body = bytes(_BARE_BYTES)

        def write() -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO bare (body) VALUES (?)", (body,))
            connection.execute("COMMIT")

        yield write
    finally:
        connection.close()


class RecordingSaver(DelegatingSaver):
    """Hands every call on to another saver and keeps how long the calls of a run took.

    Set `turn` before each turn.  Clones made by `with_allowlist` share the records.  Only what a run calls is timed;
    listing and deleting are not.  With a `bare_write`, that is timed in place of the puts of every fifth turn.
    """

    def __init__(self, inner: BaseCheckpointSaver[Any], bare_write: Callable[[], None] | None = None) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self.calls: list[SaverCall] = []
        self.bare_writes: list[BareWrite] = []
        self.turn = 0
        self._bare_write = bare_write

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Delegate, timed."""
        with self._timed(SaverOperation.GET_TUPLE):
            return super().get_tuple(config)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Delegate, timed."""
        with self._timed(SaverOperation.GET_TUPLE):
            return await super().aget_tuple(config)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, timed."""
        if self._wrote_bare():
            return super().put(config, checkpoint, metadata, new_versions)
        with self._timed(SaverOperation.PUT):
            return super().put(config, checkpoint, metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, timed."""
        if self._wrote_bare():
            return await super().aput(config, checkpoint, metadata, new_versions)
        with self._timed(SaverOperation.PUT):
            return await super().aput(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, timed."""
        with self._timed(SaverOperation.PUT_WRITES):
            super().put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, timed."""
        with self._timed(SaverOperation.PUT_WRITES):
            await super().aput_writes(config, writes, task_id, task_path)

    def _wrote_bare(self) -> bool:
        """Time the bare write if this turn is for it; the put after it finds warm caches and does not count then."""
        if self._bare_write is None or self.turn % BARE_EVERY_TURNS:
            return False
        started_s = time.perf_counter()
        self._bare_write()
        self.bare_writes.append(BareWrite(self.turn, time.perf_counter() - started_s))
        return True

    @contextmanager
    def _timed(self, operation: SaverOperation) -> Iterator[None]:
        turn, started_s = self.turn, time.perf_counter()
        yield
        self.calls.append(SaverCall(operation, turn, time.perf_counter() - started_s))
