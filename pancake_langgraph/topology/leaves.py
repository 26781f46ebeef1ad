"""Flattening: from declared edges per level to hops between the nodes that really run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pancake_langgraph._types import NodeId
from pancake_langgraph.topology.parts import END, START, Edge, NodeInfo

_JUMPS = ("command", "handoff")
_PARENT_KINDS = ("handoff", "unknown")


@dataclass(frozen=True, slots=True)
class Hops:
    """The flattened view.

    `outgoing` has a key for every node, every level's start and every sub-graph; `open_sources` those from which an
    undeclared jump is possible; `barriers` maps a join or deferred target to the nodes it waits for.
    """

    outgoing: Mapping[str, tuple[Edge, ...]]
    open_sources: frozenset[str]
    barriers: Mapping[str, tuple[str, ...]]


def flatten(nodes: Sequence[NodeInfo], outgoing: Mapping[str, tuple[Edge, ...]], unknown: frozenset[NodeId]) -> Hops:
    """Compute the hops of a graph.  Costs O(nodes + edges x nesting depth)."""
    containers = {node.id for node in nodes if node.kind == "subgraph" and f"{node.id}|{START}" in outgoing}
    walk = _Walk(containers, outgoing, unknown)
    jumps = _parent_jumps(nodes, containers, outgoing, unknown)
    hops: dict[str, tuple[Edge, ...]] = {}
    open_sources: set[str] = set()
    for source in [*(node.id for node in nodes), *(s for s in outgoing if s.endswith(START))]:
        if source in containers:
            continue
        declared = (*outgoing.get(source, ()), *jumps.get(source, ()))
        found = [leaf for edge in declared for leaf in walk.leaves(edge)]
        hops[source] = tuple(dict.fromkeys(replace(leaf, source=NodeId(source)) for leaf in found))
        if source in unknown or any(walk.is_open(edge.target) for edge in declared):
            open_sources.add(source)
    for container in containers:
        inner_start = f"{container}|{START}"
        hops[container] = tuple(replace(leaf, source=container) for leaf in hops[inner_start])
        if inner_start in open_sources:
            open_sources.add(container)
    return Hops(hops, frozenset(open_sources), _barriers(nodes, hops))


def _parent_jumps(
    nodes: Sequence[NodeInfo],
    containers: set[NodeId],
    outgoing: Mapping[str, tuple[Edge, ...]],
    unknown: frozenset[NodeId],
) -> dict[str, list[Edge]]:
    """Hand a sub-graph's declared jumps to the nodes inside that can make them, unless handoff tools explain them."""
    jumps: dict[str, list[Edge]] = {}
    for container in containers:
        inside = [node.id for node in nodes if _level(node.id) == container and node.id not in containers]
        explained = {edge.target for name in inside for edge in outgoing.get(name, ()) if edge.kind == "handoff"}
        declared = [e for e in outgoing.get(container, ()) if e.kind == "command" and e.target not in explained]
        declared = [edge for edge in declared if not edge.target.endswith(END)]
        inner_end = f"{container}|{END}"
        jumpers = [name for name in inside if name in unknown]
        jumpers = jumpers or [n for n in inside if any(e.target == inner_end for e in outgoing.get(n, ()))]
        for name in jumpers:
            jumps.setdefault(name, []).extend(replace(edge, source=name, group="jump") for edge in declared)
        # A jump to the parent ends the sub-graph early, and what always follows the sub-graph runs beside its target.
        fixed = [edge for edge in outgoing.get(container, ()) if edge.is_certain and not edge.target.endswith(END)]
        for name in inside if fixed else ():
            if any(edge.kind in _PARENT_KINDS and _level(edge.target) != container for edge in outgoing.get(name, ())):
                jumps.setdefault(name, []).extend(replace(edge, source=name, group="jump") for edge in fixed)
    return jumps


def _barriers(nodes: Sequence[NodeInfo], hops: Mapping[str, tuple[Edge, ...]]) -> dict[str, tuple[str, ...]]:
    barriers: dict[str, list[str]] = {}
    for source, edges in hops.items():
        for edge in edges:
            if edge.kind == "join":
                barriers.setdefault(edge.target, []).append(source)
    deferred = [node.id for node in nodes if node.deferred]
    for target in deferred:
        downstream, level = _reach(target, hops), _level(target)
        inside = [node.id for node in nodes if not level or node.id.startswith(f"{level}|")]
        barriers[target] = [node for node in inside if node not in downstream and node not in deferred]
    return {target: tuple(sources) for target, sources in barriers.items()}


def _reach(source: str, hops: Mapping[str, tuple[Edge, ...]]) -> set[str]:
    seen, stack = {source}, [source]
    while stack:
        for edge in hops.get(stack.pop(), ()):
            if edge.target not in seen:
                seen.add(edge.target)
                stack.append(edge.target)
    return seen


def _level(node_id: str) -> str:
    return node_id.rpartition("|")[0]


class _Walk:
    """Follows an edge through sub-graph starts and ends until a node that runs."""

    def __init__(
        self, containers: set[NodeId], outgoing: Mapping[str, tuple[Edge, ...]], unknown: frozenset[NodeId]
    ) -> None:
        self._containers = containers
        self._outgoing = outgoing
        self._unknown = unknown

    def leaves(self, edge: Edge, seen: frozenset[str] = frozenset()) -> Iterator[Edge]:
        """Yield `edge` with its target replaced by each node that can really run next."""
        onward = self._onward(edge.target)
        if onward is None:
            yield edge
            return
        if edge.target in seen:
            return
        for step in onward:
            yield from self.leaves(_combine(edge, step), seen | {edge.target})

    def is_open(self, target: NodeId, seen: frozenset[str] = frozenset()) -> bool:
        """Whether the way through starts and ends crosses an undeclared decision."""
        onward = self._onward(target)
        if onward is None or target in seen:
            return False
        decides = f"{target}|{START}" if target in self._containers else _level(target)
        return decides in self._unknown or any(self.is_open(step.target, seen | {target}) for step in onward)

    def _onward(self, target: NodeId) -> Sequence[Edge] | None:
        if target in self._containers:
            return self._outgoing[f"{target}|{START}"]
        if target == END or not target.endswith(f"|{END}"):
            return None
        container = _level(target)
        edges = [e for e in self._outgoing.get(container, ()) if e.kind not in _JUMPS and not e.is_call]
        return edges or [self._implicit_end(container)]

    def _implicit_end(self, container: str) -> Edge:
        level = _level(container)
        return Edge(NodeId(container), NodeId(f"{level}|{END}") if level else END, "plain")


def _combine(first: Edge, then: Edge) -> Edge:
    """Keep the less certain of two consecutive steps."""
    weaker = then if first.kind == "plain" and not first.group else first
    return replace(weaker, source=first.source, target=then.target)
