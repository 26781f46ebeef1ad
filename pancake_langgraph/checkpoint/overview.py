"""What a thread holds, for people to look at: counts, sizes, history.  Values are not decoded, only measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pancake_langgraph._errors import CheckpointError, StateTypeError
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.core import Core
from pancake_langgraph.checkpoint.elements import Listed, Ref, open_entries, open_refs
from pancake_langgraph.checkpoint.record import decoded
from pancake_langgraph.checkpoint.routes import next_of_checkpoint
from pancake_langgraph.checkpoint.rows import CheckpointRow, ThreadContent
from pancake_langgraph.checkpoint.transfer import fetch_from

#: Channels that say which nodes come next; their values are decoded.
_TRIGGERS = ("branch:to:", "join:", "__pregel_tasks")


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """One thread at a glance.

    `newest_ts` is the time that LangGraph wrote into the newest checkpoint (ISO 8601).  `num_bytes` are as stored.
    Where the newest checkpoint cannot be read, its step and time are `None` and `problem` says why.
    """

    thread_id: str
    num_checkpoints: int
    namespaces: tuple[str, ...]
    newest_id: str | None
    newest_step: int | None
    newest_ts: str | None
    num_bytes: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ChannelSize:
    """One channel's value: its encoded bytes, and the number of items if it is a list."""

    num_bytes: int
    num_items: int | None


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """One checkpoint.  `next_nodes` is `None` where the tasks to come hold types that are not allowed."""

    checkpoint_ns: str
    checkpoint_id: str
    parent_id: str | None
    step: int | None
    source: str | None
    ts: str | None
    next_nodes: tuple[str, ...] | None
    num_writes: int
    channels: Mapping[str, ChannelSize]


def thread_info(core: Core, codec: Codec, thread_id: str) -> ThreadInfo | None:
    """Return what a thread holds; `None` if it holds nothing."""
    content = core.store.read_thread(thread_id)
    if not content.rows and not content.writes:
        return None
    shown = _shown(content)
    num_bytes = sum(len(row.body) for row in content.rows) + sum(len(write.body) for write in content.writes)
    num_bytes += sum(map(len, content.elements.values()))
    step, ts, problem = None, None, None
    if shown:
        try:
            fields, metadata = _heads(core, codec, thread_id, shown[0])
            step, ts = metadata.get("step"), fields.get("ts")
        except CheckpointError as exc:
            problem = str(exc)
    return ThreadInfo(
        thread_id,
        len(shown),
        tuple(sorted({row.spot.checkpoint_ns for row in shown})),
        shown[0].spot.checkpoint_id if shown else None,
        step,
        ts,
        num_bytes,
        problem,
    )


def thread_history(core: Core, codec: Codec, thread_id: str) -> Iterator[HistoryItem]:
    """Yield a thread's checkpoints, newest first.

    Raises:
        CorruptCheckpoint: if one cannot be read.
    """
    content = core.store.read_thread(thread_id)
    measure = _measure(core, thread_id, content)
    num_writes = Counter(write.spot for write in content.writes)
    for row in _shown(content):
        fields, metadata = _heads(core, codec, thread_id, row)
        record = core.record(thread_id, row)
        yield HistoryItem(
            *row.spot,
            row.parent_id,
            metadata.get("step"),
            metadata.get("source"),
            fields.get("ts"),
            _next_nodes(core, codec, thread_id, record.values),
            num_writes[row.spot],
            {channel: measure(ref) for channel, ref in record.values.items()},
        )


def _shown(content: ThreadContent) -> list[CheckpointRow]:
    rows = [row for row in content.rows if not row.is_hidden]
    return sorted(rows, key=lambda row: row.spot.checkpoint_id, reverse=True)


def _heads(core: Core, codec: Codec, thread_id: str, row: CheckpointRow) -> tuple[dict[str, Any], dict[str, Any]]:
    record = core.record(thread_id, row)
    return decoded(codec, record.fields, "(checkpoint)"), decoded(codec, record.metadata, "(metadata)")


def _next_nodes(core: Core, codec: Codec, thread_id: str, refs: Mapping[str, Ref]) -> tuple[str, ...] | None:
    triggers = {channel: ref for channel, ref in refs.items() if channel.startswith(_TRIGGERS)}
    try:
        return next_of_checkpoint(core.values(codec, thread_id, triggers, {channel: channel for channel in triggers}))
    except StateTypeError:  # the argument of a `Send` is of an app's type; everything else can still be shown
        return None


def _measure(core: Core, thread_id: str, content: ThreadContent) -> Callable[[Ref], ChannelSize]:
    elements = {digest: core.open_element(thread_id, digest, data) for digest, data in content.elements.items()}
    fetch = fetch_from(elements)

    def measure(ref: Ref) -> ChannelSize:
        found = open_refs({"": ref}, fetch)[""]
        if isinstance(found, Listed):
            return ChannelSize(sum(map(len, open_entries(found.entries, fetch))), len(found.entries))
        return ChannelSize(len(found), None)

    return measure
