"""The forecaster that never learns routes: what the graph declares, with durations as they are observed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import Candidate
from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.forecast.lookahead import Exit, look_ahead
from pancake_langgraph.forecast.prior import (
    P_STREAMED,
    Announcement,
    Exits,
    announced_by,
    describe,
    exits_of,
    is_end,
    marginals,
)
from pancake_langgraph.forecast.quantiles import Durations
from pancake_langgraph.topology.graph import Topology

_VERSION = 1
_MAX_CACHED = 4096


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
        self._durations = Durations(max_keys=max_durations)
        self._declared: dict[tuple[str, str], Exits] = {}
        self._lock = threading.RLock()

    def add_graph(self, graph_id: str, topology: Topology) -> None:
        """Tell what a graph declares."""
        with self._lock:
            self._topologies[graph_id] = topology
            self._declared.clear()
            self._topologies.move_to_end(graph_id)
            if len(self._topologies) > self._max_graphs:
                self._topologies.popitem(last=False)

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
        """Record how long `source` took; where it went is not learnt."""
        with self._lock:
            self._durations.add(_key("node", graph_id, source), elapsed_s)

    def observe_tool(self, graph_id: str, tool: str, elapsed_s: float) -> None:
        """Record how long a tool ran."""
        with self._lock:
            self._durations.add(_key("tool", graph_id, tool), elapsed_s)

    def candidates(
        self,
        graph_id: str,
        node: str,
        *,
        first_tool_name: str | None = None,
        horizon_steps: int = 2,
        context: Sequence[str] = (),
    ) -> tuple[Candidate, ...]:
        """Return who may run after `node`; see `Forecaster.candidates`."""
        with self._lock:
            topology = self._topology(graph_id)
            said = announced_by(topology, node, first_tool_name) if first_tool_name else None
            first = self._exits(graph_id, node, tuple(context))
            if first_tool_name:
                first = self._with_tool(graph_id, node, first, said, first_tool_name)

            def onward(here: str, path: tuple[str, ...]) -> Mapping[str, Exit]:
                if said is not None and first_tool_name and here == said.tools_node and here not in path[:-1]:
                    return self._after_tools(graph_id, said, path, first_tool_name)
                return self._exits(graph_id, here, path)

            if said is not None:
                horizon_steps = max(horizon_steps, said.steps + 1)
            return look_ahead(node, first, onward, context=tuple(context), horizon_steps=horizon_steps)

    def p_end(self, graph_id: str, node: str, *, context: Sequence[str] = ()) -> float:
        """Return the chance that the run, or this branch of it, ends after `node`."""
        with self._lock:
            exits = self._exits(graph_id, node, tuple(context))
            return sum(exit_.p_next for target, exit_ in exits.items() if is_end(target))

    def tool_seconds(self, graph_id: str, tool: str) -> Quantiles | None:
        """Return how long a tool takes; `None` before it was seen."""
        with self._lock:
            return self._durations.quantiles(_key("tool", graph_id, tool))

    def node_seconds(self, graph_id: str, node: str) -> Quantiles | None:
        """Return how long it takes from a node's start to the start of what follows; `None` before it was seen."""
        with self._lock:
            return self._durations.quantiles(_key("node", graph_id, node))

    def snapshot(self) -> dict[str, Any]:
        """Return the durations as a JSON-able value."""
        with self._lock:
            return {"version": _VERSION, "durations": self._durations.to_rows()}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace the durations by those of a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        with self._lock:
            load_durations(self._durations, snapshot)

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

    def _shares(self, graph_id: str, node: str, exits: Exits, context: tuple[str, ...]) -> Mapping[str, float]:
        """Return how observations split over the targets of `node`; here, as declared."""
        return exits.shares

    def _tool_shares(self, graph_id: str, node: str, tool: str, expected: Mapping[str, float]) -> Mapping[str, float]:
        """Return the chances of targets once `tool` was called; here, as expected."""
        return expected

    def _exits(self, graph_id: str, node: str, context: tuple[str, ...]) -> dict[str, Exit]:
        exits = self._declared_exits(graph_id, node)
        shares = self._shares(graph_id, node, exits, context)
        eta_s = self._median(_key("node", graph_id, node))
        return {
            target: Exit(target, p_next, exits.steps.get(target, 1), eta_s, describe(exits, target))
            for target, p_next in marginals(exits, shares).items()
        }

    def _with_tool(
        self, graph_id: str, node: str, first: dict[str, Exit], said: Announcement | None, tool: str
    ) -> dict[str, Exit]:
        """Replace the exits of `node` by what the streamed tool name tells about them."""
        if said is not None and said.steps == 0:
            return self._after_tools(graph_id, said, (node,), tool)
        expected = {target: exit_.p_next for target, exit_ in first.items()}
        steps, reason = 1, f"tool {tool}"
        if said is not None:
            expected = {said.tools_node: P_STREAMED}
            steps, reason = said.steps, said.reason
        eta_s = self._median(_key("node", graph_id, node))
        chances = self._tool_shares(graph_id, node, tool, expected)
        return {
            target: Exit(target, min(1.0, p), steps if said and target == said.tools_node else 1, eta_s, reason)
            for target, p in chances.items()
        }

    def _after_tools(self, graph_id: str, said: Announcement, path: tuple[str, ...], tool: str) -> dict[str, Exit]:
        """Return the exits of a tools node when it is known which tool it runs."""
        eta_s = self._median(_key("tool", graph_id, tool))
        if said.targets:
            share = 1.0 / len(said.targets)
            return {target: Exit(target, share, 1, eta_s, said.reason) for target in said.targets}
        exits = self._exits(graph_id, said.tools_node, path[:-1] if path[-1:] == (said.tools_node,) else path)
        topology = self._topology(graph_id)
        hops = topology.hops(said.tools_node) if topology else ()
        handoffs = {hop.target for hop in hops if hop.kind == "handoff"}
        others = {hop.target for hop in hops if hop.kind != "handoff"}
        stay = {target: exit_ for target, exit_ in exits.items() if target not in handoffs - others}
        # Which way a handoff would go is settled by the tool's name, so its share falls to the ways that stay.
        lost = sum(exit_.p_next for target, exit_ in exits.items() if target not in stay)
        kept = sum(exit_.p_next for exit_ in stay.values())
        scale = (kept + lost) / kept if kept else 1.0
        return {
            target: Exit(target, min(1.0, e.p_next * scale), e.steps, eta_s or e.eta_s, f"resumes after {said.reason}")
            for target, e in stay.items()
        }

    def _median(self, key: str) -> float | None:
        found = self._durations.quantiles(key)
        return None if found is None else found.p50_s


def load_durations(durations: Durations, snapshot: Mapping[str, Any]) -> None:
    """Load the durations of a snapshot.

    Raises:
        ConfigError: if the snapshot is not one of this version; `durations` is unchanged then.
    """
    if snapshot.get("version") != _VERSION:
        raise ConfigError(
            f"cannot restore a forecast: got version {snapshot.get('version')!r}, allowed is {_VERSION}. "
            "Delete the stored forecast; it is learnt again in tens of runs."
        )
    try:
        rows = [(str(key), [float(sample) for sample in samples]) for key, samples in snapshot["durations"]]
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"cannot restore a forecast: the durations are damaged ({type(exc).__name__}). "
            "Delete the stored forecast; it is learnt again in tens of runs."
        ) from exc
    durations.load_rows(rows)


def _key(kind: str, graph_id: str, name: str) -> str:
    return f"{kind}\x1f{graph_id}\x1f{name}"
