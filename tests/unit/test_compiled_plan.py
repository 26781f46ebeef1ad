"""The compiled plan: a DAG for every shape, sources of each fact, points of rest, and a faithful round trip."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from pancake_langgraph import Phase, phase
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.plan import (
    AnswerHabits,
    CompiledPlan,
    GraphPhases,
    Learnt,
    Loop,
    Step,
    Suspension,
    compile_plan,
    declared_for,
    plan_in_words,
    plan_mermaid,
    read_phases,
)
from pancake_langgraph.topology.extract import read_topology
from pancake_langgraph.topology.graph import Edge, NodeInfo, Topology


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


def plan_of(graph: Any, learnt: Learnt | None = None) -> CompiledPlan:
    return compile_plan(read_topology(graph), read_phases(graph), learnt)


def seconds(**by_name: float) -> Any:
    """Look-ups of durations that were measured ten times each."""
    return lambda name: Quantiles(s / 2, s, s * 2, 10) if (s := by_name.get(name)) is not None else None


def needs(plan: CompiledPlan) -> dict[str, tuple[str, ...]]:
    return {step.id: step.needs for step in plan.steps}


# -- the DAG ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_every_shape_is_a_dag_that_holds_all_hops_and_survives_the_round_trip(name):
    graph = shapes.SHAPES[name].build()
    topology, plan = read_topology(graph), plan_of(graph)
    seen: set[str] = set()
    for step in plan.steps:
        assert set(step.needs) <= seen, step.id
        seen.add(step.id)
    forward = {(source, step.id) for step in plan.steps for source in step.needs}
    back = {(loop.source, loop.target) for loop in plan.loops}
    hops = {(hop.source, hop.target) for node in seen for hop in topology.hops(node) if hop.target in seen}
    assert forward | back == hops
    assert not forward & back
    assert CompiledPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan == plan_of(graph)
    assert plan_in_words(plan)
    assert plan_mermaid(plan).startswith("flowchart TD\n")


def test_loops_are_folded_and_listed_apart():
    plan = plan_of(shapes.loop())
    assert needs(plan) == {"work": (), "check": ("work",)}
    assert plan.loops == (Loop("check", "work"),)
    assert "  check may lead back to work" in plan_in_words(plan)
    assert '-.->|"again"|' in plan_mermaid(plan)


def test_joins_need_all_of_their_sources_and_come_after_the_slowest():
    plan = plan_of(shapes.join())
    step = plan.step("c")
    assert (set(step.needs), step.needs_all, step.after_steps) == ({"a", "b2"}, True, 3)
    assert Suspension("before", "join") in step.suspensions
    assert plan.step("a").after_steps == 1


def test_branches_need_any_of_their_sources_and_come_after_the_quickest():
    graph = shapes.builder("a", "b", "c").add_edge(START, "a")
    graph.add_conditional_edges("a", lambda state: "b", ["b", "c"]).add_edge("b", "c")
    step = plan_of(graph.compile()).step("c")
    assert (set(step.needs), step.needs_all, step.after_steps) == ({"a", "b"}, False, 2)
    assert step.suspensions == ()


def test_a_graph_of_500_nodes_and_a_ring_of_them_compile():
    names = [f"n{i}" for i in range(500)]
    edges = [Edge(a, b, "plain") for a, b in zip([START, *names], [*names, names[0]], strict=True)]
    plan = compile_plan(Topology("ring", tuple(NodeInfo(n, "plain") for n in names), tuple(edges)))
    assert [step.id for step in plan.steps] == names
    assert plan.loops == (Loop("n499", "n0"),)
    assert plan.steps[-1].after_steps == 500


def test_what_is_not_declared_is_said_to_be_unknown():
    plan = plan_of(shapes.functional())
    assert plan.step("flow").jumps
    assert plan.step("flow").kind == "unknown"
    plan = plan_of(shapes.no_path_map())
    assert plan.step("a").jumps
    assert "may jump where nobody declared" in "\n".join(plan_in_words(plan))
    assert plan_of(shapes.endless_loop()).step("island").after_steps is None
    assert plan_of(shapes.send()).step("work").repeats


# -- kinds, durations, waiting -----------------------------------------------------------------------------------------


def test_kinds_come_from_the_declaration_then_from_runs_then_from_the_topology():
    topology = read_topology(shapes.agent())
    plan = compile_plan(topology)
    assert [(s.id, s.kind, s.kind_source) for s in plan.steps] == [
        ("model", "reasoning", "topology"),
        ("tools", "action", "topology"),
    ]
    learnt = compile_plan(topology, None, Learnt(model_kind=lambda node: "generation"))
    assert (learnt.step("model").kind, learnt.step("model").kind_source) == ("generation", "learnt")
    assert learnt.step("tools").kind == "action"
    writer = plan_of(shapes.messages_graph()).step("write")
    assert (writer.kind, writer.kind_source) == ("generation", "topology")


@tool
def look(q: str) -> str:
    """Look."""
    return q


@tool
def ask(q: str) -> str:
    """Ask somebody."""
    return str(interrupt(q))


def two_branches(**metadata: Any) -> Any:
    graph = StateGraph(shapes.Trail)
    for name in ("fast", "slow", "last"):
        graph.add_node(name, shapes.step(name), metadata={"pancake": metadata[name]} if name in metadata else None)
    return graph.add_edge(START, "fast").add_edge(START, "slow").add_edge(["fast", "slow"], "last").compile()


def test_declared_seconds_are_used_until_runs_were_measured():
    graph = two_branches(fast={"expect_s": 2.0}, slow={"kind": "io", "expect_s": 10})
    plan = plan_of(graph)
    fast, slow, last = (plan.step(name) for name in ("fast", "slow", "last"))
    assert (fast.seconds.source, fast.seconds.p50_s, fast.seconds.num_samples) == ("declared", 2.0, 0)
    assert fast.seconds.p10_s < 2.0 < fast.seconds.p90_s
    assert (slow.kind, slow.kind_source) == ("io", "declared")
    assert (last.seconds.source, last.seconds.p50_s) == ("unknown", None)
    assert last.starts_s == 10.0
    measured = plan_of(graph, Learnt(node_seconds=seconds(fast=4.0, slow=1.0)))
    assert (measured.step("fast").seconds.source, measured.step("fast").seconds.p50_s) == ("learnt", 4.0)
    assert measured.step("last").starts_s == 4.0


def test_a_branch_that_a_slower_one_outlasts_is_not_waited_for():
    plan = plan_of(two_branches(), Learnt(node_seconds=seconds(fast=1.0, slow=5.0)))
    assert [(s.id, s.blocking, s.blocking_source) for s in plan.steps] == [
        ("fast", False, "learnt"),
        ("slow", True, "topology"),
        ("last", True, "topology"),
    ]
    assert "   not waited for (learnt)" in plan_in_words(plan)
    alike = plan_of(two_branches(), Learnt(node_seconds=seconds(fast=4.8, slow=5.0)))
    assert all(step.blocking for step in alike.steps)
    half_known = plan_of(two_branches(), Learnt(node_seconds=seconds(fast=1.0)))
    assert all(step.blocking for step in half_known.steps)


def test_declared_blocking_wins():
    graph = two_branches(fast={"blocking": True}, slow={"blocking": False})
    plan = plan_of(graph, Learnt(node_seconds=seconds(fast=1.0, slow=5.0)))
    assert (plan.step("fast").blocking, plan.step("fast").blocking_source) == (True, "declared")
    assert (plan.step("slow").blocking, plan.step("slow").blocking_source) == (False, "declared")


def with_tools(*tools: Any) -> Any:
    graph = StateGraph(shapes.MessagesState)
    graph.add_node("tools", ToolNode(list(tools)))
    return graph.add_edge(START, "tools").compile()


def test_a_tools_step_takes_kind_and_time_from_its_tools():
    marked = phase(kind="io", expect_s=3)(look.model_copy())
    step = plan_of(with_tools(marked)).step("tools")
    assert (step.kind, step.kind_source) == ("io", "declared")
    assert [(t.name, t.kind, t.seconds.p50_s, t.seconds.source) for t in step.tools] == [
        ("look", "io", 3.0, "declared")
    ]
    assert (step.seconds.source, step.seconds.p50_s) == ("declared", 3.0)
    mixed = plan_of(with_tools(marked, ask)).step("tools")
    assert (mixed.kind, mixed.seconds.source) == ("action", "unknown")
    measured = plan_of(with_tools(marked), Learnt(tool_seconds=seconds(look=0.5))).step("tools")
    assert (measured.seconds.source, measured.seconds.p50_s) == ("learnt", 0.5)


def test_a_sub_graph_hands_kind_and_needs_to_its_nodes():
    inner = shapes.builder("a", "b").add_edge(START, "a").add_edge("a", "b").compile()
    said = {"kind": "io", "may_need": ["other", "b"], "expect_s": 5}
    graph = shapes.builder("other", "b").add_node("sub", inner, metadata={"pancake": said})
    plan = plan_of(graph.add_edge(START, "sub").add_edge("sub", "other").add_edge("other", "b").compile())
    assert (plan.step("sub|a").kind, plan.step("sub|a").kind_source) == ("io", "declared")
    assert plan.step("sub|a").may_need == ("other", "b")  # as the graph around it names them
    assert plan.step("other").kind == "action"
    assert any("expect_s on a sub-graph is not used" in note for note in plan.notes)


# -- where a thread may rest -------------------------------------------------------------------------------------------


def asking(state: Any) -> dict[str, Any]:
    return {"seen": [interrupt("go on?")]}


def test_interrupts_are_points_of_rest():
    graph = StateGraph(shapes.Trail)
    for name in ("a", "b", "c"):
        graph.add_node(name, asking if name == "b" else shapes.step(name))
    graph.add_edge(START, "a").add_edge("a", "b").add_edge("b", "c")
    plan = plan_of(graph.compile(interrupt_before=["a"], interrupt_after=["b"]))
    assert plan.step("a").suspensions == (Suspension("before", "interrupt"),)
    assert plan.step("b").suspensions == (Suspension("during", "interrupt"), Suspension("after", "interrupt"))
    assert plan.step("c").suspensions == ()
    everywhere = plan_of(graph.compile(interrupt_before="*"))
    assert all(Suspension("before", "interrupt") in step.suspensions for step in everywhere.steps)


def test_tools_and_declared_io_are_points_of_rest_and_model_calls_are_not():
    plan = plan_of(shapes.agent())
    assert plan.step("tools").suspensions == (Suspension("during", "tool"),)
    assert plan.step("model").suspensions == ()
    assert Suspension("during", "interrupt") in plan_of(with_tools(ask)).step("tools").suspensions
    assert Suspension("during", "tool") in plan_of(two_branches(fast={"kind": "io"})).step("fast").suspensions


# -- declarations ------------------------------------------------------------------------------------------------------


def test_metadata_wins_over_the_mark_field_by_field():
    marked = phase(kind="generation", expect_s=1)(shapes.step("a"))
    graph = StateGraph(shapes.Trail).add_node("a", marked, metadata={"pancake": {"expect_s": 7}})
    step = plan_of(graph.add_edge(START, "a").compile()).step("a")
    assert (step.kind, step.seconds.p50_s) == ("generation", 7.0)


def test_bad_declarations_become_notes_with_the_remedy_and_nothing_else_is_lost():
    graph = two_branches(fast={"kind": "quick"}, slow={"may_need": ["nowhere", "last"]}, last={"kind": "io", "x": 1})
    plan = plan_of(graph)
    notes = "\n".join(plan.notes)
    assert "fast: cannot declare a phase: got kind='quick', allowed is one of reasoning" in notes
    assert "last: cannot declare a phase: got unknown key x" in notes
    assert "slow: may_need names 'nowhere', which is no node of this graph" in notes
    assert plan.step("slow").may_need == ("last",)
    assert plan.step("last").kind_source == "topology"
    assert "Plan notes:" in plan_in_words(plan)


def test_a_declared_prompt_is_told_and_its_text_is_not():
    graph = two_branches(fast={"prompt": "You are a secret."})
    plan = plan_of(graph)
    assert plan.step("fast").has_prompt
    assert "secret" not in json.dumps(plan.to_json()) + "\n".join(plan_in_words(plan))


def test_reading_phases_of_anything_never_raises():
    for thing in (None, 3, object(), StateGraph(shapes.Trail)):
        assert read_phases(thing).notes == ()


def test_needs_get_their_distance_and_far_or_unreachable_ones_make_no_candidate():
    graph = StateGraph(shapes.Trail)
    names = [f"n{i}" for i in range(7)]
    for name in names:
        declared = {"pancake": {"may_need": ["n1", "n3", "n6", "n0"]}} if name == "n0" else None
        graph.add_node(name, shapes.step(name), metadata=declared)
    for source, target in zip([START, *names], [*names, END], strict=True):
        graph.add_edge(source, target)
    compiled = graph.compile()
    declared = declared_for(read_topology(compiled), read_phases(compiled))
    assert {need.node: need.steps for need in declared.needs["n0"]} == {"n1": 1, "n3": 3}
    assert plan_of(compiled).step("n0").may_need == ("n1", "n3", "n6")


def test_a_need_behind_an_undeclared_jump_is_one_step_after_it():
    def jump(state: Any) -> Any:
        return Command(goto="far")

    graph = shapes.builder("a", "far", "end").add_node("jump", jump)
    graph.nodes["a"].metadata = {"pancake": {"may_need": ["far"]}}
    compiled = graph.add_edge(START, "a").add_edge("a", "jump").add_edge("a", "end").compile()
    declared = declared_for(read_topology(compiled), read_phases(compiled))
    assert [(need.node, need.steps) for need in declared.needs["a"]] == [("far", 2)]


def test_a_need_behind_a_distant_jump_makes_no_candidate():
    names = [f"n{i}" for i in range(5)]
    nodes = tuple(NodeInfo(name, "plain") for name in (*names, "far"))
    edges = tuple(Edge(a, b, "plain") for a, b in zip([START, *names[:-1]], names, strict=True))
    topology = Topology("t", nodes, edges, frozenset({"n4"}))
    phases = GraphPhases({"n0": Phase(may_need=("far",)), "n1": Phase(may_need=("far",))})
    assert {source: needs[0].steps for source, needs in declared_for(topology, phases).needs.items()} == {"n1": 4}


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"format": "pancake-plan", "version": 2},
        {"format": "pancake-plan", "version": 1},
        {**plan_of(shapes.chain()).to_json(), "steps": [{"id": 3}]},
    ],
)
def test_what_is_no_plan_is_refused_with_the_remedy(value):
    with pytest.raises(ConfigError, match=r"cannot read a plan: .*--plan FILE"):
        CompiledPlan.from_json(value)


def test_a_plan_is_frozen():
    with pytest.raises(AttributeError):
        plan_of(shapes.chain()).steps = ()  # type: ignore[misc]
    assert not hasattr(Step, "__dict__") or "kind" in Step.__slots__


def test_names_cannot_break_the_drawing():
    plan = compile_plan(Topology("odd", (NodeInfo('say "hi" <b>', "plain"),), (Edge(START, 'say "hi" <b>', "plain"),)))
    assert "say &quot;hi&quot; &lt;b&gt;" in plan_mermaid(plan)


def test_answers_show_whether_a_node_decides_or_writes():
    habits = AnswerHabits()
    assert habits.kind("g", "n") is None
    for _ in range(10):
        habits.observe("g", "router", num_tool_calls=0, num_chars=8)
        habits.observe("g", "agent", num_tool_calls=1, num_chars=0)
        habits.observe("g", "agent", num_tool_calls=0, num_chars=2000)
        habits.observe("g", "writer", num_tool_calls=0, num_chars=2000)
    assert [habits.kind("g", node) for node in ("router", "agent", "writer")] == [
        "reasoning",
        "reasoning",
        "generation",
    ]
    for _ in range(40):
        habits.observe("g", "router", num_tool_calls=0, num_chars=5000)
    assert habits.kind("g", "router") == "generation"
    assert habits.kind("other", "router") is None


def test_habits_are_bounded_and_keep_the_youngest():
    habits = AnswerHabits(max_nodes=8)
    for number in range(100):
        habits.observe("g", "kept", num_tool_calls=1, num_chars=0)
        habits.observe("g", f"n{number}", num_tool_calls=1, num_chars=0)
        assert len(habits) <= 8
    assert habits.kind("g", "kept") == "reasoning"
    assert habits.kind("g", "n0") is None
    with pytest.raises(ValueError, match="max_nodes must be at least 1"):
        AnswerHabits(max_nodes=0)
