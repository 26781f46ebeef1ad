"""Calls that are expected: paused agents that will resume, and predicted successors."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID

from pancake_langgraph._types import AgentKey, Prompt, ThreadId, TokenPrefix
from pancake_langgraph.prompts import Prediction, Source, begins_with, cut_at_block_edge
from pancake_langgraph.runtime.handles import Handle

#: Parallel workers at one place whose pauses are remembered.
MAX_PER_PLACE = 64
#: `Place.around` of a predicted call whose task ids are not known yet.
ANYWHERE = "*"
#: From this chance on what is brought up for an expected call is held as well.
SURE = 0.9


class Cause(StrEnum):
    """Why a call is expected."""

    RESUME = "resume"
    SUCCESSOR = "successor"


class Place(NamedTuple):
    """Where a call happens: thread, namespace of the graph around the node (task ids kept), node path without ids.

    The turns of one tool loop share it, and so do parallel workers of a fan-out that are plain nodes: those are told
    apart by what they read.
    """

    thread_id: ThreadId
    around: str
    node: str


@dataclass(slots=True)
class Expectation:
    """One expected call and the work done for it.  Owned by the runtime's loop.

    `prefix` is what to hold or warm: whole blocks plus, where one is known, a single token past the edge, so that a
    request that finds every block resident computes one token and not a block.  `edge_tokens` is the block edge.
    When a request last brought back `restored_tokens` that the pool had lost, it had waited for `restored_after_s`;
    the tier was asked to lift its first `lifted_tokens`.  `is_whole` says that it begins with all that its thread has
    read and written.
    `computing` says that the work under way computes and does not only copy; `barred` that the engine refused it;
    `is_branch` that it is one of several ways the graph may take next.  `source` says where a predicted prompt comes
    from, `stop` why it ends where it ends, `is_cut` that it ends inside a message; `num_between` nodes that had not
    started run before the call.  `full_prompt` is what agent `came_from` would read that comes back and keeps its
    history.  `origin` is the namespace of the execution that an expected successor was foretold from, `is_choice` says
    that this one leads one way only.  `pool_hint_id` is its hint on the engine's pool, which holds `pool_held_tokens`
    of the `pool_asked_tokens` that it was asked for until `pool_held_until_s` (`None`: not held).
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
    restored_after_s: float | None = None
    restored_tokens: int = 0
    lifted_tokens: int = 0
    is_whole: bool = False
    task: asyncio.Task[None] | None = None
    computing: bool = False
    handles: list[Handle] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    claimed: bool = False
    barred: bool = False
    is_branch: bool = False
    source: Source | None = None
    is_cut: bool = False
    stop: str = ""
    num_between: int = 0
    full_prompt: Prompt | None = None
    came_from: AgentKey | None = None
    origin: str = ""
    is_choice: bool = False
    pool_hint_id: str | None = None
    pool_asked_tokens: int = 0
    pool_held_tokens: int = 0
    pool_held_until_s: float | None = None

    @property
    def busy(self) -> bool:
        """Whether an action for it is under way."""
        return self.task is not None and not self.task.done()

    @property
    def is_sure(self) -> bool:
        """Whether the call comes, as far as anybody can know."""
        return self.cause is Cause.RESUME or self.p_next >= SURE

    def copy(self) -> ExpectedCall:
        """Return what others may know of it."""
        return ExpectedCall(
            self.place.thread_id,
            self.place.node,
            self.cause,
            self.prompt,
            self.p_next,
            self.created_at_s,
            self.is_cut,
            self.source,
            self.stop,
        )

    def fits(self, prompt: Prompt) -> bool:
        """Say whether a real prompt begins with the expected one."""
        return begins_with(prompt, self.prompt, is_cut=self.is_cut)

    def foretell(self, prediction: Prediction) -> None:
        """Take a newer prediction, which is rendered at the next evaluation."""
        if (self.prompt, self.is_cut) == (prediction.prompt, prediction.is_cut):
            return
        self.prompt, self.is_cut, self.agent = prediction.prompt, prediction.is_cut, prediction.agent
        self.source, self.stop = prediction.source, prediction.stop
        self.rendered = False

    def set_tokens(self, token_ids: tuple[int, ...], block_size_tokens: int) -> None:
        """Take `token_ids` as the certain beginning of the next prompt."""
        edge = cut_at_block_edge(len(token_ids), block_size_tokens)
        self.edge_tokens = edge
        self.prefix = TokenPrefix(token_ids[: edge + 1], self.cache_salt) if edge else None


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A copy of one expected call, to be read outside the runtime's loop.

    `prompt` is its known beginning, with `is_cut` up to inside its last message; `source` says where a predicted prompt
    comes from, `stop` why it ends where it ends.
    """

    thread_id: ThreadId
    node: str
    cause: Cause
    prompt: Prompt
    p_next: float
    created_at_s: float
    is_cut: bool = False
    source: Source | None = None
    stop: str = ""


class ExpectationTable:
    """Expected calls, several per place, bounded; the oldest fall out.  Not thread-safe."""

    def __init__(self, *, max_entries: int) -> None:
        """Hold at most `max_entries`."""
        self._max_entries = max_entries
        self._entries: OrderedDict[int, Expectation] = OrderedDict()
        self._at: dict[Place, list[Expectation]] = {}

    def __iter__(self) -> Iterator[Expectation]:
        """Iterate over a snapshot, oldest first."""
        return iter(tuple(self._entries.values()))

    def __len__(self) -> int:
        """Return how many calls are expected."""
        return len(self._entries)

    def __contains__(self, expectation: object) -> bool:
        """Say whether this very expectation is still open."""
        return id(expectation) in self._entries

    def add(self, expectation: Expectation) -> list[Expectation]:
        """Add one; return those it pushed out (the oldest at the bound, over all or at its place)."""
        self._entries[id(expectation)] = expectation
        here = self._at.setdefault(expectation.place, [])
        here.append(expectation)
        gone = here[: len(here) - MAX_PER_PLACE]
        if len(self._entries) - len(gone) > self._max_entries:
            gone = [*gone, next(e for e in self._entries.values() if e not in gone)]
        for old in gone:
            self.discard(old)
        return gone

    def at(self, place: Place) -> tuple[Expectation, ...]:
        """Return what is expected at `place`, oldest first."""
        here = self._at.get(place)
        return () if here is None else tuple(here)

    def move(self, expectation: Expectation, place: Place) -> None:
        """Let an expected call have its exact place, which was not known before."""
        if expectation in self:
            self.discard(expectation)
            expectation.place = place
            self._entries[id(expectation)] = expectation
            self._at.setdefault(place, []).append(expectation)

    def claim(self, place: Place, prompt: Prompt) -> Expectation | None:
        """Take out what was expected of a call with `prompt` at `place`: it has come.

        Among several (workers of a fan-out) it is the one whose known beginning the prompt has, longest first.  A lone
        one is taken even when the prompt turned out different: its agent came, and reads something else.
        """
        here = self._at.get(place, [])
        fitting = [e for e in here if e.fits(prompt)]
        chosen = max(fitting, key=lambda e: len(e.prompt.messages)) if fitting else None
        if chosen is None and len(here) == 1:
            chosen = here[0]
        if chosen is not None:
            self.discard(chosen)
        return chosen

    def discard(self, expectation: Expectation) -> None:
        """Take out one expectation if it is still there."""
        if self._entries.pop(id(expectation), None) is None:
            return
        here = [e for e in self._at[expectation.place] if e is not expectation]
        if here:
            self._at[expectation.place] = here
        else:
            del self._at[expectation.place]
