"""Follows runs branch by branch: which execution of a node made which other one start.

LangGraph works in steps, each graph for itself: what starts in one step was caused by what ended in the step before,
or, at a join and at a deferred node, by branches that ended earlier and waited.  A sub-graph is no place of its own:
what led to it leads to its first nodes, and its last nodes lead on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from uuid import UUID

from pancake_langgraph._types import NodeId, ThreadId
from pancake_langgraph.forecast import Clue, Forecaster
from pancake_langgraph.forecast.contexts import CONTEXT_NODES
from pancake_langgraph.ledger import SpanStatus
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.identity import parent_namespace
from pancake_langgraph.runtime.signals import Closed, Decided, Opened
from pancake_langgraph.runtime.trail import MAX_CLUES, MAX_LEVELS, MAX_TASKS, Leaf, Level, Task, Trail
from pancake_langgraph.topology import END, START, Topology

#: Parallel executions of one node from which one start is learnt.
MAX_EQUAL_SOURCES = 8

_JOIN = "join:"


class Situation(NamedTuple):
    """What is known about a node that runs: itself, what ran before, what runs beside it, and when it began."""

    node: NodeId
    context: tuple[NodeId, ...]
    running: tuple[NodeId, ...]
    started_at_s: float
    tool: str | None = None
    clues: tuple[Clue, ...] = ()


class Trails:
    """Teaches a forecaster from the starts and ends of nodes.  Bounded; lives on the runtime's loop."""

    def __init__(self, forecaster: Forecaster, topologies: Mapping[str, Topology], *, max_runs: int) -> None:
        """Follow at most `max_runs` runs at once, and remember as many that were interrupted."""
        self._forecaster = forecaster
        self._topologies = topologies
        self._max_runs = max_runs
        self._trails: OrderedDict[UUID, Trail] = OrderedDict()
        self._cut: OrderedDict[tuple[str, ThreadId], Trail] = OrderedDict()

    def __len__(self) -> int:
        """Return how many runs are followed or remembered."""
        return len(self._trails) + len(self._cut)

    # -- runs -----------------------------------------------------------------------------------------------------

    def run_started(self, opened: Opened) -> None:
        """Take in the start of a run; one that resumes goes on where it was cut."""
        cut = self._cut.pop((opened.graph_id, opened.thread_id), None)
        trail = cut if opened.is_resumed else Trail(Leaf(START, opened.at_s))
        # Where a run resumes that was cut out of sight, nothing is known of what led to its first nodes.
        self._trails[opened.run_id] = trail or Trail(None)
        self._bound(self._trails)

    def run_cut(self, root_id: UUID) -> None:
        """Take in that a run was interrupted: it stops here, and that is not its end."""
        if (trail := self._trails.get(root_id)) is not None:
            trail.is_cut = True

    def run_ended(self, opened: Opened, closed: Closed) -> None:
        """Take in the end of a run: what led to nothing led to the end, if the run ended well."""
        trail = self._trails.pop(opened.run_id, None)
        if trail is None:
            return
        if closed.status is SpanStatus.OK and not trail.is_cut:
            root = trail.levels.get("")
            # A graph without a step of its own went from its start to its end.
            ends = root.loose_ends() if root is not None else ()
            for leaf in ends:
                self._learn(opened.graph_id, leaf, END, leaf.ended_at_s)
        elif opened.thread_id:
            trail.put_aside()
            self._cut[opened.graph_id, opened.thread_id] = trail
            self._bound(self._cut)

    # -- nodes ----------------------------------------------------------------------------------------------------

    def node_started(self, opened: Opened, root_id: UUID) -> Situation:
        """Take in the start of a node; learn what led to it.  A second try of the same execution teaches nothing."""
        trail = self._trails.get(root_id)
        if trail is None:
            trail = self._trails[root_id] = Trail(Leaf(START, opened.at_s))
            self._bound(self._trails)
        around = parent_namespace(opened.checkpoint_ns)
        level = self._level(trail, around)
        tasks = level.enter(opened.step)
        node = NodeId(strip_task_ids(opened.checkpoint_ns) or opened.name)
        key = opened.checkpoint_ns or str(opened.run_id)
        task = tasks.get(key)
        if task is None:
            topology = self._topologies.get(opened.graph_id)
            sources = self._sources(level, opened, node, topology)
            task = Task(opened.name, opened.step, sources, None)
            if not (_last(node) == START or _is_subgraph(topology, node)):
                task.leaf = _leaf_after(sources, node, opened.at_s)
                self._learn_start(opened, node, sources)
            if len(tasks) < MAX_TASKS:
                tasks[key] = task
        self._reopen(trail, key, task, opened.at_s)
        # A start that decides stands for what came before it; a sub-graph is asked about by its own name.
        before = _main(task.sources) if _last(node) == START else None
        leaf = task.leaf or before or _leaf_after(task.sources, node, opened.at_s)
        return self._situation(trail, leaf)

    def node_ended(self, opened: Opened, closed: Closed, root_id: UUID) -> None:
        """Take in the end of a node."""
        trail = self._trails.get(root_id)
        key = opened.checkpoint_ns or str(opened.run_id)
        task = trail.open.pop(key, None) if trail is not None else None
        if trail is None or task is None:
            return
        task.status = closed.status
        if task.leaf is not None:
            trail.running[task.leaf.node] -= 1
            task.leaf.ended_at_s = closed.at_s
        if closed.status is SpanStatus.CANCELLED:
            trail.is_cut = True
        if closed.status is not SpanStatus.OK:
            return  # what ran inside is remembered: there it goes on when the run resumes
        inner = [trail.levels.pop(name) for name in [n for n in trail.levels if n and _container(n) == key]]
        ends = tuple(leaf for level in inner for leaf in level.loose_ends())
        task.exits = ends or ((task.leaf,) if task.leaf is not None else task.sources)

    def decided(self, signal: Decided, opened: Opened, root_id: UUID) -> None:
        """Take in which ways a node that still runs has chosen; names that are no exits of it mean nothing."""
        trail = self._trails.get(root_id)
        task = trail.open.get(opened.checkpoint_ns) if trail is not None else None
        topology = self._topologies.get(opened.graph_id)
        if task is None or topology is None:
            return
        for edge in topology.edges_from(strip_task_ids(opened.checkpoint_ns)):
            if edge.label in signal.names or _last(edge.target) in signal.names:
                task.goto.add(_last(edge.target))

    # -- evidence -------------------------------------------------------------------------------------------------

    def situation(self, root_id: UUID, checkpoint_ns: str) -> Situation | None:
        """Return what is known about the node that runs under a namespace; `None` when none does."""
        found = self._open_leaf(root_id, checkpoint_ns)
        return None if found is None else self._situation(*found)

    def call_started(self, root_id: UUID, checkpoint_ns: str) -> None:
        """Take in a model call of a node: what counts is what its last call writes, not what led to it."""
        if (found := self._open_leaf(root_id, checkpoint_ns)) is not None:
            found[1].tool = None
            found[1].told = ()
            found[1].clues.clear()

    def call_wrote(self, root_id: UUID, checkpoint_ns: str, clues: Iterable[Clue]) -> tuple[Clue, ...]:
        """Take in what a model call has written; return what of it is new."""
        found = self._open_leaf(root_id, checkpoint_ns)
        if found is None:
            return ()
        leaf = found[1]
        new = tuple(clue for clue in dict.fromkeys(clues) if clue not in leaf.clues)[: MAX_CLUES - len(leaf.clues)]
        for clue in new:
            leaf.tool = leaf.tool or clue.tool or None
            leaf.clues[clue] = None
        return new

    def tool_started(self, root_id: UUID, checkpoint_ns: str, tool: str) -> None:
        """Take in that a node runs a tool."""
        if (found := self._open_leaf(root_id, checkpoint_ns)) is not None and len(found[1].ran) < MAX_CLUES:
            found[1].ran.add(tool)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _open_leaf(self, root_id: UUID, checkpoint_ns: str) -> tuple[Trail, Leaf] | None:
        trail = self._trails.get(root_id)
        task = trail.open.get(checkpoint_ns) if trail is not None else None
        return None if trail is None or task is None or task.leaf is None else (trail, task.leaf)

    def _situation(self, trail: Trail, leaf: Leaf) -> Situation:
        evidence = leaf.evidence
        tool = leaf.tool or (leaf.asked_tool if evidence else None)
        return Situation(leaf.node, leaf.context, trail.beside(leaf.node), leaf.started_at_s, tool, evidence)

    def _level(self, trail: Trail, around: str) -> Level:
        level = trail.levels.get(around)
        if level is None:
            container = trail.open.get(_container(around)) if around else None
            if container is None:
                origins: tuple[Leaf, ...] = (trail.start,) if trail.start is not None else ()
            else:
                origins = container.sources if container.leaf is None else (container.leaf,)
            level = trail.levels[around] = Level(strip_task_ids(around), origins)
            while len(trail.levels) > MAX_LEVELS:
                trail.levels.popitem(last=False)
        return level

    def _reopen(self, trail: Trail, key: str, task: Task, at_s: float) -> None:
        task.status = None
        if key in trail.open:
            return  # tried again before the end of the first try was told
        trail.open[key] = task
        if len(trail.open) > MAX_TASKS:
            _, lost = trail.open.popitem(last=False)
            if lost.leaf is not None:
                trail.running[lost.leaf.node] -= 1
        if task.leaf is not None:
            task.leaf.started_at_s = at_s
            trail.running[task.leaf.node] = trail.running.get(task.leaf.node, 0) + 1

    def _sources(self, level: Level, opened: Opened, node: NodeId, topology: Topology | None) -> tuple[Leaf, ...]:
        """Return the executions that made `node` start."""
        if opened.is_called:  # the functional API: calls that have ended, or the function itself
            return level.loose_ends() or level.origins
        info = topology.node(node) if topology is not None else None
        before = list(level.steps.get(opened.step - 1, {}).values())
        if info is not None and info.deferred:
            ready = [task for task in level.tasks() if task.ended and task.step < opened.step]
            return _leading(ready, node, topology) or level.origins
        joined = _joined(level, opened)
        ended = [task for task in before if task.ended]
        found = _leading(ended, node, topology) if topology is not None else ()
        if joined or found:
            return tuple(dict.fromkeys((*joined, *(() if joined else found))))
        failed = [task for task in before if task.status is SpanStatus.ERROR and task.leaf is not None]
        if topology is not None and (handled := _handled(failed, node, topology)):
            return handled
        if ended:
            return _openly(ended, topology) or tuple(leaf for task in ended for leaf in task.exits)
        return level.origins

    def _learn_start(self, opened: Opened, node: NodeId, sources: Sequence[Leaf]) -> None:
        seen: dict[NodeId, int] = {}
        for leaf in sources:
            seen[leaf.node] = seen.get(leaf.node, 0) + 1
            if node in leaf.followers:
                continue
            if seen[leaf.node] > MAX_EQUAL_SOURCES:
                leaf.followers.add(node)
            else:
                self._learn(opened.graph_id, leaf, node, opened.at_s)

    def _learn(self, graph_id: str, leaf: Leaf, target: NodeId, at_s: float) -> None:
        self._forecaster.observe_transition(
            graph_id or UNREAD,
            leaf.node,
            target,
            elapsed_s=at_s - leaf.started_at_s,
            context=leaf.context,
            first_tool_name=leaf.tool,
            clues=leaf.evidence,
            nth=len(leaf.followers),
        )
        leaf.followers.add(target)

    def _bound(self, table: OrderedDict[UUID, Trail] | OrderedDict[tuple[str, ThreadId], Trail]) -> None:
        while len(table) > self._max_runs:
            table.popitem(last=False)


