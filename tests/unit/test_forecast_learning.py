"""What the forecast learns from runs (history, rounds, callers, streamed values, time), and how calibrated it is."""

import itertools
import json
import math
import random
from collections.abc import Callable

import pytest

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast import Clue, TransitionForecaster
from pancake_langgraph.forecast.arrival import Arrivals
from pancake_langgraph.forecast.contexts import CONTEXT_NODES, MAX_ROUNDS, keys_of
from pancake_langgraph.forecast.counts import CountTable
from pancake_langgraph.forecast.evidence import MAX_FIELDS, MAX_VALUES, ClueTable
from pancake_langgraph.forecast.null import NullForecaster
from pancake_langgraph.forecast.topology_prior import TopologyPrior
from pancake_langgraph.forecast.transitions import Memory
from pancake_langgraph.topology.graph import END, START, Edge, NodeInfo, Topology

G = "g"
Odds = Callable[[list[str]], dict[str, float]]
Scored = tuple[dict[str, float], str, dict[str, float]]


def hub(labels: str = "xyz") -> Topology:
    edges = [Edge(START, "r", "plain"), *(Edge("r", to, "conditional", "", "branch:b") for to in (*labels, END))]
    edges += [Edge(label, "r", "plain") for label in labels]
    return Topology("hub", tuple(NodeInfo(name, "plain") for name in ("r", *labels)), tuple(edges))


def fresh(topology: Topology | None = None) -> TransitionForecaster:
    forecaster = TransitionForecaster()
    forecaster.add_graph(G, topology or hub())
    return forecaster


def chances(forecaster: TransitionForecaster, node: str, context: tuple[str, ...], **more) -> dict[str, float]:
    found = {c.node: c.p_next for c in forecaster.candidates(G, node, horizon_steps=1, context=context, **more)}
    return {**found, END: forecaster.p_end(G, node, context=context)}


def play(
    forecaster: TransitionForecaster, odds: Odds, rng: random.Random, *, prefix: tuple[str, ...] = ()
) -> list[Scored]:
    """Let a hub route as `odds` of the labels so far say; return forecast, outcome and true odds of each decision."""
    trace, history, scored = [*prefix, START, "r"], [], []
    while True:
        true = odds(history)
        (target,) = rng.choices(list(true), list(true.values()))
        context = tuple(trace[:-1])[-CONTEXT_NODES:]
        scored.append((chances(forecaster, "r", context), target, true))
        forecaster.observe_transition(G, "r", target, elapsed_s=1.0, context=context)
        if target == END:
            return scored
        forecaster.observe_transition(G, target, "r", elapsed_s=1.0, context=(*context, "r"))
        trace += [target, "r"]
        history.append(target)


def top1(scored: list[Scored]) -> float:
    return sum(max(p, key=p.get) == target for p, target, _ in scored) / len(scored)


def brier(scored: list[Scored]) -> float:
    total = sum(
        sum((q - (node == target)) ** 2 for node, q in p.items()) + (target not in p) for p, target, _ in scored
    )
    return total / len(scored)


def markov(order: int, seed: int) -> Odds:
    """A router whose odds depend on the last `order` labels."""
    rng = random.Random(seed)
    table: dict[tuple[str, ...], dict[str, float]] = {}

    def odds(history: list[str]) -> dict[str, float]:
        key = tuple(history[-order:]) if order else ()
        if key not in table:
            weights = [rng.gammavariate(0.5, 1.0) + 1e-9 for _ in "xyz"]
            table[key] = {x: 0.85 * w / sum(weights) for x, w in zip("xyz", weights, strict=True)} | {END: 0.15}
        return table[key]

    return odds


def rounds(count: int, labels: str = "x") -> Odds:
    def odds(history: list[str]) -> dict[str, float]:
        return {labels[len(history) % len(labels)]: 1.0} if len(history) < count else {END: 1.0}

    return odds


