"""Declared durations and needs: the first estimate, which measurements replace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._types import NodeId
from pancake_langgraph.forecast import Declared, Need, TransitionForecaster
from pancake_langgraph.forecast.base import Forecaster
from pancake_langgraph.forecast.null import NullForecaster
from pancake_langgraph.forecast.topology_prior import TopologyPrior
from pancake_langgraph.topology.graph import END, START, Edge, NodeInfo, Topology

G = "g"


def topology(*edges: tuple[str, str, str], unknown: tuple[str, ...] = ()) -> Topology:
    names = {name for source, target, _ in edges for name in (source, target)} - {START, END}
    declared = tuple(Edge(a, b, kind, "", "branch:r" if kind == "conditional" else "") for a, b, kind in edges)
    return Topology("t", tuple(NodeInfo(n, "plain") for n in sorted(names)), declared, frozenset(unknown))


FORK = topology(
    (START, "a", "plain"), *(("a", name, "conditional") for name in ("b", "c", "d", "e")), ("b", END, "plain")
)
CHAIN = topology((START, "a", "plain"), ("a", "b", "plain"), ("b", "c", "plain"), ("c", "d", "plain"))


def forecaster(graph: Topology = FORK, kind: type = TransitionForecaster, **declared: object) -> Forecaster:
    made: Forecaster = kind()
    made.add_graph(G, graph)
    made.declare(G, Declared(**declared))  # type: ignore[arg-type]
    return made


def need(node: str, steps: int = 1) -> Need:
    return Need(NodeId(node), steps)


def chances(made: Forecaster, node: str = "a", horizon: int = 1) -> dict[str, float]:
    return {c.node: c.p_next for c in made.candidates(G, node, horizon_steps=horizon)}


# -- durations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TopologyPrior, TransitionForecaster])
def test_a_declared_duration_is_the_first_estimate(kind):
    made = forecaster(kind=kind, node_seconds={"a": 4.0}, tool_seconds={"look": 10.0})
    assert made.node_seconds(G, "a").p50_s == 4.0
    found = made.tool_seconds(G, "look")
    assert (found.p50_s, found.num_samples) == (10.0, 0)
    assert found.p10_s < 10.0 < found.p90_s
    assert made.tool_seconds(G, "other") is None
    assert made.tool_seconds("another graph", "look") is None
    assert {c.eta_s for c in made.candidates(G, "a", horizon_steps=1)} == {4.0}


@pytest.mark.parametrize(("declared_s", "true_s"), [(10.0, 0.1), (0.1, 10.0), (1.0, 1.1)])
def test_estimates_converge_to_what_is_measured_and_never_move_away(declared_s, true_s):
    made = forecaster(tool_seconds={"look": declared_s}, node_seconds={"a": declared_s})
    errors = []
    for _ in range(20):
        made.observe_tool(G, "look", true_s)
        made.observe_transition(G, "a", "b", elapsed_s=true_s)
        found = made.tool_seconds(G, "look")
        errors.append(abs(found.p50_s - true_s))
        if found.num_samples >= 9:  # nothing is left of the declaration
            assert (found.p10_s, found.p50_s, found.p90_s) == pytest.approx((true_s,) * 3)
    assert errors == sorted(errors, reverse=True)
    assert errors[2] <= 0.2 * true_s  # three measurements that agree outvote a declaration
    assert made.node_seconds(G, "a").p50_s == pytest.approx(true_s)
    assert made.node_seconds(G, "a").num_samples == 20


def test_what_was_measured_before_a_declaration_counts():
    made = forecaster()
    for _ in range(20):
        made.observe_tool(G, "look", 0.1)
    made.declare(G, Declared(tool_seconds={"look": 10.0}))
    assert made.tool_seconds(G, "look").p50_s == pytest.approx(0.1)


def test_declarations_are_replaced_and_bounded_by_graphs():
    made = TopologyPrior(max_graphs=4)
    for number in range(50):
        made.declare(f"g{number}", Declared(tool_seconds={"look": 1.0}))
        made.declare(f"g{number}", Declared(tool_seconds={"look": 2.0}))
    known = [number for number in range(50) if made.tool_seconds(f"g{number}", "look") is not None]
    assert known == [46, 47, 48, 49]
    assert made.tool_seconds("g49", "look").p50_s == 2.0


def test_a_declaration_is_no_part_of_a_snapshot():
    made = forecaster(tool_seconds={"look": 10.0})
    fresh = TransitionForecaster()
    fresh.restore(made.snapshot())
    assert fresh.tool_seconds(G, "look") is None


def test_the_forecaster_that_knows_nothing_takes_declarations_too():
    made = forecaster(kind=NullForecaster, tool_seconds={"look": 1.0}, needs={"a": (need("b"),)})
    assert made.tool_seconds(G, "look") is None
    assert made.candidates(G, "a") == ()


# -- needs -------------------------------------------------------------------------------------------------------------


def test_a_declared_need_is_raised_with_its_reason():
    plain = chances(forecaster())
    made = forecaster(needs={"a": (need("d"),)})
    raised = chances(made)
    assert plain["d"] == pytest.approx(0.25)
    assert raised["d"] > 0.6 > plain["d"]  # over the default threshold for acting
    assert sum(raised.values()) == pytest.approx(1.0)
    reasons = {c.node: c.reason for c in made.candidates(G, "a", horizon_steps=1)}
    assert reasons["d"] == "declared: a may need it"
    assert reasons["b"] == "declared conditional"


def test_needs_that_exclude_each_other_share():
    raised = chances(forecaster(needs={"a": (need("d"), need("e"))}))
    assert raised["d"] == pytest.approx(raised["e"])
    assert sum(raised.values()) == pytest.approx(1.0)


def test_a_need_that_never_comes_true_is_forgotten_and_one_that_does_is_believed():
    made = forecaster(needs={"a": (need("d"),)})
    for _ in range(30):
        made.observe_transition(G, "a", "b", elapsed_s=1.0)
    assert chances(made)["b"] > 0.85
    assert chances(made)["d"] < 0.1
    made = forecaster(needs={"a": (need("d"),)})
    for _ in range(30):
        made.observe_transition(G, "a", "d", elapsed_s=1.0)
    assert chances(made)["d"] > 0.95


def test_fixed_edges_keep_their_certainty():
    fixed = topology((START, "a", "plain"), ("a", "b", "plain"), ("a", "c", "conditional"), ("a", "d", "conditional"))
    raised = chances(forecaster(fixed, needs={"a": (need("c"), need("b"))}))
    assert raised["b"] == 1.0
    assert raised["c"] > chances(forecaster(fixed))["c"]


def test_the_end_of_the_run_makes_room_for_a_need():
    routed = topology((START, "a", "plain"), ("a", "b", "conditional"), ("a", END, "conditional"))
    made = forecaster(routed, needs={"a": (need("b"),)})
    assert made.p_end(G, "a") + chances(made)["b"] == pytest.approx(1.0)
    assert made.p_end(G, "a") < forecaster(routed).p_end(G, "a")


def test_a_need_behind_undeclared_jumps_becomes_a_candidate():
    open_ = topology((START, "a", "plain"), (START, "x", "plain"), unknown=("a",))
    assert "x" not in chances(forecaster(open_))
    assert chances(forecaster(open_, needs={"a": (need("x"),)}))["x"] > 0.6


def test_a_need_further_on_is_a_candidate_beyond_the_horizon_and_others_are_not():
    made = forecaster(CHAIN, needs={"a": (need("d", 3),)})
    found = {c.node: c for c in made.candidates(G, "a", horizon_steps=1)}
    assert set(found) == {"b", "d"}
    assert (found["d"].steps, found["d"].reason) == (3, "declared: a may need it")
    assert found["d"].p_next == 1.0  # fixed edges lead there
    for _ in range(30):  # a need is not worn out by runs in which it comes true
        for source, target in (("a", "b"), ("b", "c"), ("c", "d")):
            made.observe_transition(G, source, target, elapsed_s=1.0)
    found = {c.node: c for c in made.candidates(G, "a", horizon_steps=1)}
    assert found["d"].p_next > 0.9
    assert found["d"].eta_s == pytest.approx(3.0)


def test_streamed_evidence_is_stronger_than_a_declared_need_further_on():
    made = forecaster(CHAIN, needs={"a": (need("d", 3),)})
    assert "d" not in {c.node for c in made.candidates(G, "a", horizon_steps=1, first_tool_name="look")}


@given(
    st.lists(st.sampled_from("bcde"), max_size=30),
    st.lists(st.sampled_from("bcde"), min_size=1, max_size=4, unique=True),
)
def test_chances_of_exclusive_exits_never_exceed_one(history, wanted):
    made = forecaster(needs={"a": tuple(need(node) for node in wanted)})
    for target in history:
        made.observe_transition(G, "a", target, elapsed_s=1.0)
    assert sum(chances(made).values()) + made.p_end(G, "a") <= 1.0 + 1e-9
    assert all(0.0 <= p <= 1.0 for p in chances(made, horizon=4).values())
