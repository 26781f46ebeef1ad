"""The queue of a batch worker: order, pieces, fairness, room."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.retrieval.lanes import Job, Lanes, LaneSettings, Priority

INTERACTIVE, PREFETCH, BULK = Priority


def lanes(**sizes: int) -> Lanes[Job[str]]:
    return Lanes(LaneSettings(**sizes))


def job(name: str, num: int, priority: Priority = INTERACTIVE, deadline_s: float | None = None) -> Job[str]:
    return Job([f"{name}{n}" for n in range(num)], priority, deadline_s)


def batch(queue: Lanes[Job[str]], now_s: float = 0.0) -> list[str]:
    shares, _ = queue.take(now_s)
    return [text for share in shares for text in share.job.items[share.start : share.stop]]


def test_everything_of_one_priority_comes_together_in_the_order_it_came() -> None:
    queue = lanes(max_batch=4)
    for name in "abc":
        assert queue.add(job(name, 2))
    assert [batch(queue), batch(queue), batch(queue)] == [["a0", "a1", "b0", "b1"], ["c0", "c1"], []]


def test_urgent_jobs_go_first_and_are_not_mixed_with_others() -> None:
    queue = lanes()
    queue.add(job("bulk", 1, BULK))
    queue.add(job("draft", 1, PREFETCH))
    queue.add(job("user", 1))
    assert [batch(queue) for _ in range(3)] == [["user0"], ["draft0"], ["bulk0"]]


def test_bulk_is_cut_into_chunks_and_large_jobs_advance_side_by_side() -> None:
    queue = lanes(bulk_chunk=2)
    queue.add(job("a", 4, BULK))
    queue.add(job("b", 3, BULK))
    assert [batch(queue) for _ in range(4)] == [["a0", "a1"], ["b0", "b1"], ["a2", "a3"], ["b2"]]


def test_a_chunk_is_never_larger_than_a_batch() -> None:
    queue = lanes(max_batch=1, bulk_chunk=2)
    queue.add(job("a", 2, BULK))
    assert batch(queue) == ["a0"]


def test_bulk_gets_its_turn_under_unending_load() -> None:
    queue = lanes(patience=3)
    queue.add(job("bulk", 64, BULK))
    turns = []
    for n in range(8):
        queue.add(job(f"user{n}-", 1))
        turns.append(batch(queue)[0].partition("-")[0].rstrip("0123456789"))
    assert turns == ["user", "user", "user", "bulk", "user", "user", "user", "bulk"]


def test_time_spent_empty_does_not_count_as_waiting() -> None:
    queue = lanes(patience=2)
    for _ in range(8):
        queue.add(job("user", 1))
        batch(queue)
    queue.add(job("bulk", 1, BULK))
    queue.add(job("user", 1))
    assert batch(queue) == ["user0"]


def test_a_full_lane_refuses_and_leaves_others_open() -> None:
    queue = lanes(max_queued=3)
    assert queue.add(job("a", 2, BULK))
    assert not queue.add(job("b", 2, BULK))
    assert queue.add(job("c", 1, BULK))
    assert queue.add(job("user", 3))
    assert len(queue) == 6


def test_an_empty_lane_takes_a_job_of_any_size() -> None:
    queue = lanes(max_queued=3)
    assert queue.add(job("a", 100, BULK))
    assert not queue.add(job("b", 1, BULK))


def test_late_jobs_are_given_back_and_not_done() -> None:
    queue = lanes()
    early, late = job("a", 1, deadline_s=5.0), job("b", 1, deadline_s=2.0)
    queue.add(late)
    queue.add(early)
    shares, over = queue.take(2.0)
    assert [share.job for share in shares] == [early]
    assert over == [late]
    assert len(queue) == 0


def test_a_lane_of_late_jobs_only_does_not_stop_the_next_lane() -> None:
    queue = lanes()
    queue.add(job("late", 1, deadline_s=1.0))
    queue.add(job("bulk", 1, BULK))
    shares, over = queue.take(2.0)
    assert [share.job.items for share in shares] == [["bulk0"]]
    assert len(over) == 1


def test_a_discarded_job_is_gone_also_in_the_middle() -> None:
    queue = lanes(bulk_chunk=1)
    gone, stays = job("a", 3, BULK), job("b", 1, BULK)
    queue.add(gone)
    queue.add(stays)
    assert batch(queue) == ["a0"]
    assert queue.discard(gone)
    assert not queue.discard(gone)
    assert [batch(queue), batch(queue)] == [["b0"], []]
    assert len(queue) == 0


def test_clear_returns_what_waited() -> None:
    queue = lanes()
    jobs = [job("a", 1), job("b", 1, BULK)]
    for one in jobs:
        queue.add(one)
    assert queue.clear() == jobs
    assert len(queue) == 0
    assert batch(queue) == []


@pytest.mark.parametrize("name", ["max_batch", "bulk_chunk", "max_queued", "patience"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0"):
        LaneSettings(**{name: 0})


@given(
    st.lists(st.tuples(st.sampled_from(Priority), st.integers(1, 9), st.booleans()), max_size=30),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_everything_is_taken_once_and_in_order(
    plan: list[tuple[Priority, int, bool]], max_batch: int, chunk: int
) -> None:
    queue = lanes(max_batch=max_batch, bulk_chunk=chunk, patience=2)
    taken: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    positions: dict[int, int] = {}

    def take() -> None:
        shares, _ = queue.take(0.0)
        assert len({share.job.priority for share in shares}) <= 1
        assert sum(share.stop - share.start for share in shares) <= max_batch
        for share in shares:
            assert share.start == positions.get(id(share.job), 0)
            positions[id(share.job)] = share.stop
            taken.update(share.job.items[share.start : share.stop])

    jobs = [job(f"{number}-", num, priority) for number, (priority, num, _) in enumerate(plan)]
    for one, (_, _, and_take) in zip(jobs, plan, strict=True):
        assert queue.add(one)
        wanted.update(one.items)
        if and_take:
            take()
    while len(queue):
        take()
    assert taken == wanted
