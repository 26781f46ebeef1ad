"""What the answers of a model node show about it: does it decide, or does it write."""

from __future__ import annotations

import threading
from collections import OrderedDict

from pancake_langgraph.phases import PhaseKind

#: A text answer up to this long is a route or a verdict, not a text that somebody will read.
DECISION_CHARS = 160
_DECAY = 0.95


class AnswerHabits:
    """Learns per model node whether its answers are decisions (tool calls, routes) or texts.

    Thread-safe.  Keeps at most `max_nodes` nodes, forgetting the one unused for longest; old answers fade.  No text is
    kept, only one share per node.
    """

    def __init__(self, *, max_nodes: int = 2048) -> None:
        """Start without knowledge.

        Raises:
            ValueError: if the bound is under 1.
        """
        if max_nodes < 1:
            raise ValueError(f"max_nodes must be at least 1: got {max_nodes}")
        self._max_nodes = max_nodes
        self._shares: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shares)

    def observe(self, graph_id: str, node: str, *, num_tool_calls: int, num_chars: int) -> None:
        """Take in one answer by its number of tool calls and its length in characters."""
        decided = 1.0 if num_tool_calls or num_chars <= DECISION_CHARS else 0.0
        key = (graph_id, node)
        with self._lock:
            share = self._shares.pop(key, decided)
            self._shares[key] = _DECAY * share + (1 - _DECAY) * decided
            if len(self._shares) > self._max_nodes:
                self._shares.popitem(last=False)

    def kind(self, graph_id: str, node: str) -> PhaseKind | None:
        """Return "reasoning" where a good part of the answers were decisions, else "generation"; `None` if unseen.

        An agent that calls tools and then writes up what it found is reasoning, so a third of the answers is enough.
        """
        with self._lock:
            share = self._shares.get((graph_id, node))
        return None if share is None else "reasoning" if share >= 1 / 3 else "generation"
