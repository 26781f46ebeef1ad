"""Whether to warm a predicted successor's prompt ahead of its call."""

from __future__ import annotations

from dataclasses import dataclass

#: The reason to refuse a warm-up whose call is about to come.
TOO_LATE = "too late: its call will have come before that is done"


@dataclass(frozen=True, slots=True)
class WarmInputs:
    """All that the decision looks at.

    `p_next` is the successor's probability; `num_tokens` the known prefix; `resident_tokens` what lies in the pool
    (`None` = not known); `restorable` whether the missing part can come from a tier instead of being computed;
    `foreground_calls` how many model calls are running; `wasted_ratio` computed tokens wasted so far per prompt token
    served; `eta_s` the median time until the call (under 0: overdue) and `action_s` how long the work would take
    (`None` = not known).
    """

    p_next: float
    num_tokens: int
    resident_tokens: int | None
    restorable: bool
    foreground_calls: int
    pool_tokens: int | None
    busy_tokens: int
    wasted_ratio: float
    eta_s: float | None = None
    action_s: float | None = None


@dataclass(frozen=True, slots=True)
class WarmVerdict:
    """`submit` or not, with one phrase of reason."""

    submit: bool
    reason: str


def plan_warm(
    inputs: WarmInputs,
    *,
    p_warm_min: float,
    reserve_ratio: float,
    waste_budget_ratio: float,
    block_size_tokens: int,
) -> WarmVerdict:
    """Decide for one successor.  The first rule that refuses gives the reason."""
    missing_tokens = inputs.num_tokens - (inputs.resident_tokens or 0)
    if inputs.p_next < p_warm_min:
        return WarmVerdict(submit=False, reason=f"p={inputs.p_next:.2f} under {p_warm_min:.2f}")
    if inputs.num_tokens < block_size_tokens:
        return WarmVerdict(
            submit=False, reason=f"less than one block known: {inputs.num_tokens} of {block_size_tokens} tokens"
        )
    if inputs.resident_tokens is not None and missing_tokens < block_size_tokens:
        return WarmVerdict(submit=False, reason="already resident")
    if _comes_first(inputs.eta_s, inputs.action_s):
        return WarmVerdict(submit=False, reason=TOO_LATE)
    if inputs.pool_tokens is not None:
        free_tokens = int(inputs.pool_tokens * (1.0 - reserve_ratio)) - inputs.busy_tokens
        if inputs.num_tokens > free_tokens:
            return WarmVerdict(
                submit=False, reason=f"no room: {inputs.num_tokens} of {max(free_tokens, 0)} free tokens"
            )
    if not inputs.restorable and inputs.wasted_ratio > waste_budget_ratio:
        return WarmVerdict(
            submit=False, reason=f"waste over budget: {inputs.wasted_ratio:.2f} of {waste_budget_ratio:.2f}"
        )
    if not inputs.restorable and inputs.foreground_calls > 1:
        return WarmVerdict(
            submit=False, reason=f"calls running: {inputs.foreground_calls}, would compute {missing_tokens} tokens"
        )
    return WarmVerdict(
        submit=True, reason=f"p={inputs.p_next:.2f}, {missing_tokens} of {inputs.num_tokens} tokens missing"
    )


def _comes_first(eta_s: float | None, action_s: float | None) -> bool:
    """Whether a call comes before an action for it would be done.

    Work that is still under way when its call comes only takes the engine's time.  A call that is overdue (`eta_s`
    under 0) by more than the action takes may as well stay away for long, so it does not count as coming first.
    """
    return eta_s is not None and action_s is not None and -action_s < eta_s < action_s
