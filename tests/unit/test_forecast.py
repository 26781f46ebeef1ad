"""Forecasts: right after few runs where the route can be learnt, calibrated where it cannot."""

import importlib.util
import itertools
import json
import random
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast.base import Forecaster
from pancake_langgraph.forecast.counts import CountTable
from pancake_langgraph.forecast.null import NullForecaster
from pancake_langgraph.forecast.quantiles import Durations
from pancake_langgraph.forecast.topology_prior import TopologyPrior
from pancake_langgraph.forecast.transitions import Memory, TransitionForecaster
from pancake_langgraph.topology.extract import read_topology
from pancake_langgraph.topology.graph import END, START, Edge, NodeInfo, Topology


def load_shapes() -> ModuleType:
    path = Path(__file__).parents[1] / "graph_shapes.py"
    if "pancake_graph_shapes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("pancake_graph_shapes", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports of the libraries, not by us
            spec.loader.exec_module(module)
    return sys.modules["pancake_graph_shapes"]


shapes = load_shapes()
G = "g"


def forecaster_for(graph, kind=TransitionForecaster) -> Forecaster:
    forecaster = kind()
    forecaster.add_graph(G, read_topology(graph))
    return forecaster


def chances(forecaster: Forecaster, node: str, context: tuple[str, ...] = ()) -> dict[str, float]:
    found = {c.node: c.p_next for c in forecaster.candidates(G, node, horizon_steps=1, context=context)}
    return {**found, END: forecaster.p_end(G, node, context=context)}


def play(forecaster: Forecaster, trace: list[str]) -> list[tuple[dict[str, float], str]]:
    """Forecast each step of a run, then let it be learnt; returns (forecast, what happened)."""
    scored = []
    for i, (source, target) in enumerate(itertools.pairwise(trace)):
        context = tuple(trace[max(0, i - 4) : i])
        scored.append((chances(forecaster, source, context), target))
        forecaster.observe_transition(G, source, target, elapsed_s=1.0, context=context)
    return scored


def top1(scored: list[tuple[dict[str, float], str]]) -> float:
    return sum(max(p, key=p.get) == target for p, target in scored) / len(scored)


def brier(scored: list[tuple[dict[str, float], str]]) -> float:
    """Multi-class Brier score; 0 is perfect, 2 worst."""
    total = 0.0
    for p, target in scored:
        total += sum((q - (node == target)) ** 2 for node, q in p.items()) + (target not in p)
    return total / len(scored)


def hub_trace(labels: list[str]) -> list[str]:
    return [START, "route", *(node for label in labels for node in (label, "route")), END]


ROUTES = {
    "one worker": ["x"],
    "fixed order": ["x", "y", "z"],
    "comes back": ["x", "y", "x"],
    "twice each": ["x", "x", "y"],
}


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
@pytest.mark.parametrize("route", list(ROUTES))
def test_a_learnable_route_is_known_after_twenty_runs(route, declared):
    labels = ROUTES[route]
    forecaster = forecaster_for(shapes.router(labels, declared=declared))
    for _ in range(20):
        play(forecaster, hub_trace(labels))
    scored = play(forecaster, hub_trace(labels))
    assert top1(scored) >= 0.9
    assert brier(scored) <= 0.1


def test_an_undeclared_jump_is_learnt_from_one_run_and_never_known_before():
    forecaster = forecaster_for(shapes.functional())
    assert all(c.p_next <= 0.5 and c.reason != "learnt" for c in forecaster.candidates(G, "flow"))
    play(forecaster, [START, "flow", "flow|work", END])
    (first, *_) = forecaster.candidates(G, "flow")
    assert first.node == "flow|work"
    assert first.p_next >= 0.49


@pytest.mark.parametrize("weights", [[0.25, 0.25, 0.25, 0.25], [0.7, 0.2, 0.05, 0.05], [0.5, 0.5, 0.0, 0.0]])
def test_a_random_router_is_forecast_almost_as_well_as_by_its_own_odds(weights):
    rng = random.Random(7)
    workers = ["w", "x", "y", "z"]
    forecaster = forecaster_for(shapes.router(workers))
    odds = {**{w: 0.8 * p for w, p in zip(workers, weights, strict=True)}, END: 0.2}
    ours, ideal = [], []
    for _ in range(250):
        labels = []
        while rng.random() >= odds[END]:
            labels += rng.choices(workers, weights)
        scored = play(forecaster, hub_trace(labels))[1::2]  # every second step is a decision of the hub
        ours += scored
        ideal += [(odds, target) for _, target in scored]
    assert brier(ours[200:]) <= 1.06 * brier(ideal[200:])
    # Scored by the odds of what was named first, so that luck of the draw does not count.
    named = [odds[max(p, key=p.get)] for p, _ in ours[200:]]
    assert sum(named) / len(named) >= 0.95 * max(odds.values())
    for node, p_true in odds.items():
        assert abs(sum(p[node] for p, _ in ours[200:]) / len(ours[200:]) - p_true) <= 0.06


