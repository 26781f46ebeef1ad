"""Reading a compiled graph into a `Topology`, through its public attributes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pancake_langgraph._errors import TopologyError
from pancake_langgraph._types import NodeId
from pancake_langgraph.topology import _private
from pancake_langgraph.topology.graph import END, START, Edge, EdgeKind, Handoff, NodeInfo, Topology
from pancake_langgraph.topology.parts import OpenReason, StopKind, combined

_MAX_NESTING = 8
_MAX_CALLS = 3
_MAX_NODES = 4096


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
    reasons = {node_id: tuple(sorted(found)) for node_id, found in sorted(reading.unknown.items())}
    return Topology(name if isinstance(name, str) else "graph", nodes, edges, frozenset(reasons), reasons)


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
    unknown: dict[NodeId, set[OpenReason]] = field(default_factory=dict)
    leavers: set[NodeId] = field(default_factory=set)
    open_graphs: tuple[int, ...] = ()
    calls_deep: int = 0
    spent: list[NodeId] = field(default_factory=list)
    looked_at: dict[int, _private.Hints] = field(default_factory=dict)

    def read_level(self, graph: Any, prefix: str, depth: int) -> None:
        """Read one graph whose nodes carry `prefix`, then what its nodes run themselves."""
        around, self.open_graphs = self.open_graphs, (*self.open_graphs, id(graph))
        builder = getattr(graph, "builder", None)
        if builder is None or not isinstance(getattr(builder, "nodes", None), Mapping):
            self._read_undeclared(graph, prefix, depth)
        else:
            self._read_declared(graph, builder, prefix, depth)
        self.open_graphs = around

    def _read_declared(self, graph: Any, builder: Any, prefix: str, depth: int) -> None:
        for name, spec in builder.nodes.items():
            self._read_node(prefix, name, spec, builder.nodes, _stops(graph, name))
        for source, target in builder.edges:
            self._add(prefix, source, target, "plain", group=self._exclusive(prefix, source))
        for sources, target in builder.waiting_edges:
            for source in sources:
                self._add(prefix, source, target, "join", group=self._exclusive(prefix, source))
        for source, branches in builder.branches.items():
            for branch_name, branch in branches.items():
                self._read_branch(prefix, source, branch_name, branch, builder.nodes)
        self._close_dead_ends(prefix, builder.nodes)
        for name in sorted(builder.nodes):
            self._read_inner(NodeId(f"{prefix}{name}"), self._hints(builder.nodes[name].runnable).inner, depth)

    def _read_undeclared(self, graph: Any, prefix: str, depth: int) -> None:
        """Take the nodes of a graph without a builder (functional API); what follows them is unknown."""
        entry = False
        for name, node in graph.nodes.items():
            if name == START:
                continue
            node_id = NodeId(f"{prefix}{name}")
            hints = self._hints(getattr(node, "bound", None))
            kind = "unknown" if hints.kind == "plain" else hints.kind
            stops = _with_inside(_stops(graph, name), hints)
            self.nodes[node_id] = NodeInfo(node_id, kind, calls=hints.calls, stops=stops)
            self._open(node_id, "functional")
            if graph.input_channels in (getattr(node, "triggers", None) or ()):
                entry = True
                self._add(prefix, START, name, "plain")
            self._read_inner(node_id, replace(hints.inner, always=False), depth)
        if not entry:
            self._open(NodeId(f"{prefix}{START}"), "start")

    def _hints(self, runnable: Any) -> _private.Hints:
        """Look at a runnable once per reading: agents that call each other are met again and again."""
        if id(runnable) not in self.looked_at:
            self.looked_at[id(runnable)] = _private.hints_of(runnable)
        return self.looked_at[id(runnable)]

    def _read_node(
        self, prefix: str, name: str, spec: Any, level: Mapping[str, Any], stops: tuple[StopKind, ...]
    ) -> None:
        node_id, hints = NodeId(f"{prefix}{name}"), self._hints(spec.runnable)
        self.spent.append(node_id)
        destinations = [(tool, target) for tool, target in sorted(hints.tools.items()) if target]
        handoffs = tuple(Handoff(tool, self._resolve(prefix, target, level)) for tool, target in destinations)
        self.nodes[node_id] = NodeInfo(
            node_id,
            "subgraph" if hints.inner.always else hints.kind,
            deferred=bool(spec.defer),
            handoffs=handoffs,
            tools=tuple(sorted(hints.tools)),
            calls=hints.calls,
            stops=_with_inside(stops, hints),
        )
        for handoff in handoffs:
            self.edges.append(Edge(node_id, handoff.target, "handoff", label=handoff.tool, group="handoff"))
        ends = spec.ends or ()
        for target in ends:
            label = str(ends[target]) if isinstance(ends, Mapping) else ""
            self._add(prefix, name, str(target), "command", label=label, group="command")
        if getattr(spec, "error_handler_node", None):
            self._add(prefix, name, spec.error_handler_node, "conditional", label="on error", group="error")
        if hints.inner.always:
            return
        leaves = hints.traits.leaves_graph and bool(prefix)
        if leaves:
            self.leavers.add(node_id)
        # Annotations can name nodes of the node's own graph only: a way out of it is never declared.
        handles = bool(getattr(spec, "is_error_handler", False))
        if (hints.traits.jumps and (leaves or not ends)) or handles:
            jumps: OpenReason = "leaves" if leaves else "tool" if hints.kind == "tools" else "command"
            reason: OpenReason = jumps if hints.traits.jumps else "handler"
            self._mark_unknown(prefix, name, hints.traits, level, reason)

    def _read_inner(self, node_id: NodeId, inner: _private.Inner, depth: int) -> None:
        """Read the graphs and tasks that a node runs: a sub-graph as declared, anything else as a guess."""
        readable = [each for each in inner.graphs if _has_levels(each)]
        graphs = [each for each in readable if id(each) not in self.open_graphs]
        full = depth >= _MAX_NESTING or len(self.spent) >= _MAX_NODES
        full = full or (self.calls_deep >= _MAX_CALLS and not inner.always)
        if len(graphs) < len(readable) or (full and (graphs or inner.tasks)):
            self._open(node_id, "unread")  # it runs more than is read here
        if full:
            return
        if inner.always:
            for graph in graphs:
                self.read_level(graph, f"{node_id}|", depth + 1)
            return
        readings: list[_Reading] = []
        for graph in graphs:
            if len(self.spent) >= _MAX_NODES:
                self._open(node_id, "unread")
                break
            reading = replace(
                self, nodes=dict(self.nodes), edges=[], unknown={}, leavers=set(), calls_deep=self.calls_deep + 1
            )
            reading.read_level(graph, f"{node_id}|", depth + 1)
            reading.nodes = {key: info for key, info in reading.nodes.items() if key.startswith(f"{node_id}|")}
            readings.append(reading)
        self._merge(node_id, readings)
        self._read_tasks(node_id, inner.tasks, depth)

    def _merge(self, node_id: NodeId, readings: Sequence[_Reading]) -> None:
        """Put the graphs that a node chooses between under its name; where they differ, a step is a decision."""
        start = f"{node_id}|{START}"
        declared = [({edge.source for edge in each.edges}, set(each.edges)) for each in readings]
        for reading in readings:
            for source, reasons in reading.unknown.items():
                self._open(source, *reasons)
            self.leavers |= reading.leavers
            for key, info in reading.nodes.items():
                self.nodes[key] = combined(self.nodes[key], info) if key in self.nodes else info
            for edge in reading.edges:
                if edge.source == start:
                    self.edges.append(Edge(node_id, edge.target, "unknown", label="in its code", group="unknown"))
                if edge.is_certain and any(edge.source in sources and edge not in all_ for sources, all_ in declared):
                    self.edges.append(replace(edge, kind="conditional", group="graph"))
                else:
                    self.edges.append(edge)
            if start in reading.unknown:
                self._open(node_id, "start")

    def _read_tasks(self, node_id: NodeId, tasks: Sequence[Any], depth: int) -> None:
        """Take the tasks that a node's code names for its steps, in that order; when each runs is not declared."""
        previous = node_id
        for task in tasks:
            bound = task.func
            task_id = NodeId(f"{node_id}|{getattr(bound, '__name__', 'task')}")
            self.edges.append(Edge(previous, task_id, "unknown", label="in its code", group="unknown"))
            previous = task_id
            if task_id in self.nodes:
                continue
            self.spent.append(task_id)
            hints = self._hints(bound)
            self.nodes[task_id] = NodeInfo(task_id, hints.kind, calls=hints.calls, stops=_with_inside((), hints))
            self._open(task_id, "functional")
            self._read_inner(task_id, replace(hints.inner, always=False), depth + 1)
        if previous != node_id:
            self.edges.append(Edge(previous, NodeId(f"{node_id}|{END}"), "unknown", group="unknown"))

    def _read_branch(self, prefix: str, source: str, name: str, branch: Any, level: Mapping[str, Any]) -> None:
        traits = _private.jump_traits(branch.path)
        if branch.ends is None:
            self._mark_unknown(prefix, source, traits, level, "branch")
            return
        info = self.nodes.get(NodeId(f"{prefix}{source}"))
        if info is not None and (calls := _private.calls_of(branch.path)):  # the edge runs in its source's task
            self.nodes[info.id] = replace(info, calls=tuple(sorted({*info.calls, *calls})))
        kind: EdgeKind = "send" if traits.sends else "conditional"
        group = self._exclusive(prefix, source) or f"branch:{name}"
        if len(branch.ends) == 1 and _private.always_routes(branch.path):
            kind, group = "plain", self._exclusive(prefix, source)
        for key, target in branch.ends.items():
            self._add(prefix, source, target, kind, label="" if str(key) == target else str(key), group=group)

    def _open(self, node_id: NodeId, *reasons: OpenReason) -> None:
        self.unknown.setdefault(node_id, set()).update(reasons)

    def _mark_unknown(
        self, prefix: str, source: str, traits: _private.JumpTraits, level: Mapping[str, Any], reason: OpenReason
    ) -> None:
        """Record an undeclared decision, with the node names its code mentions as guesses."""
        node_id = NodeId(f"{prefix}{source}")
        self._open(node_id, reason)
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
        leaves = info is not None and prefix and (info.handoffs or info.id in self.leavers)
        return "handoff" if leaves else ""

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


def _stops(graph: Any, name: str) -> tuple[StopKind, ...]:
    """Return where the compiled graph itself stops at a node: its lists name nodes, or all of them by a star."""
    lists = (("before", "interrupt_before_nodes"), ("after", "interrupt_after_nodes"))
    found: list[StopKind] = []
    for kind, attribute in lists:
        names = getattr(graph, attribute, None) or ()
        if names == "*" or (not isinstance(names, str) and name in names):
            found.append("before" if kind == "before" else "after")
    return tuple(found)


def _with_inside(stops: tuple[StopKind, ...], hints: _private.Hints) -> tuple[StopKind, ...]:
    return (*stops, "inside") if hints.interrupts else stops


def _has_levels(graph: object) -> bool:
    """Whether a sub-graph can be read here; a remote one cannot be, without I/O."""
    return isinstance(getattr(graph, "nodes", None), Mapping) and callable(getattr(graph, "get_subgraphs", None))
