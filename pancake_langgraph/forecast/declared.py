"""What the author of a graph declared about time and needs, as a prior that measurements replace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pancake_langgraph._types import Candidate, NodeId
from pancake_langgraph.forecast.lookahead import Exit

#: Observations that a declared need is worth; one is the prior's.
NEED_STRENGTH = 2.0
_PRIOR_STRENGTH = 1.0
_FULL_UNTIL_SAMPLES = 3
_GONE_AT_SAMPLES = 9
_SPREAD = 2.0
_CERTAIN = 0.999


@dataclass(frozen=True, slots=True)
class Need:
    """A node that may run because of another one, `steps` super-steps after it began."""

    node: NodeId
    steps: int


@dataclass(frozen=True, slots=True)
class Declared:
    """The declarations of one graph: seconds by node and by tool, needs by node.  Immutable."""

    node_seconds: Mapping[str, float] = field(default_factory=dict)
    tool_seconds: Mapping[str, float] = field(default_factory=dict)
    needs: Mapping[str, tuple[Need, ...]] = field(default_factory=dict)


NOTHING_DECLARED = Declared()


def stand_ins(expect_s: float | None, num_samples: int) -> tuple[float, ...]:
    """Return the samples that a declared duration stands for next to `num_samples` real ones.

    Alone it also stands for a spread; three measurements that agree outvote it, and after nine it is gone.
    """
    if expect_s is None or num_samples >= _GONE_AT_SAMPLES:
        return ()
    if num_samples >= _FULL_UNTIL_SAMPLES:
        return (expect_s,)
    return (expect_s / _SPREAD, expect_s, expect_s * _SPREAD)


def lift_exits(chances: Mapping[str, float], needs: Iterable[Need], num_seen: int) -> dict[str, float]:
    """Raise the declared needs among the exits of a node, as if they had been seen a few times already.

    Exits that exclude each other still sum to what they did; certain ones keep their chance.
    """
    wanted = {need.node for need in needs if need.steps == 1}
    wanted = {node for node in wanted if chances.get(node, 0.0) < _CERTAIN}
    if not wanted:
        return dict(chances)
    seen = num_seen + _PRIOR_STRENGTH
    total = seen + NEED_STRENGTH
    lifted = {target: p if p >= _CERTAIN else p * seen / total for target, p in chances.items()}
    for node in wanted:
        lifted[node] = lifted.get(node, 0.0) + NEED_STRENGTH / len(wanted) / total
    return lifted


def lift_distant(
    found: tuple[Candidate, ...], needs: Iterable[Need], *, after: str, num_seen: int, horizon_steps: int
) -> tuple[Candidate, ...]:
    """Raise declared needs that are further than one step away, and drop other candidates beyond the horizon."""
    distant = {need.node: need for need in needs if need.steps > 1}
    seen = num_seen + _PRIOR_STRENGTH
    best: dict[str, Candidate] = {}
    for candidate in found:
        if candidate.node in distant and candidate.p_next > best.get(candidate.node, _none(candidate.node)).p_next:
            best[candidate.node] = candidate
    kept = [c for c in found if c.steps <= horizon_steps and best.get(c.node) is not c]
    for node, need in distant.items():
        known = best.get(node) or _none(node)._replace(steps=need.steps)
        p_next = max(known.p_next, (known.p_next * seen + NEED_STRENGTH) / (seen + NEED_STRENGTH))
        kept.append(known._replace(p_next=min(1.0, p_next), reason=reason_of_need(after)))
    return tuple(sorted(kept, key=lambda c: (-c.p_next, c.steps, c.node)))


def reason_of_need(after: str) -> str:
    """Return the phrase for the decision log."""
    return f"declared: {after} may need it"


def mark_needs(exits: dict[str, Exit], needs: Iterable[Need], *, after: str) -> dict[str, Exit]:
    """Give the exits that were raised the declaration as their reason."""
    wanted = {need.node for need in needs if need.steps == 1}
    return {
        target: exit_._replace(reason=reason_of_need(after)) if target in wanted and exit_.p_next < _CERTAIN else exit_
        for target, exit_ in exits.items()
    }


def _none(node: str) -> Candidate:
    return Candidate(NodeId(node), 0.0, 1, None, "")
