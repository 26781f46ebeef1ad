"""Tells indexes what is likely to be searched for next, as soon as a run shows it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple
from uuid import UUID

from langchain_core.messages import BaseMessage, HumanMessage

from pancake_langgraph._types import ThreadId, WireObject
from pancake_langgraph.forecast import Forecaster
from pancake_langgraph.ledger import SpanKind, SpanStatus
from pancake_langgraph.phases import TakesDrafts
from pancake_langgraph.plan import GraphPhases
from pancake_langgraph.prompts import strip_task_ids
from pancake_langgraph.prompts.fields import Fields
from pancake_langgraph.runtime.signals import Closed, Drafted, Opened, Requested, Signal
from pancake_langgraph.topology import Topology
from pancake_langgraph.wire.drafts import MAX_CHARS, draft_in

#: What follows with less is not told.  Reading ahead costs little beside computing ahead, which asks for more.
_P_MIN = 0.2
_MAX_OPEN_CALLS = 4096
_MAX_SAID = 4096
_MAX_QUIET = 4096
#: What a model wrote as a query counts until it is searched for, or so many other nodes of the thread have begun.
_PATIENCE_NODES = 4
#: Fields that graphs keep the question in which have no messages.
_QUESTIONS = ("query", "question", "input")


class _Retrieving(NamedTuple):
    """Who searches which index in one graph.

    `nodes` search themselves or by their tools, `asking` themselves; `tools` are named as models call them.  `wanted`
    are the tools whose arguments are to be seen early, and the empty name for a model's own text.
    """

    nodes: Mapping[str, TakesDrafts]
    asking: Mapping[str, TakesDrafts]
    tools: Mapping[str, TakesDrafts]
    indexes: tuple[TakesDrafts, ...]
    wanted: frozenset[str]


class _Call(NamedTuple):
    graph_id: str
    node: str
    thread_id: ThreadId


class _Said(NamedTuple):
    """What an index was told last; for how many nodes more nothing less likely is told."""

    text: str
    patience: int = 0


class RetrievalWatch:
    """Hands drafts of queries to the indexes that nodes and tools were declared to search.

    A draft is the last human message, or the state's question, when a node starts and when a model is asked; it is
    what a model writes for a tool that searches, from its first words on; and what a model answers, where a node likely
    follows that searches.  An index hears of it when the node, or one that likely follows within two steps, searches
    it.  What was written as a query is not replaced by the question again before it was searched for.

    `receive` is called on the runtime's loop only, `declare` and `wanted` from any thread; bounded in calls.
    """

    def __init__(self, forecaster: Forecaster) -> None:
        """Ask `forecaster` what follows."""
        self._forecaster = forecaster
        self._graphs: dict[str, _Retrieving] = {}
        self._calls: OrderedDict[UUID, _Call] = OrderedDict()
        self._said: OrderedDict[tuple[ThreadId, int], _Said] = OrderedDict()
        self._quiet: OrderedDict[tuple[str, str], None] = OrderedDict()

    def declare(self, graph_id: str, topology: Topology, phases: GraphPhases) -> None:
        """Take in which nodes and tools of a graph search an index."""
        tools = {name: phase.retrieves for name, phase in phases.tools.items() if phase.retrieves is not None}
        asking = {str(node): phase.retrieves for node, phase in phases.nodes.items() if phase.retrieves is not None}
        nodes: dict[str, TakesDrafts] = {}
        for info in topology.nodes:
            nodes |= {str(info.id): tools[name] for name in info.tools if name in tools}
        nodes |= asking
        indexes = {id(index): index for index in (*nodes.values(), *tools.values())}
        if indexes:
            wanted = frozenset((*tools, "") if asking else tools)
            self._graphs[graph_id] = _Retrieving(nodes, asking, tools, tuple(indexes.values()), wanted)

    def wanted(self, graph_id: str, checkpoint_ns: str) -> frozenset[str]:
        """Return of which tools the first words are wanted in a call, and as an empty name whether its own text is."""
        graph = self._graphs.get(graph_id)
        if graph is None:
            return frozenset()
        leads_nowhere = (graph_id, strip_task_ids(checkpoint_ns)) in self._quiet
        return graph.wanted - {""} if leads_nowhere else graph.wanted

    def receive(self, signal: Signal) -> None:
        """Take in one signal; costs nothing where no graph searches anything."""
        if not self._graphs:
            return
        if isinstance(signal, Opened):
            self._opened(signal)
        elif isinstance(signal, Requested):
            self._requested(signal)
        elif isinstance(signal, Drafted):
            self._drafted(signal)
        elif isinstance(signal, Closed):
            self._closed(signal)

    # -- starts ---------------------------------------------------------------------------------------------------

    def _opened(self, signal: Opened) -> None:
        graph = self._graphs.get(signal.graph_id)
        if graph is None:
            return
        call = _Call(signal.graph_id, strip_task_ids(signal.checkpoint_ns) or signal.name, signal.thread_id)
        if signal.kind is SpanKind.CALL:
            self._calls[signal.run_id] = call
            if len(self._calls) > _MAX_OPEN_CALLS:
                self._calls.popitem(last=False)
        elif signal.kind is SpanKind.NODE:
            self._node_opened(call, graph, None if signal.fields is None else _question_in(signal.fields))
        elif signal.kind is SpanKind.TOOL:
            if (index := graph.tools.get(signal.name)) is not None:
                self._said.pop((call.thread_id, id(index)), None)
        elif signal.kind is SpanKind.RUN:
            for index in graph.indexes:
                self._said.pop((call.thread_id, id(index)), None)

    def _node_opened(self, call: _Call, graph: _Retrieving, question: str | None) -> None:
        following = self._following(call)
        self._note_quiet(call, is_quiet=not any(node in graph.asking for node in following))
        near = {id(graph.nodes[node]) for node in (call.node, *following) if node in graph.nodes}
        for index in graph.indexes:
            key = call.thread_id, id(index)
            said = self._said.get(key)
            if said is not None and said.patience and graph.nodes.get(call.node) is index:
                del self._said[key]  # it is searched for now
            elif said is not None and said.patience:
                self._said[key] = said._replace(patience=said.patience - 1)
            elif id(index) in near and question:
                self._tell(index, call.thread_id, question)  # the same words again, too: they may be searched for again

    def _note_quiet(self, call: _Call, *, is_quiet: bool) -> None:
        place = call.graph_id, call.node
        if not is_quiet:
            self._quiet.pop(place, None)
            return
        self._quiet[place] = None
        if len(self._quiet) > _MAX_QUIET:
            self._quiet.popitem(last=False)

    def _requested(self, signal: Requested) -> None:
        call = self._calls.get(signal.run_id)
        if call is None or not (text := _last_question(signal.prompt.messages)):
            return
        nodes = self._graphs[call.graph_id].nodes
        found = {id(nodes[name]): nodes[name] for name in (call.node, *self._following(call)) if name in nodes}
        for index in found.values():
            said = self._said.get((call.thread_id, id(index)))
            if said is None or not (said.patience or said.text == text[:MAX_CHARS]):
                self._tell(index, call.thread_id, text)

    # -- what a model writes --------------------------------------------------------------------------------------

    def _drafted(self, signal: Drafted) -> None:
        call = self._calls.get(signal.run_id)
        if call is None:
            return
        if not signal.tool:
            self._answered(call, signal.text)
        elif (index := self._graphs[call.graph_id].tools.get(signal.tool)) is not None:
            self._written(index, call.thread_id, signal.text)

    def _closed(self, signal: Closed) -> None:
        call = self._calls.pop(signal.run_id, None)
        if call is None or signal.status is not SpanStatus.OK or signal.answer is None or signal.answer.tool_calls:
            return
        if (content := _text(signal.answer)) and (text := draft_in(content)):
            self._answered(call, text)

    def _answered(self, call: _Call, text: str) -> None:
        """Tell the indexes of nodes that likely follow and search by themselves: tools search for their arguments."""
        if asking := self._graphs[call.graph_id].asking:
            found = {id(asking[node]): asking[node] for node in self._following(call) if node in asking}
            for index in found.values():
                self._written(index, call.thread_id, text)

    def _written(self, index: TakesDrafts, thread_id: ThreadId, text: str) -> None:
        said = self._said.get((thread_id, id(index)))
        if said is None or said.text != text[:MAX_CHARS] or not said.patience:
            self._tell(index, thread_id, text, patience=_PATIENCE_NODES)

    # -- shared ---------------------------------------------------------------------------------------------------

    def _tell(self, index: TakesDrafts, thread_id: ThreadId, text: str, *, patience: int = 0) -> None:
        text = text[:MAX_CHARS]
        self._said[thread_id, id(index)] = _Said(text, patience)
        self._said.move_to_end((thread_id, id(index)))
        if len(self._said) > _MAX_SAID:
            self._said.popitem(last=False)
        index.draft(thread_id, text)

    def _following(self, call: _Call) -> list[str]:
        """Return the nodes that likely follow."""
        return [c.node for c in self._forecaster.candidates(call.graph_id, call.node) if c.p_next >= _P_MIN]


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
