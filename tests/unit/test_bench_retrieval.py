"""`pancake bench retrieval` and `agent-memory`: sets, arms and figures, with a small engine and no model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import agent_memory, retrieval, search_arms, vector_benches, vector_sets
from pancake_langgraph.bench.agent_live import LiveArm, LivePlan, run_live
from pancake_langgraph.bench.agent_live import missing_for as live_missing_for
from pancake_langgraph.bench.agent_memory import AGENTS, AgentMemoryPlan, run_agent_memory
from pancake_langgraph.bench.memory_arms import MemoryArm
from pancake_langgraph.bench.options import BenchOptions
from pancake_langgraph.bench.pinning import one_core
from pancake_langgraph.bench.retrieval import RetrievalPlan, run_retrieval
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import SearchArm, missing_package, recall
from pancake_langgraph.bench.vector_sets import VectorSet, clustered_set, nearest, real_set, walks
from pancake_langgraph.cli.main import pancake
from tests.plain_vectors import DIM, HashedEmbeddings, PlainEngine, hashed
from tests.unit.bench_kit import a_corpus, kept_engines, make_small_world


@pytest.fixture
def real(tmp_path: Path) -> VectorSet:
    return real_set(a_corpus(), hashed, lambda _: None, folder=tmp_path)


@pytest.fixture(autouse=True)
def _small_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_small_world(monkeypatch, tmp_path)


# -- sets -----------------------------------------------------------------------------------------------------------


def test_held_out_chunks_are_not_searched_and_belong_together(real: VectorSet) -> None:
    texts = set(real.texts)
    assert len(texts) == len(real.base) == len(a_corpus().texts) - 2 * len(real.queries)
    assert not texts & set(real.insert_texts)
    for query, insert in zip(real.query_texts, real.insert_texts, strict=True):
        row = next(row for row, text in enumerate(a_corpus().texts) if text.startswith(query))
        assert a_corpus().texts[row + 1] == insert
        assert a_corpus().documents[row] == a_corpus().documents[row + 1]
    np.testing.assert_array_equal(real.base, hashed(list(real.texts)))
    np.testing.assert_array_equal(real.queries, hashed(list(real.query_texts)))
    np.testing.assert_array_equal(real.inserts, hashed(list(real.insert_texts)))


def test_what_was_embedded_is_kept_and_only_damaged_parts_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_sets, "_PART_TEXTS", 100)
    asked: list[int] = []

    def embed(texts: Sequence[str]) -> np.ndarray:
        asked.append(len(texts))
        return hashed(texts)

    first = real_set(a_corpus(), embed, lambda _: None, folder=tmp_path)
    total = len(a_corpus().texts) + len(first.queries)
    assert sum(asked) == total
    asked.clear()
    [part] = list(tmp_path.rglob("100-200.npy"))
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    again = real_set(a_corpus(), embed, lambda _: None, folder=tmp_path)
    assert asked == [100]
    np.testing.assert_array_equal(again.base, first.base)
    embed.name = "another"  # type: ignore[attr-defined] # vectors of different embedders are kept apart
    assert real_set(a_corpus(), embed, lambda _: None, folder=tmp_path).source.endswith("embedded by another")
    assert sum(asked) == 100 + total


def test_a_clustered_set_lies_around_the_real_one(real: VectorSet, tmp_path: Path) -> None:
    large = clustered_set(real, 3_000, lambda _: None, folder=tmp_path)
    assert large.base.shape == (3_000, DIM)
    np.testing.assert_array_equal(large.base[: len(real.base)], real.base)
    np.testing.assert_allclose(np.linalg.norm(large.base, axis=1), 1.0, atol=1e-5)
    near = (large.base[len(real.base) :] @ real.base.T).max(axis=1)
    drawn = np.random.default_rng(0).standard_normal((1_000, DIM)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    assert near.mean() > (drawn @ real.base.T).max(axis=1).mean() + 0.05
    again = clustered_set(real, 3_000, lambda _: None, folder=tmp_path)
    np.testing.assert_array_equal(again.base, large.base)


def test_exact_neighbors_are_those_of_sorting_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_sets, "_BLOCK_ROWS", 64)
    rng = np.random.default_rng(1)
    base = rng.integers(-2, 3, (500, 3)).astype(np.float32)  # many equal scores
    queries = rng.integers(-2, 3, (7, 3)).astype(np.float32)
    scores = queries @ base.T
    expected = [sorted(range(500), key=lambda row, of=of: (-of[row], row))[:10] for of in scores]
    found = nearest(base, queries, 10)
    for of, rows, truth in zip(scores, found, expected, strict=True):
        np.testing.assert_array_equal(of[rows], of[truth])
    assert nearest(base[:4], queries, 10).shape == (7, 4)


def test_agents_walk_through_documents(real: VectorSet) -> None:
    found = walks(real, AGENTS, 40, seed=5)
    assert [len(walk) for walk in found] == [40] * AGENTS
    assert found == walks(real, AGENTS, 40, seed=5)
    steps = [(walk[place], walk[place + 1]) for walk in found for place in range(39)]
    same = sum(real.documents[a] == real.documents[b] for a, b in steps) / len(steps)
    assert same > 0.5


def test_recall_counts_what_was_found_of_the_truth() -> None:
    assert recall([1, 2, 9], np.array([1, 2, 3, 4])) == 0.5
    assert recall([], np.array([], dtype=np.int64)) == 1.0
    assert recall([], np.array([1])) == 0.0


def test_all_threads_are_held_on_one_core_and_let_go() -> None:
    before = os.sched_getaffinity(0)
    with one_core() as core:
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


# -- retrieval ------------------------------------------------------------------------------------------------------


def a_run(**changes: object) -> BenchResult:
    plan = RetrievalPlan(**{"chunks": 720, "large_rows": 2_000, "repeats": 2, "searches": 12, "arm_s": 60.0} | changes)
    return run_retrieval(plan, lambda _: None, embed=hashed, open_engine=kept_engines())


def test_every_arm_runs_or_a_note_says_what_is_missing() -> None:
    found = a_run()
    assert BenchResult.from_json(found.to_json()) == found
    for arm in SearchArm:
        ran = {str(arm), f"{arm}-clustered"} & set(found.arms)
        noted = any(note.startswith(f"{arm} was left out: its package ") for note in found.notes)
        assert bool(ran) != noted, arm
    for arm, metrics in found.arms.items():
        assert set(metrics) == {"search_s", "recall", "searches_per_s", "memory_bytes"}, arm
        assert metrics["search_s"].n == metrics["recall"].n == 24
        assert metrics["searches_per_s"].n == 2


def test_exact_arms_find_everything() -> None:
    found = a_run(arms=(SearchArm.LANGGRAPH_MEMORY, SearchArm.PANCAKE, SearchArm.FLAT))
    for arm, metrics in found.arms.items():
        assert metrics["recall"].p50 == 1.0, arm


def test_ours_is_paired_with_each_other_on_the_same_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "missing_for", lambda arm: None)
    found = a_run(arms=(SearchArm.LANGGRAPH_MEMORY, SearchArm.PANCAKE, SearchArm.PANCAKE_COLD))
    assert set(found.arms) == {"langgraph-memory", "pancake", "pancake-clustered", "pancake-cold-clustered"}
    assert "search_s.p50 langgraph-memory/pancake" in found.ratios
    assert "search_s.p99 pancake-cold-clustered/pancake-clustered" in found.ratios
    facts = (found.summary or {})["clustered"]
    assert facts["vectors"] == 2_000
    assert facts["raw_bytes"] == 2_000 * DIM * 4


def test_a_missing_package_is_named_and_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {SearchArm.PANCAKE: (), SearchArm.CHROMA: (("no_such_module_here", "chromadb"),)}
    monkeypatch.setattr(search_arms, "_NEEDED", needed)
    found = a_run(arms=(SearchArm.PANCAKE, SearchArm.CHROMA), large_rows=0)
    assert set(found.arms) == {"pancake"}
    assert "chroma was left out: its package chromadb is not installed (pip install chromadb)." in found.notes
    assert missing_package((("no_such_module_here", "that"),)) == "that"
    assert missing_package((("json", "json"),)) is None


def test_arms_take_turns_and_slow_ones_stop_early() -> None:
    said: list[str] = []
    plan = RetrievalPlan(
        chunks=720, large_rows=0, repeats=2, searches=50, arm_s=0.0, arms=(SearchArm.LANGGRAPH_MEMORY,)
    )
    found = run_retrieval(plan, said.append, embed=hashed, open_engine=kept_engines())
    assert found.arms["langgraph-memory"]["search_s"].n == 2 * 3
    assert [line for line in said if "repeat" in line] == [
        "real: repeat 1 of 2, langgraph-memory",
        "real: repeat 2 of 2, langgraph-memory",
    ]


@pytest.mark.parametrize(
    "changes", [{"chunks": 10}, {"large_rows": 600}, {"repeats": 0}, {"searches": 0}, {"arms": ()}]
)
def test_plans_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="got "):
        RetrievalPlan(**{"chunks": 720, "large_rows": 2_000} | changes)


# -- agent-memory ---------------------------------------------------------------------------------------------------


def a_memory_run(engine: type[PlainEngine] = PlainEngine, **changes: object) -> BenchResult:
    plan = AgentMemoryPlan(**{"chunks": 720, "repeats": 2, "steps": 16, "arm_s": 60.0} | changes)
    return run_agent_memory(plan, lambda _: None, embed=hashed, open_engine=lambda ack: lambda path, dim: engine(dim))


def test_every_memory_runs_or_a_note_says_what_is_missing() -> None:
    found = a_memory_run(arms=tuple(arm for arm in MemoryArm if arm is not MemoryArm.CHROMA))
    assert BenchResult.from_json(found.to_json()) == found
    for arm in set(MemoryArm) - {MemoryArm.CHROMA}:
        noted = any(note.startswith(f"{arm} was left out: its package ") for note in found.notes)
        assert (arm in found.arms) != noted, arm
    for metrics in found.arms.values():
        assert set(metrics) == {"search_s", "insert_s", "recall", "searches_per_s"}
        assert metrics["search_s"].n == metrics["insert_s"].n == 32


def test_exact_memories_see_shared_and_own_items_and_all_of_the_few() -> None:
    found = a_memory_run(arms=(MemoryArm.LANGGRAPH_MEMORY, MemoryArm.PANCAKE))
    share = (found.summary or {})["own_found_share"]
    for arm in found.arms:
        assert found.arms[arm]["recall"].p50 == 1.0
        assert share[arm] == 1.0


def test_a_memory_that_leaks_or_loses_items_has_less_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgets(PlainEngine):
        def put(self, items: Sequence[object]) -> None:
            if len(items) > 1:
                super().put(items)  # type: ignore[arg-type]

    monkeypatch.setattr(agent_memory, "missing_for", lambda arm: None)
    found = a_memory_run(Forgets, arms=(MemoryArm.PANCAKE,))
    assert (found.summary or {})["own_found_share"] == {"pancake": 0.0}


def test_agents_with_a_model_share_a_memory_and_are_all_served(real: VectorSet, tmp_path: Path) -> None:
    prompts: list[str] = []
    arms = [arm for arm in LiveArm if arm is LiveArm.PANCAKE or live_missing_for(arm) is None]
    found = run_live(
        LivePlan(repeats=2, run_s=0.0),
        real,
        arms,
        lambda _: None,
        embedder=HashedEmbeddings(),
        call_model=prompts.append,
        open_engine=kept_engines(),
        folder=tmp_path,
    )
    for arm in arms:
        assert [len(values) for values in found[arm]["search_s"]] == [AGENTS, AGENTS]  # the step that has begun
        assert [value for values in found[arm]["recall"] for value in values] == [1.0] * 2 * AGENTS
    assert len(prompts) == 2 * AGENTS * len(arms)
    assert "Where is more about: " in prompts[0]
    assert all(prompt.count("\n") == 3 for prompt in prompts)  # three texts that were found, and the question


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    embedders: list[str] = []

    def run(plan: object, on_progress: object, *, embed: Any, **given: object) -> BenchResult:
        seen.append(plan)
        embedders.append(embed.name)
        raise ConfigError("enough")

    monkeypatch.setattr(vector_benches, "run_retrieval", run)
    monkeypatch.setattr(vector_benches, "run_agent_memory", run)
    options = ["--chunks", "900", "--large", "0", "--searches", "7", "--repeats", "1"]
    for name, arms, dtype in (("retrieval", "flat,pancake", "bfloat16"), ("agent-memory", "hnswlib", "float32")):
        done = CliRunner().invoke(pancake, ["bench", name, *options, "--arms", arms, "--dtype", dtype])
        assert done.output.strip() == "Error: enough"
    assert seen == [
        RetrievalPlan(chunks=900, large_rows=0, repeats=1, searches=7, arms=(SearchArm.FLAT, SearchArm.PANCAKE)),
        AgentMemoryPlan(chunks=900, repeats=1, steps=7, arms=(MemoryArm.HNSWLIB,)),
    ]
    assert embedders == ["all-MiniLM-L6-v2-bfloat16", "all-MiniLM-L6-v2"]
    assert BenchOptions().chunks >= 80_000
