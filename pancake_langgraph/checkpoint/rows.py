"""What a store keeps: checkpoint rows, write rows, elements.  Frozen values, bytes already encoded and sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: Bytes of an element's hash.
HASH_BYTES = 20


class Spot(NamedTuple):
    """One checkpoint's place in its thread.  Later checkpoints of a namespace have greater ids (text order)."""

    checkpoint_ns: str
    checkpoint_id: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint.

    `body` is opaque to the store.  `run_id` is empty where no run is
    known.  A hidden row serves only as an ancestor that incremental channels are rebuilt from: it is not listed and
    not returned as the latest.
    """

    spot: Spot
    parent_id: str | None
    run_id: str
    body: bytes
    is_hidden: bool = False


@dataclass(frozen=True, slots=True)
class WriteRow:
    """One pending write of a task, kept in the order (`task_path`, `task_id`, `idx`)."""

    spot: Spot
    task_path: str
    task_id: str
    idx: int
    channel: str
    body: bytes


@dataclass(frozen=True, slots=True)
class PutCheckpoint:
    """All that one `put` stores, at once or not at all.

    `needs` names a checkpoint that must still exist: elements that are not sent are kept alive by it.
    """

    thread_id: str
    row: CheckpointRow
    elements: Mapping[bytes, bytes] = field(default_factory=dict)
    needs: Spot | None = None


@dataclass(frozen=True, slots=True)
class PutWrites:
    """All that one `put_writes` stores, at once or not at all.

    Rows with a negative `idx` replace what is there; others are kept as they were first written.
    """

    thread_id: str
    rows: tuple[WriteRow, ...]
    elements: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ThreadContent:
    """A whole thread, for copying, export and sweeping."""

    rows: tuple[CheckpointRow, ...]
    writes: tuple[WriteRow, ...]
    elements: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Removal:
    """What a prune takes out of a thread, decided on a consistent view of it.

    `hide` are rows that stay as ancestors only; `checkpoints` and their writes go; `elements` are no longer needed.
    """

    checkpoints: frozenset[Spot]
    hide: frozenset[Spot]
    elements: frozenset[bytes]
