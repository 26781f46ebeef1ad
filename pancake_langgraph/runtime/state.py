"""What the runtime knows at one moment.  Everything here is owned by the runtime's loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from uuid import UUID

from pancake_langgraph._clock import Clock
from pancake_langgraph._types import AgentKey, Prompt, Usage
from pancake_langgraph.config import Resolved, RuntimeSettings
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.ledger import Ledger
from pancake_langgraph.prompts import PromptBook
from pancake_langgraph.prompts.lint_book import PrefixLint
from pancake_langgraph.runtime.breaker import Breaker
from pancake_langgraph.runtime.expectations import Expectation, ExpectationTable, Place
from pancake_langgraph.runtime.handles import HandleTable
from pancake_langgraph.runtime.spans import SpanBook
from pancake_langgraph.topology import Topology

#: Characters per token assumed until the engine has told the real count; only room is estimated with it.
CHARS_PER_TOKEN = 4
DEFAULT_MAX_OUTPUT_TOKENS = 256


@dataclass(slots=True)
class Call:
    """One model call.

    `began` says that its first piece has come, `over_at_s` when its wire answer ended; its callbacks end later, or
    never where the task was cancelled.  `pool_hint_id` is the hint on the engine's pool that it carried.
    """

    run_id: UUID
    root_id: UUID
    graph_id: str
    place: Place
    agent: AgentKey
    prompt: Prompt
    cache_salt: str | None
    max_tokens: int
    num_prompt_tokens: int
    claim: Expectation | None = None
    token_ids: tuple[int, ...] | None = None
    usage: Usage | None = None
    began: bool = False
    over_at_s: float | None = None
    pool_hint_id: str | None = None

    @property
    def busy_tokens(self) -> int:
        """Pool tokens this call may take: its prompt and all it may still write."""
        return self.num_prompt_tokens + self.max_tokens

    def reads(self, expectation: Expectation) -> bool:
        """Whether this call's prompt begins with all that is known of an expected one: its blocks are in use anyway."""
        if self.cache_salt != expectation.cache_salt or expectation.prefix is None:
            return False
        if self.token_ids is None:
            return expectation.fits(self.prompt)
        known = expectation.prefix.token_ids[: expectation.edge_tokens]
        return self.token_ids[: len(known)] == known


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    calls: int = 0
    served_tokens: int = 0
    wasted_tokens: int = 0
    failed_signals: int = 0


@dataclass(slots=True)
class State:
    """The runtime's memory, shared by the watcher (writes what happened) and the actor (writes what it does)."""

    settings: RuntimeSettings
    clock: Clock
    ledger: Ledger
    forecaster: Forecaster
    book: PromptBook
    expectations: ExpectationTable
    handles: HandleTable
    spans: SpanBook
    tier_breaker: Breaker
    engine_breaker: Breaker
    lint: PrefixLint
    resolved: Resolved | None = None
    handoff_tools: dict[str, frozenset[str]] = field(default_factory=dict)
    topologies: dict[str, Topology] = field(default_factory=dict)
    calls: dict[UUID, Call] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    @property
    def running(self) -> list[Call]:
        """Calls the engine works on."""
        return [call for call in self.calls.values() if call.over_at_s is None]

    @property
    def running_tokens(self) -> int:
        """Pool tokens that calls under way may take."""
        return sum(call.busy_tokens for call in self.running)

    @property
    def prefilling(self) -> bool:
        """Whether some call waits for its first piece."""
        return any(not call.began for call in self.running)

    @property
    def wasted_ratio(self) -> float:
        """Tokens computed for nothing per prompt token served."""
        return self.counters.wasted_tokens / max(self.counters.served_tokens, 1)

    def count_bug(self) -> int:
        """Count an exception nobody expected; return the level to log it at: the first one is a warning."""
        self.counters.failed_signals += 1
        return logging.WARNING if self.counters.failed_signals == 1 else logging.DEBUG

    @staticmethod
    def build(settings: RuntimeSettings, *, clock: Clock, ledger: Ledger, forecaster: Forecaster) -> State:
        """Compose an empty state."""

        def breaker(part: str) -> Breaker:
            return Breaker(
                part,
                clock=clock,
                record=ledger.append,
                failures=settings.breaker_failures,
                open_s=settings.breaker_open_s,
            )

        return State(
            settings=settings,
            clock=clock,
            ledger=ledger,
            forecaster=forecaster,
            book=PromptBook(max_entries=settings.max_contexts),
            expectations=ExpectationTable(max_entries=settings.max_contexts),
            handles=HandleTable(clock=clock, record=ledger.append),
            spans=SpanBook(ledger.append),
            tier_breaker=breaker("tier"),
            engine_breaker=breaker("engine"),
            lint=PrefixLint(max_lines=settings.max_contexts),
        )


def estimated_tokens(prompt: Prompt) -> int:
    """Guess a prompt's length from its text, for room only."""
    return sum(len(str(message.get("content") or "")) for message in prompt.messages) // CHARS_PER_TOKEN
