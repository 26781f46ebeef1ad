"""`PancakeSaver`: a LangGraph checkpointer on SQLite or Redis, for `invoke` and `ainvoke` alike."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
)
from langgraph.checkpoint.base.id import uuid6

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.checkpoint import overview, retention, transfer
from pancake_langgraph.checkpoint.codec import Codec, TypeName
from pancake_langgraph.checkpoint.core import Core
from pancake_langgraph.checkpoint.foreign import adopt_threads
from pancake_langgraph.checkpoint.foreign_sources import open_source
from pancake_langgraph.checkpoint.listeners import Listener, SaverStatistics
from pancake_langgraph.checkpoint.observed import ObservedSaver, observe
from pancake_langgraph.checkpoint.registry import create_store
from pancake_langgraph.checkpoint.seal import Seal

__all__ = ["ObservedSaver", "PancakeSaver", "SaverStatistics", "observe"]

_T = TypeVar("_T")
#: Threads that run store calls for event loops; SQLite needs one at a time anyway.
_WORKERS = 4
_PAGE = 16


def _ignore(thread_id: str) -> None:
    """Say nothing about a thread that is done."""


class PancakeSaver(BaseCheckpointSaver[Any]):
    """Keeps the state of threads, each message once, strictly typed.

        with PancakeSaver("app.db") as saver:
            graph = builder.compile(checkpointer=saver)

    Sync and async methods may be mixed freely, from any number of threads and event loops.  The constructor opens
    nothing; the first call does.  Encoding happens in the caller's thread, so that what is stored is the state as it
    was handed over; async methods wait for the store in a thread of the saver, never on the loop.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] = ":memory:",
        *,
        allow: Iterable[type | TypeName] = (),
        keys: Sequence[bytes] = (),
        ttl_s: float | None = None,
        refresh_ttl_on_read: bool = False,
    ) -> None:
        """Describe a saver.

        Args:
            where: A SQLite file, made when missing; `:memory:`; or `redis://…`, `rediss://…`, `unix://…` of a Redis
                (6 or later) or Valkey.
            allow: Classes of the app that state may hold (pydantic models, dataclasses, enums, named tuples), as
                classes or as (module, qualified name).  Messages and LangGraph's own types are known.
            keys: Keys of 32 bytes for encryption at rest, newest first; the first encrypts, all decrypt.
            ttl_s: Seconds after its last write at which a whole thread expires.
            refresh_ttl_on_read: Whether reading a thread counts as well.

        Raises:
            ConfigError: if a setting is not usable.
        """
        super().__init__()
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"ttl_s: got {ttl_s}, allowed are seconds above 0, or None for never")
        self._codec = Codec.build(allow)
        self._core = Core(create_store(os.fspath(where)), Seal(keys), ttl_s=ttl_s, refresh_on_read=refresh_ttl_on_read)
        self._workers = _Workers()

    # -- life -----------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Open the store and check or make its schema; otherwise the first call does.  Idempotent."""
        self._core.store.open()

    async def asetup(self) -> None:
        """Do what `setup` does."""
        await self._run(self.setup)

    def close(self) -> None:
        """Finish what is under way and release everything.  Idempotent; a later call opens the store again."""
        self._workers.stop()
        self._core.store.close()

    async def aclose(self) -> None:
        """Do what `close` does."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> PancakeSaver:
        """Open the store."""
        self.setup()
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    async def __aenter__(self) -> PancakeSaver:
        """Open the store."""
        await self.asetup()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> PancakeSaver:
        """Return a clone that knows more types, named as LangGraph does; it shares everything else with this one."""
        codec = self._codec.allowing_listed([(str(module), str(name)) for module, name, *_ in extra_allowlist])
        if codec is self._codec:
            return self
        clone = copy.copy(self)
        clone._codec = codec
        return clone

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` after each acknowledged write, in the writing thread; return what ends that.

        What a listener raises is counted, logged the first time, and goes no further.
        """
        return self._core.listeners.subscribe(listener)

    def statistics(self) -> SaverStatistics:
        """Return one snapshot, of this saver and all its clones."""
        return self._core.listeners.statistics()

    def get_next_version(self, current: Any, channel: None = None) -> Any:
        """Return the version after `current`: integers count up; strings, as servers use, keep their form."""
        if isinstance(current, str):
            head, _, tail = current.partition(".")
            return f"{int(head) + 1:0{len(head)}d}" + (f".{tail}" if tail else "")
        return 1 if current is None else int(current) + 1

    # -- sync -----------------------------------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint; when this returns it is safe.

        Raises:
            StateTypeError: if a value may not be stored; nothing was.
            ThreadDeleted: if the thread was deleted while its run went on.
            StoreUnavailable: if the store does not take it.
        """
        plan = self._core.plan_put(self._codec, config, checkpoint, metadata, new_versions)
        return self._core.put(self._codec, plan)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store the pending writes of one task.  Raises as `put` does."""
        self._core.put_writes(self._core.plan_writes(self._codec, config, writes, task_id, task_path))

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint that `config` names, or the latest; `None` if there is none.

        Raises:
            CorruptCheckpoint: if it is there but cannot be read whole.
            StateTypeError: if it holds a type that is not allowed.
        """
        return self._core.read(self._codec, config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Iterate over checkpoints, newest first within a thread; writing goes on while the iteration is paused.

        Without `checkpoint_ns` in `config` all namespaces are meant, with an empty one the root only.  A limit of 0
        gives none.  `filter` compares metadata for equality, by any key.
        """
        return self._core.find(self._codec, config, filter=filter, before=before, limit=limit)

    def delete_thread(self, thread_id: str) -> None:
        """Remove everything of a thread; a run that still writes to it gets `ThreadDeleted`."""
        self._core.store.delete_thread(str(thread_id), deletion_id=str(uuid6()))
        self._core.memory.forget(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints of runs, by `run_id` in their metadata; other checkpoints keep their whole state."""
        retention.delete_runs(self._core, self._codec, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy a whole thread.

        Raises:
            ConfigError: if the target holds something already.
        """
        retention.copy_thread(self._core, str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Keep only the latest checkpoint per namespace (`keep_latest`), or nothing (`delete`).

        Raises:
            ConfigError: if the strategy is another one.
        """
        if strategy not in retention.STRATEGIES:
            raise ConfigError(f"strategy: got {strategy!r}, allowed are {', '.join(retention.STRATEGIES)}")
        for thread_id in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread_id)
            else:
                retention.prune_to_latest(self._core, self._codec, str(thread_id))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Return what incremental channels are rebuilt from.

        Raises:
            CorruptCheckpoint: if a checkpoint that is needed for it is missing.
        """
        return retention.delta_history(self._core, self._codec, config, channels)

    def threads(self) -> Iterator[str]:
        """Iterate over the ids of all threads."""
        return self._core.store.threads()

    def sizes(self, thread_id: str) -> Mapping[str, int]:
        """Return a thread's stored bytes by channel."""
        return retention.sizes(self._core, str(thread_id))

    def info(self, thread_id: str) -> overview.ThreadInfo | None:
        """Return what a thread holds, at a glance; `None` if it holds nothing."""
        return overview.thread_info(self._core, self._codec, str(thread_id))

    def history(self, thread_id: str) -> Iterator[overview.HistoryItem]:
        """Iterate over a thread's checkpoints with their sizes, newest first; values are not decoded."""
        return overview.thread_history(self._core, self._codec, str(thread_id))

    def export_threads(
        self,
        path: str | os.PathLike[str],
        thread_ids: Iterable[str] | None = None,
        *,
        overwrite: bool = False,
        on_thread: transfer.OnThread = _ignore,
    ) -> Sequence[str]:
        """Write threads (all without `thread_ids`) to a file, in plain, readable by its owner only; return their ids.

        Raises:
            ConfigError: if the file exists, or a thread holds nothing.
        """
        return transfer.export_threads(self._core, Path(path), thread_ids, overwrite=overwrite, on_thread=on_thread)

    def import_threads(
        self,
        path: str | os.PathLike[str],
        thread_ids: Iterable[str] | None = None,
        *,
        on_thread: transfer.OnThread = _ignore,
    ) -> Sequence[str]:
        """Take in threads that `export_threads` wrote, all of them checked first; return their ids.

        Raises:
            ConfigError: if a thread exists already, or is not in the file.
            CorruptCheckpoint: if the file is damaged; nothing was stored.
        """
        return transfer.import_threads(self._core, Path(path), thread_ids, on_thread=on_thread)

    def import_from(
        self,
        other: BaseCheckpointSaver[Any] | str | os.PathLike[str],
        thread_ids: Iterable[str] | None = None,
        *,
        on_thread: transfer.OnThread = _ignore,
    ) -> Sequence[str]:
        """Bring threads over from another saver, each at once or not at all; return their ids.

        `other` is a LangGraph checkpointer, a file of SqliteSaver, or the URL of a database of PostgresSaver
        (`postgresql://…`) or langgraph-checkpoint-redis (`redis://…`).

        Raises:
            ConfigError: if a thread exists here already, or a package is missing.
            StateTypeError: if a thread holds a type that is not allowed; it was not stored.
        """
        with open_source(other, self._codec) as source:
            return adopt_threads(self._core, self._codec, source, thread_ids, on_thread=on_thread)

    # -- async ----------------------------------------------------------------------------------------------------

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Do what `put` does."""
        plan = self._core.plan_put(self._codec, config, checkpoint, metadata, new_versions)
        return await self._run(self._core.put, self._codec, plan)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Do what `put_writes` does."""
        await self._run(self._core.put_writes, self._core.plan_writes(self._codec, config, writes, task_id, task_path))

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Do what `get_tuple` does."""
        return await self._run(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Do what `list` does."""
        found = self._core.find(self._codec, config, filter=filter, before=before, limit=limit)
        while page := await self._run(_take, found, _PAGE):
            for item in page:
                yield item

    async def adelete_thread(self, thread_id: str) -> None:
        """Do what `delete_thread` does."""
        await self._run(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Do what `delete_for_runs` does."""
        await self._run(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Do what `copy_thread` does."""
        await self._run(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Do what `prune` does."""
        await self._run(functools.partial(self.prune, thread_ids, strategy=strategy))

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """Do what `get_delta_channel_history` does."""
        return await self._run(functools.partial(self.get_delta_channel_history, config=config, channels=channels))

    async def _run(self, call: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers.executor(), call, *args)


class _Workers:
    """The threads behind the async methods, made when first needed, shared by all clones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0

    def executor(self) -> ThreadPoolExecutor:
        """Return the executor; a forked child gets its own."""
        with self._lock:
            if self._executor is None or self._pid != os.getpid():
                self._executor = ThreadPoolExecutor(_WORKERS, thread_name_prefix="pancake-saver")
                self._pid = os.getpid()
            return self._executor

    def stop(self) -> None:
        """Finish what is queued."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._pid == os.getpid():
            executor.shutdown(wait=True)


def _take(items: Iterator[_T], count: int) -> list[_T]:
    return [item for _, item in zip(range(count), items, strict=False)]
