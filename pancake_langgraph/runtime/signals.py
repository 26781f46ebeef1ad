"""What the hooks tell the runtime: frozen records, stamped where they happened.

They are made in the user's thread, in each callback; named tuples are made in a third of a frozen dataclass's time.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from langchain_core.messages import AIMessage

from pancake_langgraph._types import Prompt, ThreadId, Usage
from pancake_langgraph.engines.pool_hints import PoolHints
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.prompts.fields import Fields


class Opened(NamedTuple):
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


class Requested(NamedTuple):
    """A model call's exact request is known and about to be sent; `hints` are what it says to the engine's pool."""

    at_s: float
    run_id: UUID
    prompt: Prompt
    cache_salt: str | None
    max_tokens: int | None
    hints: PoolHints | None = None


class FirstPiece(NamedTuple):
    """The first piece of an answer arrived; the ids are what the engine read, where it tells."""

    at_s: float
    run_id: UUID
    prompt_token_ids: tuple[int, ...] | None


class ToolNamed(NamedTuple):
    """A streamed answer named its first tool."""

    at_s: float
    run_id: UUID
    tool_name: str


class FieldWritten(NamedTuple):
    """A streamed answer has completely written one field: of a call of `tool`, or of itself where that is empty."""

    at_s: float
    run_id: UUID
    tool: str
    field: str
    value: str


class Drafted(NamedTuple):
    """A streamed answer has written so much of one text: in a call of `tool`, or of itself where that is empty."""

    at_s: float
    run_id: UUID
    tool: str
    text: str


class Decided(NamedTuple):
    """The code that runs after a node, or the node itself, chose where to go; `run_id` is the node's.

    `names` may be labels of a path map, and may be no names of nodes at all.
    """

    at_s: float
    run_id: UUID
    names: frozenset[str]


class Interrupted(NamedTuple):
    """A graph stopped at an interrupt, static or not; `run_id` is the graph's own run."""

    at_s: float
    run_id: UUID


class Measured(NamedTuple):
    """The wire answer ended; `usage` is `None` when the server gave none or the answer was cut."""

    at_s: float
    run_id: UUID
    usage: Usage | None


class Closed(NamedTuple):
    """A run, node, call or tool ended.  `answer` is a finished call's message, `updates` what a node writes."""

    at_s: float
    run_id: UUID
    status: SpanStatus
    answer: AIMessage | None = None
    updates: tuple[Fields, ...] = ()


class Routed(NamedTuple):
    """A saver stored what makes `nodes` run next, in the graph that runs under `checkpoint_ns`."""

    at_s: float
    thread_id: ThreadId
    checkpoint_ns: str
    nodes: tuple[str, ...]


Signal = (
    Opened
    | Requested
    | FirstPiece
    | ToolNamed
    | FieldWritten
    | Drafted
    | Decided
    | Interrupted
    | Measured
    | Closed
    | Routed
)
