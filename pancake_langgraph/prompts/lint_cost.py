"""What a break costs: the tokens behind it that had been computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from pancake_langgraph._types import Prompt, WireObject
from pancake_langgraph.prompts.identity import leading_system_messages
from pancake_langgraph.prompts.lint_history import text_fields
from pancake_langgraph.prompts.lint_kinds import BreakPlace

#: Characters per token where no tokenizer counts.
CHARS_PER_TOKEN = 4


def lost_tokens(
    previous: Prompt, current: Prompt, place: BreakPlace, count_tokens: Callable[[str], int] | None = None
) -> int:
    """Return how many tokens stand behind `place`, in the prompt that has fewer there.

    Templates usually write the system prompt, then the tools, then the history; so it is counted.  Without
    `count_tokens` four characters count as one token.
    """
    sides = ("".join(_texts_behind(prompt, place)) for prompt in (previous, current))
    if count_tokens is None:
        return min(-(-len(text) // CHARS_PER_TOKEN) for text in sides)
    return min(count_tokens(text) for text in sides)


def num_chars(prompt: Prompt) -> int:
    """Return how many characters of a prompt are counted, at least one."""
    return max(1, sum(map(len, (*_message_texts(prompt.messages), *_tool_texts(prompt.tools)))))


def _texts_behind(prompt: Prompt, place: BreakPlace) -> Iterator[str]:
    head = len(leading_system_messages(prompt.messages))
    if place.where == "tool":
        yield from _tool_texts(prompt.tools[place.index :])
        yield from _message_texts(prompt.messages[head:])
        return
    if not place.field:
        yield from _message_texts(prompt.messages[place.index : place.index + 1])
    elif place.index < len(prompt.messages):
        yield from _rest_of(prompt.messages[place.index], place)
    behind = place.index + 1
    if behind <= head:
        yield from _message_texts(prompt.messages[behind:head])
        yield from _tool_texts(prompt.tools)
        behind = head
    yield from _message_texts(prompt.messages[behind:])


def _rest_of(message: WireObject, place: BreakPlace) -> Iterator[str]:
    """Yield what stands behind the place in its own message."""
    is_behind = False
    for name, text in text_fields(message):
        if name == place.field:
            is_behind = True
            yield text[place.char or 0 :]
        elif is_behind:
            yield text


def _message_texts(messages: Sequence[WireObject]) -> Iterator[str]:
    for message in messages:
        yield f"\n{message.get('role')}\n"
        yield from (text for _, text in text_fields(message))


def _tool_texts(tools: Sequence[WireObject]) -> Iterator[str]:
    return (json.dumps(tool, default=str) for tool in tools)
