"""Collects prefix breaks over many calls.  Bounded; keeps prompts only to compare the next ones with."""

from __future__ import annotations

import logging
import threading
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pancake_langgraph._types import Prompt
from pancake_langgraph.prompts.lint import compare, extends, head_of, lint_prefix
from pancake_langgraph.prompts.lint_cost import lost_tokens, num_chars
from pancake_langgraph.prompts.lint_history import SYSTEM_ROLES, first_difference, turn_key
from pancake_langgraph.prompts.lint_kinds import BreakKind, Difference, PrefixBreak
from pancake_langgraph.prompts.lint_report import AgentPrefixes, KindSummary, PrefixReport
from pancake_langgraph.prompts.lint_tools import same_tools

logger = logging.getLogger(__name__)

_MAX_LINES: Final = 256
_MAX_LINES_PER_THREAD: Final = 8
_MAX_AGENTS: Final = 256
_MAX_IDS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class LateBreak:
    """A break that a call may have: a later one shows whether the prompt before comes back, and then it is none.

    `previous` is the prompt before and `tag` that call's, `current` the prompt of the call itself and `call_tag` its.
    """

    agent: str
    found: PrefixBreak
    previous: Prompt
    tag: int
    current: Prompt
    call_tag: int

    def is_refuted_by(self, prompt: Prompt) -> bool:
        """Say whether `prompt` has what the break took away: then two agents share the node."""
        if self.found.place.where == "tool":
            return same_tools(self.previous.tools, prompt.tools)
        end = self.found.place.index + 1
        return len(prompt.messages) >= end and first_difference(self.previous.messages[:end], prompt.messages) is None


@dataclass(frozen=True, slots=True)
class Observed:
    """What one call was compared with: `agent` is its name, `previous` the prompt before it and `tag` that call's.

    `late` are breaks of earlier calls, of any agent, that this call made certain.
    """

    agent: str
    found: PrefixBreak | None = None
    previous: Prompt | None = None
    tag: int = 0
    late: tuple[LateBreak, ...] = ()


