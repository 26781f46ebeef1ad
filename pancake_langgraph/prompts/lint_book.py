"""Collects prefix breaks over many calls.  Bounded; keeps prompts only to compare the next ones with."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pancake_langgraph._types import Prompt
from pancake_langgraph.prompts.lint import compare, extends, head_of, lint_prefix
from pancake_langgraph.prompts.lint_cost import lost_tokens, num_chars
from pancake_langgraph.prompts.lint_history import SYSTEM_ROLES, turn_key
from pancake_langgraph.prompts.lint_kinds import BreakKind, Difference, PrefixBreak
from pancake_langgraph.prompts.lint_report import AgentPrefixes, KindSummary, PrefixReport

logger = logging.getLogger(__name__)

_MAX_LINES: Final = 256
_MAX_LINES_PER_THREAD: Final = 8
_MAX_AGENTS: Final = 256
_MAX_IDS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call was compared with: `agent` is its name, `previous` the prompt before it and `tag` that call's."""

    agent: str
    found: PrefixBreak | None = None
    previous: Prompt | None = None
    tag: int = 0


@dataclass(slots=True)
class _Line:
    """One conversation: prompts that extend each other, as far as nothing breaks them."""

    agent: str
    thread: str
    prompt: Prompt
    tag: int
    ids: array[int] | None = None
    turns: frozenset[Hashable] | None = None
    #: A break that is none if the prompt before comes back: then two agents share the node.
    suspected: Observed | None = None

    def shared(self, turns: frozenset[Hashable]) -> int:
        if self.turns is None:
            self.turns = _turns(self.prompt)
        return len(self.turns & turns)


@dataclass(slots=True)
class _Total:
    count: int
    lost_tokens: int
    is_estimate: bool
    worst: PrefixBreak


@dataclass(slots=True)
class _Agent:
    calls: int = 0
    head: Prompt | None = None
    tag: int = 0
    totals: dict[BreakKind, _Total] = field(default_factory=dict)


