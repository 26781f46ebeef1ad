"""Which contexts of paused agents to keep in the engine's pool, and how.

The pool evicts by recency alone.  An agent that waits for a tool is certain to come back, so its context is worth
more than its age says.  Two means exist from outside an engine, both one cheap request: *touch* a context that is
still resident before eviction reaches it, and *restore* one that eviction has reached.  Where the engine takes hints on
its pool, a touch carries one, and the context is left alone while that is in force.

How far eviction is away follows from the pool's geometry.  Free blocks form one queue, oldest first:

    [ others' old contexts | held contexts in order of last use ]  + blocks of running requests
      '---- slack_tokens ---'

Every token that others allocate takes one slot from the left.  While fewer than `slack_tokens` were allocated since
the held contexts were last used, none of them can have been evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

#: A context is touched when this share of the slack has been used up since its last use.
TOUCH_AT_SLACK_RATIO = 0.5
#: The same where the touch carries a first hint: it is sent once, so that being early costs nothing more.
HINT_AT_SLACK_RATIO = 0.1
#: A hold outlasts the time at which the context is expected back by this factor and by this many seconds.
HOLD_ETA_FACTOR = 2.0
HOLD_SLACK_S = 5.0
#: A context that the tier has, and that was lost again after it was restored, is restored anew when its pause has
#: become this many times as long, or what it lost: however long it stays away and however hard others press, what is
#: spent on it grows with the logarithm of both (doubling, as in online rent-or-buy problems; Karlin et al., 1988).
RESTORE_AGAIN_FACTOR = 2.0
#: Earlier than that it is restored once when it is expected within this time, in seconds.
DUE_S = 1.0
#: Priority of a hold for a context of which nobody knows when it comes back; 100 is for one due now.
UNKNOWN_ETA_PRIORITY = 50
#: A context whose agent is only foretold stands behind all whose agents have paused.
FORETOLD_PRIORITY = 0


class HoldVerb(StrEnum):
    """What to do with one paused context now."""

    TOUCH = "touch"
    RESTORE = "restore"
    LEAVE = "leave"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Waiting:
    """One paused context.

    `num_tokens` is its prefix, `resident_tokens` how much of it lies in the pool, `turnover_tokens` how many tokens
    the pool has stored since this context was last used, `eta_s` the median time until it resumes (`None` unknown,
    under 0 overdue), `is_held` that a hint on the engine's pool is in force for all of it, `is_asked` that the engine
    has been asked to hold it before.  It has waited for `waited_s`; when `restored_tokens` of it were last restored, it
    had waited for `restored_after_s` (`None`: not yet restored).  `restorable` says that a tier has it, so that its
    call need not compute it.
    """

    key: str
    num_tokens: int
    resident_tokens: int
    turnover_tokens: int
    eta_s: float | None
    is_held: bool = False
    is_asked: bool = False
    waited_s: float = 0.0
    restored_after_s: float | None = None
    restored_tokens: int = 0
    restorable: bool = False

    @property
    def restore_in_s(self) -> float:
        """In how many seconds it is worth its cost to restore it, 0 for now.

        Restored again and again a context under pressure costs others more than its call can save.
        """
        if not self.restorable or self.restored_after_s is None:
            return 0.0
        if self.num_tokens - self.resident_tokens >= self.restored_tokens * RESTORE_AGAIN_FACTOR:
            return 0.0
        again_after_s = self.restored_after_s * RESTORE_AGAIN_FACTOR
        if self.eta_s is not None:
            due_after_s = self.waited_s + self.eta_s - DUE_S
            if due_after_s > self.restored_after_s:
                again_after_s = min(again_after_s, due_after_s)
        return max(again_after_s - self.waited_s, 0.0)

    @property
    def room_tokens(self) -> int:
        """Tokens of the pool that it takes now."""
        is_left_lost = self.resident_tokens < self.num_tokens and self.restore_in_s > 0.0
        return self.resident_tokens if is_left_lost else self.num_tokens


@dataclass(frozen=True, slots=True)
class HoldDecision:
    """The verb for one context, with one phrase of reason; time alone may change it in `again_in_s`."""

    key: str
    verb: HoldVerb
    reason: str
    again_in_s: float | None = None


def plan_holds(
    waiting: Sequence[Waiting],
    *,
    pool_tokens: int,
    running_tokens: int,
    reserve_ratio: float,
    block_size_tokens: int,
    takes_hints: bool = False,
    is_idle: bool = True,
) -> tuple[HoldDecision, ...]:
    """Decide for every paused context, soonest to resume first.

    Contexts are taken in the order of `eta_s` (unknown last, ties by key) while their sum fits what running requests
    and the reserve leave of the pool.  `takes_hints` says that a touch makes the engine hold, `is_idle` that it works
    for nobody else: only then a request is sent for one block, which mostly is what an answer's end is rendered to.
    The result has one decision for each input, in that order.
    """
    budget_tokens = int(pool_tokens * (1.0 - reserve_ratio)) - running_tokens
    ordered = sorted(waiting, key=lambda w: (w.eta_s is None, max(w.eta_s or 0.0, 0.0), w.key))
    taken: list[Waiting] = []
    refused: list[Waiting] = []
    held_tokens = 0
    for context in ordered:
        fits = held_tokens + context.room_tokens <= budget_tokens
        (taken if fits else refused).append(context)
        held_tokens += context.room_tokens if fits else 0
    slack_tokens = max(block_size_tokens, pool_tokens - running_tokens - held_tokens)
    least_tokens = block_size_tokens if is_idle else 2 * block_size_tokens
    decisions = [
        _decide(context, slack_tokens, least_tokens, is_first_hint=takes_hints and not context.is_asked)
        for context in taken
    ]
    decisions += [
        HoldDecision(c.key, HoldVerb.REFUSE, f"over budget: {c.num_tokens} of {max(budget_tokens, 0)} tokens")
        for c in refused
    ]
    return tuple(decisions)


def hold_ttl_s(eta_s: float | None, *, longest_s: float) -> float:
    """Return how long the engine shall hold a context that is expected back in `eta_s` seconds."""
    if eta_s is None:
        return longest_s
    return min(max(eta_s, 0.0) * HOLD_ETA_FACTOR + HOLD_SLACK_S, longest_s)


def hold_priority(eta_s: float | None, *, is_foretold: bool = False) -> int:
    """Return 0 to 100: the sooner a context is expected back, the later the engine gives it up under need.

    Of agents that are only foretold (`is_foretold`) none stands before one that has paused.
    """
    if is_foretold:
        return FORETOLD_PRIORITY
    return UNKNOWN_ETA_PRIORITY if eta_s is None else 100 - min(max(int(eta_s), 0), 100)


def _decide(context: Waiting, slack_tokens: int, least_tokens: int, *, is_first_hint: bool) -> HoldDecision:
    missing_tokens = context.num_tokens - context.resident_tokens
    if missing_tokens >= least_tokens and (in_s := context.restore_in_s) > 0.0:
        return HoldDecision(context.key, HoldVerb.LEAVE, f"lost again: restored in {in_s:.1f} s", again_in_s=in_s)
    if missing_tokens >= least_tokens:
        return HoldDecision(context.key, HoldVerb.RESTORE, f"{missing_tokens} tokens not in the pool")
    if context.is_held:
        return HoldDecision(context.key, HoldVerb.LEAVE, "held by the engine")
    ratio = HINT_AT_SLACK_RATIO if is_first_hint else TOUCH_AT_SLACK_RATIO
    if context.turnover_tokens >= ratio * slack_tokens:
        return HoldDecision(
            context.key,
            HoldVerb.TOUCH,
            f"pool turned over {context.turnover_tokens} tokens, eviction is {slack_tokens} away",
        )
    return HoldDecision(context.key, HoldVerb.LEAVE, "resident and not near eviction")