@dataclass(slots=True)
class _Line:
    """One conversation: prompts that extend each other, as far as nothing breaks them."""

    agent: str
    thread: str
    prompt: Prompt
    tag: int
    ids: array[int] | None = None
    turns: frozenset[Hashable] | None = None
    suspected: LateBreak | None = None

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
        self._late: list[LateBreak] = []
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
            late, self._late = tuple(self._late), []
        return replace(observed, late=late) if late else observed

    def suspected(self) -> tuple[LateBreak, ...]:
        """Return the breaks that no later call has confirmed or refuted so far, those of the oldest calls first."""
        with self._lock:
            found = [line.suspected for line in self._lines.values() if line.suspected is not None]
            return tuple(late for late in found if late.agent in self._agents)

    def report(self) -> PrefixReport:
        """Return one snapshot of the totals; breaks that are only suspected are in it, and counted as such, too."""
        with self._lock:
            suspected: defaultdict[str, list[PrefixBreak]] = defaultdict(list)
            for line in self._lines.values():
                if line.suspected is not None:
                    suspected[line.agent].append(line.suspected.found)
            agents = [
                AgentPrefixes(name, agent.calls, tuple(_summaries(agent.totals, suspected[name])))
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
        for _, other in known:
            if other.suspected is not None and other.suspected.is_refuted_by(line.prompt):
                other.suspected = None
        before = [(k, old) for k, old in known if extends(old.prompt, line.prompt)]
        if before:
            key, old = max(before, key=lambda found: len(found[1].prompt.messages))
            found = self._break(old, line) if old.ids is not None and line.ids is not None else None
            observed = self._replaced(key, line, old, found, known)
            if len(line.prompt.messages) < len(old.prompt.messages):
                line.prompt, line.ids, line.tag = old.prompt, old.ids, old.tag  # a step back: the longer one stays
            return observed
        if not known:
            return None
        turns = _turns(line.prompt)
        key, old, difference = _nearest(known, line.prompt, turns, is_named=is_named)
        if difference is None or (not old.shared(turns) and _is_head(difference, old.prompt)):
            return None  # another conversation; what it shares with others is looked at there
        line.turns = turns
        if is_named and _may_be_another(difference, old.prompt):
            found = self._break(old, line)
            if found is not None:
                line.suspected = LateBreak(line.agent, found, old.prompt, old.tag, line.prompt, line.tag)
            return Observed(line.agent)
        if difference.continues:
            return self._replaced(key, line, old, self._break(old, line), known)
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

    def _break(self, old: _Line, line: _Line) -> PrefixBreak | None:
        ids = (old.ids, line.ids) if old.ids is not None and line.ids is not None else None
        return lint_prefix(old.prompt, line.prompt, count_tokens=self._count_tokens, token_ids=ids)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _replaced(
        self, key: int, line: _Line, old: _Line, found: PrefixBreak | None, known: Sequence[tuple[int, _Line]]
    ) -> Observed:
        """Let `line` take the place of the conversation that goes on with it."""
        for _, other in known:
            if other.suspected is not None and other.suspected.previous is old.prompt:  # it comes back, if changed
                other.suspected = None
        self._drop(key)
        return Observed(line.agent, found, old.prompt, old.tag)

    def _keep(self, line: _Line) -> None:
        mine = self._at.setdefault((line.agent, line.thread), {})
        self._lines[id(line)] = mine[id(line)] = line
        self._num_ids += len(line.ids or ())
        limit = _MAX_LINES_PER_THREAD if line.thread else self._max_lines
        for key in list(mine)[: max(0, len(mine) - limit)]:
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
        """Let go of a conversation.

        What is still suspected of it is booked: it went on, or was pushed out, and what was before did not come back.
        """
        line = self._lines.pop(key)
        if line.suspected is not None and line.agent in self._agents:
            self._late.append(line.suspected)
            self._book(line.suspected.found, line.agent)
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
        if not _add(self._agents[name].totals, found):
            return
        logger.info(
            "%s: a prompt does not extend the one before; %s at %s (%s); to mend: %s",
            name,
            found.kind.value,
            found.place,
            found.detail,
            found.mend,
        )


def _add(totals: dict[BreakKind, _Total], found: PrefixBreak) -> bool:
    """Add a break up; say whether it is the first of its kind."""
    total = totals.get(found.kind)
    if total is None:
        totals[found.kind] = _Total(1, found.lost_tokens, found.is_estimate, found)
        return True
    total.count += 1
    total.lost_tokens += found.lost_tokens
    total.is_estimate = total.is_estimate or found.is_estimate
    if found.lost_tokens > total.worst.lost_tokens:
        total.worst = found
    return False


def _nearest(
    known: Sequence[tuple[int, _Line]], prompt: Prompt, turns: frozenset[Hashable], *, is_named: bool
) -> tuple[int, _Line, Difference | None]:
    """Return the conversation that shares most with `prompt`, and how they differ."""
    key, old = max(known, key=lambda found: found[1].shared(turns))
    difference = compare(old.prompt, prompt)
    if difference is None or not (is_named and _may_be_another(difference, old.prompt)):
        return key, old, difference
    # Of two agents in the node the other one may have read more of this history: its own conversation comes first.
    head = head_of(prompt)
    mates = [found for found in known if _is_alike(head_of(found[1].prompt), head)]
    if mates:
        key, old = max(mates, key=lambda found: found[1].shared(turns))
        difference = compare(old.prompt, prompt)
    return key, old, difference


def _is_alike(head: Prompt, other: Prompt) -> bool:
    difference = compare(head, other)
    return len(head.messages) == len(other.messages) if difference is None else difference.is_alike


def _turns(prompt: Prompt) -> frozenset[Hashable]:
    return frozenset(hash(turn_key(m)) for m in prompt.messages if m.get("role") not in SYSTEM_ROLES)


def _is_head(difference: Difference, prompt: Prompt) -> bool:
    return difference.place.where == "tool" or difference.place.index < len(head_of(prompt).messages)


def _may_be_another(difference: Difference, prompt: Prompt) -> bool:
    """Whether another agent in the same node would explain it as well, for all it has of the history."""
    is_other = difference.kind in (BreakKind.SYSTEM, BreakKind.TOOL_SET) or _is_head(difference, prompt)
    return is_other and not difference.is_alike


def _summaries(booked: dict[BreakKind, _Total], suspected: Sequence[PrefixBreak]) -> list[KindSummary]:
    totals = {kind: replace(total) for kind, total in booked.items()}
    for each in suspected:
        _add(totals, each)
    open_ = Counter(each.kind for each in suspected)
    found = [KindSummary(k, t.count, t.lost_tokens, t.is_estimate, t.worst, open_[k]) for k, t in totals.items()]
    return sorted(found, key=lambda kind: -kind.lost_tokens)
