"""Steps until a node starts that waits for others: a join or a deferred node comes after its slowest branch."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from pancake_langgraph.topology.graph import END, START, Topology


class Arrivals:
    """Counts steps in one graph.  Remembers distances, at most one table per node.  Not thread-safe."""

    def __init__(self, topology: Topology) -> None:
        """Read the joins of `topology`.  Costs O(nodes + hops)."""
        self._topology = topology
        self._sources: dict[str, list[str]] = {}
        for node in (START, *(info.id for info in topology.nodes)):
            for hop in topology.hops(node):
                if hop.kind == "join":
                    self._sources.setdefault(hop.target, []).append(node)
        self._waiting = {*self._sources, *(info.id for info in topology.nodes if info.deferred)}
        self._depths = _depths(topology, self._sources)
        self._distances: dict[str, Mapping[str, int]] = {}

    def waits(self, target: str) -> bool:
        """Whether `target` starts only when other branches have come as far."""
        return target in self._waiting

    def steps(self, node: str, target: str, running: Sequence[str]) -> int:
        """Return the steps from the start of `node` to that of `target`, one of its exits that waits for others.

        `running` are the nodes that run beside it.  A branch of which nothing is known is taken to advance as fast as
        any other; of several ways to a source the shortest counts.
        """
        if target not in self._sources:
            return max(self._declared(node, target), *(self._distance(other, target) or 1 for other in running), 1)
        slowest = 0
        for source in self._sources[target]:
            ways = [d for other in (node, *running) if (d := self._distance(other, source)) is not None]
            slowest = max(slowest, min(ways) if ways else self._behind(node, source))
        return slowest + 1

    def _declared(self, node: str, target: str) -> int:
        return max(
            (self._topology.steps_between(h) for h in self._topology.hops(node) if h.target == target), default=1
        )

    def _behind(self, node: str, source: str) -> int:
        """Return how many steps later than `node` a source comes when all branches go on at one pace."""
        if source not in self._depths or node not in self._depths:
            return 0
        return max(0, self._depths[source] - self._depths[node])

    def _distance(self, node: str, target: str) -> int | None:
        known = self._distances.get(target)
        if known is None:
            known = self._distances[target] = {str(n): d for n, d in self._topology.steps_to(target).items()}
        return known.get(node)


def _depths(topology: Topology, sources: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the step at which each node runs first: one more than the soonest way in, or than all that it joins."""
    depths: dict[str, int] = {}
    missing = {target: len(set(found)) for target, found in sources.items()}
    queue = [(0, str(START))]
    while queue:
        depth, node = heapq.heappop(queue)
        if node in depths or node == END:
            continue
        depths[node] = depth
        for target in {str(hop.target): hop.kind for hop in topology.hops(node)}:
            if target not in missing:
                heapq.heappush(queue, (depth + 1, target))
                continue
            if node in sources[target]:
                missing[target] -= 1
            if missing[target] <= 0 or node not in sources[target]:
                heapq.heappush(queue, (depth + 1, target))
    return depths
