"""A bounded memory of what agents read, and the prompts predicted from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from langchain_core.messages import BaseMessage

from pancake_langgraph._types import AgentKey, Prompt, ThreadId, WireObject
from pancake_langgraph.prompts.declared import DeclaredPrompt
from pancake_langgraph.prompts.fields import NO_FORM, WireMemo, sends_reasoning, without_reasoning
from pancake_langgraph.prompts.identity import (
    agent_key,
    begins_with,
    leading_system_messages,
    same_message,
    strip_task_ids,
)
from pancake_langgraph.prompts.learner import ShapeLearner
from pancake_langgraph.prompts.parts import Known, Rendering, render
from pancake_langgraph.prompts.prediction import Doubt, Prediction, Source, Trust, Unknown
from pancake_langgraph.prompts.shape import PromptShape

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")

#: Agents seen per node; a node that invents a prompt per call must not fill the table.
MAX_AGENTS_PER_NODE = 8
#: After so many calls in a row with a system prompt never seen before, a node's prompts are taken to be made anew.
FRESH_CALLS = 2
NEVER_CALLED: Final = Unknown("no call was seen at this node", seen=False)
_HEAD_ONLY = "what comes behind the system prompt varies"


@dataclass(slots=True)
class _Agent:
    """What is known of one agent: its shape, its last prompt and salt, whether its prompts only grow.

    `head` are the system messages of that prompt; `sends_reasoning` says whether it carries earlier reasoning.

    `resumes` says that it keeps its history when it comes back from a tool, `comes_as` which agent it came back as.
    """

    learner: ShapeLearner
    prompt: Prompt
    head: tuple[WireObject, ...]
    sends_reasoning: bool = False
    salt: str | None = None
    grows: Trust = field(default_factory=Trust)
    resumes: Trust = field(default_factory=Trust)
    comes_as: AgentKey | None = None


@dataclass(slots=True)
class _Node:
    """What is known of one node: its agents, newest first, those that call first when it runs, and a common shape.

    `learner` sees the first call of every agent that opens only: it learns system prompts that are made anew each time;
    `fresh` counts such calls in a row.
    """

    learner: ShapeLearner
    agents: list[AgentKey] = field(default_factory=list)
    openers: list[AgentKey] = field(default_factory=list)
    fresh: int = 0
    task: Hashable = None
    doubt: Doubt = field(default_factory=Doubt)


@dataclass(slots=True)
class _Declaration:
    declared: DeclaredPrompt
    trust: Trust = field(default_factory=Trust)


class PromptBook:
    """Remembers shapes per agent and the last prompt per agent and thread.  Bounded; not thread-safe."""

    def __init__(self, *, max_entries: int) -> None:
        """Hold at most `max_entries` of each kind; the least recently used go first."""
        self._max_entries = max_entries
        self._memo = WireMemo()
        self._agents: OrderedDict[AgentKey, _Agent] = OrderedDict()
        self._last: OrderedDict[tuple[AgentKey, ThreadId], Prompt] = OrderedDict()
        self._nodes: OrderedDict[str, _Node] = OrderedDict()
        self._declared: OrderedDict[tuple[str, str], _Declaration] = OrderedDict()

    def declare(self, graph_id: str, prompts: Iterable[DeclaredPrompt]) -> None:
        """Take in what a graph's nodes declare, or what their code says, before anything ran."""
        for declared in prompts:
            _put(self._declared, (graph_id, declared.namespace), _Declaration(declared), self._max_entries)

    def agent_of(self, checkpoint_ns: str, agent_name: str | None, prompt: Prompt) -> AgentKey:
        """Name the agent that makes a call, as `agent_key` does; nothing is hashed for one that called here before."""
        namespace, head = strip_task_ids(checkpoint_ns), leading_system_messages(prompt.messages)
        node = self._nodes.get(namespace)
        for key in node.agents if node is not None else ():
            known = self._agents.get(key)
            if known is None or key.name != (agent_name or ""):
                continue
            if (known.head, known.prompt.tools) == (head, prompt.tools):
                return key
        return agent_key(checkpoint_ns, agent_name, prompt)

    def observe(
        self,
        agent: AgentKey,
        thread_id: ThreadId,
        prompt: Prompt,
        known: Known | None,
        *,
        cache_salt: str | None = None,
        graph_id: str = "",
        task: Hashable = None,
    ) -> None:
        """Learn from one real call.

        `known` is the state that its node had read, if it was seen; `task` identifies the run of that node, so that
        the first of several calls in it can be told.
        """
        self._check_declared(graph_id, agent.namespace, prompt, known)
        node = self._nodes.get(agent.namespace) or _Node(ShapeLearner())
        _put(self._nodes, agent.namespace, node, self._max_entries)
        record = self._agents.get(agent)
        is_fresh = record is None
        head = leading_system_messages(prompt.messages)
        if record is None:
            record = _Agent(ShapeLearner(literal_head=len(head)), prompt, head)
        _put(self._agents, agent, record, self._max_entries)
        record.learner.observe(prompt.messages, known, thread_id, self._memo)
        node.doubt.pass_one()
        previous = self._last.get((agent, thread_id))
        if previous is not None:
            record.grows.note(right=begins_with(prompt, previous))
        record.prompt, record.head, record.salt = prompt, head, cache_salt
        record.sends_reasoning = sends_reasoning(prompt.messages)
        _put(self._last, (agent, thread_id), prompt, self._max_entries)
        node.agents = _first(agent, node.agents)
        if task is None or node.task != task:
            node.openers = _first(agent, node.openers)
            node.fresh = node.fresh + 1 if is_fresh else 0
            if is_fresh:
                node.learner.observe(prompt.messages, known, thread_id, self._memo)
        node.task = task

    def note_tokens(self, namespace: str, *, right: bool) -> None:
        """Take in whether a predicted prompt whose messages were right also had the tokens of the real one.

        They differ where a template renders past messages another way than it did before (dropped reasoning, a clock
        in the template): predictions then shrink to the system prompt for a while, each time for longer.
        """
        if (node := self._nodes.get(namespace)) is not None:
            node.doubt.note(right=right)

    def note_resume(self, agent: AgentKey, came_as: AgentKey, *, right: bool) -> None:
        """Take in whether an agent that came back from a tool read all it had read before, and as whom it came.

        A system prompt that changes with each turn makes it another agent.
        """
        if (record := self._agents.get(agent)) is not None:
            record.resumes.note(right=right)
            record.comes_as = came_as

    def resumed(self, agent: AgentKey, prompt: Prompt, answer: WireObject) -> tuple[AgentKey, Prompt]:
        """Return as whom an agent that called a tool comes back, and what it can be expected to read then.

        It is all that it had read and its answer, unless its prompts were seen to be trimmed or rewritten (then its
        system prompt), or its template to render answers differently (then what it had read).
        """
        record, node = self._agents.get(agent), self._nodes.get(agent.namespace)
        doubt = node.doubt if node is not None else Doubt()
        if (record is not None and not record.resumes.holds) or (doubt.active and doubt.mistakes > 1):
            other = self._agents.get(record.comes_as) if record is not None and record.comes_as is not None else None
            if record is not None and record.comes_as is not None and other is not None:
                agent, prompt = record.comes_as, other.prompt
            return agent, Prompt(leading_system_messages(prompt.messages), prompt.tools)
        return agent, prompt if doubt.active else Prompt((*prompt.messages, answer), prompt.tools)

    def predict(
        self,
        namespace: str,
        thread_id: ThreadId,
        known: Known | None,
        *,
        graph_id: str = "",
        agent: AgentKey | None = None,
    ) -> Prediction | Unknown:
        """Return the known beginning of the next prompt of the agent at `namespace`, or why there is none.

        Without `agent` it is the one that called last when the node began, in this thread if there.
        """
        state = known or Known({}, all_unsure=True)
        best = self._declared_prediction(graph_id, namespace, state)
        node = self._nodes.get(namespace)
        if node is None:
            return best or NEVER_CALLED
        if agent is None or agent not in self._agents:
            agent = self._agent_at(node, thread_id)
        if node.doubt.active:
            return self._head_of(agent) or Unknown("the template renders earlier messages differently", seen=True)
        for found in self._learned(node, agent, thread_id, state):
            best = _better(best, found)
        return self._at_least_head(best, agent, node) or Unknown(
            "no part of its prompts has stayed the same", seen=True
        )

    def may_call(self, namespace: str, *, graph_id: str = "") -> bool:
        """Whether anything is known of calls at `namespace`; else `predict` returns `NEVER_CALLED`, at any state."""
        return namespace in self._nodes or (graph_id, namespace) in self._declared

    def wire(self, message: BaseMessage) -> WireObject | None:
        """Return a message in wire form, with the reasoning that it carries; `None` where it has none."""
        (form,) = self._memo.wire((message,))
        return None if form is NO_FORM else form

    def forget_messages(self, lists: Iterable[Sequence[object]]) -> None:
        """Let go of the messages of a run that has ended: a checkpoint gives the next run others."""
        for messages in lists:
            self._memo.forget(messages)

    def shape(self, agent: AgentKey) -> PromptShape | None:
        """Return the trusted shape of an agent's prompt, if there is one."""
        record = self._agents.get(agent)
        best = record.learner.best() if record else None
        return best.shape if best else None

    def salt(self, agent: AgentKey) -> str | None:
        """Return the cache salt of the agent's last call."""
        record = self._agents.get(agent)
        return record.salt if record else None

    def _agent_at(self, node: _Node, thread_id: ThreadId) -> AgentKey:
        candidates = [key for key in node.openers if key in self._agents] or node.agents
        return next((key for key in candidates if (key, thread_id) in self._last), candidates[0])

    def _learned(
        self, node: _Node, agent: AgentKey, thread_id: ThreadId, known: Known
    ) -> tuple[Prediction | None, ...]:
        record = self._agents.get(agent)
        if record is None:
            return ()
        if node.fresh >= FRESH_CALLS:
            return (self._from_shape(node.learner, agent, record, known, Source.NODE),)
        by_shape = self._from_shape(record.learner, agent, record, known, Source.STATE)
        last = self._last.get((agent, thread_id))
        by_thread = None
        if last is not None and record.grows.holds:
            by_thread = Prediction(agent, last, Source.THREAD, stop="the thread goes on behind its last prompt")
        if by_shape and by_thread and not _agree(by_shape, by_thread):
            by_thread = None  # the state has moved on in another way than by growing
        return by_shape, by_thread

    def _from_shape(
        self, learner: ShapeLearner, agent: AgentKey, record: _Agent, known: Known, source: Source
    ) -> Prediction | None:
        best = learner.best()
        if best is None:
            return None
        rendering = render(best.shape.parts, known, self._memo)
        return _predicted(agent, rendering, record.prompt, source, sends=record.sends_reasoning)

    def _at_least_head(self, best: Prediction | None, agent: AgentKey, node: _Node) -> Prediction | None:
        """Return the system prompt where `best` does not go that far."""
        record = self._agents.get(agent)
        if best is not None and record is not None and len(best.prompt.messages) > len(record.head):
            return best
        return _better(best, self._head_of(agent, node))

    def _head_of(self, agent: AgentKey, node: _Node | None = None) -> Prediction | None:
        """Return the system prompt, which is part of the agent's identity; nothing where each call has a new one."""
        record = self._agents.get(agent)
        if record is None or (node is not None and node.fresh >= FRESH_CALLS):
            return None
        rendering = Rendering(record.head, stop=_HEAD_ONLY)
        return _predicted(agent, rendering, record.prompt, Source.HEAD, sends=record.sends_reasoning)

    def _declared_prediction(self, graph_id: str, namespace: str, known: Known) -> Prediction | None:
        entry = self._declared.get((graph_id, namespace))
        if entry is None or not entry.trust.holds:
            return None
        declared = entry.declared
        rendering = declared.render(known, self._memo)
        tools = declared.tools
        if tools is None:
            node = self._nodes.get(namespace)
            record = self._agents.get(node.agents[0]) if node else None
            if record is None:
                return None  # tools usually stand before everything else
            tools = record.prompt.tools
        prompt = Prompt(rendering.messages, tools)
        agent = agent_key(namespace, declared.agent_name, prompt)
        return _predicted(agent, rendering, prompt, declared.source, sends=sends_reasoning(prompt.messages))

    def _check_declared(self, graph_id: str, namespace: str, prompt: Prompt, known: Known | None) -> None:
        entry = self._declared.get((graph_id, namespace))
        if entry is None:
            return
        rendering = entry.declared.render(known or Known({}, all_unsure=True), self._memo)
        head = Prompt(rendering.messages, prompt.tools)
        right = begins_with(prompt, head, is_cut=rendering.is_cut)
        tools = entry.declared.tools
        entry.trust.note(right=right and (tools is None or list(tools) == list(prompt.tools)))