#: Stands for the topology of a graph that was not read.
UNREAD = "unread"


def _is_subgraph(topology: Topology | None, node: str) -> bool:
    """Whether `node` is a sub-graph whose inside is known; any other node is taken to run itself."""
    return topology is not None and topology.entries(node) != (node,)


def _leaf_after(sources: Sequence[Leaf], node: NodeId, at_s: float) -> Leaf:
    main = _main(sources)
    if main is None:
        return Leaf(node, at_s)
    return Leaf(
        node,
        at_s,
        (*main.context, main.node)[-CONTEXT_NODES:],
        told=tuple(main.clues) or (() if main.ran else main.told),
    )


def _main(sources: Sequence[Leaf]) -> Leaf | None:
    """Return the source whose past counts: branches end in any order, and the context must not depend on that."""
    return min(sources, key=lambda leaf: (leaf.node, len(leaf.context)), default=None)


def _joined(level: Level, opened: Opened) -> tuple[Leaf, ...]:
    """Return the sources of a join that has just become complete: all have ended, the last one in the step before."""
    for trigger in opened.triggers:
        if not trigger.startswith(_JOIN):
            continue
        names = trigger.removeprefix(_JOIN).rpartition(":")[0].split("+")
        latest = {task.name: task for task in level.tasks() if task.ended and task.step < opened.step}
        found = [latest[name] for name in names if name in latest]
        if len(found) == len(names) and any(task.step == opened.step - 1 for task in found):
            return tuple(leaf for task in found for leaf in task.exits)
    return ()


