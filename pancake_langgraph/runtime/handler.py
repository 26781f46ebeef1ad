"""The LangChain callback handler: turns public callbacks into signals.

It does nothing but read, stamp and post; all thinking happens on the runtime's own loop.  One instance may serve any
number of graphs, threads and event loops at once: it holds no mutable state except a bounded set of run ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from langgraph.callbacks import GraphCallbackHandler, GraphInterruptEvent
from langgraph.errors import GraphInterrupt, ParentCommand
from langgraph.types import Command

from pancake_langgraph._clock import Clock
from pancake_langgraph._types import Prompt, ThreadId, Usage
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.prompts.fields import Fields, fields_of
from pancake_langgraph.prompts.outlook import updates_of
from pancake_langgraph.runtime.choices import names_chosen
from pancake_langgraph.runtime.signals import (
    Closed,
    Decided,
    Drafted,
    FieldWritten,
    FirstPiece,
    Interrupted,
    Measured,
    Opened,
    Requested,
    Signal,
    ToolNamed,
)
from pancake_langgraph.runtime.wire_extras import WireExtras

logger = logging.getLogger(__name__)

#: LangGraph tags the callback of a node's task with this prefix; inner sequence steps carry `seq:step:`.
_NODE_TAG = "graph:step:"
#: How LangGraph's task path begins where a node gets an input of its own.
_PUSH = "__pregel_push"
#: Parts of the path of a task that a `Send` made; a called one has more.
_SEND_PATH = 3
_MAX_OPEN_RUNS = 65_536

_T = TypeVar("_T")


class RuntimeHandler(GraphCallbackHandler):
    """Posts signals.  Never raises into the graph."""

    run_inline = True  # order matters, and no callback here blocks
    raise_error = False

    def __init__(
        self,
        post: Callable[[Signal], None],
        *,
        clock: Clock,
        wire_extras: Callable[[UUID, Mapping[str, Any]], WireExtras],
        graph_id: str = "",
        runtime: object = None,
        on_unreadable: Callable[[], None] = lambda: None,
        wanted_drafts: Callable[[str, str], frozenset[str]] = lambda graph_id, checkpoint_ns: frozenset(),
    ) -> None:
        """Send signals to `post`; `wire_extras` gives what the request of a call should say besides.

        `graph_id` names the graph whose topology is known; empty for a handler that serves any graph;
        `runtime` is kept so that the owner can be found again; `on_unreadable` is called for each state that does not
        let itself be read; `wanted_drafts` says for a graph and the place of a call what of it is wanted early, see
        `DraftObserver`.
        """
        self._post = post
        self.graph_id = graph_id
        self.runtime = runtime
        self._clock = clock
        self._wire_extras = wire_extras
        self._on_unreadable = on_unreadable
        self._wanted_drafts = wanted_drafts
        self._open: OrderedDict[UUID, str | None] = OrderedDict()
        self._chains: OrderedDict[UUID, None] = OrderedDict()
        self._nodes: OrderedDict[UUID, str] = OrderedDict()
        self._steps: OrderedDict[UUID, UUID] = OrderedDict()
        self._drafted: OrderedDict[UUID, frozenset[str]] = OrderedDict()

    # -- graph runs and nodes -------------------------------------------------------------------------------------

    def on_chain_start(
        self,
        serialized: dict[str, Any] | None,
        inputs: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the start of a run or of a node; other chains are of no interest."""
        meta = metadata or {}
        name = str(kwargs.get("name") or "")
        is_outermost = parent_run_id is None or parent_run_id not in self._chains
        self._chains[run_id] = None
        if len(self._chains) > _MAX_OPEN_RUNS:
            self._chains.popitem(last=False)
        if is_outermost:  # the run that this handler was given for, alone or inside somebody else's chain
            is_resumed = inputs is None or isinstance(inputs, Command)
            fields = None if is_resumed else self._seen(fields_of, inputs)
            self._start(run_id, parent_run_id, SpanKind.RUN, name or "run", meta, fields=fields, is_resumed=is_resumed)
        elif _is_task(tags) or self._is_called(parent_run_id, meta):
            _remember(self._nodes, run_id, str(meta.get("langgraph_checkpoint_ns") or ""))
            node = str(meta.get("langgraph_node") or name)
            self._start(run_id, parent_run_id, SpanKind.NODE, node, meta, fields=self._seen(fields_of, inputs))
        elif parent_run_id is not None and parent_run_id in self._nodes:
            _remember(self._steps, run_id, parent_run_id)

    def on_chain_end(self, outputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Report the end of a run or node."""
        self._chains.pop(run_id, None)
        node_id = self._steps.pop(run_id, None) or (run_id if self._nodes.pop(run_id, None) is not None else None)
        if node_id is not None and (names := names_chosen(outputs)):
            self._post(Decided(self._clock.now_s(), node_id, names))
        if run_id in self._open:
            self._end(run_id, SpanStatus.OK, updates=self._seen(updates_of, outputs) or ())

    def on_interrupt(self, event: GraphInterruptEvent) -> None:
        """Report that a graph stopped and may go on later, which its end does not tell."""
        if event.run_id is not None:
            self._post(Interrupted(self._clock.now_s(), event.run_id))

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Report a failed, interrupted or cancelled run or node, or one that hands over to the graph around it."""
        self._chains.pop(run_id, None)
        self._steps.pop(run_id, None)
        self._nodes.pop(run_id, None)
        self._end(run_id, _status_of(error))

    # -- model calls ----------------------------------------------------------------------------------------------

    def on_chat_model_start(
        self,
        serialized: dict[str, Any] | None,
        messages: list[list[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the start of a model call."""
        meta = metadata or {}
        name = str(meta.get("lc_agent_name") or meta.get("langgraph_node") or "model")
        self._start(run_id, parent_run_id, SpanKind.CALL, name, meta)
        if wanted := self._wanted_drafts(self.graph_id, str(meta.get("langgraph_checkpoint_ns") or "")):
            _remember(self._drafted, run_id, wanted)

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Report the first piece of an answer, for models that do not tell it themselves."""
        if self._open.get(run_id, _MISSING) is None:
            self.on_wire_first_piece(run_id, None)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Report the end of a model call with its answer in wire form."""
        self._end(run_id, SpanStatus.OK, _answer(response))

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Report a failed or cancelled model call."""
        self._end(run_id, _status_of(error))

    # -- what only PancakeChatModel tells (see `pancake_langgraph.wire.observer`) ----------------------------------

    def on_wire_request(self, run_id: UUID, payload: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Report the exact request; return what to add to it."""
        extra = payload.get("extra_body") or {}
        max_tokens = payload.get("max_tokens") or payload.get("max_completion_tokens")
        extras = self._wire_extras(run_id, payload)
        self._post(
            Requested(
                at_s=self._clock.now_s(),
                run_id=run_id,
                prompt=Prompt.of(payload.get("messages") or (), payload.get("tools")),
                cache_salt=extra.get("cache_salt") or payload.get("cache_salt"),
                max_tokens=max_tokens if isinstance(max_tokens, int) else None,
                hints=extras.hints,
            )
        )
        return extras.body

    def on_wire_first_piece(self, run_id: UUID, prompt_token_ids: tuple[int, ...] | None) -> None:
        """Report the first piece of the answer, once."""
        if self._open.get(run_id, _MISSING) is not None:
            return
        self._open[run_id] = "answering"
        self._post(FirstPiece(self._clock.now_s(), run_id, prompt_token_ids))

    def on_wire_tool_name(self, run_id: UUID, tool_name: str) -> None:
        """Report the first tool name in the streamed answer."""
        self._post(ToolNamed(self._clock.now_s(), run_id, tool_name))

    def on_wire_field(self, run_id: UUID, tool: str, field: str, value: str) -> None:
        """Report a value that the model has completely written."""
        self._post(FieldWritten(self._clock.now_s(), run_id, tool, field, value))

    def wanted_wire_drafts(self, run_id: UUID) -> frozenset[str]:
        """Return of which texts the first words are wanted; nothing where no index waits for any."""
        return self._drafted.get(run_id, frozenset())

    def on_wire_draft(self, run_id: UUID, tool: str, text: str) -> None:
        """Report the first words of what the model writes."""
        self._post(Drafted(self._clock.now_s(), run_id, tool, text))

    def on_wire_end(self, run_id: UUID, usage: Usage | None, finish_reason: str | None) -> None:
        """Report the token counts."""
        self._post(Measured(self._clock.now_s(), run_id, usage))

    # -- tools ----------------------------------------------------------------------------------------------------

    def on_tool_start(
        self,
        serialized: dict[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Report the start of a tool."""
        name = str((serialized or {}).get("name") or kwargs.get("name") or "tool")
        self._start(run_id, parent_run_id, SpanKind.TOOL, name, metadata or {})

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Report the end of a tool."""
        self._end(run_id, SpanStatus.OK)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Report a failed, interrupted or cancelled tool."""
        self._end(run_id, _status_of(error))

    # -- shared ---------------------------------------------------------------------------------------------------

    def _start(
        self,
        run_id: UUID,
        parent_id: UUID | None,
        kind: SpanKind,
        name: str,
        meta: Mapping[str, Any],
        *,
        fields: Fields | None = None,
        is_resumed: bool = False,
    ) -> None:
        self._open[run_id] = None
        if len(self._open) > _MAX_OPEN_RUNS:
            self._open.popitem(last=False)
        thread_id, path = meta.get("thread_id"), meta.get("langgraph_path")
        is_pushed, order, step, triggers = False, "", 0, ()
        if kind is SpanKind.NODE:  # of others nobody asks
            is_pushed, order = (path or ("",))[0] == _PUSH, _order(path)
            step, triggers = int(meta.get("langgraph_step") or 0), tuple(meta.get("langgraph_triggers") or ())
        self._post(
            Opened(  # by place, which is quicker than by name: this runs at each start of anything
                self._clock.now_s(),
                run_id,
                parent_id,
                kind,
                name,
                ThreadId("" if thread_id is None else str(thread_id)),
                str(meta.get("langgraph_checkpoint_ns") or ""),
                meta.get("lc_agent_name"),
                fields,
                is_pushed,
                order,
                self.graph_id,
                step,
                triggers,
                kind is SpanKind.NODE and _is_call(path),
                is_resumed,
            )
        )

    def _seen(self, read: Callable[[object], _T], value: object) -> _T | None:
        """Return what a read makes of the application's value; `None` when that value does not let itself be read."""
        try:
            return read(value)
        except Exception as exc:  # noqa: BLE001 - a state of any kind may raise anything; a hint fails open; counted
            self._on_unreadable()
            logger.debug("a state could not be read: %s", type(exc).__name__)
            return None

    def _is_called(self, parent_id: UUID | None, meta: Mapping[str, Any]) -> bool:
        """Whether a chain is a task of the functional API, called by the node that it runs inside."""
        around = self._nodes.get(parent_id) if parent_id is not None else None
        own = meta.get("langgraph_checkpoint_ns")
        return around is not None and around != own and _is_call(meta.get("langgraph_path"))

    def _end(
        self, run_id: UUID, status: SpanStatus, answer: AIMessage | None = None, updates: tuple[Fields, ...] = ()
    ) -> None:
        self._drafted.pop(run_id, None)
        if self._open.pop(run_id, _MISSING) is not _MISSING:
            self._post(Closed(self._clock.now_s(), run_id, status, answer, updates))


_K = TypeVar("_K")


def _remember(table: OrderedDict[UUID, _K], run_id: UUID, value: _K) -> None:
    table[run_id] = value
    if len(table) > _MAX_OPEN_RUNS:
        table.popitem(last=False)


def _is_task(tags: list[str] | None) -> bool:
    """Whether a chain is the task of a node, and no step inside of one."""
    for tag in tags or ():  # noqa: SIM110 - a generator costs more than the loop
        if tag.startswith(_NODE_TAG):
            return True
    return False


def _is_call(path: Any) -> bool:
    """Whether a task's path says that other code called it and waits for what it returns."""
    return isinstance(path, tuple) and len(path) > _SEND_PATH and path[0] == _PUSH and path[-1] is True


_MISSING: Any = object()


def _status_of(error: BaseException) -> SpanStatus:
    if isinstance(error, ParentCommand):  # how LangGraph leaves a sub-graph by `Command(graph=PARENT)`
        return SpanStatus.OK
    if isinstance(error, GraphInterrupt | asyncio.CancelledError | GeneratorExit):
        return SpanStatus.CANCELLED
    return SpanStatus.ERROR


def _order(path: Any) -> str:
    """Return a text that sorts the tasks of one step as LangGraph does when it applies their writes."""
    parts = path[:2] if isinstance(path, tuple) else ()
    if len(parts) < 2 or not isinstance(parts[1], str | int):
        return ""
    return f"{parts[0]}, {parts[1]:010d}" if isinstance(parts[1], int) else f"{parts[0]}, {parts[1]}"


def _answer(response: LLMResult) -> AIMessage | None:
    generations = response.generations[0] if response.generations else []
    message = getattr(generations[0], "message", None) if generations else None
    return message if isinstance(message, AIMessage) else None
