"""The learned shape of one agent's prompt: literal head, then the messages of the thread's state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pancake_langgraph._types import Prompt, WireObject
from pancake_langgraph.prompts.identity import canonical, leading_system_messages


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What is known of the prompt of one agent.

    `head` are the literal messages every call starts with, `tools` its tools in order.  `follows_state` says that the
    head was followed by exactly the state's messages in every call where the state was seen, `append_only` that within
    one thread each prompt began with the one before it.  `calls` counts the observations.
    """

    head: tuple[WireObject, ...]
    tools: tuple[WireObject, ...]
    follows_state: bool
    append_only: bool
    calls: int

    @staticmethod
    def first(prompt: Prompt, state_messages: Sequence[WireObject] | None) -> PromptShape:
        """Learn from one call; without state the head is the leading system messages."""
        head = _head_before(prompt, state_messages)
        return PromptShape(
            head=leading_system_messages(prompt.messages) if head is None else head,
            tools=prompt.tools,
            follows_state=head is not None,
            append_only=True,
            calls=1,
        )

    def observe(
        self, prompt: Prompt, state_messages: Sequence[WireObject] | None, previous: Prompt | None
    ) -> PromptShape:
        """Return the shape after one more call; `previous` is the agent's last prompt in the same thread."""
        head = _head_before(prompt, state_messages)
        follows = self.follows_state and (state_messages is None or (head is not None and _same(head, self.head)))
        known_head = self.head if head is None or follows else head
        return replace(
            self,
            head=known_head[: _common(known_head, prompt.messages)],
            tools=prompt.tools,
            follows_state=follows,
            append_only=self.append_only
            and (previous is None or _common(previous.messages, prompt.messages) == len(previous.messages)),
            calls=self.calls + 1,
        )


def _head_before(prompt: Prompt, state_messages: Sequence[WireObject] | None) -> tuple[WireObject, ...] | None:
    """Return the messages before the state's, or `None` when the prompt does not end with all of them."""
    if not state_messages or len(state_messages) > len(prompt.messages):
        return None
    start = len(prompt.messages) - len(state_messages)
    return prompt.messages[:start] if _same(prompt.messages[start:], state_messages) else None


def _same(left: Sequence[WireObject], right: Sequence[WireObject]) -> bool:
    return len(left) == len(right) and _common(left, right) == len(left)


def _common(left: Sequence[WireObject], right: Sequence[WireObject]) -> int:
    count = 0
    for ours, theirs in zip(left, right, strict=False):
        if canonical(ours) != canonical(theirs):
            break
        count += 1
    return count