def _leading(tasks: Sequence[Task], node: str, topology: Topology | None) -> tuple[Leaf, ...]:
    """Return the exits of `tasks` that declare a way to `node` and, where it is known, have taken it."""
    found = []
    for task in tasks:
        for leaf in task.exits:
            hops = topology.hops(leaf.node) if topology is not None else ()
            ways = [hop for hop in hops if _is_or_holds(hop.target, node)]
            decided = not task.goto or task.goto & set(node.split("|")) or any(hop.is_certain for hop in ways)
            if ways and decided and any(hop.kind != "join" for hop in ways):
                found.append(leaf)
    return tuple(found)


def _handled(failed: Sequence[Task], node: str, topology: Topology) -> tuple[Leaf, ...]:
    """Return the failed executions whose error handler `node` is."""
    leaves = [task.leaf for task in failed if task.leaf is not None]
    return tuple(
        leaf for leaf in leaves if any(hop.group == "error" and hop.target == node for hop in topology.hops(leaf.node))
    )


def _openly(tasks: Sequence[Task], topology: Topology | None) -> tuple[Leaf, ...]:
    """Return the exits of `tasks` from which an undeclared jump is possible."""
    if topology is None:
        return ()
    return tuple(leaf for task in tasks for leaf in task.exits if topology.is_open(leaf.node))


def _is_or_holds(target: str, node: str) -> bool:
    """Whether a hop to `target` leads to `node`, itself or as the first node inside the sub-graph `node`."""
    return target == node or target.startswith(f"{node}|")


def _container(around: str) -> str:
    """Return the namespace of the execution that a graph runs inside; its second graph has a number after that."""
    while around and ":" not in around.rpartition("|")[2]:
        around = parent_namespace(around)
    return around


def _last(node_id: str) -> str:
    return node_id.rpartition("|")[2]
