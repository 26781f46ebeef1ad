"""The forecaster that learns routes online: forgetting counts per context over the topology's prior."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.forecast.counts import CountTable, smooth
from pancake_langgraph.forecast.prior import Exits
from pancake_langgraph.forecast.topology_prior import TopologyPrior

_PRIOR_STRENGTH = 1.0
# The node alone, and with up to four nodes before it: behind a hub (supervisor, router, tools loop) every second node
# is the hub itself, so four nodes are two decisions.
_ORDERS = 5
_EXPERTS = 2 * _ORDERS  # each with a long and a short memory
_SWITCH_RATE = 0.05
_LEAST_P = 1e-4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bounds and forgetting.

    `slow_decay` remembers about fifty observations (calibrated on random routers), `fast_decay` about five (relearns a
    changed habit in a few runs); which of them is believed is itself learnt per node.
    """

    max_graphs: int = 64
    max_keys: int = 2048
    max_targets: int = 64
    slow_decay: float = 0.98
    fast_decay: float = 0.8


@dataclass(slots=True)
class _Learnt:
    """What one graph taught: counts with long and short memory, per streamed tool, and trust per node."""

    slow: CountTable
    fast: CountTable
    tools: CountTable
    trust: OrderedDict[str, list[float]] = field(default_factory=OrderedDict)


class TransitionForecaster(TopologyPrior):
    """Learns transitions from the first run on, starting at what the topology declares.

    Several estimates are kept per node: by the node alone and by up to four nodes before it (each backing off to the
    shorter context), each with a long and a short memory.  They are mixed by how well each has predicted lately
    (fixed-share weights), so a route that depends on history, one that is random and one that has just changed are all
    served.  Thread-safe, deterministic, bounded by `Memory`.
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
    ) -> None:
        """Learn one transition; see `Forecaster.observe_transition`.  Costs O(degree)."""
        with self._lock:
            super().observe_transition(graph_id, source, target, elapsed_s=elapsed_s)
            learnt = self._learnt(graph_id)
            path = tuple(context)
            estimates = self._estimates(learnt, source, self._declared_exits(graph_id, source), path)
            self._judge(learnt, source, [estimate.get(target, 0.0) for estimate in estimates])
            for order in range(min(_ORDERS, len(path) + 1)):
                key = _context_key(path, order, source)
                learnt.slow.observe(key, target)
                learnt.fast.observe(key, target)
            if first_tool_name:
                learnt.tools.observe((source, first_tool_name), target)

    def snapshot(self) -> dict[str, Any]:
        """Return counts, trust and durations as a JSON-able value; topologies are not in it."""
        with self._lock:
            graphs = [
                {
                    "graph_id": graph_id,
                    "slow": learnt.slow.to_rows(),
                    "fast": learnt.fast.to_rows(),
                    "tools": learnt.tools.to_rows(),
                    "trust": [[source, list(weights)] for source, weights in learnt.trust.items()],
                }
                for graph_id, learnt in self._graphs.items()
            ]
            return {**super().snapshot(), "graphs": graphs}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace all that was learnt by a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            try:
                graphs = OrderedDict((str(row["graph_id"]), self._load(row)) for row in snapshot.get("graphs", ()))
            except (KeyError, TypeError, ValueError, AttributeError) as exc:
                raise ConfigError(
                    f"cannot restore a forecast: its counts are damaged ({type(exc).__name__}). "
                    "Delete the stored forecast; it is learnt again in tens of runs."
                ) from exc
            super().restore(snapshot)
            while len(graphs) > self._memory.max_graphs:
                graphs.popitem(last=False)
            self._graphs = graphs

    def _shares(self, graph_id: str, node: str, exits: Exits, context: tuple[str, ...]) -> Mapping[str, float]:
        learnt = self._graphs.get(graph_id)
        if learnt is None:
            return exits.shares
        trust = learnt.trust.get(node) or _even_trust()
        mixed: dict[str, float] = {}
        for weight, estimate in zip(trust, self._estimates(learnt, node, exits, context), strict=True):
            for target, share in estimate.items():
                mixed[target] = mixed.get(target, 0.0) + weight * share
        return mixed

    def _tool_shares(self, graph_id: str, node: str, tool: str, expected: Mapping[str, float]) -> Mapping[str, float]:
        learnt = self._graphs.get(graph_id)
        return expected if learnt is None else smooth(learnt.tools.row((node, tool)), expected, _PRIOR_STRENGTH)

    def _estimates(
        self, learnt: _Learnt, node: str, exits: Exits, context: tuple[str, ...]
    ) -> list[Mapping[str, float]]:
        """Return the estimate of each expert; what an estimate lacks to one is its unknown share."""
        estimates: list[Mapping[str, float]] = []
        for table in (learnt.slow, learnt.fast):
            below: Mapping[str, float] = exits.shares
            for order in range(_ORDERS):
                if order <= len(context):
                    below = smooth(table.row(_context_key(context, order, node)), below, _PRIOR_STRENGTH)
                estimates.append(below)
        return estimates

    def _judge(self, learnt: _Learnt, source: str, chances: Sequence[float]) -> None:
        """Shift trust to the experts that expected what happened; a little always goes round, so none is lost."""
        trust = learnt.trust.get(source) or _even_trust()
        weights = [weight * max(p, _LEAST_P) for weight, p in zip(trust, chances, strict=True)]
        total = sum(weights)
        learnt.trust[source] = [(1 - _SWITCH_RATE) * w / total + _SWITCH_RATE / _EXPERTS for w in weights]
        learnt.trust.move_to_end(source)
        if len(learnt.trust) > self._memory.max_keys:
            learnt.trust.popitem(last=False)

    def _learnt(self, graph_id: str) -> _Learnt:
        learnt = self._graphs.get(graph_id)
        if learnt is None:
            learnt = self._graphs[graph_id] = self._new_learnt()
            if len(self._graphs) > self._memory.max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(graph_id)
        return learnt

    def _new_learnt(self) -> _Learnt:
        memory = self._memory

        def table(decay: float) -> CountTable:
            return CountTable(decay=decay, max_keys=memory.max_keys, max_targets=memory.max_targets)

        return _Learnt(table(memory.slow_decay), table(memory.fast_decay), table(memory.slow_decay))

    def _load(self, row: Mapping[str, Any]) -> _Learnt:
        learnt = self._new_learnt()
        learnt.slow.load_rows(row["slow"])
        learnt.fast.load_rows(row["fast"])
        learnt.tools.load_rows(row["tools"])
        for source, weights in row["trust"]:
            if len(weights) != _EXPERTS:
                raise ValueError(f"trust needs {_EXPERTS} weights, got {len(weights)}")
            learnt.trust[str(source)] = [float(weight) for weight in weights]
        while len(learnt.trust) > self._memory.max_keys:
            learnt.trust.popitem(last=False)
        return learnt


def _context_key(context: tuple[str, ...], order: int, node: str) -> tuple[str, ...]:
    return (*context[len(context) - order :], node)


def _even_trust() -> list[float]:
    return [1.0 / _EXPERTS] * _EXPERTS
