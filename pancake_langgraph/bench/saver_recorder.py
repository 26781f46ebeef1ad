"""Times every call that a graph makes to its saver, whatever saver it is."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
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


class RecordingSaver(BaseCheckpointSaver[Any]):
    """Hands every call of a run on to another saver and keeps how long it took.

    Set `turn` before each turn.  Clones made by `with_allowlist` share the records.  Only what a run calls is here;
    listing and deleting are not.
    """

    def __init__(self, inner: BaseCheckpointSaver[Any], calls: list[SaverCall] | None = None) -> None:
        """Wrap `inner`; `calls` is where records go."""
        super().__init__(serde=inner.serde)
        self.calls: list[SaverCall] = [] if calls is None else calls
        self.turn = 0
        self._inner = inner

    @property
    def config_specs(self) -> list[Any]:
        """See the wrapped saver."""
        return self._inner.config_specs

    def get_next_version(self, current: Any, channel: None) -> Any:
        """See the wrapped saver."""
        return self._inner.get_next_version(current, channel)

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> RecordingSaver:
        """Return a recorder of the wrapped saver's clone."""
        clone = RecordingSaver(self._inner.with_allowlist(extra_allowlist), self.calls)
        clone.turn = self.turn
        return clone

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See the wrapped saver."""
        with self._timed(SaverOperation.GET_TUPLE):
            return self._inner.get_tuple(config)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """See the wrapped saver."""
        with self._timed(SaverOperation.GET_TUPLE):
            return await self._inner.aget_tuple(config)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See the wrapped saver."""
        with self._timed(SaverOperation.PUT):
            return self._inner.put(config, checkpoint, metadata, new_versions)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """See the wrapped saver."""
        with self._timed(SaverOperation.PUT):
            return await self._inner.aput(config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See the wrapped saver."""
        with self._timed(SaverOperation.PUT_WRITES):
            self._inner.put_writes(config, writes, task_id, task_path)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """See the wrapped saver."""
        with self._timed(SaverOperation.PUT_WRITES):
            await self._inner.aput_writes(config, writes, task_id, task_path)

    @contextmanager
    def _timed(self, operation: SaverOperation) -> Iterator[None]:
        turn, started_s = self.turn, time.perf_counter()
        yield
        self.calls.append(SaverCall(operation, turn, time.perf_counter() - started_s))
