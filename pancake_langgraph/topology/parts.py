"""The pieces a topology is made of: nodes and edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pancake_langgraph._types import NodeId

START = NodeId("__start__")
END = NodeId("__end__")

NodeKind = Literal["model", "tools", "retriever", "subgraph", "plain", "unknown"]
EdgeKind = Literal["plain", "conditional", "join", "send", "command", "handoff", "unknown"]


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
    """

    id: NodeId
    kind: NodeKind
    deferred: bool = False
    handoffs: tuple[Handoff, ...] = ()
    tools: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Edge:
    """One possible step from `source` to `target`.

    Edges of one source that carry the same non-empty `group` exclude each other; a plain or join edge without a group
    always fires.  Kind `"unknown"` is a guess from string constants in the code that decides.
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