# -- routes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odds",
    [rounds(1), rounds(3), rounds(7), rounds(15), rounds(8, "xy"), rounds(9, "xxy"), rounds(6, "xyz")],
    ids=["once", "3 rounds", "7 rounds", "15 rounds", "alternating", "twice then once", "in turn"],
)
def test_a_route_that_can_be_learnt_is_known_after_twenty_runs(odds: Odds) -> None:
    forecaster, rng = fresh(), random.Random(1)
    for _ in range(20):
        play(forecaster, odds, rng)
    scored = play(forecaster, odds, rng)
    assert top1(scored) == 1.0
    assert brier(scored) <= 0.05


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_random_route_is_forecast_almost_as_well_as_by_its_own_odds(order: int) -> None:
    named = best = 0.0
    ours: list[Scored] = []
    for seed in range(6):
        forecaster, rng, odds = fresh(), random.Random(100 + seed), markov(order, seed)
        for number in range(60):
            scored = play(forecaster, odds, rng)
            ours += scored if number >= 20 else []
    # Scored by the true odds of what was named first, so that luck of the draw does not count.
    named = sum(true.get(max(p, key=p.get), 0.0) for p, _, true in ours)
    best = sum(max(true.values()) for _, _, true in ours)
    assert named >= 0.95 * best
    assert brier(ours) <= brier([(true, target, true) for _, target, true in ours]) + 0.05


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_a_chance_that_is_said_is_how_often_it_comes_true(order: int) -> None:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(10)]
    for seed in range(6):
        forecaster, rng, odds = fresh(), random.Random(200 + seed), markov(order, seed)
        for _ in range(60):
            for p, target, _ in play(forecaster, odds, rng):
                for node, chance in p.items():
                    bins[min(9, int(10 * chance))].append((chance, node == target))
    for row in bins:
        if len(row) >= 100:
            said = sum(chance for chance, _ in row) / len(row)
            came = sum(hit for _, hit in row) / len(row)
            assert abs(said - came) <= 0.08


def test_the_caller_of_a_sub_graph_decides_how_often_it_goes_round() -> None:
    """`p` has the team work four times, `q` seven times; the last nodes before the decision are the same."""
    inside = ["team|work", "team|check"]
    edges = [Edge("team|work", "team|check", "plain")]
    edges += [Edge("team|check", to, "conditional", "", "branch:b") for to in ("team|work", "out")]
    topology = Topology("t", tuple(NodeInfo(n, "plain") for n in ("p", "q", "out", *inside)), tuple(edges))
    forecaster = fresh(topology)

    def run(caller: str, times: int) -> list[Scored]:
        trace, scored = [START, caller], []
        for number in range(times):
            trace += inside
            target = "team|work" if number < times - 1 else "out"
            scored.append((chances(forecaster, "team|check", tuple(trace[:-1])), target, {}))
            forecaster.observe_transition(G, "team|check", target, elapsed_s=1.0, context=tuple(trace[:-1]))
        return scored

    for _ in range(20):
        run("p", 4)
        run("q", 7)
    assert top1(run("p", 4)) == 1.0
    assert top1(run("q", 7)) == 1.0


def test_rounds_are_counted_since_the_graph_around_a_node_was_entered() -> None:
    keys = keys_of("team|a", ("team|a", "team|a", "p", "team|a", "team|b"))
    assert ("\x1fround1", "team|a") in keys
    assert ("\x1fcaller", "p", "team|a") in keys
    assert keys_of("a", ("a",) * 200)[6] == (f"\x1fround{MAX_ROUNDS}", "a")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rounds(3), rounds(3, "y")),
        (rounds(3, "xy"), rounds(5, "xzy")),
        (rounds(2), rounds(6)),
        (markov(1, 3), rounds(4)),
    ],
    ids=["other worker", "other order", "more rounds", "random before"],
)
def test_a_changed_habit_of_hundreds_of_runs_is_relearnt_within_thirty(old: Odds, new: Odds) -> None:
    forecaster, rng = fresh(), random.Random(5)
    for _ in range(300):
        play(forecaster, old, rng)
    for _ in range(30):
        scored = play(forecaster, new, rng)
    assert top1(scored) == 1.0


