"""Reading topologies: every declared way is found, every undeclared one is said to be unknown."""

import importlib.util
import itertools
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START

from pancake_langgraph._errors import TopologyError
from pancake_langgraph.topology import _private
from pancake_langgraph.topology.extract import read_topology
from pancake_langgraph.topology.graph import Edge, NodeInfo, Topology
from pancake_langgraph.topology.lint import lint
from pancake_langgraph.topology.mermaid import to_mermaid


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
every_shape = pytest.mark.parametrize("name", list(shapes.SHAPES))


def edges(topology: Topology, source: str, kind: str) -> set[str]:
    return {edge.target for edge in topology.edges_from(source) if edge.kind == kind}


@every_shape
def test_declared_successors_and_unknown_sources_are_read(name):
    shape = shapes.SHAPES[name]
    topology = read_topology(shape.build())
    assert topology.unknown_sources == shape.unknown
    assert {source: set(topology.successors(source)) for source in shape.successors} == shape.successors


@every_shape
def test_history_never_shows_a_step_that_is_neither_declared_nor_unknown(name):
    shape = shapes.SHAPES[name]
    graph = shape.build()
    topology = read_topology(graph)
    config = {"configurable": {"thread_id": "t"}}
    graph.invoke(shape.inputs, config)
    steps = [set(state.next) for state in reversed(list(graph.get_state_history(config)))]
    assert len(steps) > 1
    ran: set[str] = set()
    for now, following in itertools.pairwise(steps):
        ran |= now
        for target in following:
            # A join or deferred node may have been released by any earlier node, every other one by this step's.
            waits = any(target in edges(topology, source, "join") for source in ran) or (
                (info := topology.node(target)) is not None and info.deferred
            )
            sources = ran if waits else now
            assert any(target in topology.successors(s) or s in topology.unknown_sources for s in sources), target


@every_shape
def test_reading_changes_nothing_and_is_stable(name):
    shape = shapes.SHAPES[name]
    graph = shape.build()
    first = read_topology(graph)
    assert read_topology(graph) == first
    assert read_topology(shape.build()).fingerprint == first.fingerprint
    config = {"configurable": {"thread_id": "t"}}
    untouched = shape.build().invoke(shape.inputs, config)
    touched = graph.invoke(shape.inputs, config)
    assert _words(touched) == _words(untouched)


def _words(result):
    return [m.content for m in result["messages"]] if isinstance(result, dict) and "messages" in result else result


@every_shape
def test_every_shape_can_be_drawn_and_linted(name):
    topology = read_topology(shapes.SHAPES[name].build())
    drawing = to_mermaid(topology)
    assert drawing.startswith("flowchart TD\n")
    assert all(node.id.rpartition("|")[2] in drawing for node in topology.nodes)
    assert ('{"?"}' in drawing) == bool(topology.unknown_sources)
    lint(topology)


def test_fingerprints_of_different_shapes_differ():
    prints = {name: read_topology(shape.build()).fingerprint for name, shape in shapes.SHAPES.items()}
    assert len(set(prints.values())) == len(prints)


def test_kinds_of_edges_are_told_apart():
    assert edges(read_topology(shapes.join()), "a", "join") == {"c"}
    assert edges(read_topology(shapes.send()), "plan", "send") == {"work"}
    assert edges(read_topology(shapes.command_declared()), "a", "command") == {"b", "c"}
    assert edges(read_topology(shapes.no_path_map()), "a", "unknown") == {"b", "c"}
    assert edges(read_topology(shapes.supervisor()), "supervisor|tools", "handoff") == {"math", "poet"}
    labels = {edge.label for edge in read_topology(shapes.path_map()).edges_from("a")}
    assert labels == {"left", "right"}


def test_kinds_of_nodes_are_told_apart():
    topology = read_topology(shapes.supervisor())
    kinds = {node.id: node.kind for node in topology.nodes}
    assert kinds["supervisor|agent"] == kinds["math|model"] == "model"
    assert kinds["supervisor|tools"] == "tools"
    assert kinds["math"] == "subgraph"
    assert read_topology(shapes.messages_graph()).node("write").kind == "model"
    assert read_topology(shapes.chain()).node("n0").kind == "plain"
    assert read_topology(shapes.deferred()).node("last").deferred


def test_handoff_tools_name_the_node_that_runs_next():
    topology = read_topology(shapes.swarm())
    assert [(h.tool, h.target) for h in topology.node("Alice|tools").handoffs] == [("transfer_to_bob", "Bob")]
    assert topology.entries("Bob") == ("Bob|model",)
    assert set(topology.node("Alice|tools").tools) == {"add", "transfer_to_bob"}


def test_hops_run_through_sub_graphs_without_a_step():
    topology = read_topology(shapes.nested())
    order = ["a"]
    while order[-1] != END:
        (hop,) = topology.hops(order[-1])
        assert hop.is_certain
        order.append(hop.target)
    assert order == ["a", "sub|a", "sub|inner|a", "sub|inner|b", "c", END]


