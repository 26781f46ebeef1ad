"""What the saver does, without input and output of its own: plans writes, reads tuples, decides what may go.

One core is shared by all clones of a saver.  `plan_put` and `plan_writes` only encode, and run in the caller's thread,
so that what is stored is the state as it was handed over; everything else talks to the store.
"""

from __future__ import annotations

import logging
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
from pancake_langgraph.checkpoint.chunks import chunks_of_new, chunks_of_stored
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import FANOUT, ElementSink, Listed, Ref, open_entries, open_refs
from pancake_langgraph.checkpoint.memory import Latest, Memory, Remembered, remember_single
from pancake_langgraph.checkpoint.record import (
    Record,
    place_of_element,
    place_of_row,
    place_of_write,
)
from pancake_langgraph.checkpoint.routes import next_of_checkpoint, next_of_writes
from pancake_langgraph.checkpoint.rows import CheckpointRow, PutCheckpoint, PutWrites, Spot, WriteRow
from pancake_langgraph.checkpoint.seal import Seal
from pancake_langgraph.checkpoint.store import StaleNeed, Store

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Stored:
    """What listeners are told after a write was acknowledged.

    `channels` names the channels that a task wrote, or that a checkpoint holds; `next_nodes` those nodes that certainly
    come next (`routes.py`).  `latest` is the checkpoint as it was stored, with the content hash of every list item;
    `None` for pending writes, and where another saver stores.
    """

    thread_id: str
    spot: Spot
    channels: tuple[str, ...]
    next_nodes: tuple[str, ...]
    latest: Latest | None = None


Listener = Callable[[Stored], None]


def tell(listeners: Sequence[Listener], stored: Stored) -> None:
    """Tell all listeners; one that fails is logged and costs the write and the others nothing."""
    for listener in tuple(listeners):
        try:
            listener(stored)
        except Exception:
            logger.warning("a listener of the saver failed", exc_info=True)


class Core:
    """Thread-safe.  Owns store, seal and memory; the codec comes with each call, since clones differ in it."""

    def __init__(self, store: Store, seal: Seal, *, ttl_s: float | None, refresh_on_read: bool) -> None:
        """Compose; nothing is opened."""
        self.store = store
        self.seal = seal
        self._ttl_s = ttl_s
        self._refresh_on_read = refresh_on_read
        self.memory = Memory()
        self.listeners: list[Listener] = []
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
                channels[channel] = _stored(codec, sink, channel, value, version, known)
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
        tell(self.listeners, Stored(thread_id, spot, tuple(latest.channels), plan.next_nodes, latest))
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
            ref = _ref_of(codec, sink, channel, value)
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
        tell(self.listeners, Stored(put.thread_id, put.rows[0].spot, channels, plan.next_nodes))
        self._sweep_sometimes()

    def _sealed(self, thread_id: str, sink: ElementSink) -> Mapping[bytes, bytes]:
        return {
            digest: self.seal.seal(plain, place_of_element(thread_id, digest)) for digest, plain in sink.plain.items()
        }

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
        return _decoded(codec, self.record(thread_id, row).metadata, "(metadata)")

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
        opened = self._opened(codec, thread_id, refs, {f"w{n}": write.channel for n, write in enumerate(writes)})
        values = {channel: opened[f"c{channel}"].value for channel in record.values}
        fields = _decoded(codec, record.fields, "(checkpoint)")
        fields["channel_values"] = values
        if is_latest:
            versions = fields.get("channel_versions") or {}
            self._remember(thread_id, row.spot, record, opened, versions)
        return CheckpointTuple(
            config=config_of(thread_id, row.spot),
            checkpoint=cast("Checkpoint", fields),
            metadata=cast("CheckpointMetadata", _decoded(codec, record.metadata, "(metadata)")),
            parent_config=None
            if row.parent_id is None
            else config_of(thread_id, row.spot._replace(checkpoint_id=row.parent_id)),
            pending_writes=[(w.task_id, w.channel, opened[f"w{n}"].value) for n, w in enumerate(writes)],
        )

    def _opened(
        self, codec: Codec, thread_id: str, refs: Mapping[str, Ref], channels: Mapping[str, str]
    ) -> Mapping[str, Opened]:
        """Fetch and decode all values at once; `channels` names a write's channel for its key, else the key does."""
        fetch = self.fetcher(thread_id)
        raw = open_refs(refs, fetch)
        listed = {key: value for key, value in raw.items() if isinstance(value, Listed)}
        encodings = open_entries([entry for value in listed.values() for entry in value.entries], fetch)
        at, opened = 0, {}
        for key, value in raw.items():
            channel = channels.get(key, key[1:])
            if isinstance(value, Listed):
                part = encodings[at : at + len(value.entries)]
                at += len(part)
                items = [codec.decode(encoding, channel=channel) for encoding in part]
                opened[key] = Opened(items, value)
            else:
                opened[key] = Opened(codec.decode(value, channel=channel), None)
        return opened

    def values(
        self, codec: Codec, thread_id: str, refs: Mapping[str, Ref], channels: Mapping[str, str]
    ) -> Mapping[str, object]:
        """Return the values that references lead to, by key."""
        return {key: found.value for key, found in self._opened(codec, thread_id, refs, channels).items()}

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
            return {digest: self.open_element(thread_id, digest, data) for digest, data in found.items()}

        return fetch

    def open_element(self, thread_id: str, digest: bytes, data: bytes) -> bytes:
        """Open one element."""
        return self.seal.open(data, place_of_element(thread_id, digest), what=f"thread {thread_id!r}, a stored part")

    def _remember(
        self, thread_id: str, spot: Spot, record: Record, opened: Mapping[str, Opened], versions: Mapping[str, object]
    ) -> None:
        channels = {}
        for channel, ref in record.values.items():
            value = opened[f"c{channel}"]
            version = versions.get(channel)
            if value.listed is not None:
                items, listed = cast("list[object]", value.value), value.listed
                chunks = chunks_of_stored(items, listed.entries, listed.full_leaves)
                channels[channel] = Remembered(version, ref, chunks=chunks)
            else:
                channels[channel] = remember_single(version, ref, value.value)
        self.memory.put(thread_id, Latest(spot, channels))


