"""Reads the event list back into finished things: spans with an end, actions with an outcome."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pancake_langgraph._types import ActionId, ActionKind, Outcome, SpanId, ThreadId
from pancake_langgraph.ledger import (
    ActionRecorded,
    ActionState,
    BreakerChanged,
    Event,
    MarkKind,
    SpanEnded,
    SpanKind,
    SpanMarked,
    SpanStarted,
    SpanStatus,
)


@dataclass(frozen=True, slots=True)
class Span:
    """One span put together from its events.

    `end_s` of a span that never ended is the time of the last event, and `status` is then `None`.  Token counts are
    `None` where the server reported none.
    """

    span_id: SpanId
    kind: SpanKind
    name: str
    thread_id: ThreadId | None
    parent_id: SpanId | None
    start_s: float
    end_s: float
    status: SpanStatus | None
    first_token_s: float | None
    first_tool: tuple[float, str] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None

    @property
    def is_open(self) -> bool:
        """Whether the event list has no end for this span."""
        return self.status is None


@dataclass(frozen=True, slots=True)
class Action:
    """One action put together from its events.

    `submitted_s` is `None` when it was never sent.  An action not settled yet has no `outcome`, and its `end_s` is the
    time of the last event.  `reason` is the phrase of the last change.
    """

    action_id: ActionId
    kind: ActionKind
    agent: str
    thread_id: ThreadId | None
    planned_s: float
    submitted_s: float | None
    end_s: float
    outcome: Outcome | None
    plan_reason: str
    reason: str
    num_tokens: int
    computed_tokens: int | None


@dataclass(frozen=True, slots=True)
class Story:
    """Everything in an event list, in the order it began.  `start_s` and `end_s` bound all time stamps."""

    start_s: float
    end_s: float
    spans: tuple[Span, ...]
    actions: tuple[Action, ...]
    breaker_changes: tuple[BreakerChanged, ...]


def read_story(events: Iterable[Event]) -> Story:
    """Put spans and actions together.

    Tolerates a list whose beginning fell out of a bounded ledger: an end or a mark without its start is left out, and
    an action whose plan is missing begins where it is first seen.
    """
    listed = tuple(events)
    end_s = max((event.at_s for event in listed), default=0.0)
    started: dict[SpanId, SpanStarted] = {}
    marks: dict[tuple[SpanId, MarkKind], SpanMarked] = {}
    ends: dict[SpanId, SpanEnded] = {}
    changes: dict[ActionId, list[ActionRecorded]] = {}
    breakers: list[BreakerChanged] = []
    for event in listed:
        match event:
            case SpanStarted():
                started.setdefault(event.span_id, event)
            case SpanMarked():
                marks.setdefault((event.span_id, event.mark), event)
            case SpanEnded():
                ends.setdefault(event.span_id, event)
            case ActionRecorded():
                changes.setdefault(event.action_id, []).append(event)
            case BreakerChanged():
                breakers.append(event)
    return Story(
        start_s=min((event.at_s for event in listed), default=0.0),
        end_s=end_s,
        spans=tuple(_span(start, ends.get(span_id), marks, end_s) for span_id, start in started.items()),
        actions=tuple(_action(history, end_s) for history in changes.values()),
        breaker_changes=tuple(breakers),
    )


def _span(
    start: SpanStarted, end: SpanEnded | None, marks: dict[tuple[SpanId, MarkKind], SpanMarked], last_s: float
) -> Span:
    token = marks.get((start.span_id, MarkKind.FIRST_TOKEN))
    tool = marks.get((start.span_id, MarkKind.FIRST_TOOL_NAME))
    return Span(
        span_id=start.span_id,
        kind=start.kind,
        name=start.name,
        thread_id=start.thread_id,
        parent_id=start.parent_id,
        start_s=start.at_s,
        end_s=max(start.at_s, end.at_s if end else last_s),
        status=end.status if end else None,
        first_token_s=token.at_s if token else None,
        first_tool=(tool.at_s, tool.value) if tool else None,
        prompt_tokens=end.prompt_tokens if end else None,
        cached_tokens=end.cached_tokens if end else None,
        completion_tokens=end.completion_tokens if end else None,
    )


def _action(history: list[ActionRecorded], last_s: float) -> Action:
    first, last = history[0], history[-1]
    submitted_s = next((change.at_s for change in history if change.state is ActionState.SUBMITTED), None)
    settled = last.state is ActionState.SETTLED
    return Action(
        action_id=first.action_id,
        kind=first.kind,
        agent=first.agent,
        thread_id=first.thread_id,
        planned_s=first.at_s,
        submitted_s=submitted_s,
        end_s=max(first.at_s, last.at_s if settled else last_s),
        outcome=last.outcome,
        plan_reason=first.reason,
        reason=last.reason,
        num_tokens=first.num_tokens,
        computed_tokens=last.computed_tokens,
    )


def agent_matches(agent: str, call_name: str) -> bool:
    """Whether a model call named `call_name` (a node or agent name) belongs to the agent labelled `agent`.

    Labels look like `namespace|node[name]` (see `AgentKey`); calls carry only the innermost name.
    """
    label, _, bracket = agent.partition("[")
    return call_name in {agent, label, label.rsplit("|", 1)[-1], bracket.removesuffix("]")}
