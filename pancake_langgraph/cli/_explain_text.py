"""A topology and its forecast in words and as JSON: a few lines on the whole, then each node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pancake_langgraph._types import Candidate, NodeId
from pancake_langgraph.cli._explain_facts import Facts, Loop, calls_in_words, end_in_words, some
from pancake_langgraph.topology.graph import START, Edge, NodeInfo, Topology
from pancake_langgraph.topology.lint import LintNote, lint

#: Ways out of one node, and expected nodes, that are written out.
_MAX_LINES: Final = 8
_STOPS: Final = {"before": "before it", "after": "after it", "inside": "inside it, its code calls interrupt"}

Forecasts = Mapping[NodeId, tuple[Candidate, ...]]


def in_words(topology: Topology, facts: Facts, forecasts: Forecasts) -> list[str]:
    """Return lines: the graph as a whole, every node, and the notes."""
    lines = [*_overview(topology, facts), *_open_start(topology, facts, forecasts)]
    for node in topology.nodes:
        lines += _about(topology, facts, node, forecasts.get(node.id, ()))
    notes = lint(topology)
    lines += ["", "Notes:" if notes else "Notes: none"]
    return [*lines, *(f"  {note.node} {note.text} [{note.code}]" for note in notes)]


def as_json(topology: Topology, facts: Facts, forecasts: Forecasts) -> dict[str, Any]:
    """Return the same as a JSON object, whole."""
    return {
        "name": topology.name,
        "fingerprint": topology.fingerprint,
        "entry": list(topology.entry),
        "least_steps": _least_steps(topology),
        "nodes": [_node_as_json(topology, facts, node) for node in topology.nodes],
        "edges": [
            {"source": e.source, "target": e.target, "kind": e.kind, "label": e.label, "certain": e.is_certain}
            for e in topology.edges
        ],
        "loops": [
            {
                "nodes": list(loop.nodes),
                "exits": [{"source": source, "target": target} for source, target in loop.exits],
                "open_nodes": list(loop.open_nodes),
            }
            for loop in facts.loops
        ],
        "unknown_sources": sorted(topology.unknown_sources),
        "unknown": {
            source: [{"reason": jump.reason, "remedy": jump.remedy} for jump in jumps]
            for source, jumps in facts.open_jumps.items()
        },
        "forecast": {
            source: [
                {"node": c.node, "p_next": round(c.p_next, 4), "steps": c.steps, "reason": c.reason} for c in found
            ]
            for source, found in forecasts.items()
        },
        "notes": [_note_as_json(note) for note in lint(topology)],
    }


def _overview(topology: Topology, facts: Facts) -> list[str]:
    num_open = len(topology.unknown_sources)
    sizes = f"{len(topology.nodes)} nodes, {len(topology.edges)} declared edges, {num_open} with undeclared jumps"
    lines = [
        f"Graph {topology.name}: {sizes} (fingerprint {topology.fingerprint})",
        f"Starts with: {some(topology.entry) or 'not declared'}",
    ]
    least = _least_steps(topology)
    lines += [f"Runs: at least {least} step(s)"] if least is not None else []
    for title, call in (("Models", "model"), ("Retrievers", "retriever")):
        found = tuple(node.id for node in topology.nodes if call in node.calls)
        lines += [f"{title}: called by {some(found)}"] if found else []
    tools = tuple(dict.fromkeys(name for node in topology.nodes for name in node.tools))
    lines += [f"Tools: {some(tools)}"] if tools else []
    stops = tuple(f"{node.id} ({', '.join(node.stops)})" for node in topology.nodes if node.stops)
    lines += [f"May stop for a person: {some(stops)}"] if stops else []
    lines += [f"Loop {number}: {_loop_in_words(loop)}" for number, loop in list(enumerate(facts.loops, 1))[:_MAX_LINES]]
    if len(facts.loops) > _MAX_LINES:
        lines.append(f"Loops: {len(facts.loops)} in all")
    joins = tuple(facts.waits_for)
    lines += [f"Joins: {some(joins)}"] if joins else []
    deferred = tuple(node.id for node in topology.nodes if node.deferred)
    lines += [f"Deferred: {some(deferred)}"] if deferred else []
    fan_outs = tuple(f"{end_in_words(source)} to {some(targets)}" for source, targets in facts.sends_to.items())
    lines += [f"Fan-outs: {some(fan_outs)}"] if fan_outs else []
    lines += [f"Undeclared jumps: {some(tuple(facts.open_jumps))}"] if facts.open_jumps else []
    return lines


def _least_steps(topology: Topology) -> int | None:
    """Return the steps of the shortest run that is declared; the start itself is none."""
    to_end = topology.steps_to_end(START)
    return None if to_end is None else to_end - 1


def _loop_in_words(loop: Loop) -> str:
    count = f"{len(loop.nodes)} node{'s' if len(loop.nodes) != 1 else ''}"
    leaves = [f"{node} to {end_in_words(target)}" for node, target in loop.exits]
    leaves += [f"{node} by an undeclared jump" for node in loop.open_nodes]
    return f"{some(loop.nodes)} ({count}); {'left from ' + some(tuple(leaves)) if leaves else 'nothing leaves it'}"


def _open_start(topology: Topology, facts: Facts, forecasts: Forecasts) -> list[str]:
    """Return lines about the start where it decides: another node has a paragraph of its own."""
    if topology.unknown_sources.isdisjoint((START,)) and all(e.is_certain for e in topology.edges_from(START)):
        return []
    return ["\nthe start", *_ways(topology, facts, START), *_expected(forecasts.get(START, ()))]


def _about(topology: Topology, facts: Facts, node: NodeInfo, expected: tuple[Candidate, ...]) -> list[str]:
    lines = [f"\n{node.id} ({node.kind if node.kind != 'unknown' else 'kind not known'})"]
    calls = calls_in_words(node)
    lines += [f"  calls {calls}"] if calls else []
    lines += [f"  may stop {' and '.join(_STOPS[stop] for stop in node.stops)}"] if node.stops else []
    waits_for = facts.waits_for.get(node.id)
    lines += [f"  starts once {some(waits_for)} are done"] if waits_for else []
    lines += ["  deferred: waits until all others are done"] if node.deferred else []
    lines += _ways(topology, facts, node.id)
    index = facts.loop_of.get(node.id)
    lines += [f"  in loop {index + 1}, of {len(facts.loops[index].nodes)} node(s)"] if index is not None else []
    to_end = topology.steps_to_end(node.id)
    lines += [f"  at least {to_end} step(s) before the end"] if to_end is not None else []
    return [*lines, *_expected(expected)]


def _ways(topology: Topology, facts: Facts, source: NodeId) -> list[str]:
    edges = topology.edges_from(source)
    lines = [f"  {_edge_in_words(edge)}" for edge in edges[:_MAX_LINES]]
    if len(edges) > _MAX_LINES:
        lines.append(f"  and {len(edges) - _MAX_LINES} more ways")
    if source in topology.unknown_sources:
        lines.append("  may jump elsewhere: its targets are not declared, they are learnt from runs")
    for jump in facts.open_jumps.get(source, ()):
        lines += [f"    why: {jump.reason}", f"    to declare: {jump.remedy}"]
    return lines


def _expected(found: tuple[Candidate, ...]) -> list[str]:
    lines = [f"  expect {c.node} in {c.steps} step(s), p={c.p_next:.2f} ({c.reason})" for c in found[:_MAX_LINES]]
    return [*lines, f"  and {len(found) - _MAX_LINES} less likely"] if len(found) > _MAX_LINES else lines


def _edge_in_words(edge: Edge) -> str:
    target = end_in_words(edge.target)
    label = f" ({edge.label})" if edge.label else ""
    return {
        "plain": f"then always {target}" if edge.is_certain else f"then {target}, unless control is handed over",
        "join": f"then {target}, once all its sources are done",
        "send": f"may fan out to {target}, any number at once{label}",
        "conditional": f"may go to {target}{label}",
        "command": f"may jump to {target}{label}",
        "handoff": f"hands over to {target} by tool {edge.label}",
        "unknown": f"perhaps to {target}: the name stands in the code that decides",
    }[edge.kind]


def _node_as_json(topology: Topology, facts: Facts, node: NodeInfo) -> dict[str, Any]:
    return {
        "id": node.id,
        "kind": node.kind,
        "deferred": node.deferred,
        "calls": list(node.calls),
        "tools": list(node.tools),
        "handoffs": {handoff.tool: handoff.target for handoff in node.handoffs},
        "stops": list(node.stops),
        "waits_for": list(facts.waits_for.get(node.id, ())),
        "sends_to": list(facts.sends_to.get(node.id, ())),
        "loop": facts.loop_of.get(node.id),
        "steps_to_end": topology.steps_to_end(node.id),
    }


def _note_as_json(note: LintNote) -> dict[str, str]:
    return {"code": note.code, "node": note.node, "text": note.text}