def test_an_undeclared_fan_out_learns_that_its_targets_come_together() -> None:
    forecaster = TransitionForecaster()
    for _ in range(20):
        for nth, target in enumerate(("x", "y", "z")):
            forecaster.observe_transition(G, "plan", target, elapsed_s=1.0, nth=nth)
    found = {c.node: c.p_next for c in forecaster.candidates(G, "plan", horizon_steps=1)}
    assert all(found[target] >= 0.8 for target in ("x", "y", "z"))


# -- streamed values --------------------------------------------------------------------------------------------------


def learn_values(forecaster: TransitionForecaster, runs: int, *, tool: str = "task", field: str = "kind") -> None:
    rng = random.Random(2)
    for number in range(runs):
        value, target = rng.choice([("blue", "x"), ("green", "y"), ("red", "z")])
        clues = [Clue(tool), Clue(tool, "text", f"unique {number}"), Clue(tool, field, value)]
        forecaster.observe_transition(G, "r", target, elapsed_s=1.0, first_tool_name=tool, clues=clues)


@pytest.mark.parametrize("tool", ["task", ""], ids=["argument", "structured answer"])
def test_a_value_that_decides_the_route_is_learnt_in_a_few_runs(tool: str) -> None:
    forecaster = fresh()
    learn_values(forecaster, 20, tool=tool)
    for value, target in (("blue", "x"), ("green", "y"), ("red", "z")):
        clues = [Clue(tool), Clue(tool, "text", "never seen"), Clue(tool, "kind", value)]
        (first, *_) = forecaster.candidates(G, "r", horizon_steps=1, clues=clues)
        assert first.node == target
        assert first.p_next >= 0.8
        assert "says kind" in first.reason
    assert max(chances(forecaster, "r", (), clues=[Clue(tool, "kind", "unknown")]).values()) < 0.6


def test_a_value_that_names_a_node_is_believed_before_anything_was_learnt() -> None:
    forecaster = fresh(hub_of_agents())
    (first, *_) = forecaster.candidates(G, "r", horizon_steps=1, clues=[Clue("", "next", "writer")])
    assert first.node == "writer|model"
    assert first.p_next >= 0.9


def test_a_value_that_names_a_node_by_accident_is_soon_ignored() -> None:
    forecaster = fresh(hub_of_agents())
    for _ in range(12):
        forecaster.observe_transition(G, "r", "critic|model", elapsed_s=1.0, clues=[Clue("", "author", "writer")])
    (first, *_) = forecaster.candidates(G, "r", horizon_steps=1, clues=[Clue("", "author", "writer")])
    assert first.node == "critic|model"


def hub_of_agents() -> Topology:
    edges = [Edge("r", f"{name}|model", "conditional", "", "branch:b") for name in ("writer", "critic", "finder")]
    nodes = ("r", "writer|model", "critic|model", "finder|model")
    return Topology("agents", tuple(NodeInfo(name, "plain") for name in nodes), tuple(edges))


def test_a_value_that_tells_nothing_does_not_spoil_a_route_that_history_tells() -> None:
    forecaster = fresh()
    clues = [Clue("task"), Clue("task", "language", "en")]
    scored: list[Scored] = []
    for number in range(30):
        trace = [START, "r"]
        for target in ("x", "y", "x", END):
            context = tuple(trace[:-1])
            if number >= 20:
                scored.append((chances(forecaster, "r", context, clues=clues), target, {}))
            forecaster.observe_transition(G, "r", target, elapsed_s=1.0, context=context, clues=clues)
            trace += [target, "r"]
    hits = [max(p, key=p.get) == target for p, target, _ in scored if target != END]
    assert sum(hits) / len(hits) >= 0.9


def test_only_values_that_may_change_something_are_worth_a_new_forecast() -> None:
    forecaster = fresh(hub_of_agents())
    forecaster.observe_transition(G, "r", "critic|model", elapsed_s=1.0, clues=[Clue("task", "kind", "blue")])
    for clue, tells in (
        (Clue("task"), True),
        (Clue("task", "kind", "blue"), True),
        (Clue("task", "kind", "writer"), True),
        (Clue("task", "kind", "green"), False),
        (Clue("task", "text", "blue"), False),
    ):
        assert forecaster.tells(G, "r", clue) is tells
    assert not NullForecaster().tells(G, "r", Clue("task"))
    assert TopologyPrior().tells(G, "r", Clue("task"))