def test_a_changed_habit_is_relearnt_in_tens_of_runs():
    forecaster = forecaster_for(shapes.router(["x", "y"]))
    for _ in range(200):
        play(forecaster, hub_trace(["x"]))
    for _ in range(15):
        play(forecaster, hub_trace(["y"]))
    scored = play(forecaster, hub_trace(["y"]))
    assert top1(scored) == 1.0
    assert chances(forecaster, "route", (START,))["y"] >= 0.8


def test_a_single_fixed_edge_is_certain_before_and_after_any_run():
    for kind in (TopologyPrior, TransitionForecaster):
        forecaster = forecaster_for(shapes.chain(), kind)
        for _ in range(2):
            assert [(c.node, c.p_next, c.steps) for c in forecaster.candidates(G, "n0")] == [
                ("n1", 1.0, 1),
                ("n2", 1.0, 2),
            ]
            forecaster.observe_transition(G, "n0", "stray", elapsed_s=1.0)
            forecaster = forecaster if kind is TopologyPrior else forecaster_for(shapes.chain(), kind)


def test_a_stray_observation_does_not_shake_a_fixed_edge():
    forecaster = forecaster_for(shapes.chain())
    for _ in range(20):
        forecaster.observe_transition(G, "n0", "n1", elapsed_s=1.0)
    forecaster.observe_transition(G, "n0", "stray", elapsed_s=1.0)
    found = chances(forecaster, "n0")
    assert found["n1"] == 1.0
    assert found["stray"] < 0.3


def test_nodes_started_together_are_each_certain():
    forecaster = forecaster_for(shapes.join())
    assert {c.node: c.p_next for c in forecaster.candidates(G, START, horizon_steps=1)} == {"a": 1.0, "b": 1.0}


def test_an_edge_beside_a_command_keeps_both_likely():
    forecaster = forecaster_for(shapes.edge_and_command())
    for _ in range(10):
        for target in ("b", "c"):
            forecaster.observe_transition(G, "a", target, elapsed_s=1.0)
    found = chances(forecaster, "a")
    assert found["b"] == 1.0
    assert found["c"] >= 0.8


def test_a_join_is_as_far_away_as_its_slowest_source():
    forecaster = forecaster_for(shapes.join(), TopologyPrior)
    assert [(c.node, c.steps) for c in forecaster.candidates(G, "a")] == [("c", 2)]
    assert [(c.node, c.steps) for c in forecaster.candidates(G, "b2")] == [("c", 1)]
    assert forecaster.candidates(G, "a", horizon_steps=1) == ()


def test_an_undecided_branch_is_even_over_its_declared_targets():
    forecaster = forecaster_for(shapes.path_map(), TopologyPrior)
    assert chances(forecaster, "a") == {"b": 0.5, "c": 0.5, END: 0.0}


@pytest.mark.parametrize("kind", [TopologyPrior, TransitionForecaster])
def test_a_streamed_handoff_tool_names_the_next_agent(kind):
    forecaster = forecaster_for(shapes.supervisor(), kind)
    found = forecaster.candidates(G, "supervisor|agent", first_tool_name="transfer_to_math")
    by_node = {c.node: c for c in found}
    assert by_node["math|model"].p_next >= 0.95
    assert by_node["math|model"].reason.startswith("handoff tool transfer_to_math")
    assert "poet|model" not in by_node


@pytest.mark.parametrize("kind", [TopologyPrior, TransitionForecaster])
def test_a_streamed_ordinary_tool_names_the_tools_node_and_the_agent_that_resumes(kind):
    forecaster = forecaster_for(shapes.swarm(), kind)
    found = forecaster.candidates(G, "Alice|model", first_tool_name="add")
    assert [(c.node, c.steps) for c in found] == [("Alice|tools", 1), ("Alice|model", 2)]
    assert all(c.p_next >= 0.95 for c in found)


