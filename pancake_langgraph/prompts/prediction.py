"""What is said about a next prompt, and how much its source is believed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pancake_langgraph._types import AgentKey, Prompt, WireObject

#: Right predictions in a row after which a source that was wrong is believed again.
RIGHT_AGAIN = 2
_MAX_DOUBT_CALLS = 64
_ENDS = ("x1", "\n(.")


class Source(StrEnum):
    """Where a predicted prompt comes from."""

    DECLARED = "declared prompt"
    CODE = "the agent's own prompt and tools"
    STATE = "learned shape and the thread's state"
    NODE = "what the node's prompts have in common"
    THREAD = "last prompt in this thread"
    HEAD = "head known from other threads"


class Prediction(NamedTuple):
    """The known beginning of an agent's next prompt.

    With `is_cut` the last message is only the beginning of one.  `stop` says why it ends where it ends; it is empty
    when the prompt is known to its end.
    """

    agent: AgentKey
    prompt: Prompt
    source: Source
    is_cut: bool = False
    stop: str = ""


def with_other_ends(prompt: Prompt) -> tuple[Prompt, ...]:
    """Return a prompt whose last message is only a beginning, twice, going on in two ways.

    What the tokens of both have in common does not depend on how the message goes on, but for the last of them, which
    a third way might join with what follows.
    """
    *whole, last = prompt.messages
    ends: tuple[WireObject, ...] = tuple({**last, "content": f"{last['content']}{end}"} for end in _ENDS)
    return tuple(Prompt((*whole, end), prompt.tools) for end in ends)


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing can be said: `reason`, and whether calls of this node were `seen` before."""

    reason: str
    seen: bool


@dataclass(slots=True)
class Trust:
    """Belief in one source: lost by one mistake, won back by being right `RIGHT_AGAIN` times in a row."""

    missing: int = 0

    @property
    def holds(self) -> bool:
        """Whether the source is believed."""
        return self.missing == 0

    def note(self, *, right: bool) -> None:
        """Take in one comparison with a real call."""
        self.missing = max(self.missing - 1, 0) if right else RIGHT_AGAIN


@dataclass(slots=True)
class Doubt:
    """Calls during which a node's predictions stay short; twice as many with each mistake in a row."""

    calls: int = 0
    mistakes: int = 0

    @property
    def active(self) -> bool:
        """Whether predictions stay short."""
        return self.calls > 0

    def note(self, *, right: bool) -> None:
        """Take in how one prediction turned out."""
        if right:
            self.mistakes = 0 if not self.calls else self.mistakes
            return
        self.mistakes += 1
        self.calls = min(2**self.mistakes, _MAX_DOUBT_CALLS)

    def pass_one(self) -> None:
        """Count one call."""
        self.calls = max(self.calls - 1, 0)
