"""Notes on a topology that an author will want to know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pancake_langgraph._types import NodeId
from pancake_langgraph.topology.graph import END, START, Topology


@dataclass(frozen=True, slots=True)
class LintNote:
    """One finding: a stable `code`, the node it is about, and what it means with the way to mend it."""

    code: str
    node: NodeId
    text: str


def lint(topology: Topology) -> tuple[LintNote, ...]:
    """Return notes in a stable order.  Never raises; an empty result means nothing was found."""
    return (*_double_exits(topology), *_endless_loops(topology), *_unreachable(topology))


def _double_exits(topology: Topology) -> Iterator[LintNote]:
    """A fixed edge fires next to a command's jump; authors often expect one or the other."""
    for node in topology.nodes:
        edges = topology.edges_from(node.id)
        fixed = [edge.target for edge in edges if edge.is_certain and not edge.target.endswith(END)]
        jumps = [edge.target for edge in edges if edge.kind == "command"]
        undeclared = node.id in topology.unknown_sources and any(edge.group == "unknown" for edge in edges)
        if fixed and (jumps or undeclared):
            where = ", ".join(jumps) or "an undeclared target"
            yield LintNote(
                "edge-and-command",
                node.id,
                f"has a fixed edge to {', '.join(fixed)} and jumps by Command to {where}: both run. "
                "Remove the edge, or return Command without goto.",
            )


def _endless_loops(topology: Topology) -> Iterator[LintNote]:
    ends = topology.leading_to(END)
    told: set[NodeId] = set()
    for node in topology.nodes:
        if node.id in ends or node.id in told or node.kind == "subgraph":
            continue
        inside = topology.reachable(node.id)
        loops = any(node.id in topology.successors(n) or _hops_to(topology, n, node.id) for n in inside)
        if loops and not any(topology.is_open(member) for member in inside):
            told |= inside
            yield LintNote(
                "endless-loop",
                node.id,
                "is in a loop that no declared edge leaves: the run ends at the recursion limit. "
                "Add an edge to END on one of its nodes.",
            )


def _unreachable(topology: Topology) -> Iterator[LintNote]:
    reached = topology.reachable(START)
    levels = {node_id.rpartition("|")[0] for node_id in reached}
    open_levels = {n.rpartition("|")[0] for n in reached if n != END and topology.is_open(n)}
    for node in topology.nodes:
        if node.id in reached or (node.kind == "subgraph" and _any_below(reached, node.id)):
            continue
        if any(node.id.startswith(f"{other.id}|") and not _any_below(reached, other.id) for other in topology.nodes):
            continue  # the sub-graph around it is what nothing leads to
        level = node.id.rpartition("|")[0]
        if level in open_levels or (level not in levels and "" in open_levels):
            yield LintNote("undeclared-only", node.id, "is reached only by a jump that the graph does not declare.")
        else:
            yield LintNote(
                "unreachable", node.id, "is never reached: no edge or jump leads to it. Add one, or drop it."
            )


def _hops_to(topology: Topology, source: str, target: str) -> bool:
    return any(hop.target == target for hop in topology.hops(source))


def _any_below(reached: frozenset[NodeId], node_id: str) -> bool:
    return any(other.startswith(f"{node_id}|") for other in reached)
