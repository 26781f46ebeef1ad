"""What really followed what in a run: executions of nodes and the writes that triggered the next ones.  Pure.

The writes of a task name its targets exactly (`branch:to:x`, `join:a+b:c`, a `Send`), which is what `state.next` is
computed from; a leaf without targets hands over to what its surrounding node triggers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pancake_langgraph.bench.forecast_score import END_LABEL
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.identity import parent_namespace

_BRANCH, _JOIN, _SENDS, _RETURN = "branch:to:", "join:", "__pregel_tasks", "__return__"


@dataclass(slots=True)
class Execution:
    """One run of a node.  `started` and `ended` are numbers in the order of all events; `ended` is 0 while open."""

    checkpoint_ns: str
    step: int
    started: int
    started_at_s: float
    ended: int = 0

    @property
    def label(self) -> str:
        """The node as forecasts name it."""
        return strip_task_ids(self.checkpoint_ns)

    @property
    def around(self) -> str:
        """Namespace of the node that this one runs inside; empty at the root."""
        namespace = parent_namespace(self.checkpoint_ns)
        while namespace and ":" not in namespace.rpartition("|")[2]:  # a second sub-graph in one node has a number
            namespace = parent_namespace(namespace)
        return namespace

    @property
    def name(self) -> str:
        """The node's own name."""
        return self.checkpoint_ns.rpartition("|")[2].partition(":")[0]

    @property
    def task_id(self) -> str:
        """Id that its writes are stored under."""
        return self.checkpoint_ns.rpartition(":")[2]


@dataclass(frozen=True, slots=True)
class Written:
    """What one task wrote, as far as it routes: names of nodes, and whether it is a call of the functional API."""

    targets: frozenset[str]
    is_call: bool

    @staticmethod
    def of(writes: Iterable[tuple[str, object]]) -> Written:
        """Read the writes that a saver is given."""
        targets: set[str] = set()
        is_call = False
        for channel, value in writes:
            if channel.startswith(_BRANCH):
                targets.add(channel.removeprefix(_BRANCH))
            elif channel.startswith(_JOIN):
                targets.add(channel.rpartition(":")[2])
            elif channel == _SENDS:
                targets.add(str(getattr(value, "node", "")))
            elif channel == _RETURN:
                is_call = True
        return Written(frozenset(targets), is_call)


_NOTHING = Written(frozenset(), is_call=False)


class RunTruth:
    """Answers for one run that has ended."""

    def __init__(self, executions: Sequence[Execution], written: Mapping[str, Written]) -> None:
        """Take all executions in the order of their starts, and what their tasks wrote, by task id."""
        self._executions = executions
        self._written = written
        self._at = {execution.checkpoint_ns: execution for execution in executions}
        self._composites = {execution.around for execution in executions}

    @property
    def leaves(self) -> list[Execution]:
        """Executions that have no others inside."""
        return [e for e in self._executions if e.checkpoint_ns not in self._composites]

    def after(self, execution: Execution) -> frozenset[str]:
        """Return the labels of the leaves that `execution` made start, or `END_LABEL` alone."""
        written = self._written.get(execution.task_id, _NOTHING)
        if written.targets:
            labels = [self._entries(execution, name) for name in written.targets]
            return frozenset(label for found in labels for label in found)
        if written.is_call:
            after = [e for e in self.leaves if e.around == execution.around and e.started > execution.ended]
            if after:
                return frozenset({after[0].label})
        outer = self._at.get(execution.around)
        return frozenset({END_LABEL}) if outer is None else self.after(outer)

    def _entries(self, source: Execution, name: str) -> set[str]:
        """Return the leaves that start first inside the target `name` of `source`."""
        later = [
            e for e in self._executions if e.around == source.around and e.name == name and e.started > source.started
        ]
        if not later:  # the run was cut before it came
            return {f"{strip_task_ids(source.around)}|{name}" if source.around else name}
        step = min(e.step for e in later)
        return {label for e in later if e.step == step for label in self._first_leaves(e)}

    def _first_leaves(self, execution: Execution) -> set[str]:
        inner = [e for e in self._executions if e.around == execution.checkpoint_ns]
        if not inner:
            return {execution.label}
        step = min(e.step for e in inner)
        first = [e for e in inner if e.step == step]
        if any(self._written.get(e.task_id, _NOTHING).is_call for e in first):
            first = first[:1]  # calls of the functional API have no steps
        return {label for e in first for label in self._first_leaves(e)}
