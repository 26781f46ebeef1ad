"""Prefix lint: where the second of two prompts stops being an extension of the first, why, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pancake_langgraph._types import Prompt
from pancake_langgraph.prompts.identity import leading_system_messages
from pancake_langgraph.prompts.lint_cost import lost_tokens
from pancake_langgraph.prompts.lint_history import find_message_break, first_difference, reasoning_of
from pancake_langgraph.prompts.lint_kinds import BreakKind, BreakPlace, Difference, PrefixBreak
from pancake_langgraph.prompts.lint_tools import find_tool_break, same_tools
from pancake_langgraph.prompts.prefix import common_prefix_tokens

__all__ = [
    "END_TOKENS",
    "BreakKind",
    "BreakPlace",
    "PrefixBreak",
    "Prompt",
    "compare",
    "extends",
    "head_of",
    "lint_prefix",
]

#: Ends of two token lists that differ by less are no break: the beginning of an answer may be written in another way
#: when the answer stands there, and engines keep whole blocks only.
END_TOKENS = 16


def lint_prefix(
    previous: Prompt,
    current: Prompt,
    *,
    count_tokens: Callable[[str], int] | None = None,
    token_ids: tuple[Sequence[int], Sequence[int]] | None = None,
) -> PrefixBreak | None:
    """Say where `current` stops being an extension of `previous`; `None` where it does not.

    A prompt that is only the beginning of the earlier one was computed with it and is no break either.  Pure.

    Args:
        previous: What the earlier call read.
        current: What the later call reads.
        count_tokens: Counts the tokens of a text; without it the loss is estimated, and marked so.
        token_ids: What the engine read for each of the two.  They are facts: the loss is counted by them, a template
            that writes past messages in another way is found by them, and what it does not write is no break.
    """
    found = compare(previous, current)
    if token_ids is not None:
        return _judged_by_ids(previous, current, found, *token_ids)
    if found is None:
        return None
    cost = lost_tokens(previous, current, found.place, count_tokens)
    return PrefixBreak(found.kind, found.place, found.detail, cost, is_estimate=count_tokens is None)


def compare(previous: Prompt, current: Prompt) -> Difference | None:
    """Return the first difference of two prompts in the order in which templates usually write them, or `None`."""
    message = find_message_break(previous.messages, current.messages)
    tools = find_tool_break(previous.tools, current.tools)
    if tools is None or (message is not None and _is_head(previous, message.place.index)):
        return message
    if message is None:
        return tools
    return Difference(tools.kind, tools.place, tools.detail, message.continues, tools.is_alike)


def head_of(prompt: Prompt) -> Prompt:
    """Return what the threads of an agent share: its leading system messages and its tools."""
    return Prompt(leading_system_messages(prompt.messages), prompt.tools)


def extends(previous: Prompt, current: Prompt) -> bool:
    """Say whether one of two prompts begins with the other."""
    return first_difference(previous.messages, current.messages) is None and same_tools(previous.tools, current.tools)


def _is_head(prompt: Prompt, index: int) -> bool:
    return index < len(leading_system_messages(prompt.messages))


def _judged_by_ids(
    previous: Prompt, current: Prompt, found: Difference | None, old: Sequence[int], new: Sequence[int]
) -> PrefixBreak | None:
    common = common_prefix_tokens(old, new)
    cost = min(len(old), len(new)) - common
    if cost < END_TOKENS:
        return None
    if found is None:
        found = _by_template(previous, current, common)
    return PrefixBreak(found.kind, found.place, found.detail, cost, is_estimate=False)


def _by_template(previous: Prompt, current: Prompt, common: int) -> Difference:
    """Name a break that the messages do not show: the template wrote the same messages in another way."""
    asked = _last_user(previous)
    for index, message in enumerate(previous.messages):
        thinks = reasoning_of(message) or "</think>" in str(message.get("content") or "")
        if thinks and asked < index < _last_user(current):
            place = BreakPlace("message", index, str(message.get("role") or ""), "reasoning_content")
            detail = "the template drops earlier thinking once a new user message stands behind it"
            return Difference(BreakKind.TEMPLATE, place, detail, continues=True, is_alike=True)
    detail = "the template writes the same messages in another way"
    return Difference(BreakKind.TEMPLATE, BreakPlace("token", common), detail, continues=True, is_alike=True)


def _last_user(prompt: Prompt) -> int:
    roles = [str(message.get("role")) for message in prompt.messages]
    return max((index for index, role in enumerate(roles) if role == "user"), default=-1)
