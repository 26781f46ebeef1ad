"""The forecaster that expects nothing: the reference for "attached but idle"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pancake_langgraph._types import Candidate
from pancake_langgraph.forecast.base import Quantiles
from pancake_langgraph.forecast.declared import Declared
from pancake_langgraph.forecast.evidence import Clue
from pancake_langgraph.topology.graph import Topology


class NullForecaster:
    """Learns nothing and never has a candidate.  Stateless."""

    def add_graph(self, graph_id: str, topology: Topology) -> None:
        """Do nothing."""

    def declare(self, graph_id: str, declared: Declared) -> None:
        """Do nothing."""

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
        """Do nothing."""

    def observe_tool(self, graph_id: str, tool: str, elapsed_s: float) -> None:
        """Do nothing."""

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
        """Return no candidates."""
        return ()

    def tells(self, graph_id: str, node: str, clue: Clue) -> bool:
        """Return no."""
        return False

    def p_end(self, graph_id: str, node: str, *, context: Sequence[str] = ()) -> float:
        """Return 0: nothing is known."""
        return 0.0

    def tool_seconds(self, graph_id: str, tool: str) -> Quantiles | None:
        """Return `None`."""
        return None

    def node_seconds(self, graph_id: str, node: str) -> Quantiles | None:
        """Return `None`."""
        return None

    def snapshot(self, graph_id: str | None = None) -> dict[str, Any]:
        """Return an empty value."""
        return {}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Do nothing."""

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Do nothing."""
