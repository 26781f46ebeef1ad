"""`pancake bench retrieval-node`: its program on the fake engine and a real index on disk, and what is made of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner
from langgraph.store.base import SearchItem

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench import cold_index, retrieval_node, servers, vector_benches
from pancake_langgraph.bench.arms import Arm, ArmRun
from pancake_langgraph.bench.cold_index import ColdIndex
from pancake_langgraph.bench.node_program import NodeRun, Question, run_node
from pancake_langgraph.bench.options import BenchOptions
from pancake_langgraph.bench.recorder import CallRecord
from pancake_langgraph.bench.retrieval_node import NODE_ARMS, NodePlan, draft_figures, other_hits, run_retrieval_node
from pancake_langgraph.bench.runner import ArmResult, Repeats
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import SHARED
from pancake_langgraph.bench.workloads import run_bench
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.launch.stack import EngineProcess
from pancake_langgraph.retrieval.base import Item, ItemId
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from pancake_langgraph.retrieval.partitions import PartitionId
from pancake_langgraph.retrieval.prefetch import PrefetchStats
from tests.contract.runtime_bed import Bed, open_bed
from tests.plain_vectors import DIM, hashed
from tests.unit.bench_kit import make_small_world

LIMIT_S = 30.0
TEXTS = [f"page {number} on matter {number % 7}" for number in range(40)]


class WatchedEngine(DiskVectorEngine):
    """Has partitions from a few hundred vectors on, and says what it did."""

    def __init__(self, path: Path, dim: int = DIM) -> None:
        super().__init__(path, dim=dim, ack="none", codes="sq8", coded_rows=256, exact_rows=64, merge="manual")
        self.log: list[str] = []
        self.warmed = threading.Event()

    def warm(self, ids: Sequence[PartitionId]) -> int:
        num_bytes = super().warm(ids)
        self.log.append("warm")
        self.warmed.set()
        return num_bytes

    def search(self, queries: Any) -> Any:
        if threading.current_thread().name != "pancake-prefetch":  # what is searched for ahead, for its reading only
            self.log.append("search")
        return super().search(queries)


class PatientIndex(ColdIndex):
    """Where drafts are expected, a search comes when they were followed, however busy the machine is."""

    engine: WatchedEngine
    expects_drafts = is_cold = False

    async def cool(self) -> None:
        await super().cool()
        self.is_cold = True

    async def search(self, text: str) -> Sequence[SearchItem]:
        was_cold, self.is_cold = self.is_cold, False
        if was_cold and self.expects_drafts:
            assert await asyncio.to_thread(self.engine.warmed.wait, LIMIT_S)
            prefetcher = self.store._core.engine()._prefetcher
            assert prefetcher is not None
            assert await asyncio.to_thread(prefetcher.wait_idle, LIMIT_S)
        return await super().search(text)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PatientIndex, WatchedEngine]]:
    engine = WatchedEngine(tmp_path / "index")
    random = np.random.default_rng(1)
    rows = random.standard_normal((1_000, DIM)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    engine.put([Item(ItemId(SHARED, str(n)), {"text": str(n)}, (row,)) for n, row in enumerate(rows)])
    engine.compact()

    def drop_pages(folder: Path) -> None:
        assert folder == tmp_path
        engine.log.append("drop")
        engine.warmed.clear()

    monkeypatch.setattr(cold_index, "drop_pages", drop_pages)
    made = PatientIndex(engine, tmp_path, dict(zip(TEXTS, hashed(TEXTS), strict=True)))
    made.engine = engine
    yield made, engine
    engine.close()


def arm_run_on(bed: Bed, arm: Arm) -> ArmRun:
    engine = SimpleNamespace(plan=SimpleNamespace(served_model_name="fake"), base_url=bed.server.base_url)
    return ArmRun(arm, cast("EngineProcess", engine), "salt", bed.runtime if arm is Arm.PANCAKE else None)


@pytest.mark.parametrize("arm", NODE_ARMS)
async def test_every_program_begins_with_an_index_as_its_arm_says(
    index: tuple[PatientIndex, WatchedEngine], arm: Arm
) -> None:
    cold, engine = index
    cold.expects_drafts = arm is Arm.PANCAKE
    with open_bed() as bed:
        questions = [Question(text, text) for text in TEXTS[:4]]
        done = await run_node(cold, arm_run_on(bed, arm), questions, repeat=0)
        await cold.close()
        assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert len(done.waits_s) == len(done.program_s) == len(done.found) == len(done.calls) == 3  # the first is practice
    assert all(len(keys) == 10 for keys in done.found)
    assert done.wall_s > sum(done.program_s) > sum(done.waits_s) > 0
    programs = " ".join(entry for entry in engine.log if entry != "warm").split("drop")[1:]
    assert len(programs) == 4
    # Behind the pages that are dropped: the program's search, and for the oracle one before it; then the next opening.
    # In our arm the program's was made for the draft.
    searches = {Arm.PLAIN: 1, Arm.PANCAKE: 0, Arm.ORACLE: 2}[arm]
    assert [program.split().count("search") for program in programs] == [searches + 1] * 3 + [searches]
    if arm is Arm.PANCAKE:
        assert "warm" in engine.log
        assert all(stats.searches == 1 and stats.hits == stats.needed > 0 for stats in done.drafts)
        assert all(stats.answered == 1 for stats in done.drafts)
        assert not sum(stats.failures for stats in done.drafts)
        assert len(done.drafts) == 3
    else:
        assert "warm" not in engine.log
        assert done.drafts == ()


async def test_arms_find_the_same(index: tuple[PatientIndex, WatchedEngine]) -> None:
    cold, _ = index
    with open_bed() as bed:
        questions = [Question(TEXTS[-1], text) for text in TEXTS[:3]]
        runs = [await run_node(cold, arm_run_on(bed, arm), questions, repeat=0) for arm in NODE_ARMS]
        await cold.close()
        assert await asyncio.to_thread(bed.runtime.wait_idle)
    assert runs[0].found == runs[1].found == runs[2].found


async def test_a_cool_index_has_nothing_of_what_its_store_had_brought_up(
    index: tuple[PatientIndex, WatchedEngine],
) -> None:
    cold, engine = index
    await cold.cool()
    everything = [partition.id for partition in engine.partitions(hashed(["x"])[0], 1 << 20)]
    engine.warm(everything[:3])
    assert sum(engine.is_warm(everything)) == 3
    await cold.cool()
    assert sum(engine.is_warm(everything)) == 0
    assert engine.log[-1] == "drop"
    await cold.warm(TEXTS[0])
    assert engine.log[-2:] == ["drop", "search"]
    await cold.close()


# -- what is made of the runs ---------------------------------------------------------------------------------------


def call(label: str) -> CallRecord:
    return CallRecord(label, 0.0, 0.1, 1.0, 300, 0, 24, "so")


def run_of(arm: Arm) -> NodeRun:
    wait_s = {Arm.PLAIN: 0.008, Arm.PANCAKE: 0.002, Arm.ORACLE: 0.001}[arm]
    stats = PrefetchStats(searches=1, needed_bytes=100, hit_bytes=60, hits=3, answered=1, late=1, read_bytes=80)
    drafts = (stats, replace(stats, hit_bytes=0, hits=0)) if arm is Arm.PANCAKE else ()
    found = (("1", "2"), ("3", "4") if arm is not Arm.ORACLE else ("3", "5"))
    return NodeRun((call("t/0"), call("u/0")), (1.0, 1.1), 2.2, (wait_s, wait_s), found, drafts)


def repeats_of(*arms: Arm, count: int = 2) -> Repeats:
    return [{arm: ArmResult(run_of(arm)) for arm in arms} for _ in range(count)]


def test_figures_say_what_drafts_were_worth_and_who_found_something_else() -> None:
    repeats = repeats_of(*NODE_ARMS)
    assert draft_figures(repeats) == {
        "hit_rate": 0.3,
        "read_ahead_bytes_per_search": 80.0,
        "late_partitions": 4,
        "searches_without_a_draft_in_time": 2,
        "searches_made_beforehand": 4,
        "failures": 0,
    }
    assert other_hits(repeats) == {"plain": 0, "pancake": 0, "oracle": 2}
    assert draft_figures(repeats_of(Arm.PLAIN)) is None


@pytest.fixture
def given_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    make_small_world(monkeypatch, tmp_path)
    points: list[str] = []

    async def run_arms(
        given: Any, workload: Any, *, arms: Sequence[Arm], repeats: int, point: str, **_: Any
    ) -> Repeats:
        assert isinstance(given, servers.OneEngine)
        points.append(f"{point} x{repeats}")
        return repeats_of(*arms, count=repeats)

    monkeypatch.setattr(retrieval_node, "run_arms", run_arms)
    return points


def a_result(**changes: Any) -> BenchResult:
    plan = NodePlan(**{"chunks": 720, "repeats": 2, "programs": 5} | changes)
    start: Callable[[], AbstractContextManager[Any]] = nullcontext
    return run_retrieval_node(plan, lambda _: None, embed=hashed, open_engine=WatchedEngine, start_engine=start)


def test_waits_are_compared_and_the_sweep_has_users_who_write_less(given_runs: list[str]) -> None:
    found = a_result(sweep_repeats=1)
    assert BenchResult.from_json(found.to_json()) == found
    assert given_runs == ["retrieval-node-26 x2", "retrieval-node-8 x1", "retrieval-node-13 x1"]
    assert list(found.arms) == ["plain", "pancake", "oracle"]
    assert found.arms["plain"]["retrieval_wait_s"].n == found.arms["plain"]["program_s"].n == 4
    assert found.ratios["retrieval_wait_s.p50 plain/pancake"].median == pytest.approx(4.0)
    assert (found.summary or {})["gap_closed_ratio"] == pytest.approx(6 / 7)
    rows: Sequence[Mapping[str, Any]] = found.sweep or ()
    assert [row["words_written"] for row in rows] == [8, 13, 26]
    assert rows[0]["pancake_retrieval_wait_p50_s"] == 0.002
    assert (found.summary or {})["pancake_stats"]["num_vectors"] > 500


def test_every_repeat_is_run_again_on_slower_disks(
    given_runs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[tuple[Path, int]] = []

    @contextmanager
    def limited(folder: Path, reads_per_s: int) -> Iterator[None]:
        limits.append((folder, reads_per_s))
        before = len(given_runs)
        yield
        if before:
            given_runs[-1] += f" below {reads_per_s}"

    monkeypatch.setattr(retrieval_node, "limited_reads", limited)
    found = a_result(reads_per_s=(500, 2_000), folder=tmp_path)
    slow = [
        "retrieval-node-26, 500 reads a second x2 below 500",
        "retrieval-node-26, 2000 reads a second x2 below 2000",
    ]
    assert given_runs == ["retrieval-node-26 x2", *slow]
    assert [number for _, number in limits] == [500, 2_000, 500, 2_000]  # tried before anything is prepared
    assert {folder for folder, _ in limits[:2]} == {tmp_path}
    assert {folder.parent for folder, _ in limits[2:]} == {tmp_path}
    rows: Sequence[Mapping[str, Any]] = found.sweep or ()
    assert [row["reads_per_s"] for row in rows] == [None, 2_000, 500]
    assert rows[2]["retrieval_wait_s.p50 plain/pancake"] == pytest.approx({"median": 4.0, "min": 4.0, "max": 4.0})
    assert any("`reads_per_s`" in note for note in found.notes)


def test_an_index_may_be_larger_than_the_text(given_runs: list[str]) -> None:
    found = a_result(large_rows=2_000, repeats=1)
    assert (found.summary or {})["pancake_stats"]["num_vectors"] == 2_000
    assert "mixes of neighbors" in (found.summary or {})["source"]


def test_without_a_sweep_there_is_the_main_point(given_runs: list[str]) -> None:
    found = a_result(arms=(Arm.PLAIN,), repeats=1)
    assert given_runs == ["retrieval-node-26 x1"]
    assert not found.ratios
    assert [row["words_written"] for row in found.sweep or ()] == [26]
    assert (found.summary or {})["drafts"] is None


@pytest.mark.parametrize(
    "changes",
    [{"chunks": 10}, {"large_rows": 719}, {"repeats": 0}, {"programs": 0}, {"arms": ()}, {"reads_per_s": (500, 0)}],
)
def test_plans_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="got "):
        NodePlan(**{"chunks": 720} | changes)  # type: ignore[arg-type]


def test_the_command_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(plan: object, on_progress: object, **given: object) -> BenchResult:
        seen.append(plan)
        raise ConfigError("enough")

    monkeypatch.setattr(vector_benches, "run_retrieval_node", run)
    sizes = ["--chunks", "900", "--large", "5000", "--runs", "7", "--repeats", "1", "--sweep-repeats", "1"]
    done = CliRunner().invoke(pancake, ["bench", "retrieval-node", *sizes, "--arms", "pancake,plain"])
    assert done.output.strip() == "Error: enough"
    plan = NodePlan(chunks=900, large_rows=5_000, repeats=1, sweep_repeats=1, programs=7, arms=(Arm.PLAIN, Arm.PANCAKE))
    assert seen == [plan]
    CliRunner().invoke(pancake, ["bench", "retrieval-node", *sizes, "--reads-per-s", "2000,500"])
    assert seen[1:] == [replace(plan, arms=NODE_ARMS, reads_per_s=(2_000, 500))]
    done = CliRunner().invoke(pancake, ["bench", "retrieval-node", "--reads-per-s", "fast"])
    assert "--reads-per-s: got 'fast', allowed are whole numbers" in done.output


def test_an_unknown_arm_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="got reactive, allowed for this workload are plain, pancake, oracle"):
        run_bench("retrieval-node", BenchOptions(arms=("reactive",)), pytest.fail)
