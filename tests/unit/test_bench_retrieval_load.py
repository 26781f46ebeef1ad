"""`pancake bench retrieval-load`: who is served when, and what is made of it, with a small engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import ConfigError, RetrievalError
from pancake_langgraph.bench import vector_benches
from pancake_langgraph.bench.retrieval_load import (
    BulkJob,
    LoadArm,
    LoadPlan,
    arrivals_s,
    ask_beside,
    interactive_p95,
    opened_queues,
    run_retrieval_load,
)
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.retrieval.base import Hit, Query
from tests.plain_vectors import DIM, PlainEngine, hashed
from tests.unit.bench_kit import kept_engines, make_small_world

LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_small_world(monkeypatch, tmp_path)


def queries(count: int) -> list[Query]:
    return [Query(np.ones(DIM, np.float32), limit=1)] * count


class GatedEngine(PlainEngine):
    """Remembers how many queries each call had, and is held up in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.began, self.gate = threading.Event(), threading.Event()

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        self.calls.append(len(queries))
        self.began.set()
        assert self.gate.wait(LIMIT_S)
        return [[] for _ in queries]


@pytest.mark.parametrize(
    ("arm", "calls"), [(LoadArm.FIRST_COME, [100, 100, 1]), (LoadArm.PANCAKE, [32, 1, 32, 32, 32, 32, 32, 8])]
)
def test_one_queue_serves_whole_batches_in_order_and_the_scheduler_users_first(arm: LoadArm, calls: list[int]) -> None:
    engine = GatedEngine()
    with opened_queues(arm, engine) as queues:
        asked: list[Future[list[list[Hit]]]] = [queues.bulk(queries(100))]
        assert engine.began.wait(LIMIT_S)
        asked += [queues.bulk(queries(100)), queues.interactive(queries(1))]
        engine.gate.set()
        assert [len(future.result(LIMIT_S)) for future in asked] == [100, 100, 1]
    assert engine.calls[:2] == calls[:2]
    assert engine.calls.index(1) == calls.index(1)
    assert sum(engine.calls) == sum(calls)


def a_run(**changes: object) -> BenchResult:
    plan = LoadPlan(**{"chunks": 720, "repeats": 2, "searches": 12, "bulk_batch": 8} | changes)
    return run_retrieval_load(plan, lambda _: None, embed=hashed, open_engine=kept_engines())


def test_both_arms_answer_the_same_searches_beside_a_bulk_job() -> None:
    found = a_run()
    assert BenchResult.from_json(found.to_json()) == found
    assert list(found.arms) == [str(arm) for arm in LoadArm]
    for metrics in found.arms.values():
        assert set(metrics) == {"search_s", "recall", "bulk_per_s"}
        assert metrics["search_s"].n == metrics["recall"].n == 24
        assert metrics["recall"].p50 == 1.0
        assert metrics["bulk_per_s"].n == 2
        assert metrics["bulk_per_s"].p50 > 0
    assert {"search_s.p50 first-come/pancake", "bulk_per_s.p50 first-come/pancake"} <= set(found.ratios)
    summary = found.summary or {}
    assert summary["bulk_batch"] == 8
    assert summary["interactive_per_s"] == pytest.approx(0.2 / summary["search_alone_p50_s"])
    assert set(summary["interactive_p95_s"]) == set(found.arms)


def test_one_arm_alone_gives_no_ratio() -> None:
    found = a_run(arms=(LoadArm.PANCAKE,), repeats=1)
    assert list(found.arms) == ["pancake"]
    assert not found.ratios
    assert "interactive_p95 first-come/pancake" not in (found.summary or {})


def test_the_95th_percentile_is_paired_by_repeat() -> None:
    figures = interactive_p95(
        {
            "first-come": {"search_s": [[0.0] * 16 + [8.0] * 5, [6.0] * 3]},
            "pancake": {"search_s": [[2.0] * 4, [1.0] * 3]},
        }
    )
    assert figures["interactive_p95_s"] == {"first-come": 8.0, "pancake": 2.0}
    assert figures["interactive_p95 first-come/pancake"] == {"median": 5.0, "min": 4.0, "max": 6.0}


def test_people_ask_at_random_times_that_are_the_same_in_every_arm() -> None:
    times_s = arrivals_s(2_000, 100.0, seed=3)
    assert times_s == sorted(times_s) == arrivals_s(2_000, 100.0, seed=3)
    assert times_s[0] > 0
    assert times_s[-1] == pytest.approx(20.0, rel=0.1)
    assert times_s != arrivals_s(2_000, 100.0, seed=4)


def test_a_bulk_job_that_fails_ends_the_run_with_its_error() -> None:
    class Refuses(PlainEngine):
        def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
            if len(queries) > 1:
                raise RetrievalError("too many")
            return super().search(queries)

    with opened_queues(LoadArm.FIRST_COME, Refuses()) as queues:
        job = BulkJob(queues.bulk, queries(5), 5)
        with pytest.raises(RetrievalError, match="too many"):
            ask_beside(job, queues.interactive, queries(3), [0.0, 0.001, 0.002])


def test_a_search_that_fails_ends_the_run_with_its_error() -> None:
    class Refuses(PlainEngine):
        def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
            if len(queries) == 1:
                raise RetrievalError("too few")
            return super().search(queries)

    with opened_queues(LoadArm.FIRST_COME, Refuses()) as queues:
        job = BulkJob(queues.bulk, queries(5), 5)
        with pytest.raises(RetrievalError, match="too few"):
            ask_beside(job, queues.interactive, queries(3), [0.0, 0.001, 0.002])
    assert job.num_answered % 5 == 0 < job.num_answered


@pytest.mark.parametrize(
    "changes",
    [{"chunks": 10}, {"repeats": 0}, {"searches": 0}, {"bulk_batch": 0}, {"arms": ()}, {"load": 0.0}, {"load": 1.0}],
)
def test_plans_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="got "):
        LoadPlan(**{"chunks": 720} | changes)


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(plan: object, on_progress: object, **given: object) -> BenchResult:
        seen.append(plan)
        raise ConfigError("enough")

    monkeypatch.setattr(vector_benches, "run_retrieval_load", run)
    options = ["--chunks", "900", "--searches", "7", "--repeats", "1", "--arms", "pancake"]
    done = CliRunner().invoke(pancake, ["bench", "retrieval-load", *options])
    assert done.output.strip() == "Error: enough"
    assert seen == [LoadPlan(chunks=900, repeats=1, searches=7, arms=(LoadArm.PANCAKE,))]
