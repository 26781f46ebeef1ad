"""What is known of how long the runtime's own requests take."""

import pytest

from pancake_langgraph.runtime.action_times import MIN_SAMPLES, ActionTimes, Work


def noted(work: Work, *samples: tuple[int, float]) -> ActionTimes:
    times = ActionTimes()
    for num_tokens, elapsed_s in samples:
        times.note(work, num_tokens=num_tokens, elapsed_s=elapsed_s)
    return times


def test_a_few_requests_are_not_believed() -> None:
    assert noted(Work.TOUCH, *[(0, 0.1)] * (MIN_SAMPLES - 1)).expected_s(Work.TOUCH, num_tokens=0) is None


def test_touching_and_restoring_take_their_median_whatever_their_size() -> None:
    times = noted(Work.RESTORE, (10, 0.1), (10_000, 0.3), (500, 9.0))
    assert times.expected_s(Work.RESTORE, num_tokens=77) == pytest.approx(0.3)
    assert times.expected_s(Work.TOUCH, num_tokens=0) is None


def test_computing_is_counted_per_token() -> None:
    times = noted(Work.COMPUTE, (100, 1.0), (200, 2.0), (50, 0.5))
    assert times.expected_s(Work.COMPUTE, num_tokens=1_000) == pytest.approx(10.0)


def test_the_last_requests_count() -> None:
    times = noted(Work.TOUCH, *[(0, 5.0)] * 100, *[(0, 0.1)] * 40)
    assert times.expected_s(Work.TOUCH, num_tokens=0) == pytest.approx(0.1)
