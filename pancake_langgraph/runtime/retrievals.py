"""Tells indexes what is likely to be searched for next, as soon as a run shows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from uuid import UUID

from langchain_core.messages import BaseMessage, HumanMessage

from pancake_langgraph._types import ThreadId, WireObject
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.ledger import SpanKind
from pancake_langgraph.phases import TakesDrafts
from pancake_langgraph.plan import GraphPhases
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.fields import Fields
from pancake_langgraph.runtime.signals import Closed, FieldWritten, Opened, Requested, Signal
from pancake_langgraph.topology import Topology

#: What follows with less is not told.  Reading ahead costs little beside computing ahead, which asks for more.
_P_MIN = 0.2
_MAX_OPEN_CALLS = 4096
_MAX_SAID = 4096
_MAX_CHARS = 2000
#: Fields that graphs keep the question in which have no messages.
_QUESTIONS = ("query", "question", "input")


class _Retrieving(NamedTuple):
    """Who searches which index in one graph: nodes, also by their tools, and tools by name."""

    nodes: Mapping[str, TakesDrafts]
    tools: Mapping[str, TakesDrafts]


class _Call(NamedTuple):
    graph_id: str
    node: str
    thread_id: ThreadId


class RetrievalWatch:
    """Hands drafts of queries to the indexes that nodes and tools were declared to search.

    A draft is the last human message, or the state's question, when a node starts, when a model is asked, and each
    value that a model has written for a tool that searches.  An index hears of it when the node, or one that likely
    follows within two steps, searches it.  `receive` is called on the runtime's loop only; bounded in calls.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        """Ask `forecaster` what follows."""
        self._forecaster = forecaster
        self._graphs: dict[str, _Retrieving] = {}
        self._calls: OrderedDict[UUID, _Call] = OrderedDict()
        self._said: OrderedDict[tuple[ThreadId, int], str] = OrderedDict()

    def declare(self, graph_id: str, topology: Topology, phases: GraphPhases) -> None:
        """Take in which nodes and tools of a graph search an index; may be called from any thread."""
        tools = {name: phase.retrieves for name, phase in phases.tools.items() if phase.retrieves is not None}
        nodes: dict[str, TakesDrafts] = {}
        for info in topology.nodes:
            nodes |= {str(info.id): tools[name] for name in info.tools if name in tools}
        nodes |= {str(node): phase.retrieves for node, phase in phases.nodes.items() if phase.retrieves is not None}
        if nodes or tools:
            self._graphs[graph_id] = _Retrieving(nodes, tools)

    def receive(self, signal: Signal) -> None:
        """Take in one signal; costs nothing where no graph searches anything."""
        if not self._graphs:
            return
        if isinstance(signal, Opened):
            self._opened(signal)
        elif isinstance(signal, Requested):
            if (call := self._calls.get(signal.run_id)) is not None and (
                text := _last_question(signal.prompt.messages)
            ):
                self._tell_followers(call, text)
        elif isinstance(signal, FieldWritten):
            self._written(signal)
        elif isinstance(signal, Closed):
            self._calls.pop(signal.run_id, None)

    def _opened(self, signal: Opened) -> None:
        if signal.graph_id not in self._graphs:
            return
        call = _Call(signal.graph_id, strip_task_ids(signal.checkpoint_ns) or signal.name, signal.thread_id)
        if signal.kind is SpanKind.CALL:
            self._calls[signal.run_id] = call
            if len(self._calls) > _MAX_OPEN_CALLS:
                self._calls.popitem(last=False)
        elif signal.kind is SpanKind.NODE and signal.fields is not None and (text := _question_in(signal.fields)):
            for index in self._indexes(call):
                self._said.pop((call.thread_id, id(index)), None)  # the same words may be searched for again
            self._tell_followers(call, text)

    def _written(self, signal: FieldWritten) -> None:
        call = self._calls.get(signal.run_id)
        if call is None or not signal.value.strip():
            return
        if (index := self._graphs[call.graph_id].tools.get(signal.tool)) is not None:
            self._tell(index, call.thread_id, signal.value)

    def _tell_followers(self, call: _Call, text: str) -> None:
        for index in self._indexes(call):
            if self._said.get((call.thread_id, id(index))) != text:
                self._tell(index, call.thread_id, text)

    def _tell(self, index: TakesDrafts, thread_id: ThreadId, text: str) -> None:
        self._said[thread_id, id(index)] = text
        self._said.move_to_end((thread_id, id(index)))
        if len(self._said) > _MAX_SAID:
            self._said.popitem(last=False)
        index.draft(thread_id, text[:_MAX_CHARS])

    def _indexes(self, call: _Call) -> Iterator[TakesDrafts]:
        """Yield each index once that a node, or what likely follows it, searches."""
        nodes = self._graphs[call.graph_id].nodes
        likely = [c.node for c in self._forecaster.candidates(call.graph_id, call.node) if c.p_next >= _P_MIN]
        found = {id(nodes[name]): nodes[name] for name in (call.node, *likely) if name in nodes}
        return iter(found.values())


def _question_in(fields: Fields) -> str | None:
    """Return the last human message of a state, or what it has in a field for questions."""
    messages = fields.get("messages")
    for message in reversed(messages) if isinstance(messages, list) else ():
        if isinstance(message, HumanMessage):
            return _text(message)
    for name in _QUESTIONS:
        value = fields.get(name)
        if isinstance(value, str) and value.strip():
            return value
    return None


def _text(message: BaseMessage) -> str | None:
    return message.content if isinstance(message.content, str) and message.content.strip() else None


def _last_question(messages: tuple[WireObject, ...]) -> str | None:
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) and content.strip() else None
    return None