def test_a_jump_to_the_parent_graph_is_given_to_the_node_that_makes_it():
    topology = read_topology(shapes.nested_parent_command())
    assert {hop.target for hop in topology.hops("sub|leave")} >= {"b", "c"}
    assert topology.is_open("sub|leave")
    assert not topology.is_open("b")


def test_distance_to_the_end_counts_steps():
    topology = read_topology(shapes.chain(4))
    assert [topology.steps_to_end(f"n{i}") for i in range(4)] == [4, 3, 2, 1]
    assert topology.steps_to("n3")["n0"] == 3
    assert read_topology(shapes.endless_loop()).steps_to_end("a") is None


def test_a_join_waits_for_its_slowest_source():
    topology = read_topology(shapes.join())
    (from_fast,) = topology.hops("a")
    (from_slow,) = topology.hops("b2")
    assert (topology.steps_between(from_fast), topology.steps_between(from_slow)) == (2, 1)
    deferred = read_topology(shapes.deferred())
    (waiting,) = deferred.hops("a")
    assert deferred.steps_between(waiting) == 2


def test_predecessors_are_the_sources_of_hops():
    topology = read_topology(shapes.supervisor())
    assert set(topology.predecessors("supervisor|agent")) >= {START, "math|model", "poet|model"}


def test_bound_graphs_are_unwrapped():
    graph = shapes.chain()
    assert read_topology(graph.with_retry()) == read_topology(graph)
    assert read_topology(graph.with_config(tags=["x"])) == read_topology(graph)


@pytest.mark.parametrize("wrong", [None, 3, "graph", shapes.chain, object()])
def test_what_is_no_graph_is_refused_with_the_remedy(wrong):
    with pytest.raises(TopologyError, match=r"got a .* Pass the result of"):
        read_topology(wrong)


def test_a_builder_is_refused_with_the_remedy():
    with pytest.raises(TopologyError, match=r"not compiled. Pass builder.compile\(\)"):
        read_topology(shapes.builder("a"))


class Hostile:
    """A lazy proxy outside its context: everything asked of it raises."""

    __slots__ = ()

    @property
    def __class__(self):
        raise RuntimeError("class")

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_objects_that_raise_when_looked_at_are_passed_over():
    proxy = Hostile()

    def node(state):
        return {"seen": [str(id(proxy))]}

    graph = shapes.builder("b").add_node("a", node).add_edge(START, "a").add_edge("a", "b").compile()
    topology = read_topology(graph)
    assert topology.successors("a") == ("b",)
    assert topology.unknown_sources == frozenset()


def test_a_node_that_cannot_be_looked_at_may_jump_anywhere(monkeypatch):
    def fails(runnable):
        raise RuntimeError("changed inside")

    graph = shapes.chain()
    traits = _private.guarded(fails, on_failure=_private.JumpTraits(jumps=True))
    monkeypatch.setattr(_private, "jump_traits", traits)
    monkeypatch.setattr(_private, "node_kind", _private.guarded(fails, on_failure="unknown"))
    topology = read_topology(graph)
    assert topology.unknown_sources == {"n0", "n1", "n2"}
    assert {node.kind for node in topology.nodes} == {"unknown"}


def test_lint_says_that_an_edge_and_a_command_both_run():
    graph = shapes.edge_and_command()
    (note,) = lint(read_topology(graph))
    assert (note.code, note.node) == ("edge-and-command", "a")
    config = {"configurable": {"thread_id": "t"}}
    graph.invoke({"seen": []}, config)
    assert {"b", "c"} in [set(state.next) for state in graph.get_state_history(config)]


def test_lint_finds_endless_loops_and_unreachable_nodes():
    graph = shapes.endless_loop()
    notes = {(note.code, note.node) for note in lint(read_topology(graph))}
    assert notes == {("endless-loop", "a"), ("unreachable", "island")}
    with pytest.raises(GraphRecursionError):
        graph.invoke({"seen": []}, {"configurable": {"thread_id": "t"}, "recursion_limit": 10})


def test_lint_does_not_call_a_node_unreachable_when_an_undeclared_jump_may_reach_it():
    (note,) = lint(read_topology(shapes.command_undeclared()))
    assert (note.code, note.node) == ("undeclared-only", "b")


def test_mermaid_escapes_names_and_writes_chances():
    nodes = (NodeInfo('say "hi" <b>', "model"), NodeInfo("b", "plain"))
    topology = Topology("t", nodes, (Edge('say "hi" <b>', "b", "conditional", "x", "branch:r"),))
    drawing = to_mermaid(topology, {('say "hi" <b>', "b"): 0.25})
    assert 'say &quot;hi&quot; &lt;b&gt;<br/>model"]' in drawing
    assert '|"x p=0.25"|' in drawing
