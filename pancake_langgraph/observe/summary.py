"""One run in numbers, read from the ledger alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pancake_langgraph._types import ActionKind, Outcome
from pancake_langgraph.ledger import Ledger, SpanKind, SpanStatus
from pancake_langgraph.observe.spans import Span, read_story


@dataclass(frozen=True, slots=True)
class Summary:
    """What a ledger says about the runs it saw.

    Counts of spans and tokens cover the events still held (`dropped_events` says how many fell out); outcomes cover
    everything since the ledger was made.

    `runs`, `calls`, `tools`: spans begun; `failed_calls`: calls that ended with an error or were cancelled.
    `ttft_s_by_agent`: seconds from call start to first token, per agent, in the order the calls began.
    `prompt_tokens`, `completion_tokens`: sums over the calls whose server reported them.
    `cached_tokens`: the same, or `None` when no call reported it (unknown is not 0).
    `outcomes`, `outcome_tokens`: settled actions and the tokens they were about, per outcome; every outcome is a key.
    `warm_tokens`: tokens of the warm-ups and prefetches that were really sent; `warm_computed_tokens`: how many of
    these the engine had to compute, over those where it said so.
    `waste_ratio`: (wasted + failed) / (used + late + wasted + failed), in tokens; `None` when nothing was settled.
    """

    runs: int
    calls: int
    failed_calls: int
    tools: int
    ttft_s_by_agent: Mapping[str, tuple[float, ...]]
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int
    outcomes: Mapping[Outcome, int]
    outcome_tokens: Mapping[Outcome, int]
    open_actions: int
    warm_tokens: int
    warm_computed_tokens: int
    waste_ratio: float | None
    breaker_openings: int
    dropped_events: int


def summarize(ledger: Ledger) -> Summary:
    """Summarize what `ledger` holds now.  Safe from any thread, also while runs go on."""
    story = read_story(ledger.events())
    stats = ledger.statistics()
    calls = [span for span in story.spans if span.kind is SpanKind.CALL]
    sent = [
        action
        for action in story.actions
        if action.kind in (ActionKind.WARM, ActionKind.PREFETCH) and action.submitted_s is not None
    ]
    cached = [span.cached_tokens for span in calls if span.cached_tokens is not None]
    return Summary(
        runs=sum(span.kind is SpanKind.RUN for span in story.spans),
        calls=len(calls),
        failed_calls=sum(span.status in (SpanStatus.ERROR, SpanStatus.CANCELLED) for span in calls),
        tools=sum(span.kind is SpanKind.TOOL for span in story.spans),
        ttft_s_by_agent=_ttft_s_by_agent(calls),
        prompt_tokens=sum(span.prompt_tokens or 0 for span in calls),
        cached_tokens=sum(cached) if cached else None,
        completion_tokens=sum(span.completion_tokens or 0 for span in calls),
        outcomes=dict(stats.outcomes),
        outcome_tokens=dict(stats.outcome_tokens),
        open_actions=stats.open_actions,
        warm_tokens=sum(action.num_tokens for action in sent),
        warm_computed_tokens=sum(action.computed_tokens or 0 for action in sent),
        waste_ratio=_waste_ratio(stats.outcome_tokens),
        breaker_openings=sum(change.is_open for change in story.breaker_changes),
        dropped_events=stats.dropped_events,
    )


def _ttft_s_by_agent(calls: list[Span]) -> dict[str, tuple[float, ...]]:
    found: dict[str, list[float]] = {}
    for span in calls:
        if span.first_token_s is not None:
            found.setdefault(span.name, []).append(max(0.0, span.first_token_s - span.start_s))
    return {agent: tuple(times) for agent, times in sorted(found.items())}


def _waste_ratio(tokens: Mapping[Outcome, int]) -> float | None:
    lost = tokens.get(Outcome.WASTED, 0) + tokens.get(Outcome.FAILED, 0)
    settled = lost + tokens.get(Outcome.USED, 0) + tokens.get(Outcome.LATE, 0)
    return lost / settled if settled else None
