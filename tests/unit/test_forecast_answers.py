"""Remembered answers are those that a forecaster without a memory for answers would give, and they are bounded."""

import random
import statistics
from collections import deque
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph.forecast import Clue, TransitionForecaster
from pancake_langgraph.forecast.answers import Answers
from pancake_langgraph.forecast.contexts import BACK_OFF, keys_of, ways_of
from pancake_langgraph.forecast.counts import CountTable, smooth
from pancake_langgraph.forecast.declared import Declared, Need
from pancake_langgraph.forecast.experts import _MAX_ANSWERS, NUM_EXPERTS, PRIOR_STRENGTH, Experts
from pancake_langgraph.forecast.quantiles import Durations
from pancake_langgraph.forecast.topology_prior import _MAX_WAYS
from pancake_langgraph.forecast.transitions import Memory
from pancake_langgraph.topology.graph import END, START, Edge, NodeInfo, Topology

NODES = ("r", "x", "y", "z")
EDGES = [
    Edge(START, "r", "plain"),
    *(Edge("r", to, "conditional", "", "branch:b") for to in ("x", "y", "z", END)),
    Edge("x", "y", "plain"),
    Edge("y", "r", "plain"),
    Edge("z", "r", "plain"),
]
HUB = Topology("hub", tuple(NodeInfo(name, "plain") for name in NODES), tuple(EDGES))


def test_answers_about_one_subject_go_when_it_changes_and_all_go_at_the_bound() -> None:
    answers: Answers[int] = Answers(max_answers=3)
    for number, subject in enumerate("aab"):
        answers.put(subject, number, number)
    assert [answers.get("a", 0), answers.get("a", 1), answers.get("b", 2), answers.get("c", 0)] == [0, 1, 2, None]
    answers.forget("a")
    assert (len(answers), answers.get("a", 0), answers.get("b", 2)) == (1, None, 2)
    for number in range(3, 6):
        answers.put("c", number, number)
        assert len(answers) <= 3
    assert (answers.get("c", 5), answers.get("b", 2)) == (5, None)


@pytest.mark.parametrize("memory", [Memory(), Memory(max_graphs=2, max_keys=5, max_targets=2)], ids=["roomy", "full"])
def test_what_is_remembered_is_what_would_be_found_out_anew(memory: Memory) -> None:
    rng = random.Random(5)
    forecaster = TransitionForecaster(memory)
    for graph in "gh":
        forecaster.add_graph(graph, HUB)
    questions = [(g, n, c) for g in "gh" for n in NODES for c in ((), (START,), (START, "r"), ("r", "x", "y"))]
    clues = {"clues": (Clue("t"), Clue("t", "to", "x")), "first_tool_name": "t"}
    told = Declared(node_seconds={"x": 2.0}, needs={"r": (Need("z", 1),)})
    for step in range(150):
        graph, node, context = rng.choice(questions)
        more = clues if step % 3 == 0 else {}
        target = rng.choice((*NODES, END))
        forecaster.observe_transition(graph, node, target, elapsed_s=rng.random(), context=context, **more)
        if step % 10 == 0:
            forecaster.observe_tool(graph, f"t{step}", rng.random())
        if step == 75:
            forecaster.declare("g", told)
        twin = TransitionForecaster(memory)
        for name in "gh":
            twin.add_graph(name, HUB)
        if step >= 75:
            twin.declare("g", told)
        twin.restore(forecaster.snapshot())
        for name, where, past in rng.sample(questions, 6):
            for asked in ({}, clues):
                ours = forecaster.candidates(name, where, context=past, **asked)
                assert ours == twin.candidates(name, where, context=past, **asked)


def test_remembered_answers_are_bounded_however_many_pasts_are_asked_about() -> None:
    forecaster = TransitionForecaster()
    forecaster.add_graph("g", HUB)
    forecaster.observe_transition("g", "r", "x", elapsed_s=1.0)
    sizes = []
    for number in range(2 * _MAX_WAYS):
        forecaster.candidates("g", "r", context=(f"n{number}",), first_tool_name=f"tool{number}")
        sizes.append(len(forecaster._ways))
    assert max(sizes) <= _MAX_WAYS
    assert max(sizes) > _MAX_WAYS / 2
    experts = Experts(Memory())
    for number in range(2 * _MAX_ANSWERS):
        experts.shares("r", (f"n{number}",), {"x": 0.5, "y": 0.5})
        assert len(experts._answers) <= _MAX_ANSWERS


@given(st.lists(st.tuples(st.sampled_from(("", "s", "st", "sta")), st.sampled_from("xyz")), max_size=12))
def test_the_mixture_is_that_of_all_experts_each_blended_with_what_it_falls_back_to(
    seen: list[tuple[str, str]],
) -> None:
    memory, prior = Memory(), {"x": 0.5, "y": 0.3}
    experts = Experts(memory)
    tables = [CountTable(decay=d, max_keys=99, max_targets=99) for d in (memory.slow_decay, memory.fast_decay)]
    for past, target in seen:
        experts.observe("r", target, tuple(past), prior)
        for table in tables:
            for key in filter(None, keys_of("r", tuple(past))):
                table.observe(key, target)
    trust = dict(experts.to_rows()["trust"]).get("r", [1 / NUM_EXPERTS] * NUM_EXPERTS)
    for past in ("", "s", "st", "sta", "u"):
        estimates: list[Mapping[str, float]] = []
        for table in tables:
            first = len(estimates)
            for key, back_off in zip(keys_of("r", tuple(past)), BACK_OFF, strict=True):
                below = prior if back_off < 0 else estimates[first + back_off]
                estimates.append(below if key is None else smooth(table.row(key), below, PRIOR_STRENGTH))
        shares = experts.shares("r", tuple(past), prior)
        for target in "xyz":
            mixed = sum(weight * each.get(target, 0.0) for weight, each in zip(trust, estimates, strict=True))
            assert shares.get(target, 0.0) == pytest.approx(mixed)


def test_ways_of_looking_at_pasts_do_not_pile_up() -> None:
    for number in range(1000):
        ways_of("r", (f"n{number}",))
    assert ways_of.cache_info().currsize <= 512


def test_names_of_tools_that_models_invent_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pancake_langgraph.forecast.topology_prior._MAX_CACHED", 8)
    forecaster = TransitionForecaster()
    forecaster.add_graph("g", HUB)
    for number in range(20):
        forecaster.candidates("g", "r", first_tool_name=f"tool{number}")
        assert 0 < len(forecaster._announced) <= 8


def test_a_duration_that_had_to_go_is_no_longer_told() -> None:
    forecaster = TransitionForecaster(Memory(max_keys=2))  # four durations
    forecaster.add_graph("g", HUB)
    forecaster.observe_transition("g", "x", "y", elapsed_s=1.0)
    assert [c.eta_s for c in forecaster.candidates("g", "x", horizon_steps=1)] == [1.0]
    for number in range(4):
        forecaster.observe_tool("g", f"tool{number}", 1.0)
    assert [c.eta_s for c in forecaster.candidates("g", "x", horizon_steps=1)] == [None]


def test_quantiles_are_those_of_the_last_samples_whatever_came_before() -> None:
    rng = random.Random(11)
    durations, last = Durations(max_keys=4, window=5), deque(maxlen=5)
    for _ in range(200):
        sample = float(rng.choice((0.0, 1.0, 1.0, 2.0, rng.random())))
        durations.add("k", sample)
        last.append(sample)
        found = durations.quantiles("k")
        assert found.num_samples == len(last)
        assert found.p50_s == pytest.approx(statistics.median(last))
    assert durations.to_rows() == [["k", list(last)]]
