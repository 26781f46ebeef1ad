"""What the lint tells: breaks per agent and kind, without any text of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pancake_langgraph.prompts.lint_kinds import BreakKind, PrefixBreak


@dataclass(frozen=True, slots=True)
class KindSummary:
    """All breaks of one kind of one agent; `worst` is the one that cost most, the first of them.

    `suspected` of them are none if the prompt before comes back: no later call has shown it so far.
    """

    kind: BreakKind
    count: int
    lost_tokens: int
    is_estimate: bool
    worst: PrefixBreak
    suspected: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "kind": self.kind.value,
            "count": self.count,
            "suspected": self.suspected,
            "lost_tokens": self.lost_tokens,
            "is_estimate": self.is_estimate,
            "worst": self.worst.to_json(),
            "mend": self.kind.mend,
        }


@dataclass(frozen=True, slots=True)
class AgentPrefixes:
    """One agent's calls and what broke their prefixes, the kind that cost most first."""

    agent: str
    calls: int
    kinds: tuple[KindSummary, ...]

    @property
    def breaks(self) -> int:
        """How many of its calls did not extend the one before."""
        return sum(kind.count for kind in self.kinds)

    @property
    def suspected(self) -> int:
        """How many of the breaks are none if the prompt before comes back."""
        return sum(kind.suspected for kind in self.kinds)

    @property
    def lost_tokens(self) -> int:
        """Tokens lost by all its breaks."""
        return sum(kind.lost_tokens for kind in self.kinds)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "agent": self.agent,
            "calls": self.calls,
            "breaks": self.breaks,
            "suspected": self.suspected,
            "lost_tokens": self.lost_tokens,
            "kinds": [kind.to_json() for kind in self.kinds],
        }


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """One snapshot, the agent that lost most first.

    `forgotten_agents` counts agents that are not in it because there were too many.
    """

    agents: tuple[AgentPrefixes, ...]
    forgotten_agents: int = 0

    @property
    def calls(self) -> int:
        """Calls of all agents in it."""
        return sum(agent.calls for agent in self.agents)

    @property
    def breaks(self) -> int:
        """Breaks of all agents in it."""
        return sum(agent.breaks for agent in self.agents)

    @property
    def suspected(self) -> int:
        """How many of the breaks are none if the prompt before comes back."""
        return sum(agent.suspected for agent in self.agents)

    @property
    def lost_tokens(self) -> int:
        """Tokens lost by all agents in it."""
        return sum(agent.lost_tokens for agent in self.agents)

    def agent(self, name: str) -> AgentPrefixes | None:
        """Return one agent's part, if it is known."""
        return next((found for found in self.agents if found.agent == name), None)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object: names, positions, kinds and numbers only."""
        return {
            "calls": self.calls,
            "breaks": self.breaks,
            "suspected": self.suspected,
            "lost_tokens": self.lost_tokens,
            "agents": [agent.to_json() for agent in self.agents],
            "forgotten_agents": self.forgotten_agents,
        }

    def __str__(self) -> str:
        """Return it in words, a few lines per agent."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.breaks} of {self.calls} calls did not extend the prompt before"
        for agent in self.agents:
            yield f"{agent.agent}: {agent.breaks} of {agent.calls} calls"
            for kind in agent.kinds:
                about = "about " if kind.is_estimate else ""
                where = f"worst at {kind.worst.place}: {kind.worst.detail}"
                times = f"{kind.count} times" + (f" ({kind.suspected} suspected)" if kind.suspected else "")
                yield f"  {kind.kind.value}: {times}, {about}{kind.lost_tokens} tokens; {where}"
                yield f"    {kind.kind.mend}"
