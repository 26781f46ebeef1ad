"""`observe(saver)`: any checkpointer, watched.

For those who keep another saver: everything goes to it unchanged, and after each acknowledged write listeners are told
what `PancakeSaver` would tell them, without content hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, ChannelVersions, Checkpoint, CheckpointMetadata

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.checkpoint.core import place_of
from pancake_langgraph.checkpoint.delegating import DelegatingSaver
from pancake_langgraph.checkpoint.listeners import Listener, Listeners, SaverStatistics, Stored
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


class ObservedSaver(DelegatingSaver):
    """Delegates to another saver and tells of its writes.  Clones share the listeners."""

    def __init__(self, inner: BaseCheckpointSaver[Any]) -> None:
        """Watch `inner`, which others open and close."""
        super().__init__(inner)
        self._listeners = Listeners()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after each acknowledged write, where it was written; return what ends that.

        What a listener raises is counted, logged the first time, and goes no further.
        """
        return self._listeners.subscribe(listener)

    def statistics(self) -> SaverStatistics:
        """Return one snapshot, of this saver and all its clones."""
        return self._listeners.statistics()

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, then tell."""
        stored = super().put(config, checkpoint, metadata, new_versions)
        self._tell_put(config, checkpoint)
        return stored

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Delegate, then tell."""
        stored = await super().aput(config, checkpoint, metadata, new_versions)
        self._tell_put(config, checkpoint)
        return stored

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, then tell."""
        super().put_writes(config, writes, task_id, task_path)
        self._tell_writes(config, writes)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Delegate, then tell."""
        await super().aput_writes(config, writes, task_id, task_path)
        self._tell_writes(config, writes)

    def _tell_put(self, config: RunnableConfig, checkpoint: Checkpoint) -> None:
        thread_id, checkpoint_ns, _ = place_of(config)
        values = checkpoint["channel_values"]
        spot = Spot(checkpoint_ns, checkpoint["id"])
        self._listeners.tell(Stored(thread_id, spot, tuple(values), next_of_checkpoint(values)))

    def _tell_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]]) -> None:
        thread_id, checkpoint_ns, checkpoint_id = place_of(config)
        spot = Spot(checkpoint_ns, checkpoint_id or "")
        channels = tuple(channel for channel, _ in writes)
        self._listeners.tell(Stored(thread_id, spot, channels, next_of_writes(writes)))
