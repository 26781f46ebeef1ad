"""What `pancake explain` tells beyond edges: loops with their ways out, waits, fan-outs, and why a jump is open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pancake_langgraph._types import NodeId
from pancake_langgraph.topology.graph import END, START, NodeInfo, OpenReason, Topology

_NOT_ON_A_NODE: Final = (
    "this cannot be declared on the node itself; name the targets where the sub-graph is added: "
    'add_node(NAME, graph, destinations=("x", "y"))'
)
_LEARNT_ONLY: Final = "nothing can be declared here; it is learnt from runs"
_HINT_ONLY: Final = 'no edge can be declared here; @phase(may_need=["x"]) names what may follow'
#: For each reason why a jump is open: what was found, and how to declare it.
_OPEN: Final[Mapping[OpenReason, tuple[str, str]]] = {
    "branch": (
        "a conditional edge without a path map decides",
        'add_conditional_edges(NODE, router, ["x", "y"]), or let the router return Literal["x", "y"]',
    ),
    "command": (
        "its code may return a Command with goto, and declares no targets",
        'let it return Command[Literal["x", "y"]], or add_node(NAME, node, destinations=("x", "y"))',
    ),
    "tool": (
        "a tool that it runs may return a Command with goto",
        'give the tool metadata={"__handoff_destination": "x"}, as handoff tools of supervisors and swarms have',
    ),
    "leaves": ("its code may jump out of its sub-graph by Command.PARENT", _NOT_ON_A_NODE),
    "handler": ("it handles errors, and goes on as its code says", _HINT_ONLY),
    "functional": ("the functional API declares no edges: code calls its tasks", _LEARNT_ONLY),
    "start": ("a graph without a declared start runs here", _LEARNT_ONLY),
    "unread": ("it runs more graphs, or deeper ones, than are read", _LEARNT_ONLY),
}
_UNTOLD: Final = ("its code may jump", _HINT_ONLY)


@dataclass(frozen=True, slots=True)
class Loop:
    """Nodes that can come round to each other: `exits` are the ways out, as (node inside, target outside).

    `open_nodes` are those inside that may jump elsewhere.
    """

    nodes: tuple[NodeId, ...]
    exits: tuple[tuple[NodeId, NodeId], ...]
    open_nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class OpenJump:
    """Why not all jumps of a node are declared, and how to declare them."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it for one topology.

    `loop_of` gives the index in `loops`; `waits_for` the sources of a join; `sends_to` the targets of a fan-out.
    """

    loops: tuple[Loop, ...]
    loop_of: Mapping[NodeId, int]
    waits_for: Mapping[NodeId, tuple[NodeId, ...]]
    sends_to: Mapping[NodeId, tuple[NodeId, ...]]
    open_jumps: Mapping[NodeId, tuple[OpenJump, ...]]


def facts_of(topology: Topology) -> Facts:
    """Collect the facts.  Costs O(nodes + edges)."""
    loops = tuple(_loop(topology, members) for members in topology.loops)
    waits: dict[NodeId, list[NodeId]] = {}
    sends: dict[NodeId, list[NodeId]] = {}
    for edge in topology.edges:
        if edge.kind == "join":
            waits.setdefault(edge.target, []).append(edge.source)
        elif edge.kind == "send":
            sends.setdefault(edge.source, []).append(edge.target)
    return Facts(
        loops,
        {node: index for index, loop in enumerate(loops) for node in loop.nodes},
        {target: tuple(dict.fromkeys(sources)) for target, sources in waits.items()},
        {source: tuple(dict.fromkeys(targets)) for source, targets in sends.items()},
        {source: _open_jumps(topology, source) for source in sorted(topology.unknown_sources)},
    )


def calls_in_words(node: NodeInfo) -> str:
    """Return what a node calls, tools by name; empty if nothing was found."""
    calls: list[str] = [call for call in node.calls if call not in ("graph", "tools")]
    if node.tools:
        calls.append(f"tools {some(node.tools)}")
    elif "tools" in node.calls:
        calls.append("tools")
    calls += ["a graph"] if "graph" in node.calls and node.kind != "subgraph" else []
    return ", ".join(calls)


def some(names: tuple[str, ...], *, limit: int = 8) -> str:
    """Return names with commas, at most `limit` of them and how many more there are."""
    shown = ", ".join(end_in_words(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def end_in_words(node_id: str) -> str:
    """Return a node's name; the end of a graph, and its start, in words."""
    level, _, name = node_id.rpartition("|")
    if name not in (END, START):
        return node_id
    said = "the end" if name == END else "the start"
    return f"{said} of {level}" if level else said


def _loop(topology: Topology, members: frozenset[NodeId]) -> Loop:
    nodes = tuple(sorted(members))
    exits = {
        (node, hop.target): None
        for node in nodes
        for hop in topology.hops(node)
        if hop.target not in members and hop.kind != "unknown"
    }
    return Loop(nodes, tuple(exits), tuple(node for node in nodes if topology.is_open(node)))


def _open_jumps(topology: Topology, source: NodeId) -> tuple[OpenJump, ...]:
    reasons = topology.open_reasons.get(source, ())
    return tuple(OpenJump(*_OPEN[reason]) for reason in reasons) or (OpenJump(*_UNTOLD),)
