"""Reading a compiled graph into a `Topology`, through its public attributes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._errors import TopologyError
from pancake_langgraph._types import NodeId
from pancake_langgraph.topology import _private
from pancake_langgraph.topology.graph import END, START, Edge, EdgeKind, Handoff, NodeInfo, Topology

_MAX_NESTING = 8


def read_topology(graph: object) -> Topology:
    """Read what a compiled graph declares.

    Runs nothing of the user's, does no I/O and does not change the graph.  Jumps that are not declared leave their
    source in `unknown_sources`; the functional API declares nothing, so all its nodes are there.

    Raises:
        TopologyError: if `graph` is not a compiled LangGraph graph.
    """
    compiled = _unwrap(graph)
    reading = _Reading()
    reading.read_level(compiled, "", 0)
    name = getattr(compiled, "name", None)
    nodes = tuple(sorted(reading.nodes.values(), key=lambda node: node.id))
    edges = tuple(dict.fromkeys(sorted(reading.edges, key=lambda e: (e.source, e.target, e.kind, e.label, e.group))))
    return Topology(name if isinstance(name, str) else "graph", nodes, edges, frozenset(reading.unknown))


def _unwrap(graph: object) -> Any:
    """Take bindings (`with_retry`, `with_config`) off, and refuse what is no compiled graph."""
    from langchain_core.runnables.base import RunnableBindingBase
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    seen: object = graph
    while isinstance(seen, RunnableBindingBase):
        seen = seen.bound
    if isinstance(seen, Pregel):
        return seen
    got = f"{type(graph).__module__}.{type(graph).__qualname__}"
    if isinstance(seen, StateGraph):
        raise TopologyError(
            f"cannot read a topology: got a {got} that is not compiled. Pass builder.compile() instead."
        )
    mend = "Pass the result of StateGraph(...).compile(), create_agent(...) or an @entrypoint function."
    if callable(seen):
        mend += " If this is a factory, call it first and pass what it returns."
    raise TopologyError(f"cannot read a topology: got a {got}, allowed are compiled LangGraph graphs. {mend}")


@dataclass(slots=True)
class _Reading:
    """Collects nodes and edges of all levels."""

    nodes: dict[NodeId, NodeInfo] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    unknown: set[NodeId] = field(default_factory=set)

    def read_level(self, graph: Any, prefix: str, depth: int) -> None:
        """Read one graph whose nodes carry `prefix`, then its sub-graphs."""
        builder = getattr(graph, "builder", None)
        if builder is None or not isinstance(getattr(builder, "nodes", None), Mapping):
            self._read_undeclared(graph, prefix)
            return
        subgraphs = dict(graph.get_subgraphs())
        readable = {name for name, inner in subgraphs.items() if depth < _MAX_NESTING and _has_levels(inner)}
        for name, spec in builder.nodes.items():
            self._read_node(prefix, name, spec, level=builder.nodes, is_subgraph=name in subgraphs)
        for source, target in builder.edges:
            self._add(prefix, source, target, "plain", group=self._exclusive(prefix, source))
        for sources, target in builder.waiting_edges:
            for source in sources:
                self._add(prefix, source, target, "join", group=self._exclusive(prefix, source))
        for source, branches in builder.branches.items():
            for branch_name, branch in branches.items():
                self._read_branch(prefix, source, branch_name, branch, builder.nodes)
        self._close_dead_ends(prefix, builder.nodes)
        for name in sorted(readable):
            self.read_level(subgraphs[name], f"{prefix}{name}|", depth + 1)

    def _read_undeclared(self, graph: Any, prefix: str) -> None:
        """Take the nodes of a graph without a builder (functional API); what follows them is unknown."""
        entry = False
        for name, node in graph.nodes.items():
            if name == START:
                continue
            node_id = NodeId(f"{prefix}{name}")
            kind = _private.node_kind(getattr(node, "bound", None))
            self.nodes[node_id] = NodeInfo(node_id, "unknown" if kind == "plain" else kind)
            self.unknown.add(node_id)
            if graph.input_channels in (getattr(node, "triggers", None) or ()):
                entry = True
                self._add(prefix, START, name, "plain")
        if not entry:
            self.unknown.add(NodeId(f"{prefix}{START}"))

    def _read_node(self, prefix: str, name: str, spec: Any, *, level: Mapping[str, Any], is_subgraph: bool) -> None:
        node_id = NodeId(f"{prefix}{name}")
        tools = _private.tools_of(spec.runnable)
        handoffs = tuple(
            Handoff(tool, self._resolve(prefix, target, level)) for tool, target in sorted(tools.items()) if target
        )
        kind = "subgraph" if is_subgraph else _private.node_kind(spec.runnable)
        self.nodes[node_id] = NodeInfo(
            node_id, kind, deferred=bool(spec.defer), handoffs=handoffs, tools=tuple(sorted(tools))
        )
        for handoff in handoffs:
            self.edges.append(Edge(node_id, handoff.target, "handoff", label=handoff.tool, group="handoff"))
        ends = spec.ends or ()
        for target in ends:
            label = str(ends[target]) if isinstance(ends, Mapping) else ""
            self._add(prefix, name, str(target), "command", label=label, group="command")
        if getattr(spec, "error_handler_node", None):
            self._add(prefix, name, spec.error_handler_node, "conditional", label="on error", group="error")
        if is_subgraph or ends:
            return
        traits = _private.jump_traits(spec.runnable)
        if traits.jumps or getattr(spec, "is_error_handler", False):
            self._mark_unknown(prefix, name, traits, level)

    def _read_branch(self, prefix: str, source: str, name: str, branch: Any, level: Mapping[str, Any]) -> None:
        traits = _private.jump_traits(branch.path)
        if branch.ends is None:
            self._mark_unknown(prefix, source, traits, level)
            return
        kind: EdgeKind = "send" if traits.sends else "conditional"
        group = self._exclusive(prefix, source) or f"branch:{name}"
        for key, target in branch.ends.items():
            self._add(prefix, source, target, kind, label="" if str(key) == target else str(key), group=group)

    def _mark_unknown(self, prefix: str, source: str, traits: _private.JumpTraits, level: Mapping[str, Any]) -> None:
        """Record an undeclared decision, with the node names its code mentions as guesses."""
        node_id = NodeId(f"{prefix}{source}")
        self.unknown.add(node_id)
        for name in sorted(traits.names):
            if name == source:
                continue  # a node that writes its own name into the state is far more common than one that repeats
            if name in level or name == END:
                self._add(prefix, source, name, "unknown", label="named in code", group="unknown")
            elif traits.leaves_graph and prefix:
                target = self._resolve(prefix, name, {})
                if target in self.nodes:
                    self.edges.append(Edge(node_id, target, "unknown", "named in code", "unknown"))

    def _exclusive(self, prefix: str, source: str) -> str:
        """Return the group that a fixed edge falls into when a jump to the parent graph would suppress it."""
        info = self.nodes.get(NodeId(f"{prefix}{source}"))
        return "handoff" if info is not None and info.handoffs and prefix else ""

    def _close_dead_ends(self, prefix: str, level: Mapping[str, Any]) -> None:
        """A node without any declared way out ends its branch, unless its jumps are unknown."""
        sources = {edge.source for edge in self.edges if edge.kind != "handoff" and edge.group != "error"}
        for name in level:
            node_id = NodeId(f"{prefix}{name}")
            if node_id not in sources and node_id not in self.unknown:
                self._add(prefix, name, END, "plain", group=self._exclusive(prefix, name))

    def _resolve(self, prefix: str, target: str, level: Mapping[str, Any]) -> NodeId:
        """Find the node a handoff means: one level up (a command to the parent), else this level, else further up."""
        outer = prefix.rstrip("|").rpartition("|")[0]
        while prefix:
            candidate = NodeId(f"{outer}|{target}" if outer else target)
            if candidate in self.nodes or not outer:
                if candidate not in self.nodes and target in level:
                    break
                return candidate
            outer = outer.rpartition("|")[0]
        return NodeId(f"{prefix}{target}")

    def _add(self, prefix: str, source: str, target: str, kind: EdgeKind, *, label: str = "", group: str = "") -> None:
        self.edges.append(Edge(NodeId(f"{prefix}{source}"), NodeId(f"{prefix}{target}"), kind, label, group))


def _has_levels(graph: object) -> bool:
    """Whether a sub-graph can be read here; a remote one cannot be, without I/O."""
    return isinstance(getattr(graph, "nodes", None), Mapping) and callable(getattr(graph, "get_subgraphs", None))