def test_what_a_model_wrote_settles_the_second_step_too() -> None:
    """`model` always leads to `tools`; where `tools` leads is in the arguments of the call."""
    edges = [Edge("model", "tools", "plain"), *(Edge("tools", to, "conditional", "", "branch:b") for to in "xyz")]
    forecaster = fresh(Topology("t", tuple(NodeInfo(n, "plain") for n in ("model", "tools", *"xyz")), tuple(edges)))
    for _ in range(6):
        for value, target in (("blue", "x"), ("green", "y"), ("red", "z")):
            clues = [Clue("task", "kind", value)]
            forecaster.observe_transition(G, "model", "tools", elapsed_s=1.0, clues=clues)
            forecaster.observe_transition(G, "tools", target, elapsed_s=1.0, context=("model",), clues=clues)
    found = {c.node: c for c in forecaster.candidates(G, "model", clues=[Clue("task", "kind", "green")])}
    assert found["y"].p_next >= 0.8
    assert found["y"].steps == 2


def test_clues_are_bounded_and_free_text_is_given_up() -> None:
    table = ClueTable(decay=0.99, max_keys=100, max_targets=4)
    for number in range(1000):
        table.observe("r", [Clue("t", "text", f"v{number}"), Clue("t", f"f{number}", "v")], "x", {"x": 0.5, "y": 0.5})
        assert len(table) <= MAX_FIELDS
    rows = table.to_rows()
    assert len(rows["values"]) <= 100
    free = next(row for row in rows["fields"] if row[2] == "text")
    assert free[4] <= MAX_VALUES + 1
    assert table.shares("r", [Clue("t", "text", "v999")], {"x": 0.5, "y": 0.5}) is None
    assert table.shares("r", [Clue("t", "f999", "v")], {"x": 0.5, "y": 0.5}) is not None


def test_a_snapshot_holds_no_value_that_a_model_wrote() -> None:
    forecaster = fresh()
    learn_values(forecaster, 20)
    text = json.dumps(forecaster.snapshot())
    assert "kind" in text
    assert not any(value in text for value in ("blue", "green", "unique"))


# -- steps and time ---------------------------------------------------------------------------------------------------


def join_of(short: int, long: int) -> Topology:
    """Two branches of different lengths, `a1…` and `b1…`, that join in `c`."""
    edges = []
    for name, length in (("a", short), ("b", long)):
        nodes = [START, *(f"{name}{n}" for n in range(1, length + 1))]
        edges += [Edge(one, two, "plain") for one, two in itertools.pairwise(nodes)]
        edges.append(Edge(f"{name}{length}", "c", "join"))
    names = sorted({edge.target for edge in edges} | {"d"})
    edges += [Edge("c", "d", "plain"), Edge("d", END, "plain")]
    return Topology("join", tuple(NodeInfo(name, "plain") for name in names), tuple(edges))


@pytest.mark.parametrize(
    ("node", "running", "steps"),
    [("a1", (), 4), ("a1", ("b1",), 4), ("a1", ("b3",), 2), ("a1", ("b4",), 1), ("b4", (), 1), ("b4", ("a1",), 1)],
)
def test_a_join_is_as_far_away_as_its_slowest_branch(node: str, running: tuple[str, ...], steps: int) -> None:
    forecaster = fresh(join_of(1, 4))
    found = {c.node: c.steps for c in forecaster.candidates(G, node, horizon_steps=9, running=running)}
    assert (found["c"], found["d"]) == (steps, steps + 1)


