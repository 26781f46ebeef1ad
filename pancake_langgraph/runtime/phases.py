"""What a runtime learns about the phases of its graphs, and the plans made of it."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.plan.compiled import CompiledPlan
from pancake_langgraph.plan.compiling import Learnt, compile_plan
from pancake_langgraph.plan.declared import read_phases
from pancake_langgraph.plan.habits import AnswerHabits
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.runtime.signals import Closed, Opened
from pancake_langgraph.topology import read_topology

_MAX_OPEN_CALLS = 4096


class PhaseWatch:
    """Learns from model calls whether a node decides or writes.

    `opened` and `closed` are called on the runtime's loop only; `plan` is thread-safe.  Bounded in calls and in nodes.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        """Take durations from `forecaster`."""
        self._forecaster = forecaster
        self._habits = AnswerHabits()
        self._calls: OrderedDict[UUID, tuple[str, str]] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Calls whose answer is waited for."""
        return len(self._calls)

    def opened(self, signal: Opened) -> None:
        """Take in a start; all but model calls inside a read graph are of no interest."""
        if signal.kind is SpanKind.CALL and signal.graph_id and (node := strip_task_ids(signal.checkpoint_ns)):
            self._calls[signal.run_id] = signal.graph_id, node
            if len(self._calls) > _MAX_OPEN_CALLS:
                self._calls.popitem(last=False)

    def closed(self, signal: Closed) -> None:
        """Take in an end; only that of a call which was seen to start and has an answer tells anything."""
        found = self._calls.pop(signal.run_id, None) if self._calls else None
        answer = signal.answer
        if found is not None and signal.status is SpanStatus.OK and answer is not None:
            self._habits.observe(*found, num_tool_calls=len(answer.tool_calls), num_chars=_num_chars(answer))

    def plan(self, graph: object) -> CompiledPlan:
        """Compile the plan of a graph with what was learnt about it.

        Raises:
            TopologyError: if `graph` is not a compiled graph.
        """
        topology = read_topology(graph)
        graph_id = topology.fingerprint
        learnt = Learnt(
            node_seconds=partial(self._forecaster.node_seconds, graph_id),
            tool_seconds=partial(self._forecaster.tool_seconds, graph_id),
            model_kind=partial(self._habits.kind, graph_id),
        )
        return compile_plan(topology, read_phases(graph), learnt)


def _num_chars(answer: AIMessage) -> int:
    if isinstance(answer.content, str):
        return len(answer.content)
    texts = [part if isinstance(part, str) else part.get("text") for part in answer.content]
    return sum(len(text) for text in texts if isinstance(text, str))
