"""From topology, declarations and what was learnt to a compiled plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pancake_langgraph._types import NodeId
from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.forecast.quantiles import Durations
from pancake_langgraph.phases import Phase, PhaseKind
from pancake_langgraph.plan.compiled import (
    CompiledPlan,
    Expected,
    Loop,
    Source,
    Step,
    StepKind,
    Suspension,
    ToolStep,
)
from pancake_langgraph.plan.declared import GraphPhases, needs_of, unresolved_needs
from pancake_langgraph.topology.graph import END, START, NodeInfo, Topology

_NO_PHASE = Phase()
#: A sibling that ends this much earlier than the slowest one is not waited for.
_CLEARLY_EARLIER = 0.9
_KINDS: Mapping[str, StepKind] = {"tools": "action", "plain": "action", "retriever": "io"}


def _nothing(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Learnt:
    """What runs taught about one graph, as look-ups by node or tool name that give `None` for the unseen."""

    node_seconds: Callable[[str], Quantiles | None] = _nothing
    tool_seconds: Callable[[str], Quantiles | None] = _nothing
    model_kind: Callable[[str], PhaseKind | None] = _nothing


def compile_plan(topology: Topology, phases: GraphPhases | None = None, learnt: Learnt | None = None) -> CompiledPlan:
    """Compile a plan.  Pure and deterministic; costs O(nodes + hops).

    What is declared wins for kind and blocking; a declared duration counts until enough runs were measured.
    """
    compiling = _Compiling(topology, phases or GraphPhases(), learnt or Learnt())
    return compiling.plan()


class _Compiling:
    """One compilation."""

    def __init__(self, topology: Topology, phases: GraphPhases, learnt: Learnt) -> None:
        self._topology = topology
        self._phases = phases
        self._learnt = learnt
        self._leaves = [n for n in topology.nodes if n.kind != "subgraph" or not topology.edges_from(f"{n.id}|{START}")]
        self._order, back = _fold(topology, [node.id for node in self._leaves])
        self._loops = sorted(back)
        known = {node.id for node in self._leaves}
        needs: dict[str, dict[str, None]] = {node.id: {} for node in self._leaves}
        for source in (START, *self._order):
            for hop in topology.hops(source):
                if hop.target in known and (source, hop.target) not in back:
                    needs[hop.target][source] = None
        self._needs = {target: tuple(sources) for target, sources in needs.items()}

    def plan(self) -> CompiledPlan:
        """Put all together, each step after what it needs."""
        steps: dict[str, Step] = {}
        infos: dict[str, NodeInfo] = {node.id: node for node in self._leaves}
        for node_id in self._order:
            steps[node_id] = self._step(infos[node_id], steps)
        for step_id in list(_not_waited_for(steps)):
            if steps[step_id].blocking_source == "topology":
                source: Source = "learnt" if steps[step_id].seconds.source == "learnt" else "declared"
                steps[step_id] = replace(steps[step_id], blocking=False, blocking_source=source)
        loops = tuple(Loop(source, target) for source, target in self._loops)
        return CompiledPlan(
            self._topology.name, self._topology.fingerprint, tuple(steps.values()), loops, tuple(self._notes())
        )

    def _step(self, info: NodeInfo, before: Mapping[str, Step]) -> Step:
        phase = self._phase(info.id)
        tools = tuple(self._tool(name) for name in info.tools)
        kind, kind_source = self._kind(info, phase, tools)
        hops = self._topology.hops(info.id)
        incoming = [h for source in self._needs[info.id] for h in self._topology.hops(source) if h.target == info.id]
        needs_all = info.deferred or any(hop.kind == "join" for hop in incoming)
        depth, starts_s = self._when(info.id, before, needs_all=needs_all)
        return Step(
            id=info.id,
            kind=kind,
            kind_source=kind_source,
            blocking=True if phase.blocking is None else phase.blocking,
            blocking_source="topology" if phase.blocking is None else "declared",
            seconds=self._seconds(info, phase, tools),
            needs=tuple(source for source in self._needs[info.id] if source != START),
            needs_all=needs_all,
            may_need=needs_of(self._topology, self._phases, info.id),
            suspensions=tuple(self._suspensions(info, kind, needs_all=needs_all)),
            tools=tools,
            after_steps=depth,
            starts_s=starts_s,
            ends=any(hop.target == END for hop in hops),
            jumps=self._topology.is_open(info.id),
            repeats=any(hop.kind == "send" for hop in incoming),
            has_prompt=phase.prompt is not None,
        )

    def _phase(self, node_id: str) -> Phase:
        """Return what is declared on a node; kind and blocking also come from the sub-graphs around it."""
        found = self._phases.nodes.get(NodeId(node_id), _NO_PHASE)
        outer = node_id.rpartition("|")[0]
        while outer:
            around = self._phases.nodes.get(NodeId(outer))
            if around is not None:
                found = found.over(Phase(kind=around.kind, blocking=around.blocking))
            outer = outer.rpartition("|")[0]
        return found

    def _kind(self, info: NodeInfo, phase: Phase, tools: tuple[ToolStep, ...]) -> tuple[StepKind, Source]:
        if phase.kind is not None:
            return phase.kind, "declared"
        if info.kind == "model":
            learnt = self._learnt.model_kind(info.id)
            if learnt is not None:
                return learnt, "learnt"
            decides = any(not hop.is_certain for hop in self._topology.hops(info.id)) or self._topology.is_open(info.id)
            return ("reasoning" if decides else "generation"), "topology"
        declared = {tool.kind for tool in tools if tool.kind_source == "declared"}
        if len(declared) == 1 and all(tool.kind_source == "declared" for tool in tools):
            return declared.pop(), "declared"
        kind = _KINDS.get(info.kind, "unknown")
        return kind, "unknown" if kind == "unknown" else "topology"

    def _tool(self, name: str) -> ToolStep:
        phase = self._phases.tools.get(name, _NO_PHASE)
        seconds = _expected(self._learnt.tool_seconds(name), phase.expect_s)
        kind_source: Source = "topology" if phase.kind is None else "declared"
        return ToolStep(name, phase.kind or "action", kind_source, phase.blocking is not False, seconds)

    def _seconds(self, info: NodeInfo, phase: Phase, tools: tuple[ToolStep, ...]) -> Expected:
        own = _expected(self._learnt.node_seconds(info.id), phase.expect_s)
        handoffs = {handoff.tool for handoff in info.handoffs}
        medians = sorted(t.seconds.p50_s for t in tools if t.name not in handoffs and t.seconds.p50_s is not None)
        if own.source != "unknown" or not medians or len(medians) < len(tools) - len(handoffs):
            return own
        sources = {tool.seconds.source for tool in tools if tool.name not in handoffs}
        source: Source = "learnt" if sources == {"learnt"} else "declared"
        return Expected(source, medians[0], medians[len(medians) // 2], medians[-1])

    def _when(self, node_id: str, before: Mapping[str, Step], *, needs_all: bool) -> tuple[int | None, float | None]:
        """Return the least steps and usual seconds from the start: a join waits for the slowest of its sources."""
        steps: list[int] = []
        times: list[float | None] = []
        for source in self._needs[node_id]:
            step = before.get(source)
            depth = 0 if step is None else step.after_steps
            if depth is None:
                continue
            steps.append(depth + 1)
            times.append(0.0 if step is None else _ends_s(step))
        if not steps:
            return None, None
        pick = max if needs_all else min
        known = [time for time in times if time is not None]
        return pick(steps), pick(known) if len(known) == len(times) else None

    def _suspensions(self, info: NodeInfo, kind: StepKind, *, needs_all: bool) -> Iterator[Suspension]:
        if needs_all and len(self._needs[info.id]) > 1:
            yield Suspension("before", "join")
        if info.id in self._phases.interrupts_before:
            yield Suspension("before", "interrupt")
        if info.kind == "tools" or (info.kind != "model" and kind == "io"):
            yield Suspension("during", "tool")
        if info.id in self._phases.interrupting:
            yield Suspension("during", "interrupt")
        if info.id in self._phases.interrupts_after:
            yield Suspension("after", "interrupt")

    def _notes(self) -> Iterator[str]:
        yield from self._phases.notes
        for who, name in unresolved_needs(self._topology, self._phases):
            yield f"{who}: may_need names {name!r}, which is no node of this graph. Mend the name."
        leaves = {node.id for node in self._leaves}
        for node, phase in sorted(self._phases.nodes.items()):
            if phase.expect_s is not None and node not in leaves:
                yield f"{node}: expect_s on a sub-graph is not used, because its nodes run in its place. Say it there."


def _expected(measured: Quantiles | None, declared_s: float | None) -> Expected:
    """Say how long something takes.  The quantiles of a forecast have the declaration in them already."""
    if measured is None and declared_s is not None:
        measured = Durations(max_keys=1).quantiles("", expect_s=declared_s)
    if measured is None:
        return Expected()
    source: Source = "learnt" if measured.num_samples else "declared"
    return Expected(source, measured.p10_s, measured.p50_s, measured.p90_s, measured.num_samples)


def _fold(topology: Topology, leaves: list[str]) -> tuple[list[str], set[tuple[str, str]]]:
    """Return the leaves in an order in which all hops point forward, except the ways back, which come second.

    A depth-first walk from the start: a hop to a node that is still being walked closes a loop.
    """
    known = set(leaves)
    done: list[str] = []
    state: dict[str, bool] = {}  # True = being walked
    back: set[tuple[str, str]] = set()
    for root in (START, *leaves):
        if root in state:
            continue
        state[root] = True
        stack = [(root, iter(_targets(topology, root, known)))]
        while stack:
            here, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                state[here] = False
                done.append(here)
                stack.pop()
            elif target not in state:
                state[target] = True
                stack.append((target, iter(_targets(topology, target, known))))
            elif state[target]:
                back.add((here, target))
    return [node for node in reversed(done) if node != START], back


def _targets(topology: Topology, source: str, known: set[str]) -> list[str]:
    # Reversed, so that the reversed finishing order has equals in their own order.
    return [t for t in reversed(dict.fromkeys(hop.target for hop in topology.hops(source))) if t in known]


def _not_waited_for(steps: Mapping[str, Step]) -> Iterator[str]:
    """Yield the steps that only joins follow, each of which waits for a sibling that takes clearly longer."""
    followers: dict[str, list[Step]] = {}
    for step in steps.values():
        for source in step.needs:
            followers.setdefault(source, []).append(step)
    for step in steps.values():
        after = followers.get(step.id, [])
        if step.ends or step.jumps or not after or not all(follower.needs_all for follower in after):
            continue
        if all(_has_slack(step, follower, steps) for follower in after):
            yield step.id


def _has_slack(step: Step, join: Step, steps: Mapping[str, Step]) -> bool:
    ends = {source: _ends_s(steps[source]) for source in join.needs}
    known = [end for end in ends.values() if end is not None]
    own = ends[step.id]
    return own is not None and len(known) == len(ends) and own < _CLEARLY_EARLIER * max(known)


def _ends_s(step: Step) -> float | None:
    return None if step.starts_s is None or step.seconds.p50_s is None else step.starts_s + step.seconds.p50_s
