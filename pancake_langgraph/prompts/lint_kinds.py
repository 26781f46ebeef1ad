"""What a prefix break is: its kind, its place, what it cost, and how to mend it.  Holds no text of any prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal


class BreakKind(StrEnum):
    """Who put the break there."""

    CLOCK = "clock"
    RANDOM_ID = "random_id"
    COUNTER = "counter"
    TOOL_ORDER = "tool_order"
    TOOL_SCHEMA = "tool_schema"
    TOOL_SET = "tool_set"
    REASONING = "reasoning"
    TEMPLATE = "template"
    TRIMMED = "trimmed"
    SUMMARIZED = "summarized"
    REMOVED = "removed"
    INSERTED = "inserted"
    EDITED = "edited"
    SYSTEM = "system"
    OTHER = "other"

    @property
    def mend(self) -> str:
        """One sentence on how to mend it."""
        return _MEND[self]


_MEND: Final[dict[BreakKind, str]] = {
    BreakKind.CLOCK: (
        "Take the time out of what stands before the history: say it in the newest user message, or coarsen it to "
        "the day."
    ),
    BreakKind.RANDOM_ID: (
        "Keep ids that are made anew out of the prompt (put them into the config or metadata of the run), and store "
        "the ids of messages and tool calls with the history."
    ),
    BreakKind.COUNTER: "Put the number that changes into the newest message, behind the history.",
    BreakKind.TOOL_ORDER: (
        "Bind tools in one order, with one order of keys, or let PancakeChatModel do it: tool_order='first_seen' (the "
        "default) within a process, tool_order='sorted' across processes."
    ),
    BreakKind.TOOL_SCHEMA: (
        "Build the tool once and keep its name, description and schema; what changes belongs into a message."
    ),
    BreakKind.TOOL_SET: (
        "Bind the same tools in every call of the agent, and say in the newest message (or by tool_choice) which of "
        "them may be used."
    ),
    BreakKind.REASONING: (
        "Send past reasoning in every call or in none (PancakeChatModel: send_reasoning_back), so that a past turn "
        "always reads the same."
    ),
    BreakKind.TEMPLATE: (
        "Use a chat template that writes past turns as it wrote them first: one that keeps past thinking (or thinking "
        "switched off for this agent) and puts no date at the top."
    ),
    BreakKind.TRIMMED: (
        "Trim seldom and in large steps, for example from the whole window to half of it, not a little before each "
        "call."
    ),
    BreakKind.SUMMARIZED: (
        "Summarize seldom, at a high mark, and keep the summary as it is until the next one, so that the calls between "
        "extend each other."
    ),
    BreakKind.REMOVED: (
        "Keep in the history what was sent once, or let a reminder that is not kept be the very last message."
    ),
    BreakKind.INSERTED: (
        "Put retrieved or remembered context behind the history, next to the newest user message, not before it."
    ),
    BreakKind.EDITED: "Leave messages that were sent as they are, and append a new one that corrects them.",
    BreakKind.SYSTEM: "Keep the system prompt constant, and put what changes into the newest message.",
    BreakKind.OTHER: (
        "Build each prompt by appending to the one before, and look at the named place for what is made anew."
    ),
}


@dataclass(frozen=True, slots=True)
class BreakPlace:
    """Where the second prompt stops being an extension of the first.

    `index` counts messages, tools or tokens of the prompt from 0, by `where`; it is the same in both prompts.  `role`
    is a message's role or a tool's name, `field` the path inside it, `char` the first character of that field that
    differs; they are empty or `None` where the whole message or tool is another one, or only tokens are known.
    """

    where: Literal["message", "tool", "token"]
    index: int
    role: str = ""
    field: str = ""
    char: int | None = None

    def __str__(self) -> str:
        """Return it in words."""
        text = f"{self.where} {self.index}" + (f" ({self.role})" if self.role else "")
        text += f", {self.field}" if self.field else ""
        return text if self.char is None else f"{text}, character {self.char}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "where": self.where,
            "index": self.index,
            "role": self.role,
            "field": self.field,
            "char": self.char,
        }


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """One break between two prompts.

    `detail` names what was seen there (a form such as `uuid`, a tool, a number of messages), never its text.
    `lost_tokens` counts what stood in the first prompt behind the break and so had been computed, at most what the
    second one has there; `is_estimate` says that no tokenizer counted it.
    """

    kind: BreakKind
    place: BreakPlace
    detail: str
    lost_tokens: int
    is_estimate: bool

    @property
    def mend(self) -> str:
        """One sentence on how to mend it."""
        return self.kind.mend

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object without any text of a prompt."""
        return {
            "kind": self.kind.value,
            "place": self.place.to_json(),
            "detail": self.detail,
            "lost_tokens": self.lost_tokens,
            "is_estimate": self.is_estimate,
            "mend": self.mend,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """A break before its cost is known.

    `continues` says that the two prompts are surely of one conversation: the history goes on behind the break, or the
    message itself is nearly the same.  `is_alike` says so of the message or tool at the break alone.
    """

    kind: BreakKind
    place: BreakPlace
    detail: str
    continues: bool
    is_alike: bool
