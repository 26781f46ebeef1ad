"""The forecaster that learns routes online: forgetting counts per context over the topology's prior."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast.counts import CountTable, smooth
from pancake_langgraph.forecast.evidence import Clue, ClueTable
from pancake_langgraph.forecast.experts import PRIOR_STRENGTH, Experts, Memory
from pancake_langgraph.forecast.lookahead import Exit
from pancake_langgraph.forecast.prior import Exits, marginals
from pancake_langgraph.forecast.topology_prior import TopologyPrior

__all__ = ["Memory", "TransitionForecaster"]

_WIDTH_STRENGTH = 2.0


@dataclass(slots=True)
class _Learnt:
    """What one graph taught: routes, streamed tool names, streamed values, and how many targets a node starts."""

    experts: Experts
    tools: CountTable
    clues: ClueTable
    widths: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)


class TransitionForecaster(TopologyPrior):
    """Learns transitions from the first run on, starting at what the topology declares.

    See `Experts` for how routes are learnt and `ClueTable` for what streamed answers tell.  Thread-safe,
    deterministic, bounded by `Memory`.
    """

    def __init__(self, memory: Memory | None = None) -> None:
        """Start without knowledge.

        Raises:
            ValueError: if a bound of `memory` is under 1 or a decay outside (0, 1].
        """
        self._memory = memory or Memory()
        super().__init__(max_graphs=self._memory.max_graphs, max_durations=2 * self._memory.max_keys)
        self._graphs: OrderedDict[str, _Learnt] = OrderedDict()
        self._new_learnt()

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
        """Learn one transition; see `Forecaster.observe_transition`.  Costs O(degree)."""
        with self._lock:
            super().observe_transition(graph_id, source, target, elapsed_s=elapsed_s)
            learnt = self._learnt(graph_id)
            exits = self._declared_exits(graph_id, source)
            if clues:
                shares = learnt.experts.shares(source, context, exits.shares)
                expected = marginals(exits, shares, self._width(graph_id, source, exits))
                learnt.clues.observe(source, clues, target, expected)
            if learnt.experts.observe(source, target, context, exits.shares):
                self._ways.clear()
            if first_tool_name:
                learnt.tools.observe((source, first_tool_name), target)
            self._count_width(learnt, source, nth)

    def tells(self, graph_id: str, node: str, clue: Clue) -> bool:
        """Whether a value may change the candidates; see `Forecaster.tells`."""
        with self._lock:
            learnt = self._graphs.get(graph_id)
            is_known = learnt is not None and learnt.clues.knows(node, clue)
            return not clue.field or is_known or clue.value in self._names.get(graph_id, ())

    def snapshot(self, graph_id: str | None = None) -> dict[str, Any]:
        """Return all that was learnt, of one graph or of all; topologies are not in it."""
        with self._lock:
            graphs = [
                {
                    "graph_id": name,
                    **learnt.experts.to_rows(),
                    "tools": learnt.tools.to_rows(),
                    "clues": learnt.clues.to_rows(),
                    "widths": [[node, *width] for node, width in learnt.widths.items()],
                }
                for name, learnt in self._graphs.items()
                if graph_id in (None, name)
            ]
            return {**super().snapshot(graph_id), "graphs": graphs}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace all that was learnt by a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            graphs = self._read(snapshot)
            super().restore(snapshot)
            while len(graphs) > self._memory.max_graphs:
                graphs.popitem(last=False)
            self._graphs = graphs

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Add a snapshot, of another process or an earlier one, to what was learnt.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            self._read(snapshot)
            super().merge(snapshot)
            for row in snapshot.get("graphs", ()):
                learnt = self._learnt(str(row["graph_id"]))
                learnt.experts.add_rows(row)
                learnt.tools.add_rows(row["tools"])
                learnt.clues.add_rows(row["clues"])
                for node, executions, targets in row["widths"]:
                    own = learnt.widths.get(node, (0.0, 0.0))
                    self._set_width(learnt, node, own[0] + executions, own[1] + targets)

    def _shares(self, graph_id: str, node: str, exits: Exits, context: tuple[str, ...]) -> Mapping[str, float]:
        learnt = self._graphs.get(graph_id)
        return exits.shares if learnt is None else learnt.experts.shares(node, context, exits.shares)

    def _tool_shares(self, graph_id: str, node: str, tool: str, expected: Mapping[str, float]) -> Mapping[str, float]:
        learnt = self._graphs.get(graph_id)
        return expected if learnt is None else smooth(learnt.tools.row((node, tool)), expected, PRIOR_STRENGTH)

    def _with_clues(
        self, graph_id: str, node: str, exits: Mapping[str, Exit], clues: Sequence[Clue]
    ) -> Mapping[str, Exit]:
        if not clues:
            return exits
        learnt = self._graphs.get(graph_id) or self._new_learnt()
        told = learnt.clues.shares(node, clues, {target: exit_.p_next for target, exit_ in exits.items()})
        if told is None:
            return exits
        chances, clue = told
        reason = f"{clue.tool or 'answer'} says {clue.field}" if clue.field else f"tool {clue.tool}"
        found = {}
        for target, p_next in chances.items():
            known = exits.get(target)
            exit_ = self._leave(graph_id, node, target, p_next, reason) if known is None else known
            found[target] = exit_.revised(min(1.0, p_next), reason)
        return found

    def _width(self, graph_id: str, node: str, exits: Exits) -> float:
        learnt = self._graphs.get(graph_id)
        executions, targets = learnt.widths.get(node, (0.0, 0.0)) if learnt is not None else (0.0, 0.0)
        told = _WIDTH_STRENGTH * exits.num_branches
        return max(1.0, (targets + told) / (executions + _WIDTH_STRENGTH))

    def _count_width(self, learnt: _Learnt, node: str, nth: int) -> None:
        """Count one target, and one execution if it is the first target of it."""
        executions, targets = learnt.widths.get(node, (0.0, 0.0))
        if nth == 0:
            decay = self._memory.slow_decay
            executions, targets = executions * decay + 1.0, targets * decay
        self._set_width(learnt, node, executions, targets + 1.0)

    def _set_width(self, learnt: _Learnt, node: str, executions: float, targets: float) -> None:
        learnt.widths[node] = executions, targets
        learnt.widths.move_to_end(node)
        if len(learnt.widths) > self._memory.max_keys:
            learnt.widths.popitem(last=False)
            self._ways.clear()

    def _learnt(self, graph_id: str) -> _Learnt:
        learnt = self._graphs.get(graph_id)
        if learnt is None:
            learnt = self._graphs[graph_id] = self._new_learnt()
            if len(self._graphs) > self._memory.max_graphs:
                self._graphs.popitem(last=False)
                self._ways.clear()
        self._graphs.move_to_end(graph_id)
        return learnt

    def _new_learnt(self) -> _Learnt:
        memory = self._memory
        decay, max_keys, max_targets = memory.slow_decay, memory.max_keys, memory.max_targets
        return _Learnt(
            Experts(memory),
            CountTable(decay=decay, max_keys=max_keys, max_targets=max_targets),
            ClueTable(decay=decay, max_keys=max_keys, max_targets=max_targets),
        )

    def _read(self, snapshot: Mapping[str, Any]) -> OrderedDict[str, _Learnt]:
        """Read the graphs of a snapshot.

        Raises:
            ConfigError: if they or the durations are not as this version writes them.
        """
        self._read_durations(snapshot)
        try:
            return OrderedDict((str(row["graph_id"]), self._load(row)) for row in snapshot.get("graphs", ()))
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise ConfigError(
                f"cannot restore a forecast: its counts are damaged ({type(exc).__name__}). "
                "Delete the stored forecast; it is learnt again in tens of runs."
            ) from exc

    def _load(self, row: Mapping[str, Any]) -> _Learnt:
        learnt = self._new_learnt()
        learnt.experts.load_rows(row)
        learnt.tools.load_rows(row["tools"])
        learnt.clues.load_rows(row["clues"])
        for node, executions, targets in row["widths"]:
            self._set_width(learnt, str(node), float(executions), float(targets))
        return learnt
