"""The pieces a topology is made of: nodes and edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pancake_langgraph._types import NodeId

START = NodeId("__start__")
END = NodeId("__end__")

NodeKind = Literal["model", "tools", "retriever", "subgraph", "plain", "unknown"]
#: What the code of a node can call while the node runs.
CallKind = Literal["model", "tools", "retriever", "graph"]
#: Where a run can stop for a person: before or after the node by the compiled graph's own list, or inside its code.
StopKind = Literal["before", "after", "inside"]
EdgeKind = Literal["plain", "conditional", "join", "send", "command", "handoff", "unknown"]
#: Why not all jumps of a node are declared: a conditional edge without a path map, a command without declared targets
#: (returned by the node, by one of its tools, or to a graph around it), an error handler, code of the functional API, a
#: graph without a declared start, or graphs inside it that were not all read.
OpenReason = Literal["branch", "command", "tool", "leaves", "handler", "functional", "start", "unread"]


@dataclass(frozen=True, slots=True)
class Handoff:
    """A tool that hands control to another agent: `tool` as the model names it, `target` the node that then runs."""

    tool: str
    target: NodeId


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """One node.

    `tools` are the tool names a tools node is known to run, `handoffs` those among them that change the agent.
    `kind` is `"unknown"` where the code behind the node could not be looked at; it is a hint, never a promise.
    `calls` says more than `kind`: everything that was found in the node's code and in the conditional edges that run in
    its task.  `stops` are the places where a run can be interrupted; `"before"` and `"after"` are certain, `"inside"`
    is a hint.
    """

    id: NodeId
    kind: NodeKind
    deferred: bool = False
    handoffs: tuple[Handoff, ...] = ()
    tools: tuple[str, ...] = ()
    calls: tuple[CallKind, ...] = ()
    stops: tuple[StopKind, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """One possible step from `source` to `target`.

    Edges of one source that carry the same non-empty `group` exclude each other; a plain or join edge without a group
    always fires.  Kind `"unknown"` is a guess from the code of a node or of the edge that decides.
    """

    source: NodeId
    target: NodeId
    kind: EdgeKind
    label: str = ""
    group: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether `target` runs whenever `source` ends well."""
        return self.kind in ("plain", "join") and not self.group

    @property
    def is_call(self) -> bool:
        """Whether the code of `source` runs `target` itself, a task or a node of a graph: control comes back."""
        return self.kind == "unknown" and self.target.startswith(f"{self.source}|")


def combined(one: NodeInfo, other: NodeInfo) -> NodeInfo:
    """Return one description of two nodes with one name, of graphs that a node chooses between."""
    return replace(
        one,
        kind=one.kind if one.kind == other.kind else "unknown",
        deferred=one.deferred and other.deferred,
        handoffs=tuple(sorted({*one.handoffs, *other.handoffs}, key=lambda each: (each.tool, each.target))),
        tools=tuple(sorted({*one.tools, *other.tools})),
        calls=tuple(sorted({*one.calls, *other.calls})),
        stops=tuple(dict.fromkeys((*one.stops, *other.stops))),
    )
