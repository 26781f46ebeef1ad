"""Reading graphs: what a compiled graph declares about who runs after whom."""

from pancake_langgraph.topology.extract import read_topology
from pancake_langgraph.topology.graph import END, START, Edge, EdgeKind, Handoff, NodeInfo, NodeKind, Topology
from pancake_langgraph.topology.mermaid import to_mermaid
from pancake_langgraph.topology.parts import CallKind, OpenReason, StopKind

__all__ = [
    "END",
    "START",
    "CallKind",
    "Edge",
    "EdgeKind",
    "Handoff",
    "NodeInfo",
    "NodeKind",
    "OpenReason",
    "StopKind",
    "Topology",
    "read_topology",
    "to_mermaid",
]