class PrefixLint:
    """Compares each call of an agent with the one before, in its thread or else in another, and adds up what broke.

    Calls that run beside each other in one thread (workers, two prompts in one node) are told apart by what they read:
    only a prompt that goes on with an earlier one, or nearly repeats it, can break it.  Thread-safe.
    """

    def __init__(
        self,
        *,
        max_lines: int = _MAX_LINES,
        max_agents: int = _MAX_AGENTS,
        max_ids: int = _MAX_IDS,
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        """Keep the last prompts of `max_lines` conversations, totals of `max_agents` agents, `max_ids` token ids."""
        self._max_lines, self._max_agents, self._max_ids = max_lines, max_agents, max_ids
        self._count_tokens = count_tokens
        self._lock = threading.Lock()
        self._lines: OrderedDict[int, _Line] = OrderedDict()
        self._at: dict[tuple[str, str], dict[int, _Line]] = {}  # the same by agent and thread
        self._agents: OrderedDict[str, _Agent] = OrderedDict()
        self._forgotten = self._named = self._num_ids = 0

    def observe(
        self,
        prompt: Prompt,
        *,
        agent: str = "",
        thread: str = "",
        token_ids: Sequence[int] | None = None,
        tag: int = 0,
    ) -> Observed:
        """Take in one call, in the order of the calls.

        Args:
            prompt: What it read; kept until the next call of its conversation.
            agent: Who called; without it the system prompt tells.
            thread: Where; without it the conversation that it shares most with.
            token_ids: What the engine read, where it told.
            tag: Any number, given back with the call that follows.
        """
        ids = None if token_ids is None else array("q", token_ids)
        with self._lock:
            head = head_of(prompt)
            name = agent or self._agent_for(head)
            line = _Line(name, thread, prompt, tag, ids)
            observed = self._compared(line, is_named=bool(agent)) or self._against_others(line, head)
            record = self._agent(name)
            record.calls, record.head, record.tag = record.calls + 1, head, tag
            self._keep(line)
            if observed.found is not None:
                self._book(observed.found, name)
        return observed

    def report(self) -> PrefixReport:
        """Return one snapshot of the totals."""
        with self._lock:
            agents = [
                AgentPrefixes(name, agent.calls, tuple(_summaries(agent.totals)))
                for name, agent in self._agents.items()
            ]
            forgotten = self._forgotten
        return PrefixReport(tuple(sorted(agents, key=lambda found: -found.lost_tokens)), forgotten)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many conversations, agents and token ids are kept."""
        with self._lock:
            return len(self._lines), len(self._agents), self._num_ids

    # -- which call came before ------------------------------------------------------------------------------------

    def _compared(self, line: _Line, *, is_named: bool) -> Observed | None:
        """Compare with the conversation that this call belongs to; `None` where it begins one."""
        known = list(self._at.get((line.agent, line.thread), {}).items())[::-1]
        before = [(k, old) for k, old in known if extends(old.prompt, line.prompt)]
        if before:
            key, old = max(before, key=lambda found: len(found[1].prompt.messages))
            self._settle(old, known)
            found = self._break(old, line) if old.ids is not None and line.ids is not None else None
            if len(line.prompt.messages) < len(old.prompt.messages):
                line.prompt, line.ids, line.tag = old.prompt, old.ids, old.tag  # a step back: the longer one stays
            return self._replaced(key, line, old, found)
        if not known:
            return None
        turns = _turns(line.prompt)
        key, old = max(known, key=lambda found: found[1].shared(turns))
        difference = compare(old.prompt, line.prompt)
        if difference is None or (not old.shared(turns) and _is_head(difference, old.prompt)):
            return None  # another conversation; what it shares with others is looked at there
        line.turns = turns
        if _may_be_another(difference) and is_named:
            found = self._break(old, line)
            line.suspected = None if found is None else Observed(line.agent, found, old.prompt, old.tag)
            return Observed(line.agent)
        if difference.continues:
            self._settle(old, known)
            return self._replaced(key, line, old, self._break(old, line))
        return Observed(line.agent)

    def _against_others(self, line: _Line, head: Prompt) -> Observed:
        """Compare the head of a new conversation with that of the agent's newest call."""
        agent = self._agents.get(line.agent)
        if agent is None or agent.head is None:
            return Observed(line.agent)
        difference = compare(agent.head, head)
        if difference is None or not difference.is_alike:
            return Observed(line.agent)
        found = lint_prefix(agent.head, head, count_tokens=self._count_tokens)
        if found is not None and found.is_estimate and line.ids:  # no ids of heads alone: this prompt tells the rate
            rate = len(line.ids) / num_chars(line.prompt)
            cost = lost_tokens(agent.head, head, found.place, lambda text: round(len(text) * rate))
            found = replace(found, lost_tokens=cost)
        return Observed(line.agent, found, agent.head, agent.tag)

    def _agent_for(self, head: Prompt) -> str:
        """Return the agent whose system prompt and tools these are, or were changed into these; else a new name."""
        alike = ""
        for name, agent in reversed(self._agents.items()):
            if agent.head is None:
                continue
            difference = compare(agent.head, head)
            if difference is None and len(head.messages) == len(agent.head.messages):
                return name
            is_longer = difference is None and head.messages and agent.head.messages
            if is_longer or (difference is not None and difference.is_alike):
                alike = alike or name
        if not alike:
            self._named += 1
        return alike or f"agent {self._named}"

    def _settle(self, line: _Line, known: Sequence[tuple[int, _Line]]) -> None:
        """A conversation goes on: what was suspected of it is true, of the others in its thread it is not."""
        for _, other in known:
            suspected, other.suspected = other.suspected, None
            if other is line and suspected is not None and suspected.found is not None:
                self._book(suspected.found, line.agent)

    def _break(self, old: _Line, line: _Line) -> PrefixBreak | None:
        ids = (old.ids, line.ids) if old.ids is not None and line.ids is not None else None
        return lint_prefix(old.prompt, line.prompt, count_tokens=self._count_tokens, token_ids=ids)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _replaced(self, key: int, line: _Line, old: _Line, found: PrefixBreak | None) -> Observed:
        self._drop(key)
        return Observed(line.agent, found, old.prompt, old.tag)

    def _keep(self, line: _Line) -> None:
        mine = self._at.setdefault((line.agent, line.thread), {})
        self._lines[id(line)] = mine[id(line)] = line
        self._num_ids += len(line.ids or ())
        limit = _MAX_LINES_PER_THREAD if line.thread else self._max_lines
        for key in list(mine)[: max(0, len(mine) - limit)]:
            suspected = self._lines[key].suspected
            if suspected is not None and suspected.found is not None:  # nothing before it came back
                self._book(suspected.found, line.agent)
            self._drop(key)
        while len(self._lines) > self._max_lines:
            self._drop(next(iter(self._lines)))
        if self._num_ids > self._max_ids:
            self._forget_ids()

    def _forget_ids(self) -> None:
        for old in self._lines.values():
            if self._num_ids <= self._max_ids:
                break
            self._num_ids -= len(old.ids or ())
            old.ids = None

    def _drop(self, key: int) -> None:
        line = self._lines.pop(key)
        self._num_ids -= len(line.ids or ())
        place = line.agent, line.thread
        del self._at[place][key]
        if not self._at[place]:
            del self._at[place]

    def _agent(self, name: str) -> _Agent:
        agent = self._agents.setdefault(name, _Agent())
        self._agents.move_to_end(name)
        while len(self._agents) > self._max_agents:
            self._agents.popitem(last=False)
            self._forgotten += 1
        return agent

    def _book(self, found: PrefixBreak, name: str) -> None:
        totals = self._agent(name).totals
        total = totals.get(found.kind)
        if total is None:
            totals[found.kind] = _Total(1, found.lost_tokens, found.is_estimate, found)
            logger.info(
                "%s: a prompt does not extend the one before; %s at %s (%s); to mend: %s",
                name,
                found.kind.value,
                found.place,
                found.detail,
                found.mend,
            )
            return
        total.count += 1
        total.lost_tokens += found.lost_tokens
        total.is_estimate = total.is_estimate or found.is_estimate
        if found.lost_tokens > total.worst.lost_tokens:
            total.worst = found


def _turns(prompt: Prompt) -> frozenset[Hashable]:
    return frozenset(hash(turn_key(m)) for m in prompt.messages if m.get("role") not in SYSTEM_ROLES)


def _is_head(difference: Difference, prompt: Prompt) -> bool:
    return difference.place.where == "tool" or difference.place.index < len(head_of(prompt).messages)


def _may_be_another(difference: Difference) -> bool:
    """Whether another agent in the same node would explain it as well."""
    return difference.kind in (BreakKind.SYSTEM, BreakKind.TOOL_SET) and not difference.is_alike


def _summaries(totals: dict[BreakKind, _Total]) -> list[KindSummary]:
    found = [KindSummary(kind, t.count, t.lost_tokens, t.is_estimate, t.worst) for kind, t in totals.items()]
    return sorted(found, key=lambda kind: -kind.lost_tokens)
