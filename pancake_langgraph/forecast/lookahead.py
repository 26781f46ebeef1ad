"""From one-step exits to candidates several steps away."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pancake_langgraph._types import Candidate, NodeId
from pancake_langgraph.forecast.prior import is_end

_P_MIN = 0.01
_MAX_CANDIDATES = 64


class Exit(NamedTuple):
    """One way out of a node: `steps` until the target starts, the chance, and the median wait (`None` = unknown).

    `sooner_s` and `later_s` are how far the tenth and the ninetieth percentile of the wait lie from the median.
    """

    target: str
    p_next: float
    steps: int
    eta_s: float | None
    reason: str
    sooner_s: float = 0.0
    later_s: float = 0.0

    def revised(self, p_next: float, reason: str) -> Exit:
        """Return the same way out with another chance, for another reason."""
        target, _, steps, eta_s, _, sooner_s, later_s = self
        return Exit(target, p_next, steps, eta_s, reason, sooner_s, later_s)


ExitsOf = Callable[[str, tuple[str, ...]], Mapping[str, Exit]]


def look_ahead(
    node: str, first: Mapping[str, Exit], exits_of: ExitsOf, *, context: tuple[str, ...], horizon_steps: int
) -> tuple[Candidate, ...]:
    """Expand `first`, the exits of `node`, up to `horizon_steps`.

    `exits_of(node, context)` gives the exits of a node further on.  Nodes with a chance under one percent are not
    expanded, and at most 64 candidates come back, so the cost is O(degree) per step looked ahead.
    """
    found: dict[tuple[str, int], Exit] = {}
    # What lies before an exit, the exit, the nodes before it, and the chance of all that.
    frontier: list[tuple[Exit | None, Exit, tuple[str, ...], float]] = [
        (None, exit_, (*context, node), exit_.p_next) for exit_ in first.values()
    ]
    while frontier:
        following: list[tuple[Exit | None, Exit, tuple[str, ...], float]] = []
        for before, step, path, p_next in frontier:
            steps = step.steps if before is None else before.steps + step.steps
            if steps > horizon_steps or p_next <= 0.0 or is_end(step.target):
                continue
            exit_ = step if before is None else _after(before, step)
            _merge(found, exit_)
            if steps < horizon_steps and p_next >= _P_MIN and len(found) < _MAX_CANDIDATES:
                behind = path if before is None else (*path, before.target)
                onward = exits_of(exit_.target, behind).values()
                following += [(exit_, then, behind, p_next * then.p_next) for then in onward]
        if len(following) > 1:
            following.sort(key=lambda way: -way[3])
        frontier = following[:_MAX_CANDIDATES]
    ordered = sorted(found.values(), key=lambda e: (-e.p_next, e.steps, e.target))[:_MAX_CANDIDATES]
    return tuple(_candidate(exit_) for exit_ in ordered)


def _candidate(exit_: Exit) -> Candidate:
    early_s = late_s = None
    if exit_.eta_s is not None:
        early_s, late_s = max(0.0, exit_.eta_s - exit_.sooner_s), exit_.eta_s + exit_.later_s
    return Candidate(NodeId(exit_.target), exit_.p_next, exit_.steps, exit_.eta_s, exit_.reason, early_s, late_s)


def _after(first: Exit, then: Exit) -> Exit:
    eta_s = None if first.eta_s is None or then.eta_s is None else first.eta_s + then.eta_s
    return Exit(
        then.target,
        first.p_next * then.p_next,
        first.steps + then.steps,
        eta_s,
        f"{then.reason}, after {first.target}",
        # Waits that do not depend on each other: distances from the median add up like standard deviations.
        math.hypot(first.sooner_s, then.sooner_s),
        math.hypot(first.later_s, then.later_s),
    )


def _merge(found: dict[tuple[str, int], Exit], exit_: Exit) -> None:
    """Add up chances of different ways to one node at one step; the likeliest way gives time and reason."""
    key = (exit_.target, exit_.steps)
    other = found.get(key)
    if other is None:
        found[key] = exit_
        return
    likelier = exit_ if exit_.p_next > other.p_next else other
    found[key] = likelier.revised(min(1.0, exit_.p_next + other.p_next), likelier.reason)
