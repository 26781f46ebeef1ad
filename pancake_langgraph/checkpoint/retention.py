"""What may go, what has to stay, and how a thread is copied.

Incremental channels (`DeltaChannel`) keep most of their state in the writes of ancestors.  A checkpoint that stays
therefore keeps those ancestors up to the nearest one that holds a value, hidden: not listed, only read to rebuild.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import DeltaChannelHistory, PendingWrite

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint, ThreadDeleted
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.core import Core, place_of
from pancake_langgraph.checkpoint.elements import Ref, reachable
from pancake_langgraph.checkpoint.record import Record, place_of_element, place_of_row, place_of_write
from pancake_langgraph.checkpoint.rows import CheckpointRow, Removal, Spot, ThreadContent, WriteRow

#: Metadata that LangGraph keeps for incremental channels.
COUNTERS = "counters_since_delta_snapshot"
STRATEGIES = ("keep_latest", "delete")


def prune_to_latest(core: Core, codec: Codec, thread_id: str) -> None:
    """Keep the latest checkpoint of each namespace, with its pending writes, and the ancestors it is rebuilt from."""

    def decide(content: ThreadContent) -> Removal:
        latest: dict[str, CheckpointRow] = {}
        for row in content.rows:
            known = latest.get(row.spot.checkpoint_ns)
            if not row.is_hidden and (known is None or row.spot.checkpoint_id > known.spot.checkpoint_id):
                latest[row.spot.checkpoint_ns] = row
        return _removal(core, codec, thread_id, content, kept={row.spot for row in latest.values()})

    core.store.rewrite_thread(thread_id, decide)
    core.memory.forget(thread_id)


def delete_runs(core: Core, codec: Codec, run_ids: Collection[str]) -> None:
    """Remove the checkpoints of runs; ancestors that other checkpoints are rebuilt from stay, hidden."""
    for thread_id in sorted({thread for run_id in run_ids for thread in core.store.threads_of_run(str(run_id))}):
        delete_runs_of_thread(core, codec, thread_id, frozenset(map(str, run_ids)))


def delete_runs_of_thread(core: Core, codec: Codec, thread_id: str, run_ids: frozenset[str]) -> None:
    """Remove the checkpoints of runs from one thread."""

    def decide(content: ThreadContent) -> Removal:
        kept = {row.spot for row in content.rows if row.run_id not in run_ids and not row.is_hidden}
        return _removal(core, codec, thread_id, content, kept=kept)

    core.store.rewrite_thread(thread_id, decide)
    core.memory.forget(thread_id)


def _removal(core: Core, codec: Codec, thread_id: str, content: ThreadContent, *, kept: set[Spot]) -> Removal:
    by_spot = {row.spot: row for row in content.rows}

    @cache  # chains share ancestors
    def record_of(spot: Spot) -> Record:
        return core.record(thread_id, by_spot[spot])

    ancestors = {ancestor for spot in kept for ancestor in _rebuilt_from(codec, by_spot, record_of, spot)}
    hidden = ancestors - kept
    stays = kept | hidden
    live = set(_live(core, thread_id, content, stays, record_of))
    return Removal(
        checkpoints=frozenset(by_spot.keys() - stays) | {w.spot for w in content.writes if w.spot not in by_spot},
        hide=frozenset(spot for spot in hidden if not by_spot[spot].is_hidden),
        elements=frozenset(content.elements.keys() - live),
    )


def _rebuilt_from(
    codec: Codec, by_spot: Mapping[Spot, CheckpointRow], record_of: Callable[[Spot], Record], spot: Spot
) -> Iterator[Spot]:
    """Yield the ancestors that a checkpoint's incremental channels are rebuilt from."""
    record = record_of(spot)
    metadata = cast("dict[str, Any]", codec.decode(record.metadata, channel="(metadata)"))
    missing = set(metadata.get(COUNTERS) or ()) - record.values.keys()
    while missing and (parent_id := by_spot[spot].parent_id) is not None:
        spot = spot._replace(checkpoint_id=parent_id)
        if spot not in by_spot:
            return
        yield spot
        missing -= record_of(spot).values.keys()


def _live(
    core: Core,
    thread_id: str,
    content: ThreadContent,
    stays: Collection[Spot],
    record_of: Callable[[Spot], Record],
) -> Iterator[bytes]:
    plain = _Opened(core, thread_id, content.elements)
    for spot in stays:
        for ref in record_of(spot).values.values():
            yield from reachable(ref, plain)
    for write in content.writes:
        if write.spot in stays:
            yield from reachable(core.ref_of(thread_id, write), plain)


class _Opened(dict[bytes, bytes]):
    """Opens elements when they are looked at."""

    def __init__(self, core: Core, thread_id: str, sealed: Mapping[bytes, bytes]) -> None:
        super().__init__()
        self._core, self._thread_id, self._sealed = core, thread_id, sealed

    def __contains__(self, digest: object) -> bool:
        return digest in self._sealed

    def __missing__(self, digest: bytes) -> bytes:
        self[digest] = self._core.open_element(self._thread_id, digest, self._sealed[digest])
        return self[digest]


def copy_thread(core: Core, source_id: str, target_id: str) -> None:
    """Copy everything of a thread, pending writes and hidden ancestors too; of an empty thread nothing.

    Raises:
        ConfigError: if the target is the source, or holds something already.
    """
    if source_id == target_id:
        raise ConfigError(f"copy_thread: source and target are both {source_id!r}; name another target")
    content = core.store.read_thread(source_id)
    if not content.rows and not content.writes:
        return
    taken = core.store.read_thread(target_id)
    if taken.rows or taken.writes:
        raise ConfigError(
            f"copy_thread: thread {target_id!r} holds checkpoints already; delete it or name another target"
        )
    core.store.write_thread(target_id, resealed(core, source_id, target_id, content), expires_at_s=core.expires_at_s())
    core.memory.forget(target_id)