def test_a_join_of_a_join_waits_for_the_slowest_of_all() -> None:
    edges = [Edge(START, "a", "plain"), Edge(START, "b", "plain"), Edge("b", "b2", "plain"), Edge("b2", "b3", "plain")]
    edges += [Edge("a", "c", "join"), Edge("b3", "c", "join"), Edge("a", "d", "join"), Edge("c", "d", "join")]
    topology = Topology("t", tuple(NodeInfo(n, "plain") for n in ("a", "b", "b2", "b3", "c", "d")), tuple(edges))
    assert Arrivals(topology).steps("a", "c", ()) == 3
    assert Arrivals(topology).steps("a", "d", ()) == 4


def test_of_several_ways_to_a_source_the_shortest_counts() -> None:
    edges = [Edge(START, "a", "plain"), Edge(START, "b", "plain"), Edge("b", "b2", "conditional", "", "branch:b")]
    edges += [Edge("b", "s", "conditional", "", "branch:b"), Edge("b2", "s", "plain")]
    edges += [Edge("a", "c", "join"), Edge("s", "c", "join")]
    topology = Topology("t", tuple(NodeInfo(n, "plain") for n in ("a", "b", "b2", "s", "c")), tuple(edges))
    assert Arrivals(topology).steps("a", "c", ("b",)) == 2
    assert Arrivals(topology).steps("a", "c", ("b2",)) == 2
    assert Arrivals(topology).steps("a", "c", ("s",)) == 1


def test_a_deferred_node_waits_for_what_runs() -> None:
    nodes = (
        NodeInfo("a", "plain"),
        NodeInfo("b", "plain"),
        NodeInfo("b2", "plain"),
        NodeInfo("z", "plain", deferred=True),
    )
    edges = [(START, "a"), (START, "b"), ("b", "b2"), ("a", "z"), ("b2", "z"), ("z", END)]
    forecaster = fresh(Topology("t", nodes, tuple(Edge(one, two, "plain") for one, two in edges)))
    assert {c.node: c.steps for c in forecaster.candidates(G, "a", horizon_steps=3, running=("b",))} == {"z": 2}


def test_waiting_for_a_join_is_timed_by_itself() -> None:
    forecaster = fresh(join_of(1, 2))
    for _ in range(5):
        forecaster.observe_transition(G, "a1", "c", elapsed_s=9.0)
        forecaster.observe_transition(G, "a1", "d", elapsed_s=1.0)
    found = {c.node: c.eta_s for c in forecaster.candidates(G, "a1", horizon_steps=2)}
    assert found["c"] == 9.0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_nodes_start_within_the_quantiles_that_were_said(steps: int) -> None:
    nodes = ["a", "b", "c", "d"]
    edges = [Edge(one, two, "plain") for one, two in itertools.pairwise(nodes)]
    forecaster = fresh(Topology("t", tuple(NodeInfo(n, "plain") for n in nodes), tuple(edges)))
    rng = random.Random(3)
    early = middle = late = 0
    for number in range(460):
        waits = [rng.lognormvariate(0.0, 0.5) for _ in range(3)]
        if number >= 60:
            found = {c.steps: c for c in forecaster.candidates(G, "a", horizon_steps=3)}[steps]
            real = sum(waits[:steps])
            early += real < found.eta_p10_s
            middle += real < found.eta_s
            late += real < found.eta_p90_s
        for wait, one, two in zip(waits, nodes, nodes[1:], strict=False):
            forecaster.observe_transition(G, one, two, elapsed_s=wait)
    assert abs(early / 400 - 0.1) <= 0.06
    assert abs(middle / 400 - 0.5) <= 0.1
    assert abs(late / 400 - 0.9) <= 0.06


def test_a_time_across_an_interrupt_is_not_learnt() -> None:
    forecaster = fresh()
    forecaster.observe_transition(G, "x", "r", elapsed_s=math.nan)
    assert forecaster.node_seconds(G, "x") is None


# -- adding up --------------------------------------------------------------------------------------------------------


