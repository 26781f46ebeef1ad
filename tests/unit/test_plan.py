"""The pure decisions."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.plan import HoldVerb, Waiting, WarmInputs, hold_priority, hold_ttl_s, plan_holds, plan_warm

BLOCK = 32


def holds(*waiting: Waiting, pool: int = 10_000, running: int = 0) -> dict[str, HoldVerb]:
    decisions = plan_holds(
        waiting, pool_tokens=pool, running_tokens=running, reserve_ratio=0.1, block_size_tokens=BLOCK
    )
    return {decision.key: decision.verb for decision in decisions}


def waiting(
    key: str = "a", *, tokens: int = 2000, resident: int | None = None, turnover: int = 0, eta: float | None = 1.0
) -> Waiting:
    return Waiting(key, tokens, tokens if resident is None else resident, turnover, eta)


def test_a_resident_context_far_from_eviction_is_left_alone() -> None:
    assert holds(waiting(turnover=1000)) == {"a": HoldVerb.LEAVE}


def test_a_resident_context_is_touched_before_eviction_reaches_it() -> None:
    assert holds(waiting(turnover=4000)) == {"a": HoldVerb.TOUCH}
    assert holds(waiting(turnover=3999)) == {"a": HoldVerb.LEAVE}


def test_running_requests_bring_eviction_nearer() -> None:
    assert holds(waiting(turnover=1000), running=6000) == {"a": HoldVerb.TOUCH}


def test_a_first_hint_is_given_early_and_what_the_engine_holds_is_left_alone() -> None:
    def verb(context: Waiting, *, takes_hints: bool = True) -> HoldVerb:
        (decision,) = plan_holds(
            [context],
            pool_tokens=10_000,
            running_tokens=0,
            reserve_ratio=0.1,
            block_size_tokens=BLOCK,
            takes_hints=takes_hints,
        )
        return decision.verb

    assert verb(waiting(turnover=799)) is HoldVerb.LEAVE
    assert verb(waiting(turnover=800)) is HoldVerb.TOUCH
    assert verb(waiting(turnover=800), takes_hints=False) is HoldVerb.LEAVE
    assert verb(replace(waiting(turnover=9000), is_asked=True, is_held=True)) is HoldVerb.LEAVE
    assert verb(replace(waiting(turnover=9000, resident=0), is_asked=True, is_held=True)) is HoldVerb.RESTORE
    assert verb(replace(waiting(turnover=3999), is_asked=True)) is HoldVerb.LEAVE  # clipped: as without hints
    assert verb(replace(waiting(turnover=4000), is_asked=True)) is HoldVerb.TOUCH


def test_a_hold_outlasts_the_pause_and_the_soonest_is_given_up_last() -> None:
    assert [hold_ttl_s(eta, longest_s=60.0) for eta in (None, -3.0, 0.0, 4.0, 500.0)] == [60.0, 5.0, 5.0, 13.0, 60.0]
    assert [hold_priority(eta) for eta in (None, -3.0, 0.0, 4.5, 500.0)] == [50, 100, 100, 96, 0]


def test_a_lost_context_is_restored() -> None:
    assert holds(waiting(resident=0)) == {"a": HoldVerb.RESTORE}
    assert holds(waiting(resident=2000 - BLOCK)) == {"a": HoldVerb.RESTORE}
    assert holds(waiting(resident=2000 - BLOCK + 1)) == {"a": HoldVerb.LEAVE}


def test_one_lost_block_is_brought_back_only_by_an_engine_that_has_nothing_else_to_do() -> None:
    def verb(missing: int, *, is_idle: bool) -> HoldVerb:
        context = waiting(resident=2000 - missing)
        (decision,) = plan_holds(
            [context],
            pool_tokens=10_000,
            running_tokens=0,
            reserve_ratio=0.1,
            block_size_tokens=BLOCK,
            is_idle=is_idle,
        )
        return decision.verb

    assert verb(BLOCK, is_idle=True) is HoldVerb.RESTORE
    assert verb(2 * BLOCK - 1, is_idle=False) is HoldVerb.LEAVE
    assert verb(2 * BLOCK, is_idle=False) is HoldVerb.RESTORE


def test_a_context_lost_again_is_restored_anew_when_its_pause_has_doubled() -> None:
    lost = replace(waiting(resident=0, eta=None), restorable=True, restored_after_s=3.0, restored_tokens=2000)
    assert holds(replace(lost, restored_after_s=None)) == {"a": HoldVerb.RESTORE}
    assert holds(replace(lost, waited_s=5.9)) == {"a": HoldVerb.LEAVE}
    assert holds(replace(lost, waited_s=6.0)) == {"a": HoldVerb.RESTORE}
    assert holds(replace(lost, waited_s=5.9, restorable=False)) == {"a": HoldVerb.RESTORE}  # it would be computed
    assert holds(replace(lost, waited_s=5.9, resident_tokens=2000)) == {"a": HoldVerb.LEAVE}


def test_a_context_lost_again_is_restored_anew_when_twice_as_much_is_lost() -> None:
    lost = replace(waiting(resident=1500, eta=None), restorable=True, restored_after_s=3.0, waited_s=3.5)
    assert holds(replace(lost, restored_tokens=251)) == {"a": HoldVerb.LEAVE}
    assert holds(replace(lost, restored_tokens=250)) == {"a": HoldVerb.RESTORE}


def test_what_is_left_lost_takes_no_room_from_others() -> None:
    lost = replace(waiting("lost", tokens=4000, resident=100, eta=1.0), restorable=True, restored_after_s=3.0)
    lost = replace(lost, restored_tokens=4000, waited_s=3.5, eta_s=None)
    other = waiting("other", tokens=4000, eta=None)
    assert holds(lost, other, pool=6000) == {"lost": HoldVerb.LEAVE, "other": HoldVerb.LEAVE}
    assert holds(replace(lost, restored_after_s=None), other, pool=6000)["other"] is HoldVerb.REFUSE


def test_a_context_lost_again_is_restored_once_more_when_it_is_due() -> None:
    """Restored after 3 s of a pause that is expected to last 5.2 s: due from 4.2 s on."""
    lost = replace(waiting(resident=0), restorable=True, restored_after_s=3.0, restored_tokens=2000)
    assert holds(replace(lost, waited_s=4.1, eta_s=1.1)) == {"a": HoldVerb.LEAVE}
    assert holds(replace(lost, waited_s=4.2, eta_s=1.0)) == {"a": HoldVerb.RESTORE}
    assert holds(replace(lost, waited_s=5.5, eta_s=-0.3, restored_after_s=4.3)) == {"a": HoldVerb.LEAVE}
    assert holds(replace(lost, waited_s=8.7, eta_s=-3.5, restored_after_s=4.3)) == {"a": HoldVerb.RESTORE}


@given(st.floats(0.5, 2.0), st.floats(2.0, 200.0))
def test_what_is_spent_on_a_pause_grows_with_its_logarithm(first_s: float, pause_s: float) -> None:
    context = replace(waiting(resident=0, eta=None), restorable=True)
    restored, now_s = 0, first_s
    while now_s < pause_s:  # lost at once, whenever it was restored
        if holds(replace(context, waited_s=now_s)) == {"a": HoldVerb.RESTORE}:
            restored += 1
            context = replace(context, restored_after_s=now_s, restored_tokens=2000)
        now_s += 0.5
    assert restored <= 1 + math.log2(pause_s / first_s)


def test_what_does_not_fit_is_refused_latest_to_resume_first() -> None:
    decisions = holds(waiting("late", tokens=4000, eta=9.0), waiting("soon", tokens=4000, eta=1.0), pool=6000)
    assert decisions == {"soon": HoldVerb.LEAVE, "late": HoldVerb.REFUSE}


def test_unknown_return_times_come_last() -> None:
    decisions = holds(waiting("unknown", tokens=4000, eta=None), waiting("known", tokens=4000, eta=99.0), pool=6000)
    assert decisions["unknown"] is HoldVerb.REFUSE


@given(
    st.lists(st.tuples(st.integers(32, 5000), st.floats(0, 100) | st.none()), max_size=12),
    st.integers(64, 20_000),
    st.integers(0, 20_000),
)
def test_held_contexts_never_exceed_what_running_requests_and_reserve_leave(
    contexts: list[tuple[int, float | None]], pool: int, running: int
) -> None:
    given_contexts = [waiting(f"{n:03d}", tokens=tokens, eta=eta) for n, (tokens, eta) in enumerate(contexts)]
    decisions = holds(*given_contexts, pool=pool, running=running)
    assert set(decisions) == {context.key for context in given_contexts}
    held = sum(c.num_tokens for c in given_contexts if decisions[c.key] is not HoldVerb.REFUSE)
    assert held <= max(int(pool * 0.9) - running, 0)


def inputs(**changes: object) -> WarmInputs:
    values = {
        "p_next": 1.0,
        "num_tokens": 1000,
        "resident_tokens": 0,
        "restorable": False,
        "foreground_calls": 1,
        "pool_tokens": 10_000,
        "busy_tokens": 0,
        "wasted_ratio": 0.0,
    }
    return WarmInputs(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "submit", "reason"),
    [
        ({}, True, "missing"),
        ({"p_next": 0.5}, False, "p=0.50"),
        ({"num_tokens": 31}, False, "less than one block"),
        ({"resident_tokens": 1000}, False, "already resident"),
        ({"resident_tokens": None}, True, "missing"),
        ({"busy_tokens": 8500}, False, "no room"),
        ({"pool_tokens": None, "busy_tokens": 10**9}, True, "missing"),
        ({"wasted_ratio": 0.3}, False, "waste"),
        ({"wasted_ratio": 0.3, "restorable": True}, True, "missing"),
        ({"foreground_calls": 2}, False, "calls running"),
        ({"foreground_calls": 2, "restorable": True}, True, "missing"),
        ({"eta_s": 0.2, "action_s": 0.3}, False, "too late"),
        ({"eta_s": -0.2, "action_s": 0.3}, False, "too late"),
        ({"eta_s": -0.4, "action_s": 0.3}, True, "missing"),
    ],
)
def test_a_successor_is_warmed_only_when_it_can_pay(changes: dict[str, object], submit: bool, reason: str) -> None:
    verdict = plan_warm(
        inputs(**changes), p_warm_min=0.6, reserve_ratio=0.1, waste_budget_ratio=0.25, block_size_tokens=BLOCK
    )
    assert (verdict.submit, reason in verdict.reason) == (submit, True)


@pytest.mark.parametrize("changes", [{"wasted_ratio": 0.3}, {"foreground_calls": 2}, {"num_tokens": 31}])
def test_the_figures_of_a_refusal_stand_behind_a_colon(changes: dict[str, object]) -> None:
    """The runtime books a refusal once per phrase, and the phrase ends at the colon."""
    verdict = plan_warm(
        inputs(**changes), p_warm_min=0.6, reserve_ratio=0.1, waste_budget_ratio=0.25, block_size_tokens=BLOCK
    )
    assert not any(character.isdigit() for character in verdict.reason.split(":")[0])