def test_a_tool_name_without_any_topology_is_learnt():
    forecaster = TransitionForecaster()
    for _ in range(5):
        forecaster.observe_transition(G, "ask", "search", elapsed_s=1.0, first_tool_name="find")
        forecaster.observe_transition(G, "ask", "write", elapsed_s=1.0, first_tool_name="note")
    (first, *_) = forecaster.candidates(G, "ask", first_tool_name="note", horizon_steps=1)
    assert first.node == "write"
    assert first.p_next > 0.8


def test_the_end_of_a_run_is_a_chance_and_no_candidate():
    forecaster = forecaster_for(shapes.agent())
    assert {c.node for c in forecaster.candidates(G, "model")} == {"tools", "model"}
    assert forecaster.p_end(G, "model") == pytest.approx(0.5)
    for _ in range(20):
        play(forecaster, [START, "model", "tools", "model", END])
    assert chances(forecaster, "model", (START,))["tools"] >= 0.9
    assert forecaster.p_end(G, "model", context=(START, "model", "tools")) >= 0.9


def test_waiting_times_come_from_what_was_seen():
    forecaster = forecaster_for(shapes.agent())
    assert forecaster.candidates(G, "model")[0].eta_s is None
    for seconds in (1.0, 2.0, 3.0):
        forecaster.observe_transition(G, "model", "tools", elapsed_s=seconds)
        forecaster.observe_tool(G, "add", 10 * seconds)
    found = {c.node: c.eta_s for c in forecaster.candidates(G, "model", first_tool_name="add")}
    assert found == {"tools": 2.0, "model": 22.0}
    assert forecaster.tool_seconds(G, "add").p50_s == 20.0
    assert forecaster.node_seconds(G, "model").num_samples == 3
    assert forecaster.tool_seconds(G, "other") is None
    assert forecaster.tool_seconds("other graph", "add") is None


def test_a_sub_graph_name_forecasts_the_way_into_it():
    forecaster = forecaster_for(shapes.nested(), TopologyPrior)
    assert forecaster.candidates(G, "sub", horizon_steps=1)[0].node == "sub|a"


def test_unknown_graphs_and_nodes_give_no_candidates():
    for forecaster in (NullForecaster(), TopologyPrior(), TransitionForecaster()):
        assert forecaster.candidates("none", "node") == ()
        assert forecaster.candidates("none", "node", first_tool_name="x") == ()
        assert forecaster.p_end("none", "node") == 0.0


def test_a_full_count_table_still_learns_new_keys_and_targets():
    table = CountTable(decay=0.9, max_keys=3, max_targets=2)
    for i in range(10):
        table.observe((f"k{i}",), "t")
        assert table.row((f"k{i}",)) == {"t": 1.0}
        assert len(table) == min(i + 1, 3)
    for i in range(10):
        table.observe(("k9",), f"t{i}")
        assert f"t{i}" in table.row(("k9",))
        assert len(table.row(("k9",))) <= 2


def test_a_full_count_table_forgets_the_key_unused_for_longest():
    table = CountTable(decay=1.0, max_keys=2, max_targets=2)
    for key in ("old", "kept", "old", "new"):
        table.observe((key,), "t")
    assert table.row(("kept",)) == {}
    assert table.row(("old",)) == {"t": 2.0}


def test_a_full_forecaster_still_learns_new_graphs_and_nodes():
    forecaster = TransitionForecaster(Memory(max_graphs=2, max_keys=4, max_targets=3))
    for graph in range(6):
        for node in range(12):
            for target in range(5):
                forecaster.observe_transition(f"g{graph}", f"n{node}", f"t{target}", elapsed_s=1.0, context=("p", "q"))
            found = forecaster.candidates(f"g{graph}", f"n{node}", horizon_steps=1)
            assert found[0].node == "t4"
    state = forecaster.snapshot()
    assert len(state["graphs"]) == 2
    for learnt in state["graphs"]:
        assert all(len(learnt[table]) <= 4 for table in ("slow", "fast", "tools", "trust"))
        assert all(len(row) <= 3 for _, row in learnt["slow"])
    assert len(state["durations"]) <= 8


def test_a_full_duration_table_still_learns_and_drops_measuring_faults():
    durations = Durations(max_keys=2, window=4)
    for i in range(5):
        for sample in range(10):
            durations.add(f"k{i}", float(sample))
        assert durations.quantiles(f"k{i}").num_samples == 4
    assert len(durations) == 2
    assert durations.quantiles("k0") is None
    for fault in (-1.0, float("nan"), float("inf")):
        durations.add("k4", fault)
    assert durations.quantiles("k4").p50_s == 7.5


