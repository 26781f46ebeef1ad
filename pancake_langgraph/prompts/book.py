"""A bounded memory of what agents read, and the prompts predicted from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from pancake_langgraph._types import AgentKey, Prompt, ThreadId, WireObject
from pancake_langgraph.prompts.shape import PromptShape

_K = TypeVar("_K")
_V = TypeVar("_V")

#: Agents seen per node; a node that invents a prompt per call must not fill the table.
MAX_AGENTS_PER_NODE = 8


class Source(StrEnum):
    """Where a predicted prompt comes from, strongest first."""

    THREAD = "last prompt in this thread"
    STATE = "head and the thread's messages"
    HEAD = "head known from other threads"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The known beginning of an agent's next prompt."""

    agent: AgentKey
    prompt: Prompt
    source: Source


class PromptBook:
    """Remembers shapes per agent and the last prompt per agent and thread.  Bounded; not thread-safe."""

    def __init__(self, *, max_entries: int) -> None:
        """Hold at most `max_entries` shapes and as many last prompts; the least recently used go first."""
        self._max_entries = max_entries
        self._shapes: OrderedDict[AgentKey, PromptShape] = OrderedDict()
        self._last: OrderedDict[tuple[AgentKey, ThreadId], Prompt] = OrderedDict()
        self._agents: OrderedDict[str, list[AgentKey]] = OrderedDict()
        self._salts: OrderedDict[AgentKey, str | None] = OrderedDict()

    def observe(
        self,
        agent: AgentKey,
        thread_id: ThreadId,
        prompt: Prompt,
        state_messages: Sequence[WireObject] | None,
        *,
        cache_salt: str | None = None,
    ) -> None:
        """Learn from one real call.  `state_messages` is the node's input state in wire form, if it was seen."""
        self._put(self._salts, agent, cache_salt)
        previous = self._last.get((agent, thread_id))
        shape = self._shapes.get(agent)
        self._put(
            self._shapes,
            agent,
            PromptShape.first(prompt, state_messages)
            if shape is None
            else shape.observe(prompt, state_messages, previous),
        )
        self._put(self._last, (agent, thread_id), prompt)
        known = [key for key in self._agents.get(agent.namespace, ()) if key != agent]
        self._put(self._agents, agent.namespace, [agent, *known][:MAX_AGENTS_PER_NODE])

    def predict(
        self, namespace: str, thread_id: ThreadId, state_messages: Sequence[WireObject] | None
    ) -> Prediction | None:
        """Return the known beginning of the next prompt of the agent last seen at `namespace`.

        `None` when no agent was seen there or nothing of its prompt is known.
        """
        agents = self._agents.get(namespace)
        if not agents:
            return None
        agent = next((key for key in agents if (key, thread_id) in self._last), agents[0])
        shape = self._shapes.get(agent)
        if shape is None:
            return None
        last = self._last.get((agent, thread_id))
        if shape.follows_state and state_messages:
            messages = (*shape.head, *state_messages)
            if last is None or len(messages) >= len(last.messages):
                return Prediction(agent, Prompt(messages, shape.tools), Source.STATE)
        if last is not None and shape.append_only:
            return Prediction(agent, last, Source.THREAD)
        if shape.head:
            return Prediction(agent, Prompt(shape.head, shape.tools), Source.HEAD)
        return None

    def shape(self, agent: AgentKey) -> PromptShape | None:
        """Return what is known of an agent's prompt."""
        return self._shapes.get(agent)

    def salt(self, agent: AgentKey) -> str | None:
        """Return the cache salt of the agent's last call."""
        return self._salts.get(agent)

    def _put(self, table: OrderedDict[_K, _V], key: _K, value: _V) -> None:
        table[key] = value
        table.move_to_end(key)
        while len(table) > self._max_entries:
            table.popitem(last=False)