def resealed(core: Core, source_id: str, target_id: str, content: ThreadContent) -> ThreadContent:
    """Return a thread's content sealed for another thread (and with the newest key)."""
    what = f"thread {source_id!r}"
    opened = core.seal.open

    def move_row(row: CheckpointRow) -> CheckpointRow:
        plain = opened(row.body, place_of_row(source_id, row), what=what)
        return replace(row, body=core.seal.seal(plain, place_of_row(target_id, row)))

    def move_write(write: WriteRow) -> WriteRow:
        plain = opened(write.body, place_of_write(source_id, write), what=what)
        return replace(write, body=core.seal.seal(plain, place_of_write(target_id, write)))

    elements = {
        digest: core.seal.seal(core.open_element(source_id, digest, data), place_of_element(target_id, digest))
        for digest, data in content.elements.items()
    }
    return ThreadContent(tuple(map(move_row, content.rows)), tuple(map(move_write, content.writes)), elements)


def delta_history(
    core: Core, codec: Codec, config: RunnableConfig, channels: Sequence[str]
) -> Mapping[str, DeltaChannelHistory]:
    """Return for each channel the writes since the nearest ancestor that holds a value, oldest first, and that value.

    Raises:
        CorruptCheckpoint: if an ancestor that is needed is missing.
        ThreadDeleted: if the checkpoint was deleted, or expired, before all was read.
    """
    thread_id, checkpoint_ns, checkpoint_id = place_of(config)
    row = core.store.get_checkpoint(thread_id, checkpoint_ns, checkpoint_id) if channels else None
    if row is None:
        if channels and checkpoint_id is not None:
            raise _gone(thread_id, checkpoint_id)
        return {channel: cast("DeltaChannelHistory", {"writes": []}) for channel in channels}
    corrupt: CorruptCheckpoint | None = None
    history: Mapping[str, DeltaChannelHistory] = {}
    try:
        history = _walked(core, codec, thread_id, row, channels)
    except CorruptCheckpoint as exc:
        corrupt = exc
    if core.store.get_checkpoint(thread_id, *row.spot) is None:  # then parts may have been missing
        raise _gone(thread_id, row.spot.checkpoint_id) from corrupt
    if corrupt is not None:
        raise corrupt
    return history


def _gone(thread_id: str, checkpoint_id: str) -> ThreadDeleted:
    return ThreadDeleted(
        f"thread {thread_id!r}: checkpoint {checkpoint_id} was deleted, or expired, while it was read; "
        "read the thread again, or start it anew"
    )


def _walked(
    core: Core, codec: Codec, thread_id: str, row: CheckpointRow, channels: Sequence[str]
) -> Mapping[str, DeltaChannelHistory]:
    collected: dict[str, list[PendingWrite]] = {channel: [] for channel in channels}
    seeds: dict[str, Any] = {}
    remaining = set(channels)
    while row.parent_id is not None and remaining:
        parent = core.store.get_checkpoint(thread_id, row.spot.checkpoint_ns, row.parent_id)
        if parent is None:
            raise CorruptCheckpoint(
                f"thread {thread_id!r}: checkpoint {row.parent_id}, from which channels {sorted(remaining)} are "
                "rebuilt, is missing; restore the store from a copy, or go back to a checkpoint that loads"
            )
        record = core.record(thread_id, parent)
        writes = [w for w in core.store.get_writes(thread_id, parent.spot) if w.channel in remaining]
        held = {channel: record.values[channel] for channel in remaining & record.values.keys()}
        refs = {f"c{channel}": ref for channel, ref in held.items()}
        refs |= {f"w{number}": core.ref_of(thread_id, write) for number, write in enumerate(writes)}
        values = core.values(codec, thread_id, refs, {f"w{n}": w.channel for n, w in enumerate(writes)})
        for number in reversed(range(len(writes))):
            write = writes[number]
            collected[write.channel].append((write.task_id, write.channel, values[f"w{number}"]))
        seeds |= {channel: values[f"c{channel}"] for channel in held}
        remaining -= held.keys()
        row = parent
    return {
        channel: cast(
            "DeltaChannelHistory",
            {"writes": collected[channel][::-1], **({"seed": seeds[channel]} if channel in seeds else {})},
        )
        for channel in channels
    }


def sizes(core: Core, thread_id: str) -> Mapping[str, int]:
    """Return stored bytes by channel; a part that channels share counts for the first of them (by name)."""
    content = core.store.read_thread(thread_id)
    plain = _Opened(core, thread_id, content.elements)
    owners: dict[bytes, str] = {}
    totals: dict[str, int] = {"(checkpoints)": sum(len(row.body) for row in content.rows)}
    refs: list[tuple[str, Ref]] = []
    for row in content.rows:
        refs += core.record(thread_id, row).values.items()
    for write in content.writes:
        refs.append((write.channel, core.ref_of(thread_id, write)))
        totals[write.channel] = totals.get(write.channel, 0) + len(write.body)
    seen: set[tuple[str, bytes]] = set()
    for channel, ref in sorted(refs, key=lambda pair: pair[0]):
        if (channel, ref.data) in seen:
            continue
        seen.add((channel, ref.data))
        for digest in reachable(ref, plain):
            owners.setdefault(digest, channel)
    for digest, channel in owners.items():
        totals[channel] = totals.get(channel, 0) + len(content.elements.get(digest, b""))
    return totals
