"""Frozen values that describe a graph: nodes, edges, and what can be asked of them.

A node inside a sub-graph is named as in checkpoint namespaces without task ids: `"team|writer"`.  Every level has its
own start and end (`"__start__"`, `"team|__start__"`).  Two views exist: *declared* edges as the author wrote them, one
level at a time, and *hops*, the flattened view between nodes that really run, in which entering and leaving sub-graphs
costs no step.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pancake_langgraph._types import NodeId
from pancake_langgraph.topology import leaves, paths
from pancake_langgraph.topology.parts import END, START, Edge, EdgeKind, Handoff, NodeInfo, NodeKind, OpenReason

__all__ = ["END", "START", "Edge", "EdgeKind", "Handoff", "NodeInfo", "NodeKind", "OpenReason", "Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """What is known about a graph before it runs.  Immutable and safe to share between threads.

    `unknown_sources` are the nodes whose jumps are not (all) declared: conditional edges without a path map, commands
    without declared targets, and everything in the functional API; `open_reasons` says which, where that is known.
    `edges` holds declared edges only.
    """

    name: str
    nodes: tuple[NodeInfo, ...]
    edges: tuple[Edge, ...]
    unknown_sources: frozenset[NodeId] = frozenset()
    open_reasons: Mapping[NodeId, tuple[OpenReason, ...]] = field(default_factory=dict, compare=False)
    _nodes: dict[str, NodeInfo] = field(init=False, repr=False, compare=False)
    _outgoing: dict[str, tuple[Edge, ...]] = field(init=False, repr=False, compare=False)
    _hops: leaves.Hops = field(init=False, repr=False, compare=False)
    _depths: dict[str, int] = field(init=False, repr=False, compare=False)
    _to_end: dict[NodeId, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Build the look-up tables once."""
        outgoing: dict[str, list[Edge]] = {}
        for edge in self.edges:
            outgoing.setdefault(edge.source, []).append(edge)
        object.__setattr__(self, "_nodes", {node.id: node for node in self.nodes})
        object.__setattr__(self, "_outgoing", {source: tuple(edges) for source, edges in outgoing.items()})
        object.__setattr__(self, "_hops", leaves.flatten(self.nodes, self._outgoing, self.unknown_sources))
        object.__setattr__(self, "_depths", self._breadth_first(START))
        to_end = paths.steps_to_all_ends(self._hops.outgoing, self.steps_between, END)
        object.__setattr__(self, "_to_end", to_end)

    @property
    def entry(self) -> tuple[NodeId, ...]:
        """Nodes that a run can start with, as declared on the outermost level."""
        return self.successors(START)

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when nodes, edges or declared jumps change; equal across processes."""
        nodes = sorted([n.id, n.kind, n.deferred, sorted([h.tool, h.target] for h in n.handoffs)] for n in self.nodes)
        edges = sorted([e.source, e.target, e.kind, e.label, e.group] for e in self.edges)
        facts = [nodes, edges, sorted(self.unknown_sources)]
        return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]

    def node(self, node_id: str) -> NodeInfo | None:
        """Return the node, or `None` when the graph declares no such node."""
        return self._nodes.get(node_id)

    def edges_from(self, node_id: str) -> tuple[Edge, ...]:
        """Return the declared edges of one source, in a stable order."""
        return self._outgoing.get(node_id, ())

    def successors(self, node_id: str) -> tuple[NodeId, ...]:
        """Return the distinct declared targets of a node on its own level; `END` may be among them."""
        return tuple(dict.fromkeys(edge.target for edge in self.edges_from(node_id)))

    def predecessors(self, node_id: str) -> tuple[NodeId, ...]:
        """Return the nodes from which one hop can lead to `node_id`."""
        return tuple(NodeId(source) for source, hops in self._hops.outgoing.items() if _leads_to(hops, node_id))

    def hops(self, node_id: str) -> tuple[Edge, ...]:
        """Return the flattened steps out of a node: targets are nodes that run themselves, or `END`.

        For a sub-graph's own name these are the ways into it.
        """
        return self._hops.outgoing.get(node_id, ())

    def entries(self, node_id: str) -> tuple[NodeId, ...]:
        """Return the nodes that run first when control goes to `node_id`: itself, or the ways into a sub-graph."""
        info = self.node(node_id)
        if info is None or info.kind != "subgraph" or not self.edges_from(f"{node_id}|{START}"):
            return (NodeId(node_id),)
        return tuple(dict.fromkeys(hop.target for hop in self.hops(node_id)))

    def is_open(self, node_id: str) -> bool:
        """Whether undeclared jumps can leave this node, itself or through the sub-graph that ends with it."""
        return node_id in self._hops.open_sources or node_id not in self._hops.outgoing

    def steps_between(self, hop: Edge) -> int:
        """Return after how many steps the target of a hop starts, counted from the start of its source.

        One, except for joins and deferred nodes, which wait for their slowest source.
        """
        waits_for = self._hops.barriers.get(hop.target)
        if waits_for is None or hop.source not in self._depths:
            return 1
        slowest = max((self._depths.get(source, 0) for source in waits_for), default=0)
        return max(1, slowest - self._depths[hop.source] + 1)

    def steps_to(self, target: str) -> dict[NodeId, int]:
        """Return for every node that can reach `target` the least number of steps to it, waits at joins included.

        Guesses are no way.  For `END` this is the end of the whole run: of all branches that a node's fixed exits
        start.  Costs O(hops x log hops).
        """
        if target == END:
            return dict(self._to_end)
        return paths.least_steps(self._hops.outgoing, self.steps_between, target)

    def steps_to_end(self, node_id: str) -> int | None:
        """Return the least number of steps from a node to the end of the run; `None` when no declared way exists."""
        return self._to_end.get(NodeId(node_id))

    @property
    def loops(self) -> tuple[frozenset[NodeId], ...]:
        """The largest sets of nodes that can all come round to each other on declared ways, in a stable order."""
        return paths.loops_of(self._hops.outgoing)

    def reachable(self, source: str) -> frozenset[NodeId]:
        """Return the nodes that hops, guesses among them, lead to from `source`, itself included."""
        return frozenset(NodeId(node_id) for node_id in self._breadth_first(source))

    def leading_to(self, target: str) -> frozenset[NodeId]:
        """Return the nodes from which hops, guesses among them, lead to `target`, itself included."""
        sources: dict[str, list[NodeId]] = {}
        for source, found in self._hops.outgoing.items():
            for hop in found:
                sources.setdefault(hop.target, []).append(NodeId(source))
        seen, stack = {NodeId(target)}, [target]
        while stack:
            for source in sources.get(stack.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        return frozenset(seen)

    def _breadth_first(self, source: str) -> dict[str, int]:
        depths = {source: 0}
        queue = deque([source])
        while queue:
            here = queue.popleft()
            for hop in self.hops(here):
                if hop.target not in depths:
                    depths[hop.target] = depths[here] + 1
                    queue.append(hop.target)
        return depths


def _leads_to(hops: Iterable[Edge], node_id: str) -> bool:
    return any(hop.target == node_id for hop in hops)