def _predicted(
    agent: AgentKey, rendering: Rendering, like: Prompt, source: Source, *, sends: bool
) -> Prediction | None:
    messages = rendering.messages
    if not messages:
        return None
    if not sends:
        messages = without_reasoning(messages)
    return Prediction(agent, Prompt(messages, like.tools), source, rendering.is_cut, rendering.stop)


def _agree(left: Prediction, right: Prediction) -> bool:
    """Whether one of the two begins with the other."""
    whole = min(len(p.prompt.messages) - p.is_cut for p in (left, right))
    pairs = zip(left.prompt.messages[:whole], right.prompt.messages[:whole], strict=True)
    if not all(same_message(ours, theirs) for ours, theirs in pairs):
        return False
    short, long = sorted((left, right), key=lambda p: len(p.prompt.messages) - p.is_cut)
    return len(long.prompt.messages) <= whole or begins_with(long.prompt, short.prompt, is_cut=short.is_cut)


def _better(first: Prediction | None, second: Prediction | None) -> Prediction | None:
    """Return the first, or the second where it only says more."""
    if first is None or second is None:
        return first or second
    if _extent(second) <= _extent(first) or first.prompt.tools != second.prompt.tools:
        return first
    return second if begins_with(second.prompt, first.prompt, is_cut=first.is_cut) else first


def _extent(prediction: Prediction) -> tuple[int, int]:
    """Return how far a prediction goes, comparable among those that begin alike."""
    messages = prediction.prompt.messages
    return len(messages), len(str(messages[-1].get("content") or ""))


def _first(agent: AgentKey, agents: list[AgentKey]) -> list[AgentKey]:
    return [agent, *(key for key in agents if key != agent)][:MAX_AGENTS_PER_NODE]


def _put(table: OrderedDict[_K, _V], key: _K, value: _V, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
