"""Scores of forecasts: hits, Brier score, reliability, lead time and the share of prompts known ahead.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

#: Stands for the end of the run (or of this branch of it) among the labels of a decision.
END_LABEL = "__end__"
#: Numbers of runs seen at which figures are reported; a window reaches from one to the next.
MARKS: tuple[int, ...] = (0, 1, 2, 5, 10, 20, 40)
#: Runs seen from which the summary counts.
SETTLED_AFTER = 20
RELIABILITY_BINS = 10
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Decision:
    """One end of a node: what was forecast of the nodes after it just before, and what came.

    `chances` maps nodes (and `END_LABEL`) to their forecast chance, and may sum to less than 1: the rest was unknown.
    `outcome` holds the nodes that came, or `END_LABEL` alone.  `odds` are the true chances where the route is drawn by
    lot, and `None` where it can be learnt.  `runs_seen` counts the runs before this one.
    """

    runs_seen: int
    node: str
    chances: Mapping[str, float]
    outcome: frozenset[str]
    odds: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One model call: the tokens of its prompt, and how many were known as a true prefix before its node started.

    `foretold_tokens` is the length of the prediction itself, so that a wrong tail shows.  `turn` counts the calls of
    its agent in its run, from 0.  `opens_run` says that no node had ended before: what the user wrote came with it.
    """

    runs_seen: int
    node: str
    turn: int
    prompt_tokens: int
    known_tokens: int
    foretold_tokens: int
    opens_run: bool = False


@dataclass(frozen=True, slots=True)
class Lead:
    """One start of a node: seconds since the forecast had first named it; 0 if it never did."""

    runs_seen: int
    node: str
    lead_s: float


@dataclass(frozen=True, slots=True)
class Observed:
    """All that was measured on one shape."""

    decisions: tuple[Decision, ...] = ()
    calls: tuple[ReadCall, ...] = ()
    leads: tuple[Lead, ...] = ()

    def between(self, first: int, last: int | None) -> Observed:
        """Return what was measured with `first` or more runs seen, and fewer than `last` (`None`: no limit)."""

        def inside(runs_seen: int) -> bool:
            return runs_seen >= first and (last is None or runs_seen < last)

        return Observed(
            tuple(d for d in self.decisions if inside(d.runs_seen)),
            tuple(c for c in self.calls if inside(c.runs_seen)),
            tuple(lead for lead in self.leads if inside(lead.runs_seen)),
        )


def ranked(chances: Mapping[str, float]) -> list[str]:
    """Return the labels with a chance above 0, most likely first; equal chances in the order of their names."""
    return sorted((label for label, p in chances.items() if p > 0.0), key=lambda label: (-chances[label], label))


def is_hit(chances: Mapping[str, float], outcome: frozenset[str], *, among: int) -> bool:
    """Say whether one of the `among` likeliest labels came."""
    return any(label in outcome for label in ranked(chances)[:among])


def brier(chances: Mapping[str, float], outcome: frozenset[str]) -> float:
    """Return the Brier score over all labels that were named or came: 0 is perfect, 2 is certain of the wrong one.

    For one outcome this is the multi-class score; several outcomes at once (a fan-out) are one yes or no each.
    """
    return sum((chances.get(label, 0.0) - (label in outcome)) ** 2 for label in set(chances) | outcome)


def reliability(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return a row per tenth of chance that was used: mean chance said, share that came, and how many."""
    rows: list[list[tuple[float, bool]]] = [[] for _ in range(RELIABILITY_BINS)]
    for decision in decisions:
        for label, p in decision.chances.items():
            if p > 0.0:
                index = min(int(p * RELIABILITY_BINS), RELIABILITY_BINS - 1)
                rows[index].append((p, label in decision.outcome))
    return [
        {
            "from_p": index / RELIABILITY_BINS,
            "mean_p": round(sum(p for p, _ in row) / len(row), 3),
            "came_ratio": round(sum(came for _, came in row) / len(row), 3),
            "n": len(row),
        }
        for index, row in enumerate(rows)
        if row
    ]


def figures(observed: Observed) -> dict[str, Any]:
    """Return the figures of what was observed; those without any value are left out.

    `later_prefix_share` leaves out the calls that open a run.  `best_top1` and `best_brier` are those of a predictor
    that knows all odds and every route that can be learnt.
    """
    found: dict[str, Any] = {"decisions": len(observed.decisions)}
    decisions = observed.decisions
    if decisions:
        found["top1"] = _mean(decisions, lambda d: float(is_hit(d.chances, d.outcome, among=1)))
        found["top3"] = _mean(decisions, lambda d: float(is_hit(d.chances, d.outcome, among=3)))
        found["brier"] = _mean(decisions, lambda d: brier(d.chances, d.outcome))
        if any(d.odds is not None for d in decisions):
            best = [(_best_chances(d), d.outcome) for d in decisions]
            found["best_top1"] = round(sum(is_hit(c, o, among=1) for c, o in best) / len(best), 4)
            found["best_brier"] = round(sum(brier(c, o) for c, o in best) / len(best), 4)
    if observed.calls:
        tokens = sum(call.prompt_tokens for call in observed.calls)
        known = sum(call.known_tokens for call in observed.calls)
        foretold = sum(call.foretold_tokens for call in observed.calls)
        found["prefix_share"] = round(known / tokens, 4)
        found["wrong_share"] = round((foretold - known) / tokens, 4)
        later = [call for call in observed.calls if not call.opens_run]
        if later:
            later_tokens = sum(call.prompt_tokens for call in later)
            found["later_prefix_share"] = round(sum(call.known_tokens for call in later) / later_tokens, 4)
    if observed.leads:
        found["lead_s"] = _mean(observed.leads, lambda lead: lead.lead_s)
    return found


def by_runs_seen(observed: Observed) -> list[dict[str, Any]]:
    """Return figures per window of runs seen; windows without a decision are left out."""
    rows = []
    for first, last in zip(MARKS, (*MARKS[1:], None), strict=True):
        window = observed.between(first, last)
        if window.decisions:
            rows.append({"runs_seen": first, **figures(window)})
    return rows


def mean_of(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a figure over the rows that have it; `None` if none has."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return round(sum(values) / len(values), 4) if values else None


def in_hindsight(observed: Observed) -> Observed:
    """Return the same with `odds` that nobody could know: how often, over all runs, each label came after its node.

    A predictor with these odds is the best that knows the present node alone; who hears what a model says, or knows
    the past of the run, may do better.
    """
    came: dict[str, Counter[str]] = {}
    ends = Counter(decision.node for decision in observed.decisions)
    for decision in observed.decisions:
        came.setdefault(decision.node, Counter()).update(decision.outcome)
    odds = {node: {label: n / ends[node] for label, n in counts.items()} for node, counts in came.items()}
    return replace(observed, decisions=tuple(replace(d, odds=odds[d.node]) for d in observed.decisions))


def _best_chances(decision: Decision) -> Mapping[str, float]:
    return dict.fromkeys(decision.outcome, 1.0) if decision.odds is None else decision.odds


def _mean(values: Sequence[_T], of: Callable[[_T], float]) -> float:
    return round(sum(of(value) for value in values) / len(values), 4)