def test_merged_knowledge_of_two_processes_knows_what_either_knew() -> None:
    one, two, rng = fresh(), fresh(), random.Random(1)
    for _ in range(10):
        play(one, rounds(3), rng)
        one.observe_transition("other", "p", "q", elapsed_s=1.0)
    learn_values(two, 20)
    two.observe_tool(G, "search", 2.0)
    merged = fresh()
    merged.merge(json.loads(json.dumps(one.snapshot())))
    merged.merge(json.loads(json.dumps(two.snapshot())))
    assert top1(play(merged, rounds(3), rng)) == 1.0
    assert merged.candidates("other", "p")[0].node == "q"
    assert merged.candidates(G, "r", clues=[Clue("task", "kind", "blue")], horizon_steps=1)[0].node == "x"
    assert merged.tool_seconds(G, "search").p50_s == 2.0


def test_merging_into_nothing_is_the_same_as_restoring() -> None:
    one, rng = fresh(), random.Random(1)
    for _ in range(10):
        play(one, markov(1, 2), rng)
    learn_values(one, 5)
    restored, merged = fresh(), fresh()
    restored.restore(one.snapshot())
    merged.merge(one.snapshot())
    assert restored.snapshot() == one.snapshot()
    assert chances(merged, "r", (START,)) == pytest.approx(chances(one, "r", (START,)))


def test_merged_knowledge_still_forgets() -> None:
    merged, rng = fresh(), random.Random(1)
    one = fresh()
    for _ in range(300):
        play(one, rounds(3), rng)
    for _ in range(20):
        merged.merge(one.snapshot())
    for _ in range(30):
        scored = play(merged, rounds(3, "y"), rng)
    assert top1(scored) == 1.0


def test_added_counts_weigh_no_more_than_counted_ones() -> None:
    table = CountTable(decay=0.9, max_keys=4, max_targets=4)
    for _ in range(50):
        table.add_rows([[("k",), {"x": 6.0, "y": 3.0}]])
    assert sum(table.row(("k",)).values()) == pytest.approx(10.0)
    assert table.row(("k",))["x"] == pytest.approx(2 * table.row(("k",))["y"])


def test_merging_keeps_the_bounds() -> None:
    memory = Memory(max_graphs=2, max_keys=16, max_targets=3)
    merged = TransitionForecaster(memory)
    for process in range(8):
        other = TransitionForecaster()
        for number in range(40):
            clues = [Clue("t", "f", f"{process} {number}")]
            other.observe_transition(f"g{process}", f"n{number}", f"t{process}", elapsed_s=1.0, clues=clues)
            other.observe_transition("g7", "n", f"t{number}", elapsed_s=1.0)
        merged.merge(other.snapshot())
    state = merged.snapshot()
    assert len(state["graphs"]) == 2
    for learnt in state["graphs"]:
        assert all(len(learnt[table]) <= 16 for table in ("slow", "fast", "tools", "trust", "widths"))
        assert all(len(row) <= 3 for _, row in learnt["slow"])
        assert len(learnt["clues"]["values"]) <= 16
    assert len(state["durations"]) <= 32


def test_a_snapshot_of_one_graph_leaves_the_others_out() -> None:
    forecaster = fresh()
    for graph_id in ("one", "two"):
        forecaster.observe_transition(graph_id, "p", "q", elapsed_s=1.0)
        forecaster.observe_tool(graph_id, "search", 1.0)
    state = forecaster.snapshot("one")
    assert [row["graph_id"] for row in state["graphs"]] == ["one"]
    assert "two" not in json.dumps(state)


@pytest.mark.parametrize(
    "damage",
    [{"version": 1}, {"durations": [["no graph", [1.0]]]}, {"graphs": [{"graph_id": "g"}]}, {"graphs": 7}],
)
def test_a_damaged_snapshot_is_not_merged_and_changes_nothing(damage: dict[str, object]) -> None:
    forecaster = fresh()
    play(forecaster, rounds(3), random.Random(1))
    before = forecaster.snapshot()
    with pytest.raises(ConfigError, match="Delete the stored forecast"):
        forecaster.merge({**before, **damage})
    assert forecaster.snapshot() == before


def test_forecasters_that_learn_no_routes_merge_what_they_have() -> None:
    NullForecaster().merge({})
    prior = TopologyPrior()
    prior.observe_tool(G, "search", 1.0)
    prior.merge(prior.snapshot())
    assert prior.tool_seconds(G, "search").num_samples == 2
