"""What the hooks tell the runtime: frozen records, stamped where they happened."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph._types import Prompt, ThreadId, Usage
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.prompts.fields import Fields


@dataclass(frozen=True, slots=True)
class Opened:
    """A run, node, call or tool began.

    `checkpoint_ns` keeps its task ids; `fields` is the input of a node or run, by reference, `is_pushed` says that a
    node's is no part of the graph's state (`Send`), `order` sorts the tasks of a step; `graph_id` is empty when the
    graph's topology was not read.  `step` counts the steps of the graph around a node, `triggers` are all channels that
    can start it, `is_called` says that it is a task of the functional API; `is_resumed` that a run goes on from a
    checkpoint instead of taking an input.
    """

    at_s: float
    run_id: UUID
    parent_id: UUID | None
    kind: SpanKind
    name: str
    thread_id: ThreadId
    checkpoint_ns: str = ""
    agent_name: str | None = None
    fields: Fields | None = None
    is_pushed: bool = False
    order: str = ""
    graph_id: str = ""
    step: int = 0
    triggers: tuple[str, ...] = ()
    is_called: bool = False
    is_resumed: bool = False


@dataclass(frozen=True, slots=True)
class Requested:
    """A model call's exact request is known and about to be sent."""

    at_s: float
    run_id: UUID
    prompt: Prompt
    cache_salt: str | None
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class FirstPiece:
    """The first piece of an answer arrived; the ids are what the engine read, where it tells."""

    at_s: float
    run_id: UUID
    prompt_token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ToolNamed:
    """A streamed answer named its first tool."""

    at_s: float
    run_id: UUID
    tool_name: str


@dataclass(frozen=True, slots=True)
class FieldWritten:
    """A streamed answer has completely written one field: of a call of `tool`, or of itself where that is empty."""

    at_s: float
    run_id: UUID
    tool: str
    field: str
    value: str


@dataclass(frozen=True, slots=True)
class Decided:
    """The code that runs after a node, or the node itself, chose where to go; `run_id` is the node's.

    `names` may be labels of a path map, and may be no names of nodes at all.
    """

    at_s: float
    run_id: UUID
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A graph stopped at an interrupt, static or not; `run_id` is the graph's own run."""

    at_s: float
    run_id: UUID


@dataclass(frozen=True, slots=True)
class Measured:
    """The wire answer ended; `usage` is `None` when the server gave none or the answer was cut."""

    at_s: float
    run_id: UUID
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Closed:
    """A run, node, call or tool ended.  `answer` is a finished call's message, `updates` what a node writes."""

    at_s: float
    run_id: UUID
    status: SpanStatus
    answer: AIMessage | None = None
    updates: tuple[Fields, ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """A saver stored what makes `nodes` run next, in the graph that runs under `checkpoint_ns`."""

    at_s: float
    thread_id: ThreadId
    checkpoint_ns: str
    nodes: tuple[str, ...]


Signal = Opened | Requested | FirstPiece | ToolNamed | FieldWritten | Decided | Interrupted | Measured | Closed | Routed
