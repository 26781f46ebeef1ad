"""The forecaster that never learns routes: what the graph declares, with durations as they are observed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import Candidate
from pancake_langgraph.forecast.answers import Answers
from pancake_langgraph.forecast.arrival import Arrivals
from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.forecast.declared import (
    NOTHING_DECLARED,
    Declared,
    Need,
    lift_distant,
    lift_exits,
    mark_needs,
)
from pancake_langgraph.forecast.evidence import Clue
from pancake_langgraph.forecast.lookahead import Exit, look_ahead
from pancake_langgraph.forecast.prior import (
    LEARNT,
    P_STREAMED,
    Announcement,
    Exits,
    announced_by,
    exits_of,
    is_end,
    marginals,
)
from pancake_langgraph.forecast.quantiles import Durations
from pancake_langgraph.topology.graph import Topology

_VERSION = 2
_SEPARATOR = "\x1f"
_MAX_CACHED = 4096
#: Ways out of nodes, each after one past, that are kept at once.
_MAX_WAYS = 256


class TopologyPrior:
    """Forecasts from declared edges only: a fixed edge is certain, a decision is even over its declared targets.

    Thread-safe.  Keeps at most `max_graphs` graphs, forgetting the one unused for longest.
    """

    def __init__(self, *, max_graphs: int = 64, max_durations: int = 4096) -> None:
        """Start without graphs.

        Raises:
            ValueError: if a bound is under 1.
        """
        if max_graphs < 1:
            raise ValueError(f"max_graphs must be at least 1: got {max_graphs}")
        self._max_graphs = max_graphs
        self._topologies: OrderedDict[str, Topology] = OrderedDict()
        self._arrivals: dict[str, Arrivals] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._told: OrderedDict[str, Declared] = OrderedDict()
        self._durations = Durations(max_keys=max_durations)
        self._declared: dict[tuple[str, str], Exits] = {}
        self._announced: dict[tuple[str, str, str], Announcement | None] = {}
        # What is known about the ways out of a node changes only when it is seen to lead somewhere.
        self._ways: Answers[Mapping[str, Exit]] = Answers(max_answers=_MAX_WAYS)
        self._lock = threading.RLock()

    def add_graph(self, graph_id: str, topology: Topology) -> None:
        """Tell what a graph declares."""
        with self._lock:
            self._topologies[graph_id] = topology
            self._arrivals[graph_id] = Arrivals(topology)
            self._names[graph_id] = frozenset(part for info in topology.nodes for part in info.id.split("|"))
            self._declared.clear()
            self._announced.clear()
            self._ways.clear()
            self._topologies.move_to_end(graph_id)
            if len(self._topologies) > self._max_graphs:
                oldest, _ = self._topologies.popitem(last=False)
                del self._arrivals[oldest], self._names[oldest]

    def declare(self, graph_id: str, declared: Declared) -> None:
        """Tell what the author of a graph declared; see `Forecaster.declare`."""
        with self._lock:
            self._told[graph_id] = declared
            self._told.move_to_end(graph_id)
            self._ways.clear()
            if len(self._told) > self._max_graphs:
                self._told.popitem(last=False)

    def observe_transition(
        self,
        graph_id: str,
        source: str,
        target: str,
        *,
        elapsed_s: float,
        context: Sequence[str] = (),
        first_tool_name: str | None = None,
        clues: Sequence[Clue] = (),
        nth: int = 0,
    ) -> None:
        """Record how long `source` took; where it went is not learnt."""
        with self._lock:
            self._ways.forget((graph_id, source))
            self._time(_key("node", graph_id, source), elapsed_s)
            if self._waits(graph_id, target):
                self._time(_key("wait", graph_id, f"{source}{_SEPARATOR}{target}"), elapsed_s)

    def observe_tool(self, graph_id: str, tool: str, elapsed_s: float) -> None:
        """Record how long a tool ran."""
        with self._lock:
            self._time(_key("tool", graph_id, tool), elapsed_s)

    def candidates(
        self,
        graph_id: str,
        node: str,
        *,
        first_tool_name: str | None = None,
        horizon_steps: int = 2,
        context: Sequence[str] = (),
        clues: Sequence[Clue] = (),
        running: Sequence[str] = (),
    ) -> tuple[Candidate, ...]:
        """Return who may run after `node`; see `Forecaster.candidates`."""
        with self._lock:
            topology = self._topology(graph_id)
            said = self._announcement(graph_id, topology, node, first_tool_name) if first_tool_name else None
            first = self._exits(graph_id, node, tuple(context), running)
            if first_tool_name:
                first = self._with_tool(graph_id, node, first, said, first_tool_name)
            first = self._with_clues(graph_id, node, first, clues)
            at_second = len(context) + 1

            def onward(here: str, path: tuple[str, ...]) -> Mapping[str, Exit]:
                if said is not None and first_tool_name and here == said.tools_node and here not in path[at_second:]:
                    return self._with_clues(
                        graph_id, here, self._after_tools(graph_id, said, path, first_tool_name), clues
                    )
                exits = self._exits(graph_id, here, path, running)
                # What an answer says may also settle where the node after it leads: it does as it was told.
                return self._with_clues(graph_id, here, exits, clues) if len(path) == at_second else exits

            if said is not None:
                horizon_steps = max(horizon_steps, said.steps + 1)
            needs = () if first_tool_name else self._needs(graph_id, node)
            furthest = max((need.steps for need in needs), default=0)
            found = look_ahead(node, first, onward, context=tuple(context), horizon_steps=max(horizon_steps, furthest))
            if furthest < 2:
                return found
            seen = self._times_seen(graph_id, node)
            return lift_distant(found, needs, after=node, num_seen=seen, horizon_steps=horizon_steps)

    def tells(self, graph_id: str, node: str, clue: Clue) -> bool:
        """Whether a value may change the candidates; see `Forecaster.tells`."""
        return not clue.field

    def p_end(self, graph_id: str, node: str, *, context: Sequence[str] = ()) -> float:
        """Return the chance that the run, or this branch of it, ends after `node`."""
        with self._lock:
            exits = self._exits(graph_id, node, tuple(context))
            return sum(exit_.p_next for target, exit_ in exits.items() if is_end(target))

    def tool_seconds(self, graph_id: str, tool: str) -> Quantiles | None:
        """Return how long a tool takes; `None` before it was seen or declared."""
        with self._lock:
            expect_s = self._told.get(graph_id, NOTHING_DECLARED).tool_seconds.get(tool)
            return self._durations.quantiles(_key("tool", graph_id, tool), expect_s=expect_s)

    def node_seconds(self, graph_id: str, node: str) -> Quantiles | None:
        """Return how long it takes from a node's start to the start of what follows, or `None`."""
        with self._lock:
            expect_s = self._told.get(graph_id, NOTHING_DECLARED).node_seconds.get(node)
            return self._durations.quantiles(_key("node", graph_id, node), expect_s=expect_s)

    def snapshot(self, graph_id: str | None = None) -> dict[str, Any]:
        """Return the durations, of one graph or of all, as a JSON-able value."""
        with self._lock:
            rows = self._durations.to_rows()
            if graph_id is not None:
                rows = [row for row in rows if str(row[0]).split(_SEPARATOR)[1] == graph_id]
            return {"version": _VERSION, "durations": rows}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the durations by those of a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            self._durations.load_rows(self._read_durations(snapshot))
            self._ways.clear()

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Add the durations of a snapshot to those measured here; the latest of both are kept.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            self._durations.add_rows(self._read_durations(snapshot))
            self._ways.clear()

    def _time(self, key: str, elapsed_s: float) -> None:
        if self._durations.add(key, elapsed_s):
            self._ways.clear()

    def _topology(self, graph_id: str) -> Topology | None:
        topology = self._topologies.get(graph_id)
        if topology is not None:
            self._topologies.move_to_end(graph_id)
        return topology

    def _declared_exits(self, graph_id: str, node: str) -> Exits:
        """Return the exits that the topology declares, from a bounded cache."""
        exits = self._declared.get((graph_id, node))
        if exits is None:
            exits = exits_of(self._topology(graph_id), node)
            if len(self._declared) >= _MAX_CACHED:
                self._declared.clear()
            self._declared[graph_id, node] = exits
        return exits

    def _announcement(self, graph_id: str, topology: Topology | None, node: str, tool: str) -> Announcement | None:
        """Return what a streamed tool name tells, from a bounded cache."""
        key = graph_id, node, tool
        if key not in self._announced:
            if len(self._announced) >= _MAX_CACHED:
                self._announced.clear()
            self._announced[key] = announced_by(topology, node, tool)
        return self._announced[key]

    def _shares(self, graph_id: str, node: str, exits: Exits, context: tuple[str, ...]) -> Mapping[str, float]:
        """Return how observations split over the targets of `node`; here, as declared."""
        return exits.shares

    def _tool_shares(self, graph_id: str, node: str, tool: str, expected: Mapping[str, float]) -> Mapping[str, float]:
        """Return the chances of targets once `tool` was called; here, as expected."""
        return expected

    def _with_clues(
        self, graph_id: str, node: str, exits: Mapping[str, Exit], clues: Sequence[Clue]
    ) -> Mapping[str, Exit]:
        """Replace the chances of exits by what the streamed values tell about them; here, nothing was learnt."""
        return exits

    def _width(self, graph_id: str, node: str, exits: Exits) -> float:
        """Return how many targets one execution of `node` starts, where none of them is certain."""
        return float(exits.num_branches)

    def _waits(self, graph_id: str, target: str) -> bool:
        arrivals = self._arrivals.get(graph_id)
        return arrivals is not None and arrivals.waits(target)

    def _leave(
        self, graph_id: str, node: str, target: str, p_next: float, reason: str, running: Sequence[str] = ()
    ) -> Exit:
        """Return a way out of `node` with its steps and waiting time."""
        return self._leave_after(self.node_seconds(graph_id, node), graph_id, node, target, p_next, reason, running)

    def _leave_after(
        self,
        wait: Quantiles | None,
        graph_id: str,
        node: str,
        target: str,
        p_next: float,
        reason: str,
        running: Sequence[str],
    ) -> Exit:
        """Return a way out of `node`, which takes `wait` where `target` waits for nothing else."""
        steps = 1
        if self._waits(graph_id, target):
            key = _key("wait", graph_id, f"{node}{_SEPARATOR}{target}")
            wait = self._durations.quantiles(key) or wait
            steps = self._arrivals[graph_id].steps(node, target, running)
        if wait is None:
            return Exit(target, p_next, steps, None, reason)
        return Exit(target, p_next, steps, wait.p50_s, reason, wait.p50_s - wait.p10_s, wait.p90_s - wait.p50_s)

    def _exits(
        self, graph_id: str, node: str, context: tuple[str, ...], running: Sequence[str] = ()
    ) -> Mapping[str, Exit]:
        """Return the ways out of `node` after `context`, from a bounded cache."""
        subject, question = (graph_id, node), (context, tuple(running))
        ways = self._ways.get(subject, question)
        if ways is None:
            ways = self._find_exits(graph_id, node, context, running)
            self._ways.put(subject, question, ways)
        return ways

    def _find_exits(
        self, graph_id: str, node: str, context: tuple[str, ...], running: Sequence[str]
    ) -> Mapping[str, Exit]:
        exits = self._declared_exits(graph_id, node)
        shares = self._shares(graph_id, node, exits, context)
        chances = marginals(exits, shares, self._width(graph_id, node, exits))
        needs = self._needs(graph_id, node)
        if needs:
            chances = lift_exits(chances, needs, self._times_seen(graph_id, node))
        wait, reasons = self.node_seconds(graph_id, node), exits.reasons
        found = {
            target: self._leave_after(wait, graph_id, node, target, p_next, reasons.get(target, LEARNT), running)
            for target, p_next in chances.items()
        }
        return mark_needs(found, needs, after=node) if needs else found

    def _with_tool(
        self, graph_id: str, node: str, first: Mapping[str, Exit], said: Announcement | None, tool: str
    ) -> Mapping[str, Exit]:
        """Replace the exits of `node` by what the streamed tool name tells about them."""
        if said is not None and said.steps == 0:
            return self._after_tools(graph_id, said, (node,), tool)
        expected = {target: exit_.p_next for target, exit_ in first.items()}
        steps, reason = 1, f"tool {tool}"
        if said is not None:
            expected = {said.tools_node: P_STREAMED}
            steps, reason = said.steps, said.reason
        found = {}
        for target, p_next in self._tool_shares(graph_id, node, tool, expected).items():
            exit_ = self._leave(graph_id, node, target, min(1.0, p_next), reason)
            if said is not None and target == said.tools_node and exit_.steps != steps:
                exit_ = exit_._replace(steps=steps)
            found[target] = exit_
        return found

    def _after_tools(self, graph_id: str, said: Announcement, path: tuple[str, ...], tool: str) -> Mapping[str, Exit]:
        """Return the exits of a tools node when it is known which tool it runs."""
        wait = self.tool_seconds(graph_id, tool)
        if said.targets:
            share = 1.0 / len(said.targets)
            return {t: _timed(Exit(t, share, 1, None, said.reason), wait) for t in said.targets}
        exits = self._exits(graph_id, said.tools_node, path[:-1] if path[-1:] == (said.tools_node,) else path)
        stay = {target: exit_ for target, exit_ in exits.items() if target not in said.not_these}
        # Which way a handoff would go is settled by the tool's name, so its share falls to the ways that stay.
        lost = sum(exit_.p_next for target, exit_ in exits.items() if target not in stay)
        kept = sum(exit_.p_next for exit_ in stay.values())
        scale = (kept + lost) / kept if kept else 1.0
        reason = f"resumes after {said.reason}"
        return {
            target: _timed(exit_.revised(min(1.0, exit_.p_next * scale), reason), wait)
            for target, exit_ in stay.items()
        }

    def _read_durations(self, snapshot: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
        """Read the durations of a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version.
        """
        if snapshot.get("version") != _VERSION:
            raise ConfigError(
                f"cannot restore a forecast: got version {snapshot.get('version')!r}, allowed is {_VERSION}. "
                "Delete the stored forecast; it is learnt again in tens of runs."
            )
        try:
            rows = [(str(key), [float(sample) for sample in samples]) for key, samples in snapshot["durations"]]
            if not all(key.count(_SEPARATOR) >= 2 for key, _ in rows):
                raise ValueError("a key names no graph")
        except (KeyError, TypeError, ValueError) as exc:
            raise ConfigError(
                f"cannot restore a forecast: the durations are damaged ({type(exc).__name__}). "
                "Delete the stored forecast; it is learnt again in tens of runs."
            ) from exc
        return rows

    def _needs(self, graph_id: str, node: str) -> tuple[Need, ...]:
        return self._told.get(graph_id, NOTHING_DECLARED).needs.get(node, ())

    def _times_seen(self, graph_id: str, node: str) -> int:
        found = self._durations.quantiles(_key("node", graph_id, node))
        return 0 if found is None else found.num_samples


def _timed(exit_: Exit, wait: Quantiles | None) -> Exit:
    if wait is None:
        return exit_
    sooner_s, later_s = wait.p50_s - wait.p10_s, wait.p90_s - wait.p50_s
    return Exit(exit_.target, exit_.p_next, exit_.steps, wait.p50_s, exit_.reason, sooner_s, later_s)


def _key(kind: str, graph_id: str, name: str) -> str:
    return f"{kind}{_SEPARATOR}{graph_id}{_SEPARATOR}{name}"
