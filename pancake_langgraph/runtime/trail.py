"""What is remembered of one run: its graphs, the executions of their nodes, and the branches that wait."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from pancake_langgraph._types import NodeId
from pancake_langgraph.forecast import Clue
from pancake_langgraph.ledger import SpanStatus

#: Bounds: graphs that run inside one run, executions in one step of a graph, branches that wait, clues of a call.
MAX_LEVELS = 256
MAX_TASKS = 1024
MAX_WAITING = 64
MAX_CLUES = 16


@dataclass(slots=True, eq=False)
class Leaf:
    """One execution of a node that runs itself.

    `context` are the nodes before it in its branch, oldest first; `tool` and `clues` what its last model call has
    written so far; `told` what the call of the node before it wrote, and `ran` the tools that it ran itself.
    """

    node: NodeId
    started_at_s: float
    context: tuple[NodeId, ...] = ()
    ended_at_s: float = math.nan
    tool: str | None = None
    clues: dict[Clue, None] = field(default_factory=dict)
    told: tuple[Clue, ...] = ()
    ran: set[str] = field(default_factory=set)
    followers: set[str] = field(default_factory=set)

    @property
    def evidence(self) -> tuple[Clue, ...]:
        """What is written about where this leads: by its own call, or by the one whose tools it runs."""
        return tuple(self.clues) or tuple(clue for clue in self.told if not self.ran or clue.tool in self.ran)

    @property
    def asked_tool(self) -> str | None:
        """The one tool that the node before asked for; `None` when there were several or none."""
        tools = {clue.tool for clue in self.evidence if clue.tool} if not self.clues else set()
        return next(iter(tools)) if len(tools) == 1 else None


@dataclass(slots=True, eq=False)
class Task:
    """One execution as LangGraph counts them; `leaf` is `None` for a sub-graph, `goto` what it decided if known."""

    name: str
    step: int
    sources: tuple[Leaf, ...]
    leaf: Leaf | None
    status: SpanStatus | None = None
    exits: tuple[Leaf, ...] = ()
    goto: set[str] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether it ended well."""
        return self.status is SpanStatus.OK


@dataclass(slots=True)
class Level:
    """One graph that runs: its executions by step, and those of earlier steps that led nowhere yet."""

    prefix: str
    origins: tuple[Leaf, ...]
    steps: dict[int, OrderedDict[str, Task]] = field(default_factory=dict)
    waiting: deque[Task] = field(default_factory=lambda: deque(maxlen=MAX_WAITING))

    def enter(self, step: int) -> OrderedDict[str, Task]:
        """Return the executions of `step`, and set aside what is older than the step before."""
        for old in [number for number in self.steps if number < step - 1]:
            for task in self.steps.pop(old).values():
                if task.ended and any(not leaf.followers for leaf in task.exits):
                    self.waiting.append(task)
        return self.steps.setdefault(step, OrderedDict())

    def tasks(self) -> list[Task]:
        """Return all executions that are remembered, oldest first."""
        return [*self.waiting, *(task for step in sorted(self.steps) for task in self.steps[step].values())]

    def loose_ends(self) -> tuple[Leaf, ...]:
        """Return what has ended and led to nothing inside this graph."""
        return tuple(leaf for task in self.tasks() if task.ended for leaf in task.exits if not leaf.followers)


@dataclass(slots=True)
class Trail:
    """Where one run has been.  `is_cut` says that it was interrupted: its end is then not the end of the graph."""

    start: Leaf | None
    levels: OrderedDict[str, Level] = field(default_factory=OrderedDict)
    open: OrderedDict[str, Task] = field(default_factory=OrderedDict)
    running: dict[NodeId, int] = field(default_factory=dict)
    is_cut: bool = False

    def beside(self, node: str) -> tuple[NodeId, ...]:
        """Return the nodes that run beside `node`."""
        return tuple(name for name, count in self.running.items() if count > 0 and name != node)

    def put_aside(self) -> None:
        """Wait for the run to resume: how long that takes says nothing about the graph."""
        self.is_cut = False
        self.open.clear()
        self.running.clear()
        for level in self.levels.values():
            for task in level.tasks():
                for leaf in (*task.exits, *task.sources):
                    leaf.started_at_s = math.nan
