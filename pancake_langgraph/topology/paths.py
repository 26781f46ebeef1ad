"""Distances and loops over hops.  A hop's weight is the number of steps until its target starts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping

from pancake_langgraph._types import NodeId
from pancake_langgraph.topology.parts import Edge

_Weight = Callable[[Edge], int]
_JUMPS = ("handoff", "command", "jump")


def least_steps(hops: Mapping[str, tuple[Edge, ...]], weight: _Weight, target: str) -> dict[NodeId, int]:
    """Return for every node that can reach `target` the least number of steps to it, over declared hops."""
    incoming: dict[str, list[Edge]] = {}
    for found in hops.values():
        for hop in found:
            if hop.kind != "unknown":
                incoming.setdefault(hop.target, []).append(hop)
    distances: dict[NodeId, int] = {}
    queue = [(0, target)]
    while queue:
        so_far, here = heapq.heappop(queue)
        if here in distances:
            continue
        distances[NodeId(here)] = so_far
        for hop in incoming.get(here, ()):
            if hop.source not in distances:
                heapq.heappush(queue, (so_far + weight(hop), hop.source))
    return distances


def steps_to_all_ends(hops: Mapping[str, tuple[Edge, ...]], weight: _Weight, end: str) -> dict[NodeId, int]:
    """Return for every node the least number of steps until all that it starts has ended.

    All fixed exits of a node run, and one target of each decision: a node is as far from the end as the farthest of
    these.  Nodes from which no declared way ends everything are left out.  Costs O(hops x log hops).
    """
    clauses = {source: _clauses(found) for source, found in hops.items()}
    waiting: dict[str, list[tuple[str, int, int]]] = {}
    for source, of_source in clauses.items():
        for index, clause in enumerate(of_source):
            for hop in clause:
                waiting.setdefault(hop.target, []).append((source, index, weight(hop)))
    best: dict[str, dict[int, int]] = {}
    distances: dict[NodeId, int] = {}
    queue = [(0, end)]
    while queue:
        so_far, here = heapq.heappop(queue)
        if here in distances:
            continue
        distances[NodeId(here)] = so_far
        for source, index, steps in waiting.get(here, ()):
            known = best.setdefault(source, {})
            known[index] = min(known.get(index, so_far + steps), so_far + steps)
            if len(known) == len(clauses[source]):
                heapq.heappush(queue, (max(known.values()), source))
    return distances


def _clauses(hops: Iterable[Edge]) -> list[list[Edge]]:
    """Group the exits of a node: one clause per fixed exit, one per decision."""
    decided: dict[str, list[Edge]] = {}
    clauses: list[list[Edge]] = []
    for hop in hops:
        if hop.kind == "unknown" or hop.group == "error":
            continue  # a guess, or an exit that only a failure takes
        if hop.is_certain:
            clauses.append([hop])
        else:
            decided.setdefault("jump" if hop.group in _JUMPS else hop.group, []).append(hop)
    return [*clauses, *decided.values()]


def loops_of(hops: Mapping[str, tuple[Edge, ...]]) -> tuple[frozenset[NodeId], ...]:
    """Return the largest sets of nodes that can all come round to each other, by hops that are no guesses.

    Tarjan's strongly connected components without recursion; components of one node count if it can follow itself.
    """
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    found: list[frozenset[NodeId]] = []

    def enter(node: str) -> tuple[str, list[str]]:
        order[node] = low[node] = len(order)
        path.append(node)
        on_path.add(node)
        return node, [hop.target for hop in hops.get(node, ()) if hop.kind != "unknown"]

    for root in hops:
        stack = [enter(root)] if root not in order else []
        while stack:
            node, targets = stack[-1]
            if targets:
                target = targets.pop()
                if target not in order:
                    stack.append(enter(target))
                elif target in on_path:
                    low[node] = min(low[node], order[target])
                continue
            stack.pop()
            if stack:
                low[stack[-1][0]] = min(low[stack[-1][0]], low[node])
            if low[node] == order[node]:
                members: list[str] = []
                while not members or members[-1] != node:
                    members.append(path.pop())
                on_path.difference_update(members)
                if len(members) > 1 or any(h.target == node and h.kind != "unknown" for h in hops.get(node, ())):
                    found.append(frozenset(NodeId(member) for member in members))
    return tuple(sorted(found, key=sorted))
