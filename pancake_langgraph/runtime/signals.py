"""What the hooks tell the runtime: frozen records, stamped where they happened."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage

from pancake_langgraph._types import Prompt, ThreadId, Usage
from pancake_langgraph.ledger import SpanKind, SpanStatus


@dataclass(frozen=True, slots=True)
class Opened:
    """A run, node, call or tool began.

    `checkpoint_ns` keeps its task ids; `state_messages` are a node's input messages, where it has any; `graph_id` is
    empty when the graph's topology was not read.
    """

    at_s: float
    run_id: UUID
    parent_id: UUID | None
    kind: SpanKind
    name: str
    thread_id: ThreadId
    checkpoint_ns: str = ""
    agent_name: str | None = None
    state_messages: tuple[BaseMessage, ...] | None = None
    graph_id: str = ""


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
class Measured:
    """The wire answer ended; `usage` is `None` when the server gave none or the answer was cut."""

    at_s: float
    run_id: UUID
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Closed:
    """A run, node, call or tool ended.  `answer` is a finished call's message."""

    at_s: float
    run_id: UUID
    status: SpanStatus
    answer: AIMessage | None = None


@dataclass(frozen=True, slots=True)
class Routed:
    """A saver stored what makes `nodes` run next, in the graph that runs under `checkpoint_ns`."""

    at_s: float
    thread_id: ThreadId
    checkpoint_ns: str
    nodes: tuple[str, ...]


Signal = Opened | Requested | FirstPiece | ToolNamed | Measured | Closed | Routed