@dataclass(frozen=True, slots=True)
class Opened:
    """A decoded value, and if it is a list how it is stored."""

    value: object
    listed: Listed | None


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


def _decoded(codec: Codec, data: bytes, what: str) -> dict[str, Any]:
    found = codec.decode(data, channel=what)
    if type(found) is not dict:
        raise CorruptCheckpoint(f"{what}: a {type(found).__name__} in place of a dict; restore the store from a copy")
    return found


def _run_id(config: RunnableConfig) -> str:
    found = (config.get("metadata") or {}).get("run_id") or (config.get("configurable") or {}).get("run_id") or ""
    return str(found)


def _stored(
    codec: Codec, sink: ElementSink, channel: str, value: object, version: object, known: Remembered | None
) -> Remembered:
    """Encode what is new of a value into `sink`; return how it is stored."""
    if type(value) is not list:
        if known is not None and known.value is value:
            return replace(known, version=version)
        return remember_single(version, sink.single(codec.encode(value, channel=channel)), value)
    listing = chunks_of_new(
        value,
        () if known is None else known.chunks,
        encode=lambda item: sink.entry(codec.encode(item, channel=channel)),
        leaf=sink.leaf,
    )
    chunks = listing.chunks
    leaves = [leaf for chunk in chunks for leaf in chunk.leaves]
    rest = chunks[-1].entries[len(chunks[-1].leaves) * FANOUT :] if chunks else ()
    num_kept = sum(len(chunk.leaves) for chunk in chunks[: listing.num_shared])
    return Remembered(version, sink.joined(leaves, rest, num_kept=num_kept), chunks=chunks)


def _ref_of(codec: Codec, sink: ElementSink, channel: str, value: object) -> Ref:
    """Encode a value into `sink`; return the reference to it."""
    if type(value) is not list:
        return sink.single(codec.encode(value, channel=channel))
    return sink.list_of([sink.entry(codec.encode(item, channel=channel)) for item in value])[0]
