"""The port of forecasting: who runs next, how sure, how soon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pancake_langgraph._types import Candidate
from pancake_langgraph.forecast.declared import Declared
from pancake_langgraph.forecast.evidence import Clue
from pancake_langgraph.topology.graph import Topology


class Quantiles(NamedTuple):
    """Durations seen lately, in seconds; `num_samples` is how many were measured (0 = declared only)."""

    p10_s: float
    p50_s: float
    p90_s: float
    num_samples: int


class Forecaster(Protocol):
    """Learns which node follows which and says what to expect.

    Implementations are thread-safe, deterministic (equal observations in equal order give equal answers), bounded in
    memory, do no I/O and never raise for unknown names.  `graph_id` names a graph, best by `Topology.fingerprint`;
    nodes are named as in `Topology`.  `context` holds the nodes that ran before, oldest first, in the same thread;
    leaving it out costs accuracy on routes that depend on history or on who called the graph around a node, and at most
    the last `contexts.CONTEXT_NODES` are of use.
    """

    def add_graph(self, graph_id: str, topology: Topology) -> None:
        """Tell what a graph declares.  Idempotent; keeps what has been learnt."""
        ...

    def declare(self, graph_id: str, declared: Declared) -> None:
        """Tell what the author of a graph declared about durations and needs; replaces what was told before.

        Declared seconds are the first estimate of `node_seconds` and `tool_seconds`; declared needs raise candidates.
        Both give way to what is observed.
        """
        ...

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
        """Learn that `target` started because `source` ended, `elapsed_s` seconds after `source` started.

        Call once per distinct target of one execution of `source`, with targets that run themselves (not sub-graphs);
        `nth` counts those before this one.  `"__start__"` as source and `"__end__"` as target are welcome.
        `first_tool_name` is the first tool that the model in `source` called, if any, and `clues` what it, or the node
        before that does as it is told, has written.
        """
        ...

    def observe_tool(self, graph_id: str, tool: str, elapsed_s: float) -> None:
        """Learn how long a tool ran, in seconds."""
        ...

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
        """Return who may run after `node`, most likely first, up to `horizon_steps` steps away.

        `p_next` is the chance that the node runs at that step.  Among the exits of a node that exclude each other the
        chances at `steps == 1` sum to at most 1, and what is missing is the end of the run (`p_end`) or unknown; where
        a node starts several others at once, each has its own chance and the sum may exceed 1.  The times count from
        the start of `node`.  The end of a run is never a candidate.

        `clues` are what the model in `node` has written so far; `running` are the nodes that run beside it, which a
        join may wait for: it is as far away as its slowest branch.
        """
        ...

    def tells(self, graph_id: str, node: str, clue: Clue) -> bool:
        """Whether a value that the model in `node` has just written may change its candidates.  Quick."""
        ...

    def p_end(self, graph_id: str, node: str, *, context: Sequence[str] = ()) -> float:
        """Return the chance that the run, or this branch of it, ends after `node`."""
        ...

    def tool_seconds(self, graph_id: str, tool: str) -> Quantiles | None:
        """Return how long a tool takes; `None` before it was seen or declared."""
        ...

    def node_seconds(self, graph_id: str, node: str) -> Quantiles | None:
        """Return how long it takes from a node's start to the start of what follows.

        `None` before it was seen or declared.
        """
        ...

    def snapshot(self, graph_id: str | None = None) -> dict[str, Any]:
        """Return what was learnt about one graph, or about all, as a JSON-able value.

        It names nodes, tools and fields, and holds no value that a model wrote.
        """
        ...

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Replace what was learnt by a snapshot.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        ...

    def merge(self, snapshot: Mapping[str, Any]) -> None:
        """Add a snapshot to what was learnt, as if both had been seen.  Order matters little.

        Raises:
            ConfigError: if the snapshot is not one of this version; nothing is changed then.
        """
        ...
