"""The six kinds of event.  None of them holds prompt or answer text.

All `at_s` are seconds on the runtime's monotonic clock; events of one ledger are in the order they were appended,
which is the order of `at_s` per thread of execution.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from pancake_langgraph._types import ActionId, ActionKind, HintState, HintVerb, Outcome, SpanId, ThreadId


class SpanKind(StrEnum):
    """What a span of time was spent on."""

    RUN = "run"
    NODE = "node"
    CALL = "call"
    TOOL = "tool"
    WARM = "warm"


class SpanStatus(StrEnum):
    """How a span ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"


class MarkKind(StrEnum):
    """An instant inside a span."""

    FIRST_TOKEN = "first_token"
    FIRST_TOOL_NAME = "first_tool_name"


class ActionState(StrEnum):
    """Where an action stands: `planned` → `submitted` → `settled` (a rejected one goes from planned to settled)."""

    PLANNED = "planned"
    SUBMITTED = "submitted"
    SETTLED = "settled"


class SpanStarted(NamedTuple):
    """A span began.  `parent_id` is `None` for a run; `name` is a node, agent or tool name."""

    at_s: float
    span_id: SpanId
    kind: SpanKind
    name: str
    thread_id: ThreadId | None
    parent_id: SpanId | None


class SpanMarked(NamedTuple):
    """Something worth a mark happened inside a span; `value` is a tool name or empty."""

    at_s: float
    span_id: SpanId
    mark: MarkKind
    value: str = ""


class SpanEnded(NamedTuple):
    """A span ended.  Token counts are `None` where the server did not report them."""

    at_s: float
    span_id: SpanId
    status: SpanStatus
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class ActionRecorded(NamedTuple):
    """An action changed state.

    `num_tokens` is the length of the prefix acted on, `computed_tokens` how many of them the engine had to compute
    (known when settled, else `None`).  `outcome` is set exactly when `state` is `settled`.  `reason` is one phrase.
    """

    at_s: float
    action_id: ActionId
    state: ActionState
    kind: ActionKind
    agent: str
    thread_id: ThreadId | None
    num_tokens: int
    reason: str
    computed_tokens: int | None = None
    outcome: Outcome | None = None


class HintAnswered(NamedTuple):
    """The engine answered one hint on its pool; `num_tokens` says how many tokens it is in force for."""

    at_s: float
    hint_id: str
    verb: HintVerb
    state: HintState
    num_tokens: int


class BreakerChanged(NamedTuple):
    """A circuit breaker opened (`is_open`) or closed again.  `part` names what it guards: `engine` or `tier`."""

    at_s: float
    part: str
    is_open: bool
    reason: str


Event = SpanStarted | SpanMarked | SpanEnded | ActionRecorded | HintAnswered | BreakerChanged
