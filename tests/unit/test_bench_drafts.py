"""`pancake bench drafts`: arms, figures and sweep, over partitions in which nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import vector_benches
from pancake_langgraph.bench.drafts import DRAFT_WORDS, DraftArm, DraftPlan, run_drafts
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.cli.main import pancake
from tests.plain_vectors import hashed
from tests.unit.bench_kit import ShelvedEngine, kept_engines, make_small_world


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_small_world(monkeypatch, tmp_path)


def a_run(embed: object = hashed, **changes: object) -> BenchResult:
    plan = DraftPlan(**{"chunks": 720, "repeats": 2, "searches": 64, "with_sweep": False} | changes)
    return run_drafts(plan, lambda _: None, embed=embed, open_engine=kept_engines(ShelvedEngine))  # type: ignore[arg-type]


def test_every_arm_says_what_it_found_in_memory_and_what_it_read() -> None:
    found = a_run()
    assert BenchResult.from_json(found.to_json()) == found
    assert list(found.arms) == [str(arm) for arm in DraftArm]
    for arm, metrics in found.arms.items():
        assert set(metrics) == {"hit_rate", "read_bytes"} | ({"precision"} if arm != "lru" else set())
        assert {figures.n for figures in metrics.values()} == {2}
        assert 0 <= metrics["hit_rate"].p50 <= 1
    summary = found.summary or {}
    assert summary["partitions"] == 1_024
    assert summary["budget_bytes"] == summary["partition_bytes"] // 20
    assert found.sweep is None


def test_more_words_of_a_query_tell_more_of_it_and_all_tell_more_than_what_was_used_last() -> None:
    found = a_run(repeats=1)
    rates = [found.arms[arm]["hit_rate"].p50 for arm in (DraftArm.WORDS_4, DraftArm.WORDS_8, DraftArm.WORDS_13)]
    assert rates == sorted(rates)
    assert rates[-1] > found.arms["last-queries"]["hit_rate"].p50
    assert found.ratios["hit_rate.p50 lru/draft-13"].median > 1


def test_a_small_memory_is_said_to_hold_less_than_one_search_needs() -> None:
    roomy, tight = a_run(arms=(DraftArm.LRU,)), a_run(arms=(DraftArm.WORDS_13,), budget=0.01)
    assert (roomy.summary or {})["hit_rate_limit"] == 1.0
    limit = (tight.summary or {})["hit_rate_limit"]
    assert 0.2 < limit < 0.4
    assert tight.arms["draft-13"]["hit_rate"].p99 <= limit + 0.02  # partitions differ in size


def test_figures_are_counted_and_therefore_the_same_each_time() -> None:
    assert a_run().arms == a_run().arms


def test_a_draft_is_the_first_words_of_its_query() -> None:
    asked: list[str] = []

    def embed(texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return hashed(texts)

    a_run(embed, arms=(DraftArm.WORDS_4,))
    drafts = [text for text in asked if len(text.split()) == DRAFT_WORDS[DraftArm.WORDS_4]]
    queries = {text for text in asked if len(text.split()) == 26}
    assert drafts
    assert all(any(query.startswith(f"{draft} ") for query in queries) for draft in drafts)
    asked.clear()
    a_run(embed, arms=(DraftArm.WORDS_4,))
    assert asked == []  # kept in the cache folder


def test_the_sweep_has_other_budgets_and_drafts_that_come_before_the_searches_of_others() -> None:
    found = a_run(with_sweep=True, arms=(DraftArm.LRU, DraftArm.WORDS_13))
    rows = list(found.sweep or ())
    assert [(row["searches_between"], row["budget"]) for row in rows] == [
        (ahead, budget) for ahead in (0, 15) for budget in (0.02, 0.05, 0.1, 0.2)
    ]
    at_once, later = rows[:4], rows[4:]
    assert [row["lru_hit_rate"] for row in at_once] == [row["lru_hit_rate"] for row in later]
    rates = [row["draft-13_hit_rate"] for row in at_once]
    assert rates == sorted(rates)
    assert later[1]["draft-13_hit_rate"] < at_once[1]["draft-13_hit_rate"]


def test_an_index_that_is_searched_whole_has_nothing_to_bring_up() -> None:
    plan = DraftPlan(chunks=720, repeats=1, searches=16)
    with pytest.raises(ConfigError, match=r"no partitions.*--chunks"):
        run_drafts(plan, lambda _: None, embed=hashed, open_engine=kept_engines())


@pytest.mark.parametrize(
    "changes", [{"chunks": 10}, {"repeats": 0}, {"searches": 15}, {"arms": ()}, {"budget": 0.0}, {"budget": 1.1}]
)
def test_plans_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="got "):
        DraftPlan(**{"chunks": 720} | changes)


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(plan: object, on_progress: object, **given: object) -> BenchResult:
        seen.append(plan)
        raise ConfigError("enough")

    monkeypatch.setattr(vector_benches, "run_drafts", run)
    options = ["--chunks", "900", "--searches", "70", "--repeats", "1", "--arms", "lru,draft-8"]
    for sweep in ([], ["--sweep-repeats", "1"]):
        done = CliRunner().invoke(pancake, ["bench", "drafts", *options, *sweep])
        assert done.output.strip() == "Error: enough"
    assert seen == [
        DraftPlan(chunks=900, repeats=1, searches=70, arms=(DraftArm.LRU, DraftArm.WORDS_8), with_sweep=bool(number))
        for number in range(2)
    ]
