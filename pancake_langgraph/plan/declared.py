"""Reading what the author of a compiled graph declared: phases of nodes and tools, and where runs may pause."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import NodeId
from pancake_langgraph.forecast.declared import Declared, Need
from pancake_langgraph.phases import METADATA_KEY, Phase, phase_of, unwrapped
from pancake_langgraph.topology.graph import END, START, Topology

_logger = logging.getLogger(__name__)
_MAX_NESTING = 8
#: Further than this a declared need is shown in the plan, and no candidate is made of it.
MAX_NEED_STEPS = 4


@dataclass(frozen=True, slots=True)
class GraphPhases:
    """What one graph declares: phases by node and by tool name, and where it can be interrupted.

    `interrupts_before` and `interrupts_after` are set at compile time; `interrupting` nodes call `interrupt` in their
    own code or a tool's.  `notes` say which declarations cannot be used, and how to mend them.
    """

    nodes: Mapping[NodeId, Phase] = field(default_factory=dict)
    tools: Mapping[str, Phase] = field(default_factory=dict)
    interrupts_before: frozenset[NodeId] = frozenset()
    interrupts_after: frozenset[NodeId] = frozenset()
    interrupting: frozenset[NodeId] = frozenset()
    notes: tuple[str, ...] = ()


def read_phases(graph: object) -> GraphPhases:
    """Read the declarations of a compiled graph and its sub-graphs.

    Runs nothing of the user's and never raises: what cannot be read is not declared, and a bad declaration in a
    node's metadata becomes a note.  Where metadata and a mark declare the same field, metadata wins.
    """
    from langchain_core.runnables.base import RunnableBindingBase

    while isinstance(graph, RunnableBindingBase):
        graph = graph.bound
    reading = _Reading()
    _guarded(reading.read_level, graph, "", 0)
    return reading.result()


def declared_for(topology: Topology, phases: GraphPhases) -> Declared:
    """Turn declarations into what the forecast takes: seconds, and needs as nodes with their distance."""
    needs: dict[str, tuple[Need, ...]] = {}
    for node in topology.nodes:
        reachable = _distances(topology, node.id) if (wanted := needs_of(topology, phases, node.id)) else {}
        nearest_open = min((n for here, n in reachable.items() if here != END and topology.is_open(here)), default=None)
        found = [
            Need(target, steps)
            for target in wanted
            if (steps := reachable.get(target) or (None if nearest_open is None else nearest_open + 1)) is not None
            and steps <= MAX_NEED_STEPS
        ]
        if found:
            needs[node.id] = tuple(found)
    return Declared(
        {node: phase.expect_s for node, phase in phases.nodes.items() if phase.expect_s is not None},
        {tool: phase.expect_s for tool, phase in phases.tools.items() if phase.expect_s is not None},
        needs,
    )


def needs_of(topology: Topology, phases: GraphPhases, node_id: str) -> tuple[NodeId, ...]:
    """Return the nodes that a node, its tools or the sub-graphs around it declare to need, by their full names."""
    info = topology.node(node_id)
    declaring = [(name, phases.nodes[name].may_need) for name in _around(node_id) if name in phases.nodes]
    declaring += [
        (NodeId(node_id), phases.tools[t].may_need) for t in (info.tools if info else ()) if t in phases.tools
    ]
    found = [_resolve(topology, source, name) for source, names in declaring for name in names]
    targets = [target for resolved in found if resolved is not None for target in topology.entries(resolved)]
    return tuple(target for target in dict.fromkeys(targets) if target != node_id)


def unresolved_needs(topology: Topology, phases: GraphPhases) -> Iterator[tuple[str, str]]:
    """Yield (who declares, name) for names in `may_need` that the graph does not have."""
    for node, phase in sorted(phases.nodes.items()):
        yield from ((node, name) for name in phase.may_need if _resolve(topology, node, name) is None)
    for node_info in topology.nodes:
        for tool in node_info.tools:
            names = phases.tools[tool].may_need if tool in phases.tools else ()
            yield from ((f"tool {tool}", name) for name in names if _resolve(topology, node_info.id, name) is None)


def _resolve(topology: Topology, source: str, name: str) -> NodeId | None:
    """Find a node by its name as seen from `source`: on the same level first, then further out."""
    for level in (*(_outer(around) for around in _around(source)), ""):
        candidate = f"{level}|{name}" if level else name
        if topology.node(candidate) is not None:
            return NodeId(candidate)
    return None


def _around(node_id: str) -> list[NodeId]:
    """Return the node and the sub-graphs around it, innermost first."""
    parts = node_id.split("|")
    return [NodeId("|".join(parts[:end])) for end in range(len(parts), 0, -1)]


def _outer(node_id: str) -> str:
    return node_id.rpartition("|")[0]


def _distances(topology: Topology, source: NodeId) -> dict[NodeId, int]:
    """Return the least number of steps from a node to each one near it; 0 stands for itself."""
    found = {source: 0}
    frontier = [source]
    for steps in range(1, MAX_NEED_STEPS + 1):
        targets = dict.fromkeys(hop.target for here in frontier for hop in topology.hops(here))
        frontier = [target for target in targets if target not in found]
        found.update(dict.fromkeys(frontier, steps))
    return found


@dataclass(slots=True)
class _Reading:
    """Collects declarations of all levels."""

    nodes: dict[NodeId, Phase] = field(default_factory=dict)
    tools: dict[str, Phase] = field(default_factory=dict)
    before: set[NodeId] = field(default_factory=set)
    after: set[NodeId] = field(default_factory=set)
    interrupting: set[NodeId] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def read_level(self, graph: Any, prefix: str, depth: int) -> None:
        """Read one graph whose nodes carry `prefix`, then its sub-graphs."""
        builder = getattr(graph, "builder", None)
        specs = getattr(builder, "nodes", None)
        if isinstance(specs, Mapping):
            for name, spec in specs.items():
                _guarded(self._read_node, NodeId(f"{prefix}{name}"), spec.runnable, spec.metadata)
        else:
            for name, node in graph.nodes.items():
                if name != START:
                    _guarded(self._read_node, NodeId(f"{prefix}{name}"), node.bound, node.metadata)
        names = [str(name) for name in (specs if isinstance(specs, Mapping) else graph.nodes)]
        for found, listed in (
            (self.before, getattr(graph, "interrupt_before_nodes", ())),
            (self.after, getattr(graph, "interrupt_after_nodes", ())),
        ):
            found.update(NodeId(f"{prefix}{name}") for name in (names if listed == "*" else listed or ()))
        if depth < _MAX_NESTING:
            for name, inner in graph.get_subgraphs():
                if isinstance(getattr(inner, "nodes", None), Mapping):
                    _guarded(self.read_level, inner, f"{prefix}{name}|", depth + 1)

    def result(self) -> GraphPhases:
        """Return what was found."""
        return GraphPhases(
            self.nodes,
            self.tools,
            frozenset(self.before),
            frozenset(self.after),
            frozenset(self.interrupting),
            tuple(self.notes),
        )

    def _read_node(self, node_id: NodeId, runnable: object, metadata: object) -> None:
        found = phase_of(runnable)
        if isinstance(metadata, Mapping) and metadata.get(METADATA_KEY) is not None:
            try:
                said = Phase.of_metadata(metadata[METADATA_KEY])
                found = said if found is None else said.over(found)
            except ConfigError as exc:
                self.notes.append(f"{node_id}: {exc}")
        if found is not None and not found.is_empty:
            self.nodes[node_id] = found
        tools = getattr(runnable, "tools_by_name", None)
        for name, tool in tools.items() if isinstance(tools, Mapping) else ():
            if (marked := phase_of(tool)) is not None:
                self.tools[str(name)] = marked
            if _may_interrupt(tool):
                self.interrupting.add(node_id)
        if _may_interrupt(runnable):
            self.interrupting.add(node_id)


def _may_interrupt(runnable: object) -> bool:
    """Whether the code behind a runnable calls LangGraph's `interrupt`, as far as its own text shows."""
    from langgraph.types import interrupt

    functions = [item for item in unwrapped(runnable) if type(item) is types.FunctionType]
    return any(
        function.__globals__.get(name) is interrupt or name == "interrupt"
        for function in functions
        for name in _names(function.__code__)
    )


def _names(code: types.CodeType) -> Iterator[str]:
    stack = [code]
    while stack:
        here = stack.pop()
        yield from here.co_names
        stack.extend(constant for constant in here.co_consts if isinstance(constant, types.CodeType))


def _guarded(read: Callable[..., None], *arguments: object) -> None:
    try:
        read(*arguments)
    except Exception:  # objects of others may raise anything; a declaration that cannot be read is none
        _logger.debug("a declaration could not be read", exc_info=True)
