"""Calls that are expected: paused agents that will resume, and predicted successors."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from uuid import UUID

from pancake_langgraph._types import AgentKey, Prompt, ThreadId, TokenPrefix
from pancake_langgraph.runtime.handles import Handle


class Cause(StrEnum):
    """Why a call is expected."""

    RESUME = "resume"
    SUCCESSOR = "successor"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call happens: thread, namespace of the graph around the node (task ids kept), node path without ids.

    Two workers of one fan-out differ in `around`; the turns of one tool loop share it.
    """

    thread_id: ThreadId
    around: str
    node: str


@dataclass(slots=True)
class Expectation:
    """One expected call and the work done for it.  Owned by the runtime's loop.

    `prefix` is what to hold or warm: whole blocks plus, where one is known, a single token past the edge, so that a
    request that finds every block resident computes one token and not a block.  `edge_tokens` is the block edge.
    `computing` says that the work under way computes and does not only copy; `barred` that the engine refused it.
    """

    place: Place
    agent: AgentKey
    cause: Cause
    run_id: UUID
    prompt: Prompt
    cache_salt: str | None
    p_next: float
    created_at_s: float
    eta_at_s: float | None = None
    base_ids: tuple[int, ...] | None = None
    rendered: bool = False
    prefix: TokenPrefix | None = None
    edge_tokens: int = 0
    restorable: bool = False
    used_at_allocated_tokens: int | None = None
    task: asyncio.Task[None] | None = None
    computing: bool = False
    handles: list[Handle] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    claimed: bool = False
    barred: bool = False

    @property
    def busy(self) -> bool:
        """Whether an action for it is under way."""
        return self.task is not None and not self.task.done()

    def set_tokens(self, token_ids: tuple[int, ...], block_size_tokens: int) -> None:
        """Take `token_ids` as the certain beginning of the next prompt."""
        edge = len(token_ids) // block_size_tokens * block_size_tokens
        self.edge_tokens = edge
        self.prefix = TokenPrefix(token_ids[: edge + 1], self.cache_salt) if edge else None


class ExpectationTable:
    """Expected calls by place, bounded; the oldest fall out.  Not thread-safe."""

    def __init__(self, *, max_entries: int) -> None:
        """Hold at most `max_entries`."""
        self._max_entries = max_entries
        self._by_place: OrderedDict[Place, Expectation] = OrderedDict()

    def __iter__(self) -> Iterator[Expectation]:
        """Iterate over a snapshot, oldest first."""
        return iter(tuple(self._by_place.values()))

    def __len__(self) -> int:
        """Return how many calls are expected."""
        return len(self._by_place)

    def add(self, expectation: Expectation) -> list[Expectation]:
        """Add one; return those it pushed out (same place, or the oldest at the bound)."""
        gone = [old] if (old := self._by_place.pop(expectation.place, None)) is not None else []
        self._by_place[expectation.place] = expectation
        while len(self._by_place) > self._max_entries:
            gone.append(self._by_place.popitem(last=False)[1])
        return gone

    def get(self, place: Place) -> Expectation | None:
        """Return what is expected at `place`."""
        return self._by_place.get(place)

    def claim(self, place: Place) -> Expectation | None:
        """Take out what is expected at `place`: its call has come."""
        return self._by_place.pop(place, None)

    def discard(self, expectation: Expectation) -> None:
        """Take out one expectation if it is still there."""
        if self._by_place.get(expectation.place) is expectation:
            del self._by_place[expectation.place]