@pytest.mark.parametrize("bad", [{"max_keys": 0}, {"max_targets": 0}, {"max_graphs": 0}, {"slow_decay": 1.5}])
def test_unusable_bounds_are_refused(bad):
    with pytest.raises(ValueError, match="got"):
        TransitionForecaster(Memory(**bad))


def test_equal_observations_give_equal_forecasts_and_snapshots_survive_json():
    def learnt() -> TransitionForecaster:
        rng = random.Random(3)
        forecaster = forecaster_for(shapes.router(["x", "y", "z"]))
        for _ in range(30):
            play(forecaster, hub_trace(rng.choices(["x", "y", "z"], k=3)))
        forecaster.observe_transition(G, "route", "x", elapsed_s=0.5, first_tool_name="find")
        forecaster.observe_tool(G, "find", 2.0)
        return forecaster

    first, second = learnt(), learnt()
    assert first.snapshot() == second.snapshot()
    restored = forecaster_for(shapes.router(["x", "y", "z"]))
    restored.restore(json.loads(json.dumps(first.snapshot())))
    assert restored.snapshot() == first.snapshot()
    for tool in (None, "find"):
        assert restored.candidates(G, "route", first_tool_name=tool) == first.candidates(
            G, "route", first_tool_name=tool
        )


@pytest.mark.parametrize(
    "damage",
    [
        {"version": 99},
        {"durations": [["k"]]},
        {"durations": None},
        {"graphs": [{"graph_id": "g"}]},
        {"graphs": [{"graph_id": "g", "slow": [], "fast": [], "tools": [], "trust": [["n", [1.0]]]}]},
        {"graphs": [{"graph_id": "g", "slow": [[["n"], {"t": "many"}]], "fast": [], "tools": [], "trust": []}]},
    ],
)
def test_a_damaged_snapshot_is_refused_and_changes_nothing(damage):
    forecaster = forecaster_for(shapes.agent())
    play(forecaster, [START, "model", END])
    before = forecaster.snapshot()
    with pytest.raises(ConfigError, match="Delete the stored forecast"):
        forecaster.restore({**before, **damage})
    assert forecaster.snapshot() == before


NAMES = ["a", "b", "c", "d", END]


@st.composite
def topologies(draw) -> Topology:
    """Any graph of four nodes in which the exits of a node exclude each other."""
    edges = []
    for source in (START, "a", "b", "c", "d"):
        targets = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
        kind = "plain" if len(targets) == 1 and draw(st.booleans()) else "conditional"
        edges += [Edge(source, t, kind, "", "" if kind == "plain" else "branch:r") for t in targets]
    unknown = draw(st.frozensets(st.sampled_from(["a", "b", "c", "d"])))
    unknown -= {edge.source for edge in edges if edge.kind == "plain"}
    declared = {edge.source for edge in edges}
    edges += [Edge(n, END, "plain") for n in ("a", "b", "c", "d") if n not in declared and n not in unknown]
    return Topology("any", tuple(NodeInfo(n, "plain") for n in ("a", "b", "c", "d")), tuple(edges), unknown)


@settings(max_examples=60, deadline=None)
@given(
    topologies(),
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", "d"]), st.sampled_from(NAMES)), max_size=30),
    st.integers(1, 3),
)
def test_chances_of_exclusive_exits_never_exceed_one(topology, observations, horizon_steps):
    forecaster = TransitionForecaster(Memory(max_keys=16))
    forecaster.add_graph(G, topology)
    path: tuple[str, ...] = ()
    for source, target in observations:
        forecaster.observe_transition(G, source, target, elapsed_s=1.0, context=path[-4:])
        path = (*path, source)
    for node in ("a", "b", "c", "d"):
        found = forecaster.candidates(G, node, horizon_steps=horizon_steps, context=path[-4:])
        assert all(0.0 <= c.p_next <= 1.0 and 1 <= c.steps <= horizon_steps for c in found)
        assert [c.p_next for c in found] == sorted((c.p_next for c in found), reverse=True)
        assert len({(c.node, c.steps) for c in found}) == len(found)
        assert END not in {c.node for c in found}
        if not any(edge.is_certain for edge in topology.hops(node)):
            total = sum(c.p_next for c in found if c.steps == 1) + forecaster.p_end(G, node, context=path[-4:])
            assert total <= 1.0 + 1e-9
