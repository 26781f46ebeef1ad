"""What the saver does, without input and output of its own: plans writes, reads tuples, decides what may go.

One core is shared by all clones of a saver.  `plan_put` and `plan_writes` only encode, and run in the caller's thread,
so that what is stored is the state as it was handed over; everything else talks to the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import ormsgpack
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_metadata,
)

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, ThreadDeleted
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import ElementSink, Ref
from pancake_langgraph.checkpoint.listeners import Listeners, Stored
from pancake_langgraph.checkpoint.memory import Latest, Memory
from pancake_langgraph.checkpoint.record import (
    Record,
    decoded,
    place_of_element,
    place_of_row,
    place_of_write,
    places_of_elements,
)
from pancake_langgraph.checkpoint.routes import next_of_checkpoint, next_of_writes
from pancake_langgraph.checkpoint.rows import CheckpointRow, PutCheckpoint, PutWrites, Spot, WriteRow
from pancake_langgraph.checkpoint.seal import Seal
from pancake_langgraph.checkpoint.store import StaleNeed, Store
from pancake_langgraph.checkpoint.values import latest_of, open_values, ref_of_value, stored_value

#: Writes between two looks for threads whose time has come.
_SWEEP_EVERY: Final = 256
_PAGE: Final = 32


@dataclass(frozen=True, slots=True)
class PutPlan:
    """An encoded checkpoint, what to remember once it is stored, and the inputs, should it have to be encoded anew."""

    put: PutCheckpoint
    latest: Latest
    next_nodes: tuple[str, ...]
    inputs: tuple[RunnableConfig, Checkpoint, CheckpointMetadata, ChannelVersions]


@dataclass(frozen=True, slots=True)
class WritesPlan:
    """Encoded pending writes, and the nodes they lead to."""

    put: PutWrites
    next_nodes: tuple[str, ...]


class Core:
    """Thread-safe.  Owns store, seal and memory; the codec comes with each call, since clones differ in it."""

    def __init__(self, store: Store, seal: Seal, *, ttl_s: float | None, refresh_on_read: bool) -> None:
        """Compose; nothing is opened."""
        self.store = store
        self.seal = seal
        self._ttl_s = ttl_s
        self._refresh_on_read = refresh_on_read
        self.memory = Memory()
        self.listeners = Listeners()
        self._lock = threading.Lock()
        self._writes = 0

    # -- writing --------------------------------------------------------------------------------------------------

    def plan_put(
        self,
        codec: Codec,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
        *,
        remembered: bool = True,
    ) -> PutPlan:
        """Encode one checkpoint.

        Raises:
            StateTypeError: if a value may not be stored.
            ConfigError: if the config names no thread.
        """
        thread_id, checkpoint_ns, parent_id = place_of(config)
        spot = Spot(checkpoint_ns, checkpoint["id"])
        latest = self.memory.get(thread_id, checkpoint_ns) if remembered else None
        sink = ElementSink(self.seal.digest)
        channels = {}
        for channel, value in checkpoint["channel_values"].items():
            version = checkpoint["channel_versions"].get(channel)
            known = latest.channels.get(channel) if latest is not None else None
            if (
                latest is not None
                and known is not None
                and channel not in new_versions
                and latest.spot.checkpoint_id == parent_id
                and known.version == version
            ):
                channels[channel] = known  # by LangGraph's contract a channel changes only with its version
            else:
                channels[channel] = stored_value(codec, sink, channel, value, version, known)
        record = Record(
            codec.encode({k: v for k, v in checkpoint.items() if k != "channel_values"}, channel="(checkpoint)"),
            {channel: known.ref for channel, known in channels.items()},
            codec.encode(dict(get_checkpoint_metadata(config, metadata)), channel="(metadata)"),
        )
        row = CheckpointRow(spot, parent_id, str(metadata.get("run_id") or _run_id(config)), b"")
        row = replace(row, body=self.seal.seal(record.packed(), place_of_row(thread_id, row)))
        put = PutCheckpoint(
            thread_id, row, self._sealed(thread_id, sink), needs=None if latest is None else latest.spot
        )
        next_nodes = next_of_checkpoint(checkpoint["channel_values"])
        return PutPlan(put, Latest(spot, channels), next_nodes, (config, checkpoint, metadata, new_versions))

    def put(self, codec: Codec, plan: PutPlan) -> RunnableConfig:
        """Store a planned checkpoint; return its config.

        Raises:
            ThreadDeleted: if the thread was deleted while the run went on.
            StoreUnavailable: if it could not be stored.
        """
        thread_id = plan.put.thread_id
        try:
            try:
                self.store.put_checkpoint(plan.put, expires_at_s=self.expires_at_s())
            except StaleNeed:  # what was remembered has been pruned or deleted elsewhere
                self.memory.forget(thread_id)
                plan = self.plan_put(codec, *plan.inputs, remembered=False)
                self.store.put_checkpoint(plan.put, expires_at_s=self.expires_at_s())
        except ThreadDeleted:
            self.memory.forget(thread_id)
            raise
        self.memory.put(thread_id, plan.latest)
        spot = plan.put.row.spot
        latest = plan.latest
        self.listeners.tell(Stored(thread_id, spot, tuple(latest.channels), plan.next_nodes, latest))
        self._sweep_sometimes()
        return config_of(thread_id, spot)

    def plan_writes(
        self, codec: Codec, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str
    ) -> WritesPlan:
        """Encode the pending writes of one task.

        Raises:
            StateTypeError: if a value may not be stored.
            ConfigError: if the config names no thread or no checkpoint.
        """
        thread_id, checkpoint_ns, checkpoint_id = place_of(config)
        if checkpoint_id is None:
            raise ConfigError("put_writes: the config has no checkpoint_id; pass the one that `put` returned")
        sink = ElementSink(self.seal.digest)
        rows = []
        for position, (channel, value) in enumerate(writes):
            ref = ref_of_value(codec, sink, channel, value)
            idx = WRITES_IDX_MAP.get(channel, position)
            row = WriteRow(Spot(checkpoint_ns, checkpoint_id), task_path, task_id, idx, channel, b"")
            body = self.seal.seal(ormsgpack.packb(ref.packed()), place_of_write(thread_id, row))
            rows.append(replace(row, body=body))
        return WritesPlan(PutWrites(thread_id, tuple(rows), self._sealed(thread_id, sink)), next_of_writes(writes))

    def put_writes(self, plan: WritesPlan) -> None:
        """Store planned writes."""
        put = plan.put
        if not put.rows:
            return
        self.store.put_writes(put, expires_at_s=self.expires_at_s())
        channels = tuple(row.channel for row in put.rows)
        self.listeners.tell(Stored(put.thread_id, put.rows[0].spot, channels, plan.next_nodes))
        self._sweep_sometimes()

    def _sealed(self, thread_id: str, sink: ElementSink) -> Mapping[bytes, bytes]:
        place = places_of_elements(thread_id)
        return {digest: self.seal.seal(plain, place(digest)) for digest, plain in sink.plain.items()}

    def expires_at_s(self) -> float | None:
        """Return when a thread written now expires, Unix time; `None` for never."""
        return None if self._ttl_s is None else time.time() + self._ttl_s

    def _sweep_sometimes(self) -> None:
        with self._lock:
            self._writes += 1
            is_due = self._writes % _SWEEP_EVERY == 1  # without a time to live too: deletions are forgotten by it
        if is_due:
            self.store.expire(now_s=time.time())

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, codec: Codec, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint a config names, or its namespace's latest; `None` if there is none.

        Raises:
            CorruptCheckpoint: if it is there but cannot be read whole.
            StateTypeError: if it holds a type that is not allowed.
        """
        thread_id, checkpoint_ns, checkpoint_id = place_of(config)
        for _ in range(2):  # the latest may be taken out while it is read, and another one be the latest then
            row = self.store.get_checkpoint(thread_id, checkpoint_ns, checkpoint_id)
            if row is None or row.is_hidden:
                return None
            found = self._whole(codec, thread_id, row, is_latest=checkpoint_id is None)
            if found is not None:
                break
        else:
            return None
        if self._refresh_on_read and self._ttl_s is not None:
            self.store.touch(thread_id, expires_at_s=time.time() + self._ttl_s)
        return found

    def find(
        self,
        codec: Codec,
        config: RunnableConfig | None,
        *,
        filter: Mapping[str, Any] | None = None,  # noqa: A002 - LangGraph's name
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Iterate over checkpoints, newest first within a thread; no lock is held between two of them.

        A config without `checkpoint_ns` means all namespaces, an empty one the root only.  Without a config all
        threads are read, one after the other.

        Raises:
            ConfigError: if `limit` is negative.
        """
        if limit is not None and limit < 0:
            raise ConfigError(f"limit: got {limit}, allowed are 0 and more")
        left = limit
        where = (config or {}).get("configurable") or {}
        threads = self.store.threads() if where.get("thread_id") is None else iter((str(where["thread_id"]),))
        before_id = ((before or {}).get("configurable") or {}).get("checkpoint_id")
        for thread_id in threads if left != 0 else ():
            for row in self._rows(thread_id, where, before_id):
                metadata = self._metadata(codec, thread_id, row)
                if any(metadata.get(key) != value for key, value in (filter or {}).items()):
                    continue
                found = self._whole(codec, thread_id, row, is_latest=False)
                if found is None:
                    continue
                yield found
                if left is not None:
                    left -= 1
                    if left == 0:
                        return

    def _rows(self, thread_id: str, where: Mapping[str, Any], before_id: str | None) -> Iterator[CheckpointRow]:
        checkpoint_ns, exact = where.get("checkpoint_ns"), where.get("checkpoint_id")
        if exact is not None:
            row = self.store.get_checkpoint(thread_id, checkpoint_ns or "", exact)
            if row is not None and not row.is_hidden and (before_id is None or exact < before_id):
                yield row
            return
        while True:
            page = list(self.store.list_checkpoints(thread_id, checkpoint_ns, before_id=before_id, limit=_PAGE))
            is_full = len(page) == _PAGE
            if is_full:  # namespaces may share an id: none of them is split from the others by a page's end
                edge = page[-1].spot.checkpoint_id
                page = [row for row in page if row.spot.checkpoint_id != edge] or page
            yield from page
            if not is_full:
                return
            before_id = page[-1].spot.checkpoint_id

    def record(self, thread_id: str, row: CheckpointRow) -> Record:
        """Open one row's body."""
        what = f"thread {thread_id!r}, checkpoint {row.spot.checkpoint_id}"
        return Record.unpacked(self.seal.open(row.body, place_of_row(thread_id, row), what=what))

    def ref_of(self, thread_id: str, write: WriteRow) -> Ref:
        """Open one write's body."""
        what = f"thread {thread_id!r}, writes of checkpoint {write.spot.checkpoint_id}"
        body = self.seal.open(write.body, place_of_write(thread_id, write), what=what)
        try:
            return Ref.unpacked(ormsgpack.unpackb(body))
        except ormsgpack.MsgpackDecodeError as exc:
            raise CorruptCheckpoint(f"{what}: damaged; restore the store from a copy") from exc

    def _metadata(self, codec: Codec, thread_id: str, row: CheckpointRow) -> dict[str, Any]:
        return decoded(codec, self.record(thread_id, row).metadata, "(metadata)")

    def _whole(self, codec: Codec, thread_id: str, row: CheckpointRow, *, is_latest: bool) -> CheckpointTuple | None:
        """Return what a row stands for; `None` if it was taken out before all of it was read."""
        corrupt: CorruptCheckpoint | None = None
        found = None
        try:
            found = self._tuple(codec, thread_id, row, is_latest=is_latest)
        except CorruptCheckpoint as exc:
            corrupt = exc
        else:
            if found.pending_writes:  # a row and its writes are taken out at once
                return found
        if self.store.get_checkpoint(thread_id, *row.spot) is None:
            return None
        if corrupt is not None:
            raise corrupt
        return found

    def _tuple(self, codec: Codec, thread_id: str, row: CheckpointRow, *, is_latest: bool) -> CheckpointTuple:
        record = self.record(thread_id, row)
        writes = self.store.get_writes(thread_id, row.spot)
        refs = {f"c{channel}": ref for channel, ref in record.values.items()}
        refs |= {f"w{number}": self.ref_of(thread_id, write) for number, write in enumerate(writes)}
        latest = self.memory.get(thread_id, row.spot.checkpoint_ns) if is_latest else None
        known = {} if latest is None else {f"c{name}": channel.chunks for name, channel in latest.channels.items()}
        channels = {f"w{number}": write.channel for number, write in enumerate(writes)}
        opened = open_values(codec, refs, channels, self.fetcher(thread_id), known)
        values = {channel: opened[f"c{channel}"].value for channel in record.values}
        fields = decoded(codec, record.fields, "(checkpoint)")
        fields["channel_values"] = values
        if is_latest:
            self.memory.put(thread_id, latest_of(row.spot, record, opened, fields.get("channel_versions") or {}))
        return CheckpointTuple(
            config=config_of(thread_id, row.spot),
            checkpoint=cast("Checkpoint", fields),
            metadata=cast("CheckpointMetadata", decoded(codec, record.metadata, "(metadata)")),
            parent_config=None
            if row.parent_id is None
            else config_of(thread_id, row.spot._replace(checkpoint_id=row.parent_id)),
            pending_writes=[(w.task_id, w.channel, opened[f"w{n}"].value) for n, w in enumerate(writes)],
        )

    def values(
        self, codec: Codec, thread_id: str, refs: Mapping[str, Ref], channels: Mapping[str, str]
    ) -> Mapping[str, object]:
        """Return the values that references lead to, by key."""
        opened = open_values(codec, refs, channels, self.fetcher(thread_id), {})
        return {key: found.value for key, found in opened.items()}

    def fetcher(self, thread_id: str) -> Callable[[Sequence[bytes]], Mapping[bytes, bytes]]:
        """Return a function that fetches elements' plain bytes by hash."""

        def fetch(hashes: Sequence[bytes]) -> Mapping[bytes, bytes]:
            if not hashes:
                return {}
            found = self.store.get_elements(thread_id, dict.fromkeys(hashes))
            for digest in hashes:
                if digest not in found:
                    raise CorruptCheckpoint(
                        f"thread {thread_id!r}: {len(hashes) - len(found)} stored parts are missing; the store has "
                        "lost them (does the server evict keys when memory is full?); go back to an older checkpoint "
                        "or restore the store from a copy"
                    )
            opened, place, what = self.seal.open, places_of_elements(thread_id), f"thread {thread_id!r}, a stored part"
            return {digest: opened(data, place(digest), what=what) for digest, data in found.items()}

        return fetch

    def open_element(self, thread_id: str, digest: bytes, data: bytes) -> bytes:
        """Open one element."""
        return self.seal.open(data, place_of_element(thread_id, digest), what=f"thread {thread_id!r}, a stored part")


def place_of(config: RunnableConfig) -> tuple[str, str, str | None]:
    """Return thread id (as text), namespace, and checkpoint id of a config.

    Raises:
        ConfigError: if it names no thread.
    """
    where = config.get("configurable") or {}
    if where.get("thread_id") is None:
        raise ConfigError(
            'the config names no thread; pass {"configurable": {"thread_id": "…"}} when you call the graph'
        )
    return str(where["thread_id"]), where.get("checkpoint_ns") or "", where.get("checkpoint_id")


def config_of(thread_id: str, spot: Spot) -> RunnableConfig:
    """Return the config that names a checkpoint."""
    return {
        "configurable": {
            "thread_id": thread_id,
            "checkpoint_ns": spot.checkpoint_ns,
            "checkpoint_id": spot.checkpoint_id,
        }
    }


def _run_id(config: RunnableConfig) -> str:
    found = (config.get("metadata") or {}).get("run_id") or (config.get("configurable") or {}).get("run_id") or ""
    return str(found)
