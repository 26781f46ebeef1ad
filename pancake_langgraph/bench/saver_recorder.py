"""Times every call that a graph makes to its saver, whatever saver it is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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


@dataclass(frozen=True, slots=True)
class SaverCall:
    """One call: the turn it belongs to, counted from 1, and its wall time as the graph saw it."""

    operation: SaverOperation
    turn: int
    elapsed_s: float


class RecordingSaver(DelegatingSaver):
    """Hands every call on to another saver and keeps how long the calls of a run took.

    Set `turn` before each turn.  Clones made by `with_allowlist` share the records.  Only what a run calls is timed;
    listing and deleting are not.
    """

    def __init__(self, inner: BaseCheckpointSaver[Any]) -> None:
        """Wrap `inner`."""
        super().__init__(inner)
        self.calls: list[SaverCall] = []
        self.turn = 0

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

    @contextmanager
    def _timed(self, operation: SaverOperation) -> Iterator[None]:
        turn, started_s = self.turn, time.perf_counter()
        yield
        self.calls.append(SaverCall(operation, turn, time.perf_counter() - started_s))
