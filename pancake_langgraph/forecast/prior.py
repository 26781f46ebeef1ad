"""What a topology alone says about exits: shares before anything was seen, and what a streamed tool name means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pancake_langgraph.topology.graph import END, Edge, NodeInfo, Topology

#: A call whose name was streamed can still be cut short or invalid.
P_STREAMED = 0.98
#: An exit that only an exception takes.
_ERROR_WEIGHT = 0.02
_TOOLS_WITHIN = 3


@dataclass(frozen=True, slots=True)
class Exits:
    """The ways out of one node.

    `certain` targets always run.  `shares` splits one unit over all targets, certain ones included, and
    `unknown_share`; `num_branches` counts the decisions that are taken independently of each other,
    `reasons` has the phrase for the decision log that stands for each declared way.
    """

    certain: tuple[str, ...]
    shares: Mapping[str, float]
    unknown_share: float
    num_branches: int
    reasons: Mapping[str, str]


NO_EXITS = Exits((), {}, 1.0, 1, {})
#: The phrase for a way out that no graph declares.
LEARNT = "learnt"


def exits_of(topology: Topology | None, node: str) -> Exits:
    """Return the exits of `node`; everything is unknown without a topology.  Costs O(degree)."""
    if topology is None:
        return NO_EXITS
    hops = topology.hops(node)
    groups: dict[str, list[Edge]] = {}
    for hop in hops:
        groups.setdefault("" if hop.is_certain else hop.group or "jump", []).append(hop)
    is_open = topology.is_open(node)
    if is_open:
        groups.setdefault("unknown", [])
    certain = tuple(dict.fromkeys(hop.target for hop in groups.pop("", [])))
    errors = groups.pop("error", [])
    merged = _merge_exclusive(groups)
    # Each certain target and each decision is one unit; a decision splits its unit evenly, its unknown part included.
    weights: dict[str, float] = dict.fromkeys(certain, 1.0)
    unknown = 0.0
    for name, edges in merged.items():
        targets = list(dict.fromkeys(edge.target for edge in edges))
        parts = len(targets) + (1 if name == "unknown" else 0)
        for target in targets:
            weights[target] = weights.get(target, 0.0) + 1.0 / parts
        unknown += 1.0 / parts if name == "unknown" else 0.0
    for edge in errors:
        weights.setdefault(edge.target, _ERROR_WEIGHT)
    total = sum(weights.values()) + unknown or 1.0
    return Exits(
        certain,
        {target: weight / total for target, weight in weights.items()},
        unknown / total if total else 1.0,
        max(1, sum(1 for name in merged if name.startswith("branch:"))),
        {hop.target: _describe(hop.kind, is_certain=hop.target in certain) for hop in reversed(hops)},
    )


def marginals(exits: Exits, shares: Mapping[str, float], width: float) -> dict[str, float]:
    """Turn shares of observations into the chance that each target runs.

    A certain target is its own yardstick: it is seen once per execution, so another target seen half as often runs
    every second time.  Without one, an execution is seen as often as it starts targets, `width` times on average.
    """
    yardstick = 1.0 / width
    if exits.certain:
        yardstick = max(shares.get(target, 0.0) for target in exits.certain) or 1.0
    chances = {target: min(1.0, share / yardstick) for target, share in shares.items()}
    return chances | dict.fromkeys(exits.certain, 1.0)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a streamed tool name tells: `tools_node` runs in `steps`, then `targets` (empty = whatever follows it).

    `not_these` are the targets that only a handoff leads to, which the tool is not.
    """

    tools_node: str
    steps: int
    targets: tuple[str, ...]
    reason: str
    not_these: frozenset[str] = frozenset()


def announced_by(topology: Topology | None, node: str, tool: str) -> Announcement | None:
    """Read a streamed tool name; `None` when no tools node is in sight.  Looks at most three hops ahead."""
    if topology is None:
        return None
    nearest = _tools_nodes(topology, node)
    for info, steps in nearest:
        for handoff in info.handoffs:
            if handoff.tool == tool:
                return Announcement(info.id, steps, topology.entries(handoff.target), f"handoff tool {tool}")
    if not nearest:
        return None
    info, steps = next(((i, n) for i, n in nearest if tool in i.tools), nearest[0])
    hops = topology.hops(info.id)
    not_these = {hop.target for hop in hops if hop.kind == "handoff"} - {h.target for h in hops if h.kind != "handoff"}
    return Announcement(info.id, steps, (), f"tool {tool}", frozenset(not_these))


def _tools_nodes(topology: Topology, node: str) -> list[tuple[NodeInfo, int]]:
    """Return tools nodes of the same level with their distance, nearest first; the node itself has distance 0."""
    level = node.rpartition("|")[0]
    own = topology.node(node)
    found = [(own, 0)] if own is not None and own.kind == "tools" else []
    seen, frontier = {node}, [node]
    for steps in range(1, _TOOLS_WITHIN + 1):
        targets = dict.fromkeys(hop.target for here in frontier for hop in topology.hops(here))
        frontier = [t for t in targets if t not in seen and t.rpartition("|")[0] == level]
        seen.update(frontier)
        for target in list(frontier):
            info = topology.node(target)
            if info is not None and info.kind == "tools":
                found.append((info, steps))
                frontier.remove(target)
    return found


def _merge_exclusive(groups: Mapping[str, list[Edge]]) -> dict[str, list[Edge]]:
    """Jumps of one node exclude each other: a command, a handoff and an undeclared jump are one decision."""
    merged: dict[str, list[Edge]] = {}
    jumps = [name for name in ("handoff", "command", "jump", "unknown") if name in groups]
    for name, edges in groups.items():
        key = ("unknown" if "unknown" in jumps else jumps[0]) if name in jumps else name
        merged.setdefault(key, []).extend(edges)
    return merged


def _describe(kind: str, *, is_certain: bool) -> str:
    if kind == "join":
        return "join waits for its sources"
    if is_certain:
        return "fixed edge"
    return "named in the code that decides" if kind == "unknown" else f"declared {'edge' if kind == 'plain' else kind}"


def is_end(node: str) -> bool:
    """Whether a name stands for the end of a run."""
    return node == END
