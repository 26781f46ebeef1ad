"""Scores of forecasts, computed by hand, and what counts as the truth about a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import Candidate, NodeId, Prompt, ThreadId
from pancake_langgraph.bench.forecast import ForecastPlan, ShapeRuns, missing_packages, summary_of, summary_of_models
from pancake_langgraph.bench.forecast_cost import Cost, Weight
from pancake_langgraph.bench.forecast_models import RoutingModel, pattern_of
from pancake_langgraph.bench.forecast_score import (
    END_LABEL,
    Decision,
    Lead,
    Observed,
    ReadCall,
    brier,
    by_runs_seen,
    figures,
    in_hindsight,
    is_hit,
    mean_of,
    ranked,
    reliability,
)
from pancake_langgraph.bench.forecast_shapes import Shape, every_shape, no_script, one_message
from pancake_langgraph.bench.forecast_truth import Execution, RunTruth, Written
from pancake_langgraph.bench.forecast_watch import best_prefix, next_chances, tokens_of
from pancake_langgraph.runtime.expectations import Cause, ExpectedCall
from pancake_langgraph.topology import Edge, NodeInfo, Topology


def decision(chances: Mapping[str, float], *outcome: str, seen: int = 0, **more: Mapping[str, float]) -> Decision:
    return Decision(seen, "n", chances, frozenset(outcome), **more)


# -- scores -----------------------------------------------------------------------------------------------------------


def test_labels_are_ranked_by_chance_then_name_and_impossible_ones_left_out() -> None:
    assert ranked({"b": 0.4, "a": 0.4, "c": 0.2, "d": 0.0}) == ["a", "b", "c"]


def test_a_hit_is_any_outcome_among_the_likeliest() -> None:
    chances = {"a": 0.4, "b": 0.3, "c": 0.2, END_LABEL: 0.1}
    assert is_hit(chances, frozenset({"a"}), among=1)
    assert not is_hit(chances, frozenset({"c"}), among=1)
    assert is_hit(chances, frozenset({"c", "x"}), among=3)
    assert not is_hit(chances, frozenset({END_LABEL}), among=3)
    assert not is_hit({}, frozenset({"a"}), among=3)


@pytest.mark.parametrize(
    ("chances", "outcome", "expected"),
    [
        ({"a": 1.0}, {"a"}, 0.0),
        ({"a": 1.0}, {"b"}, 2.0),
        ({"a": 0.6, "b": 0.3, END_LABEL: 0.1}, {"a"}, 0.16 + 0.09 + 0.01),
        ({}, {"a"}, 1.0),
        ({"a": 0.5}, {"a"}, 0.25),
        ({"a": 1.0, "b": 0.8}, {"a", "b"}, 0.04),
    ],
)
def test_the_brier_score_adds_up_all_labels_that_were_named_or_came(
    chances: dict[str, float], outcome: set[str], expected: float
) -> None:
    assert brier(chances, frozenset(outcome)) == pytest.approx(expected)


def test_the_reliability_table_compares_chances_said_with_what_came() -> None:
    rows = reliability(
        [decision({"a": 0.72, "b": 0.28}, "a"), decision({"a": 0.78, "b": 0.22}, "b"), decision({"a": 1.0}, "a")]
    )
    assert rows == [
        {"from_p": 0.2, "mean_p": 0.25, "came_ratio": 0.5, "n": 2},
        {"from_p": 0.7, "mean_p": 0.75, "came_ratio": 0.5, "n": 2},
        {"from_p": 0.9, "mean_p": 1.0, "came_ratio": 1.0, "n": 1},
    ]


def test_figures_of_what_was_observed() -> None:
    observed = Observed(
        decisions=(decision({"a": 0.8, "b": 0.2}, "a"), decision({"a": 0.8, "b": 0.2}, "b")),
        calls=(ReadCall(0, "a", 0, 100, 80, 90, opens_run=True), ReadCall(0, "b", 0, 300, 220, 220)),
        leads=(Lead(0, "a", 1.0), Lead(0, "b", 0.0)),
    )
    assert figures(observed) == {
        "decisions": 2,
        "top1": 0.5,
        "top3": 1.0,
        "brier": pytest.approx((0.08 + 1.28) / 2),
        "prefix_share": 0.75,
        "wrong_share": 0.025,
        "later_prefix_share": 0.7333,
        "lead_s": 0.5,
    }
    assert figures(Observed()) == {"decisions": 0}


def test_routes_by_lot_are_scored_next_to_the_best_that_is_possible() -> None:
    odds = {"a": 0.75, "b": 0.25}
    observed = Observed(
        (
            decision({"a": 1.0}, "a", odds=odds),
            decision({"a": 1.0}, "b", odds=odds),
            decision({"x": 1.0}, "y"),
        )
    )
    row = figures(observed)
    assert row["top1"] == pytest.approx(1 / 3, abs=1e-4)
    assert row["best_top1"] == pytest.approx(2 / 3, abs=1e-4)
    assert row["best_brier"] == pytest.approx((0.125 + 1.125 + 0.0) / 3, abs=1e-4)


def test_the_best_predictor_in_hindsight_knows_how_often_each_node_came() -> None:
    observed = Observed((decision({"a": 1.0}, "a"), decision({"a": 1.0}, "a", "b"), decision({"b": 1.0}, END_LABEL)))
    judged = in_hindsight(observed)
    assert [d.odds for d in judged.decisions] == [{"a": 2 / 3, "b": 1 / 3, END_LABEL: 1 / 3}] * 3
    row = figures(judged)
    assert (row["top1"], row["best_top1"]) == (pytest.approx(2 / 3, abs=1e-4), pytest.approx(2 / 3, abs=1e-4))


def test_routes_of_real_models_have_a_summary_of_their_own() -> None:
    rows = [
        {"top1": 1.0, "best_top1": 0.5, "prefix_share": 0.9, "failed_signals": 1},
        {"top1": 0.5, "best_top1": 0.5, "failed_signals": 0},
    ]
    summary = summary_of_models(rows)
    assert (summary["shapes"], summary["top1"], summary["best_top1"]) == (2, 0.75, 0.5)
    assert (summary["top1_over_best"], summary["prefix_share"], summary["failed_signals"]) == (1.5, 0.9, 1)


def test_a_model_that_routes_has_to_choose_a_tool_three_times_and_none_after_that() -> None:
    model = RoutingModel(model="m", base_url="http://127.0.0.1:9/v1", max_tokens=64)
    tool = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
    call = {"name": "go", "args": {}, "id": "c", "type": "tool_call"}

    def payload(num_calls: int, **more: object) -> dict[str, Any]:
        turns = [
            m for _ in range(num_calls) for m in (AIMessage("", tool_calls=[call]), ToolMessage("ok", tool_call_id="c"))
        ]
        return model._get_request_payload([HumanMessage("hi"), *turns], **more)

    forced = payload(2, tools=[tool])
    expression = forced["extra_body"]["structured_outputs"]["regex"]
    assert re.fullmatch(expression, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    assert forced["max_tokens"] == 64
    free = payload(3, tools=[tool])
    assert (free["tool_choice"], free["max_tokens"]) == ("none", 12)
    assert "extra_body" not in free
    assert "tool_choice" not in payload(0)


@pytest.mark.parametrize(
    ("schema", "fits", "fails"),
    [
        ({"enum": ["a.b", 2]}, ['"a.b"', "2"], ['"axb"', '"2"', " 2"]),
        ({"const": "x"}, ['"x"'], ['"y"']),
        ({"type": "string"}, ['"some words 7"'], ['""', '"no\nbreak"', f'"{"a" * 25}"']),
        (
            {"type": "array", "items": {"enum": ["a"]}, "minItems": 1, "maxItems": 3},
            ['["a"]', '["a", "a", "a"]'],
            ["[]", '["a", "a", "a", "a"]'],
        ),
        (
            {"type": "object", "properties": {"q": {"const": 1}, "r": {"const": True}}},
            ['{"q": 1, "r": true}'],
            ['{"q": 1}', '{"q":  1, "r": true}'],
        ),
        ({"type": "object", "properties": {}}, ["{}"], ["{ }"]),
    ],
)
def test_a_schema_becomes_an_expression_without_room_for_white_space(
    schema: dict[str, object], fits: list[str], fails: list[str]
) -> None:
    expression = pattern_of(schema)
    assert all(re.fullmatch(expression, text) for text in fits)
    assert not any(re.fullmatch(expression, text) for text in fails)


def test_windows_reach_from_one_number_of_runs_seen_to_the_next() -> None:
    observed = Observed(tuple(decision({"a": 1.0}, "a" if n >= 2 else "b", seen=n) for n in (0, 1, 2, 4, 5, 25)))
    rows = by_runs_seen(observed)
    assert [(row["runs_seen"], row["decisions"], row["top1"]) for row in rows] == [
        (0, 1, 0.0),
        (1, 1, 0.0),
        (2, 2, 1.0),
        (5, 1, 1.0),
        (20, 1, 1.0),
    ]


def test_the_summary_keeps_routes_by_lot_apart() -> None:
    def runs(name: str, chances: dict[str, float], odds: dict[str, float] | None) -> ShapeRuns:
        shape = Shape(name, "agent", lambda parts: None, one_message, no_script, odds={"n": odds} if odds else {})
        calls = (ReadCall(0, "n", 0, 10, 0, 0), ReadCall(0, "n", 1, 10, 9, 9), ReadCall(3, "n", 0, 10, 5, 5))
        return ShapeRuns(shape, Observed((decision(chances, "a", seen=3, **({"odds": odds} if odds else {})),), calls))

    done = [runs("sure", {"a": 1.0}, None), runs("lot", {"b": 1.0}, {"a": 0.5, "b": 0.5})]
    rows = [each.row(2) for each in done]
    summary = summary_of(done, rows, settled_after=2)
    assert (summary["top1"], summary["brier"], summary["prefix_share"]) == (1.0, 0.0, 0.5)
    assert summary["random"]["top1"] == 0.0
    assert summary["random"]["best_top1"] == 1.0
    assert summary["random"]["top1_over_best"] == 0.0
    assert summary["agents_first_run_prefix_share_from_second_call"] == 0.9
    assert mean_of(rows, "not there") is None


# -- truth ------------------------------------------------------------------------------------------------------------


def execution(namespace: str, step: int, started: int, ended: int) -> Execution:
    return Execution(namespace, step, started, 0.0, ended)


def wrote(*channels: str) -> Written:
    return Written.of([(channel, None) for channel in channels])


def test_writes_name_branches_joins_sends_and_calls() -> None:
    send = SimpleNamespace(node="worker")
    assert Written.of([("x", 1), ("branch:to:a", None), ("join:b+c:d", "b"), ("__pregel_tasks", send)]) == Written(
        frozenset({"a", "d", "worker"}), is_call=False
    )
    assert Written.of([("__return__", 1)]).is_call


def test_the_truth_goes_into_sub_graphs_and_out_of_them_again() -> None:
    run = [
        execution("a:1", 1, 1, 2),
        execution("team:2", 2, 3, 8),
        execution("team:2|in:3", 1, 4, 5),
        execution("team:2|out:4", 2, 6, 7),
        execution("z:5", 3, 9, 10),
    ]
    written = {"1": wrote("branch:to:team"), "3": wrote("branch:to:out"), "2": wrote("branch:to:z")}
    truth = RunTruth(run, written)
    assert [leaf.label for leaf in truth.leaves] == ["a", "team|in", "team|out", "z"]
    assert [set(truth.after(leaf)) for leaf in truth.leaves] == [{"team|in"}, {"team|out"}, {"z"}, {END_LABEL}]


def test_of_two_visits_to_a_sub_graph_the_next_one_counts() -> None:
    run = [
        execution("a:1", 1, 1, 2),
        execution("team:2", 2, 3, 6),
        execution("team:2|early:3", 1, 4, 5),
        execution("a:4", 3, 7, 8),
        execution("team:5", 4, 9, 12),
        execution("team:5|late:6", 1, 10, 11),
    ]
    written = {"1": wrote("branch:to:team"), "2": wrote("branch:to:a"), "4": wrote("branch:to:team")}
    truth = RunTruth(run, written)
    assert [set(truth.after(leaf)) for leaf in truth.leaves] == [{"team|early"}, {"a"}, {"team|late"}, {END_LABEL}]


def test_a_join_that_waits_and_workers_sent_at_once_are_the_next_of_all_their_sources() -> None:
    run = [
        execution("a:1", 1, 1, 2),
        execution("w:2", 2, 3, 6),
        execution("w:3", 2, 4, 5),
        execution("z:4", 4, 9, 10),
    ]
    send = ("__pregel_tasks", SimpleNamespace(node="w"))
    written = {"1": Written.of([send, send]), "2": wrote("join:v+w:z"), "3": wrote("branch:to:z")}
    truth = RunTruth(run, written)
    assert [set(truth.after(leaf)) for leaf in truth.leaves] == [{"w"}, {"z"}, {"z"}, {END_LABEL}]


def test_calls_of_the_functional_api_follow_each_other() -> None:
    run = [execution("wf:1", 0, 1, 6), execution("wf:1|one:2", 0, 2, 3), execution("wf:1|two:3", 0, 4, 5)]
    truth = RunTruth(run, {"1": wrote("__end__"), "2": wrote("__return__"), "3": wrote("__return__")})
    assert [set(truth.after(leaf)) for leaf in truth.leaves] == [{"wf|two"}, {END_LABEL}]


def test_a_node_that_was_due_and_never_came_is_still_the_truth() -> None:
    truth = RunTruth([execution("team:1|a:2", 1, 1, 2)], {"2": wrote("branch:to:b")})
    assert truth.after(truth.leaves[0]) == {"team|b"}


# -- what was overheard -----------------------------------------------------------------------------------------------


def candidate(node: str, p_next: float, steps: int = 1) -> Candidate:
    return Candidate(NodeId(node), p_next, steps, None, "")


def test_chances_are_those_of_the_next_step_and_the_end_gets_what_is_left() -> None:
    found = [candidate("a", 0.7), candidate("b", 0.7, steps=2)]
    assert next_chances(found, None, "n", p_end=0.3) == {"a": 0.7, END_LABEL: pytest.approx(0.3)}
    assert next_chances([candidate("a", 1.0)], None, "n", p_end=0.3) == {"a": 1.0}
    assert next_chances([], None, "n", p_end=0.3) == {END_LABEL: 0.3}


def test_a_join_is_taken_by_its_name_however_many_steps_off_it_is() -> None:
    nodes = tuple(NodeInfo(NodeId(name), "plain") for name in ("a", "b", "b2", "z"))
    edges = [("__start__", "a", "plain"), ("__start__", "b", "plain"), ("b", "b2", "plain")]
    edges += [("a", "z", "join"), ("b2", "z", "join"), ("z", "__end__", "plain")]
    topology = Topology("t", nodes, tuple(Edge(NodeId(s), NodeId(t), kind) for s, t, kind in edges))
    # By the graph alone z comes two steps after a; where b has run ahead it is the next one, where b lags it is later.
    for steps in (1, 2, 3):
        assert next_chances([candidate("z", 1.0, steps)], topology, "a", p_end=0.0) == {"z": 1.0}
    twice = [candidate("z", 1.0, 3), candidate("z", 0.4, 2)]
    assert next_chances(twice, topology, "a", p_end=0.0) == {"z": 0.4}
    assert next_chances([candidate("z", 1.0, 2)], topology, "b", p_end=0.0) == {}


def test_the_best_prediction_at_the_node_counts_as_far_as_it_is_true() -> None:
    def expected(node: str, text: str) -> ExpectedCall:
        prompt = Prompt.of([{"role": "user", "content": text}])
        return ExpectedCall(ThreadId("t"), node, Cause.SUCCESSOR, prompt, 1.0, 0.0)

    real = tokens_of(Prompt.of([{"role": "user", "content": "one two three"}]), is_asked=True)
    known, foretold = best_prefix(
        [expected("n", "one"), expected("n", "one two"), expected("m", "one two three")], "n", real
    )
    assert (known, foretold) == (3, 4)
    assert best_prefix([], "n", real) == (0, 0)


# -- plan -------------------------------------------------------------------------------------------------------------


def test_there_are_at_least_sixteen_shapes_of_different_names_and_several_families() -> None:
    shapes = every_shape()
    assert len({shape.name for shape in shapes}) == len(shapes) >= 16
    assert len({shape.family for shape in shapes}) >= 8
    by_model = [shape for shape in shapes if shape.routes_by_model]
    assert len(by_model) >= 5
    assert len({shape.family for shape in by_model}) >= 5
    assert sum(bool(shape.odds) for shape in shapes) >= 3


def test_a_shape_whose_package_is_missing_says_which() -> None:
    shape = Shape("s", "f", lambda parts: None, one_message, no_script, packages=("langgraph", "no-such-package-here"))
    assert missing_packages(shape) == ["no-such-package-here"]


def test_a_plan_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="runs: got 1 per shape"):
        ForecastPlan(runs=1)
    with pytest.raises(ConfigError, match="shapes: got circle, allowed are chain"):
        ForecastPlan(shapes=("circle",))
    assert (ForecastPlan(runs=6).settled_after, ForecastPlan().settled_after) == (3, 20)


def test_cost_tells_milliseconds_and_what_has_grown() -> None:
    cost = Cost((0.001, 0.003), (Weight(10, 2**20, 5), Weight(20, 3 * 2**20, 7)))
    summary = cost.summary()
    assert summary["observe_ms_per_call"] == {"p50": 2.0, "p99": pytest.approx(2.98)}
    assert (summary["grown_mib"], summary["grown_objects"]) == (2.0, 2)
