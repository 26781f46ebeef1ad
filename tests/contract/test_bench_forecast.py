"""Bench `forecast`, short, on every shape."""

import pytest

from pancake_langgraph.bench.forecast import ForecastPlan, run_forecast, watch_scripted
from pancake_langgraph.bench.forecast_cost import measure_cost
from pancake_langgraph.bench.forecast_shapes import Shape, every_shape
from pancake_langgraph.bench.forecast_watch import SharedClock
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.cli.bench import show
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.testing.fake_server import FakeEngineServer


def shape_named(name: str) -> Shape:
    return next(shape for shape in every_shape() if shape.name == name)


def test_two_runs_of_every_shape_give_a_valid_result() -> None:
    told: list[str] = []
    result = run_forecast(ForecastPlan(runs=2, cost_runs=4), told.append)
    again = BenchResult.from_json(result.to_json())
    shapes = [shape.name for shape in every_shape()]
    assert [row["shape"] for row in again.sweep or ()] == shapes
    assert not any("Left out" in note for note in again.notes)
    assert again.summary is not None
    assert {"top1", "top3", "brier", "prefix_share", "lead_s"} <= set(again.summary)
    assert again.summary["failed_signals"] == 0
    assert again.arms["pancake"]["observe_s"].n == 4
    assert all(row["decisions"] >= 2 and "prefix_share" in row for row in again.sweep or ())
    assert len(told) == len(shapes) + 1
    assert told[0] == "forecast: cost and memory over 4 runs"  # before any other graph has run in the process


def test_shapes_routed_by_a_model_on_an_engine_are_told_apart_from_scripted_ones() -> None:
    script = shape_named("judged-loop").script
    engine = FakeEngine(FakeEngineSettings(script=script, max_model_len_tokens=8192, pool_blocks=8192), SharedClock())
    plan = ForecastPlan(runs=4, cost_runs=2, shapes=("judged-loop", "chain"))
    with FakeEngineServer(engine) as server:
        result = run_forecast(plan, lambda text: None, real=(server.base_url, "fake"))
    rows = {row["shape"]: row for row in result.sweep or ()}
    assert list(rows) == ["chain", "judged-loop", "judged-loop/real"]
    assert "best_top1" in rows["judged-loop/real"]
    assert "best_top1" not in rows["judged-loop"]
    assert result.summary is not None
    assert result.summary["real_routers"]["shapes"] == 1
    assert result.summary["real_routers"]["failed_signals"] == 0
    scripted = [rows["chain"]["top1"], rows["judged-loop"]["top1"]]
    assert result.summary["top1"] == pytest.approx(sum(scripted) / 2, abs=1e-4)


async def test_a_model_chooses_how_often_a_loop_goes_round_and_is_heard_before_it_ends() -> None:
    observed, failed = await watch_scripted(shape_named("judged-loop"), runs=12, seed=0)
    assert failed == 0
    judged = [decision for decision in observed.decisions if decision.node == "judge"]
    assert {label for decision in judged for label in decision.outcome} == {"write", "publish"}
    late = [decision for decision in judged if decision.runs_seen >= 8]
    assert all(max(d.chances, key=lambda label: d.chances[label]) in d.outcome for d in late)


def test_the_result_is_shown_with_a_row_per_shape(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    result = run_forecast(ForecastPlan(runs=2, cost_runs=2, shapes=("chain", "random-router")), lambda text: None)
    show(result, Console(width=200))
    out = capsys.readouterr().out
    assert "chain" in out
    assert "random-router" in out
    assert "by shape" in out


async def test_a_chain_is_foreseen_from_the_first_run_on_and_its_start_named_before() -> None:
    observed, failed = await watch_scripted(shape_named("chain"), runs=3, seed=0)
    assert failed == 0
    assert [(d.node, set(d.outcome)) for d in observed.decisions[:3]] == [
        ("plan", {"write"}),
        ("write", {"polish"}),
        ("polish", {"__end__"}),
    ]
    assert all(max(d.chances, key=lambda label: d.chances[label]) in d.outcome for d in observed.decisions)
    assert all(lead.lead_s > 0.1 for lead in observed.leads)
    later = [call for call in observed.calls if call.runs_seen > 0 and call.node != "plan"]
    assert later
    assert all(0 < call.known_tokens < call.prompt_tokens for call in later)


async def test_what_an_agent_reads_after_its_tool_is_known_in_the_first_run() -> None:
    observed, _ = await watch_scripted(shape_named("create-agent"), runs=1, seed=0)
    first, *later = observed.calls
    assert first.known_tokens <= first.prompt_tokens
    assert len(later) == 2
    assert all(call.known_tokens > 0.9 * call.prompt_tokens for call in later)


async def test_the_last_forecast_before_each_end_is_heard_in_sub_graphs_too() -> None:
    observed, _ = await watch_scripted(shape_named("same-team-twice"), runs=2, seed=0)
    assert len(observed.decisions) == 10
    assert all(decision.chances for decision in observed.decisions)


async def test_equal_seeds_draw_equal_routes() -> None:
    def outcomes(runs: object) -> list[object]:
        return [d.outcome for d in runs[0].decisions]  # type: ignore[index]

    shape = shape_named("random-router")
    first = outcomes(await watch_scripted(shape, runs=6, seed=3))
    assert first == outcomes(await watch_scripted(shape, runs=6, seed=3))
    assert first != outcomes(await watch_scripted(shape, runs=6, seed=4))


async def test_cost_and_memory_are_weighed_twice() -> None:
    cost = await measure_cost(4)
    assert [weight.runs for weight in cost.weights] == [2, 4]
    assert all(weight.rss_bytes > 0 and weight.objects > 0 for weight in cost.weights)
    assert len(cost.observe_s) == 4
    assert min(cost.observe_s) > 0.0
