"""Brings threads over from other savers: each at once or not at all, and compared with what was there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ormsgpack
from langgraph.checkpoint.base import (
    Checkpoint,
    CheckpointMetadata,
    get_checkpoint_metadata,
)

from pancake_langgraph._errors import CheckpointError, ConfigError, CorruptCheckpoint, PancakeError, StoreUnavailable
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.core import Core, config_of
from pancake_langgraph.checkpoint.record import place_of_write
from pancake_langgraph.checkpoint.rows import CheckpointRow, Removal, Spot, ThreadContent, WriteRow
from pancake_langgraph.checkpoint.transfer import OnThread, require_free


@dataclass(frozen=True, slots=True)
class ForeignWrite:
    """One pending write."""

    task_path: str
    task_id: str
    idx: int
    channel: str
    value: object


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """One checkpoint with its values and pending writes."""

    spot: Spot
    parent_id: str | None
    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    writes: tuple[ForeignWrite, ...]


class Source(Protocol):
    """Another saver, to read from."""

    def threads(self) -> Iterable[str]:
        """Return the ids of all threads."""

    def checkpoints(self, thread_id: str) -> Iterator[ForeignCheckpoint]:
        """Yield a thread's checkpoints, newest first."""


@contextlib.contextmanager
def of_other_saver() -> Iterator[None]:
    """Turn what another library raises into errors of ours.

    Raises:
        ConfigError: if the other saver lacks what is needed.
        StoreUnavailable: if it fails.
    """
    try:
        yield
    except (PancakeError, GeneratorExit):
        raise
    except NotImplementedError as exc:
        raise ConfigError("the other saver does not implement `list`; it cannot be imported from") from exc
    except Exception as exc:  # another library, and another database behind it
        raise StoreUnavailable(f"the other saver failed ({type(exc).__name__}: {str(exc)[:200]})") from exc


def adopt_threads(
    core: Core, codec: Codec, source: Source, thread_ids: Iterable[str] | None, *, on_thread: OnThread
) -> tuple[str, ...]:
    """Bring threads over, each at once or not at all; return their ids.

    Raises:
        ConfigError: if a thread exists here, or does not exist there; nothing was stored.
        StateTypeError: if a thread holds a type that is not allowed; it was not stored, those before it were.
    """
    chosen = dict.fromkeys(map(str, source.threads() if thread_ids is None else thread_ids))
    for thread_id in chosen:
        require_free(core, thread_id)
    for thread_id in chosen:
        try:
            _adopt(core, codec, source, thread_id)
        except CheckpointError as exc:
            raise type(exc)(f"thread {thread_id!r} was not imported: {exc}") from exc
        on_thread(thread_id)
    return tuple(chosen)


def _adopt(core: Core, codec: Codec, source: Source, thread_id: str) -> None:
    try:
        content, samples = _gathered(core, codec, source, thread_id)
    finally:
        core.memory.forget(thread_id)
    core.store.write_thread(thread_id, content, expires_at_s=core.expires_at_s())
    for sample in samples:
        if not _is_equal(core, codec, thread_id, sample):
            core.store.rewrite_thread(thread_id, _everything)
            raise CorruptCheckpoint(
                f"checkpoint {sample.spot.checkpoint_id} did not come back as it was; this is a bug, please report it"
            )


def _gathered(
    core: Core, codec: Codec, source: Source, thread_id: str
) -> tuple[ThreadContent, Iterable[ForeignCheckpoint]]:
    """Return a thread as it is stored here, and the newest checkpoint of each namespace."""
    rows: list[CheckpointRow] = []
    writes: list[WriteRow] = []
    elements: dict[bytes, bytes] = {}
    samples: dict[str, ForeignCheckpoint] = {}
    for found in source.checkpoints(thread_id):
        if found.checkpoint.get("id") != found.spot.checkpoint_id:
            raise CorruptCheckpoint(f"checkpoint {found.spot.checkpoint_id} says that it is another one")
        parent = config_of(thread_id, found.spot._replace(checkpoint_id=found.parent_id or ""))
        if found.parent_id is None:
            del parent["configurable"]["checkpoint_id"]
        # All of them: no channel is taken over by its version alone, as in a run.
        changed = {**dict.fromkeys(found.checkpoint["channel_values"], ""), **found.checkpoint["channel_versions"]}
        plan = core.plan_put(codec, parent, found.checkpoint, found.metadata, changed)
        # Should somebody store this thread right now, the store tells them that what they lean on is not there.
        core.memory.put(thread_id, plan.latest)
        rows.append(plan.put.row)
        elements.update(plan.put.elements)
        for write in found.writes:
            row, parts = _planned(core, codec, thread_id, found.spot, write)
            writes.append(row)
            elements.update(parts)
        newest = samples.setdefault(found.spot.checkpoint_ns, found)
        if found.spot > newest.spot:
            samples[found.spot.checkpoint_ns] = found
    if not rows:
        raise ConfigError(f"there is no thread {thread_id!r} to import")
    return ThreadContent(tuple(rows), tuple(writes), elements), samples.values()


def _planned(
    core: Core, codec: Codec, thread_id: str, spot: Spot, write: ForeignWrite
) -> tuple[WriteRow, Mapping[bytes, bytes]]:
    """Return a write as it is stored, under its own number."""
    put = core.plan_writes(
        codec, config_of(thread_id, spot), [(write.channel, write.value)], write.task_id, write.task_path
    ).put
    [planned] = put.rows
    row = replace(planned, idx=write.idx)
    body = ormsgpack.packb(core.ref_of(thread_id, planned).packed())
    return replace(row, body=core.seal.seal(body, place_of_write(thread_id, row))), put.elements


def _everything(content: ThreadContent) -> Removal:
    spots = {row.spot for row in content.rows} | {write.spot for write in content.writes}
    return Removal(frozenset(spots), frozenset(), frozenset(content.elements))


def _is_equal(core: Core, codec: Codec, thread_id: str, sample: ForeignCheckpoint) -> bool:
    """Say whether a checkpoint that was brought over reads as it was: equal values give equal encodings."""
    config = config_of(thread_id, sample.spot)
    found = core.read(codec, config)
    if found is None:
        return False
    parent = (found.parent_config or {}).get("configurable", {}).get("checkpoint_id")
    metadata = get_checkpoint_metadata(config, sample.metadata)
    writes = [(w.task_id, w.channel, w.value) for w in sample.writes]
    return parent == sample.parent_id and _encoded(
        codec, found.checkpoint, found.metadata, found.pending_writes or []
    ) == _encoded(codec, sample.checkpoint, metadata, writes)


def _encoded(codec: Codec, checkpoint: Checkpoint, metadata: object, writes: Iterable[tuple[str, str, Any]]) -> object:
    fields = {key: value for key, value in checkpoint.items() if key != "channel_values"}
    return (
        {key: codec.encode(value, channel=key) for key, value in fields.items()},
        {key: codec.encode(value, channel=key) for key, value in checkpoint["channel_values"].items()},
        codec.encode(metadata, channel="(metadata)"),
        [(task_id, channel, codec.encode(value, channel=channel)) for task_id, channel, value in writes],
    )
