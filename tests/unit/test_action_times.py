"""What is known of how long the runtime's own requests take."""

import pytest

from pancake_langgraph.runtime.action_times import MAX_AGE_S, MIN_SAMPLES, ActionTimes, Work


def noted(work: Work, *samples: tuple[int, float]) -> ActionTimes:
    times = ActionTimes()
    for num_tokens, elapsed_s in samples:
        times.note(work, num_tokens=num_tokens, elapsed_s=elapsed_s, now_s=100.0)
    return times


def expected(times: ActionTimes, work: Work, num_tokens: int = 0, *, after_s: float = 1.0) -> float | None:
    return times.expected_s(work, num_tokens=num_tokens, now_s=100.0 + after_s)


def test_a_few_requests_are_not_believed() -> None:
    assert expected(noted(Work.TOUCH, *[(0, 0.1)] * (MIN_SAMPLES - 1)), Work.TOUCH) is None


def test_touching_and_restoring_take_their_median_whatever_their_size() -> None:
    times = noted(Work.RESTORE, (10, 0.1), (10_000, 0.3), (500, 9.0))
    assert expected(times, Work.RESTORE, 77) == pytest.approx(0.3)
    assert expected(times, Work.TOUCH) is None


def test_computing_is_counted_per_token() -> None:
    times = noted(Work.COMPUTE, (100, 1.0), (200, 2.0), (50, 0.5))
    assert expected(times, Work.COMPUTE, 1_000) == pytest.approx(10.0)


def test_the_last_requests_count() -> None:
    times = noted(Work.TOUCH, *[(0, 5.0)] * 100, *[(0, 0.1)] * 40)
    assert expected(times, Work.TOUCH) == pytest.approx(0.1)


def test_a_slow_spell_does_not_keep_its_own_relearning_away() -> None:
    times = noted(Work.RESTORE, *[(0, 5.0)] * 10)
    assert expected(times, Work.RESTORE, after_s=MAX_AGE_S) == pytest.approx(5.0)
    assert expected(times, Work.RESTORE, after_s=MAX_AGE_S + 1.0) is None
