"""`pancake bench saver`: every arm leads a short conversation, and the result follows the documented schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint
from pancake_langgraph.bench import saver as bench_module
from pancake_langgraph.bench import saver_arms
from pancake_langgraph.bench.render import arms_table, format_figure, ratios_table
from pancake_langgraph.bench.saver import SaverBenchPlan, run_saver_bench, run_turns
from pancake_langgraph.bench.saver_arms import OpenSaver, SaverArm, file_bytes, open_arm
from pancake_langgraph.bench.saver_figures import SaverRun, build_saver_figures
from pancake_langgraph.bench.saver_recorder import BareWrite, RecordingSaver, SaverCall, SaverOperation
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.cli.main import pancake
from pancake_langgraph.saver import PancakeSaver

TEXTS = tuple(f"text {number}" for number in range(200))
METRICS = {"put_s", "put_writes_s", "get_tuple_s", "step_s", "stored_bytes"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    plan = SaverBenchPlan(marks=(2, 3), repeats=2, folder=tmp_path_factory.mktemp("bench"))
    return run_saver_bench(plan, lambda _: None)


def test_every_arm_has_every_metric_and_the_result_follows_the_schema(result: BenchResult) -> None:
    assert BenchResult.from_json(result.to_json()) == result
    assert set(result.arms) == set(SaverArm)
    for metrics in result.arms.values():
        assert set(metrics) == METRICS
        assert metrics["step_s"].n == 3 * 2
        assert metrics["stored_bytes"].n == 2
        assert metrics["stored_bytes"].p50 > 0
        assert metrics["get_tuple_s"].n == 3 * 2
        assert metrics["put_s"].n >= 3 * 2
        assert metrics["put_writes_s"].n >= 3 * 2


def test_every_arm_is_called_equally_often(result: BenchResult) -> None:
    for metric in METRICS:
        assert len({metrics[metric].n for metrics in result.arms.values()}) == 1, metric


def test_the_ratios_pair_others_with_ours(result: BenchResult) -> None:
    for key in (
        "put_s.p50 async-sqlite/pancake-sqlite",
        "stored_bytes.p50 sqlite/pancake-sqlite",
        "step_s.p50 plainredis/pancake-valkey",
        "get_tuple_s.p99 memory/pancake-sqlite",
    ):
        assert result.ratios[key].median > 0


def test_the_sweep_has_a_row_for_each_mark_and_arm(result: BenchResult) -> None:
    rows = {(row["turns"], row["arm"]): row for row in result.sweep or ()}
    assert set(rows) == {(mark, str(arm)) for mark in (2, 3) for arm in SaverArm}
    assert rows[3, "sqlite"]["since_turn"] == 3
    assert all(row["repeats"] == 2 and row["stored_bytes"] > 0 for row in rows.values())
    assert set((result.summary or {})["stored_bytes sqlite/pancake-sqlite by turns"]) == {"2", "3"}
    assert (result.summary or {})["flatness"] == {str(arm): None for arm in SaverArm}  # three turns say nothing


def test_the_result_prints_as_tables(result: BenchResult) -> None:
    assert len(arms_table(result).rows) == len(SaverArm) * len(METRICS)
    assert len(ratios_table(result).rows) == 4 * len(METRICS) * 2


def test_no_file_is_left_behind(tmp_path: Path) -> None:
    arms = (SaverArm.PANCAKE_SQLITE, SaverArm.SQLITE, SaverArm.ASYNC_SQLITE)
    run_saver_bench(SaverBenchPlan(marks=(1,), repeats=1, arms=arms, folder=tmp_path), lambda _: None)
    assert not list(tmp_path.iterdir())


def test_arms_rotate_and_quadratic_ones_go_far_only_once(tmp_path: Path) -> None:
    said: list[str] = []
    arms = (SaverArm.PANCAKE_SQLITE, SaverArm.MEMORY)
    plan = SaverBenchPlan(marks=(1, 101), repeats=2, arms=arms, folder=tmp_path)
    found = run_saver_bench(plan, said.append)
    assert said == [
        "saver: repeat 1 of 2, pancake-sqlite, 101 turns",
        "saver: repeat 1 of 2, memory, 101 turns",
        "saver: repeat 2 of 2, memory, 1 turns",
        "saver: repeat 2 of 2, pancake-sqlite, 101 turns",
    ]
    assert found.arms["memory"]["step_s"].n == found.arms["pancake-sqlite"]["step_s"].n == 2
    assert [row["repeats"] for row in found.sweep or ()] == [2, 2, 2, 1]
    flatness = (found.summary or {})["flatness"]
    assert flatness["pancake-sqlite"]["repeats"] == 2
    assert flatness["memory"]["turns"] == 101
    told = {"turns", "repeats", "bare_write_s", "put_over_bare_write", *METRICS} - {"stored_bytes"}
    assert set(flatness["memory"]) == told


async def test_an_arm_stops_when_it_has_stored_too_much() -> None:
    memory = OpenSaver(InMemorySaver(), lambda: 1000)
    run = await run_turns(memory, (2, 10), TEXTS, limit_bytes=999)
    assert (run.turns, run.stored_bytes, run.last_bytes) == (2, {2: 1000}, 1000)
    figures = build_saver_figures([{SaverArm.MEMORY: run}], (2, 10))
    assert "memory was stopped after 2 turns, at 1,000 bytes." in figures.notes
    assert figures.sweep[1] == {"turns": 10, "since_turn": 3, "arm": "memory", "repeats": 0}


async def test_a_saver_that_loses_messages_gives_no_figures() -> None:
    class Forgetful(InMemorySaver):
        async def aget_tuple(self, config: Any) -> None:
            return None

    with pytest.raises(CorruptCheckpoint, match=r"Forgetful: after 2 turns .*2 messages, 4 expected"):
        await run_turns(OpenSaver(Forgetful(), lambda: 0), (2,), TEXTS, limit_bytes=10)


def test_flatness_compares_the_last_turns_with_the_first() -> None:
    calls = tuple(SaverCall(op, turn, 3.0 if turn > 50 else 2.0) for op in SaverOperation for turn in range(1, 101))
    run = SaverRun(calls, tuple(float(turn > 50) + 1.0 for turn in range(1, 101)), {100: 7}, 7)
    figures = build_saver_figures([{SaverArm.MEMORY: run}], (100,))
    assert figures.summary["flatness"]["memory"] == {
        "turns": 100, "repeats": 1, "put_s": 1.5, "put_writes_s": 1.5, "get_tuple_s": 1.5, "step_s": 2.0,
    }  # fmt: skip


def test_the_growth_of_puts_is_compared_with_that_of_a_write_that_never_changes() -> None:
    calls = tuple(SaverCall(op, turn, 3.0 if turn > 50 else 2.0) for op in SaverOperation for turn in range(1, 101))
    bare = tuple(BareWrite(turn, 5.0 if turn > 50 else 4.0) for turn in range(5, 101, 5))
    run = SaverRun(calls, (1.0,) * 100, {100: 7}, 7, bare)
    flatness = build_saver_figures([{SaverArm.MEMORY: run}], (100,)).summary["flatness"]["memory"]
    assert (flatness["put_s"], flatness["bare_write_s"], flatness["put_over_bare_write"]) == (1.5, 1.25, 1.2)


async def test_a_bare_write_takes_the_place_of_the_puts_of_every_fifth_turn(tmp_path: Path) -> None:
    written: list[int] = []
    recorder = RecordingSaver(InMemorySaver(), lambda: written.append(recorder.turn))
    graph = bench_module.build_conversation(TEXTS, recorder, is_async=True)
    for recorder.turn in range(1, 11):
        await graph.ainvoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t"}}, durability="sync")
    assert {write.turn for write in recorder.bare_writes} == set(written) == {5, 10}
    timed = {call.turn for call in recorder.calls if call.operation is SaverOperation.PUT}
    assert timed == set(range(1, 11)) - {5, 10}


async def test_the_recorder_is_the_saver_it_wraps(tmp_path: Path) -> None:
    async with PancakeSaver(tmp_path / "x.db") as inner:
        recorder = RecordingSaver(inner)
        recorder.turn = 7
        clone = recorder.with_allowlist([("some.module", "Name")])
        graph = bench_module.build_conversation(TEXTS, clone, is_async=True)
        state = await graph.ainvoke({"messages": [("user", "hi")]}, {"configurable": {"thread_id": "t"}})
        assert isinstance(state["messages"][-1], AIMessage)
        assert {call.operation for call in recorder.calls} == set(SaverOperation)
        assert {call.turn for call in recorder.calls} == {7}
        assert recorder.get_next_version(None, None) == inner.get_next_version(None)
        assert recorder.config_specs == inner.config_specs


def test_a_failed_call_is_not_counted() -> None:
    recorder = RecordingSaver(InMemorySaver())
    with pytest.raises(KeyError):
        recorder.get_tuple({"configurable": {}})
    assert recorder.calls == []


async def test_a_file_is_weighed_with_its_log_written_back(tmp_path: Path) -> None:
    async with open_arm(SaverArm.ASYNC_SQLITE, tmp_path, None) as opened:
        await run_turns(opened, (3,), TEXTS, limit_bytes=10**9)
        path = tmp_path / "async-sqlite.db"
        assert opened.stored_bytes() == file_bytes(path) == path.stat().st_size > 0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(saver_arms.importlib, "import_module", refuse)
    with pytest.raises(ConfigError, match="plainredis needs the package langgraph-checkpoint-plainredis"):
        run_saver_bench(SaverBenchPlan(marks=(1,), arms=(SaverArm.PLAINREDIS,)), lambda _: None)


async def test_an_arm_on_a_server_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a Valkey server"):
        async with open_arm(SaverArm.PLAINREDIS, tmp_path, None):
            pass


@pytest.mark.parametrize("change", [{"marks": ()}, {"marks": (0,)}, {"marks": (3, 2)}, {"repeats": 0}, {"arms": ()}])
def test_a_plan_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="got"):
        SaverBenchPlan(**change)


def test_the_command_runs_it_and_writes_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "saver.json"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    outcome = CliRunner().invoke(pancake, ["bench", "saver", "--turns", "1,2", "--repeats", "1", "--json", str(target)])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(target.read_text(encoding="utf-8"))["workload"] == "saver"
    assert "pancake-valkey" in outcome.stdout


@pytest.mark.parametrize(("turns", "code"), [("ten", 2), ("5,3", 1), ("", 2)])
def test_turns_that_make_no_sense_are_one_line(turns: str, code: int) -> None:
    outcome = CliRunner().invoke(pancake, ["bench", "saver", "--turns", turns])
    assert outcome.exit_code == code
    assert "turns: got" in outcome.stderr


@pytest.mark.parametrize(("value", "text"), [(0.000512, "0.00051"), (0.0099, "0.0099"), (0.01, "0.010")])
def test_times_far_below_a_second_keep_two_digits(value: float, text: str) -> None:
    assert format_figure(value) == text
