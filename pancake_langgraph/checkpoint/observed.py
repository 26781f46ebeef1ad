"""`observe(saver)`: any checkpointer, watched.

For those who keep another saver: everything goes to it unchanged, and after each acknowledged write listeners are told
what `PancakeSaver` would tell them, without content hashes.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.checkpoint.core import Listener, Stored, place_of, tell
from pancake_langgraph.checkpoint.routes import next_of_checkpoint, next_of_writes
from pancake_langgraph.checkpoint.rows import Spot


def observe(saver: BaseCheckpointSaver[Any]) -> ObservedSaver:
    """Return a saver that does what `saver` does and tells listeners (an attached runtime is one).

    Raises:
        ConfigError: if `saver` is not a LangGraph checkpointer.
    """
    if not isinstance(saver, BaseCheckpointSaver):
        raise ConfigError(f"observe needs a checkpointer (a BaseCheckpointSaver), got {type(saver).__name__}")
    return ObservedSaver(saver)


class ObservedSaver(BaseCheckpointSaver[Any]):
    """Delegates to another saver.  As thread- and loop-safe as that one."""

    def __init__(self, inner: BaseCheckpointSaver[Any]) -> None:
        """Watch `inner`, which others open and close."""
        super().__init__(serde=inner.serde)
        self.inner = inner
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after each acknowledged write, where it was written; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> ObservedSaver:
        """Return a clone around the inner saver's clone; listeners are shared."""
        clone = copy.copy(self)
        clone.inner = self.inner.with_allowlist(extra_allowlist)
        clone.serde = clone.inner.serde
        return clone

    @property
    def config_specs(self) -> list[Any]:
        """Return the inner saver's."""
        return self.inner.config_specs

    def get_next_version(self, current: Any, channel: None = None) -> Any:
        """Return the inner saver's next version."""
        return self.inner.get_next_version(current, channel)

    def _tell_put(self, config: RunnableConfig, checkpoint: Checkpoint) -> None:
        thread_id, checkpoint_ns, _ = place_of(config)
        values = checkpoint["channel_values"]
        spot = Spot(checkpoint_ns, checkpoint["id"])
        tell(self._listeners, Stored(thread_id, spot, tuple(values), next_of_checkpoint(values)))

    def _tell_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]]) -> None:
        thread_id, checkpoint_ns, checkpoint_id = place_of(config)
        spot = Spot(checkpoint_ns, checkpoint_id or "")
        channels = tuple(channel for channel, _ in writes)
        tell(self._listeners, Stored(thread_id, spot, channels, next_of_writes(writes)))

    # -- delegation -----------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Delegate."""
        return self.inner.get_tuple(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Delegate."""
        return self.inner.list(config, filter=filter, before=before, limit=limit)

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, then tell."""
        stored = self.inner.put(config, checkpoint, metadata, new_versions)
        self._tell_put(config, checkpoint)
        return stored

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, then tell."""
        self.inner.put_writes(config, writes, task_id, task_path)
        self._tell_writes(config, writes)

    def delete_thread(self, thread_id: str) -> None:
        """Delegate."""
        self.inner.delete_thread(thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delegate."""
        self.inner.delete_for_runs(run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Delegate."""
        self.inner.copy_thread(source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delegate."""
        self.inner.prune(thread_ids, strategy=strategy)

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Delegate."""
        return self.inner.get_delta_channel_history(config=config, channels=channels)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Delegate."""
        return await self.inner.aget_tuple(config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Delegate."""
        async for item in self.inner.alist(config, filter=filter, before=before, limit=limit):
            yield item

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, then tell."""
        stored = await self.inner.aput(config, checkpoint, metadata, new_versions)
        self._tell_put(config, checkpoint)
        return stored

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, then tell."""
        await self.inner.aput_writes(config, writes, task_id, task_path)
        self._tell_writes(config, writes)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delegate."""
        await self.inner.adelete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delegate."""
        await self.inner.adelete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Delegate."""
        await self.inner.acopy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Delegate."""
        await self.inner.aprune(thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Delegate."""
        return await self.inner.aget_delta_channel_history(config=config, channels=channels)
