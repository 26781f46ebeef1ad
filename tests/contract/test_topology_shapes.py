"""Every shape is run, and its topology is held against what really happened: `state.next` is the oracle."""

import itertools
from collections import defaultdict

import pytest

from pancake_langgraph.topology import Topology, read_topology
from tests.contract.topology_oracle import END, START, Fired, Observed, observe
from tests.contract.topology_shapes import SHAPES, Scripted, Shape

every_shape = pytest.mark.parametrize("name", list(SHAPES))


@pytest.fixture(scope="module")
def run_of():
    """Run each shape once per script for the whole module."""
    kept: dict[str, tuple[Topology, list[Observed]]] = {}

    def run(name: str) -> tuple[Topology, list[Observed]]:
        if name not in kept:
            shape = SHAPES[name]
            runs = [observe(shape, script) for script in (shape.answers, *shape.others)]
            kept[name] = (read_topology(shape.build(Scripted())), runs)
        return kept[name]

    return run


def level_of(node: str) -> str:
    return node.rpartition("|")[0]


def may_jump(topology: Topology, source: str, target: str) -> bool:
    """Whether the level of `source` declares a step to `target`, or says that it does not know all of them.

    A sub-graph may also be left by what is inside: a handoff, or a jump that is not declared.
    """
    inside = [node.id for node in topology.nodes if node.id.startswith(f"{source}|")]
    if source in topology.unknown_sources or any(node in topology.unknown_sources for node in inside):
        return True
    return any(edge.target == target for node in (source, *inside) for edge in topology.edges_from(node))


def may_end(topology: Topology, source: str) -> bool:
    """Whether a branch may end with `source`: a command or a fan-out may also go nowhere."""
    level = level_of(source)
    return may_jump(topology, source, f"{level}|{END}" if level else END) or any(
        edge.kind in ("command", "send") for edge in topology.edges_from(source)
    )


@every_shape
def test_every_step_in_the_history_is_declared_or_said_to_be_unknown(run_of, name):
    topology, runs = run_of(name)
    for run in runs:
        for prefix, steps in run.nexts.items():
            ran: set[str] = set()
            for now, following in itertools.pairwise(steps):
                ran |= now
                for target in following - now - {START} if now == following else following - {START}:
                    waits = topology.node(f"{prefix}{target}")
                    late = waits is not None and (waits.deferred or _joined(topology, f"{prefix}{target}"))
                    sources = ran if late else now or {START}
                    assert any(may_jump(topology, f"{prefix}{s}", f"{prefix}{target}") for s in sources), (
                        f"{prefix}{now} -> {target}"
                    )


def _joined(topology: Topology, target: str) -> bool:
    return any(edge.target == target and edge.kind == "join" for edge in topology.edges)


@every_shape
def test_every_step_is_declared_by_the_very_task_that_sets_it_off(run_of, name):
    topology, runs = run_of(name)
    for fired in itertools.chain.from_iterable(run.fired for run in runs):
        if topology.node(fired.source) is None:
            continue  # a task of the functional API: the stream tells its name, not where it belongs
        for target in fired.targets:
            assert may_jump(topology, fired.source, target), (fired.source, target)
        assert fired.targets or fired.left or may_end(topology, fired.source), fired.source


@every_shape
def test_every_node_that_starts_is_a_hop_from_the_one_that_ended(run_of, name):
    topology, runs = run_of(name)
    containers = {node.id for node in topology.nodes if node.kind == "subgraph"}
    for run in runs:
        pairs = [(source, target) for source, target in _without(containers, run.follows) if target != END or run.ended]
        assert pairs
        for source, target in pairs:
            known = {hop.target for hop in topology.hops(source)}
            assert target in known or topology.is_open(source), (source, target)


def _without(containers: set[str], follows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave sub-graphs out: they run as their nodes, so what comes before one comes before its first node."""
    pairs: list[tuple[str, str]] = []
    before = START
    for source, target in follows:
        source = before if source in containers else source
        before = source if target in containers else target
        if target not in containers:
            pairs.append((source, target))
    return pairs


@every_shape
def test_certain_steps_always_happen_and_none_that_always_happens_is_missed(run_of, name):
    shape: Shape = SHAPES[name]
    topology, runs = run_of(name)
    by_source: dict[str, list[Fired]] = defaultdict(list)
    for fired in itertools.chain.from_iterable(run.fired for run in runs):
        if topology.node(fired.source) is not None:
            by_source[fired.source].append(fired)
    assert by_source or topology.unknown_sources
    for source, all_fired in by_source.items():
        level = level_of(source)
        end = f"{level}|{END}" if level else END
        certain = {edge.target for edge in topology.edges_from(source) if edge.is_certain} - {end}
        always = frozenset.intersection(*(fired.targets for fired in all_fired))
        assert certain <= always, source
        if source not in topology.unknown_sources and source not in shape.varies:
            assert always <= certain, source


@every_shape
def test_exactly_the_sources_of_undeclared_jumps_are_unknown(run_of, name):
    topology, _ = run_of(name)
    expected = SHAPES[name].unknown
    assert topology.unknown_sources == ({node.id for node in topology.nodes} if expected is None else expected)


def test_there_are_many_shapes_and_they_differ(run_of):
    assert len(SHAPES) >= 24
    prints = {run_of(name)[0].fingerprint for name in SHAPES}
    same = 6  # shapes that run one graph under two scripts or differ only inside of nodes
    assert len(prints) >= len(SHAPES) - same
