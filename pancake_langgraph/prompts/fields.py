"""A node's state as prompts are made of it: fields by name, their texts, their messages in wire form."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
    convert_to_messages,
)

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.wire_form import wire_form

#: State by field name.  The values are the application's own objects: they are read, never copied or changed.
Fields = Mapping[str, Any]

#: Name under which a state that has no fields (a bare string or list) is kept.
WHOLE: Final = ""
MAX_FIELDS: Final = 64
#: Longer texts are not searched for in prompts.
MAX_TEXT_CHARS: Final = 65_536
MAX_ITEMS: Final = 128
MAX_MESSAGES: Final = 4096
_MEMO_MESSAGES: Final = 8192
_ATOMS: Final = (str, int, float, bool)
_JSON_NODES: Final = 500
_PLAIN_ROLES: Final = {HumanMessage: "user", AIMessage: "assistant", SystemMessage: "system"}
REASONING_KEYS: Final = ("reasoning_content", "reasoning")
_REASONING: Final = frozenset(REASONING_KEYS)
#: `json.dumps` would make such an encoder each time.
_arguments = json.JSONEncoder(ensure_ascii=False).encode
#: Stands for a message that has no wire form; it equals no message of any prompt.
NO_FORM: Final[WireObject] = {}


class Form(StrEnum):
    """How a value becomes text."""

    TEXT = "text"
    JSON = "json"
    INDENTED = "indented json"
    JOINED = "joined"
    LAST = "content of the last message"
    FIRST = "content of the first message"
    COUNT = "number of items"


@dataclass(frozen=True, slots=True)
class Hole:
    """A place in a text where a value of the state stands: `path` names the field, and perhaps a key inside it.

    `separator` stands between the items of a joined list; `{n}` in it is the number of the item behind it.
    """

    path: tuple[str, ...]
    form: Form
    separator: str = ""


def fields_of(state: object) -> Fields | None:
    """Return a state's fields, or `None` when there is nothing to read.  Costs the same for a huge state.

    Dicts and objects with attributes (pydantic models, dataclasses) have fields; a bare text or list is kept under
    `WHOLE`.  No value is looked into.
    """
    if isinstance(state, dict):
        items = state.items()
    elif isinstance(state, str | list):
        return {WHOLE: state}
    elif type(stored := getattr(state, "__dict__", None)) is dict:
        items = stored.items()
    else:
        return None
    return {key: value for key, value in islice(items, MAX_FIELDS) if type(key) is str}


def is_messages(value: object) -> bool:
    """Say whether a value is a list of messages, by its first and last item."""
    if type(value) not in (list, tuple) or not value:
        return False
    items: Sequence[object] = value  # type: ignore[assignment]
    return isinstance(items[0], BaseMessage) and isinstance(items[-1], BaseMessage)


class WireMemo:
    """Wire forms of messages, each converted once while it stays the same object.  Bounded; not thread-safe."""

    def __init__(self) -> None:
        """Start empty."""
        self._known: OrderedDict[int, tuple[BaseMessage, object, object, WireObject]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many messages are remembered."""
        return len(self._known)

    def wire(self, messages: Sequence[object]) -> tuple[WireObject, ...]:
        """Return the messages in wire form; one that has none is `NO_FORM`, and so is the rest of an endless list."""
        forms = [self._one(message) for message in messages[:MAX_MESSAGES]]
        return (*forms, NO_FORM) if len(messages) > MAX_MESSAGES else tuple(forms)

    def forget(self, messages: Sequence[object]) -> None:
        """Let go of messages that will hardly be asked for again as the same objects."""
        for message in messages[:MAX_MESSAGES]:
            known = self._known.get(id(message))
            if known is not None and known[0] is message:
                del self._known[id(message)]

    def _one(self, message: object) -> WireObject:
        if not isinstance(message, BaseMessage):
            return NO_FORM
        calls = vars(message).get("tool_calls")
        known = self._known.get(id(message))
        if known is not None and known[0] is message and known[1] is message.content and known[2] == calls:
            return known[3]
        form = _plain_form(message)
        if form is None:
            converted = wire_form([message])
            form = with_reasoning(converted[0], message) if converted else NO_FORM
        self._known[id(message)] = (message, message.content, calls, form)
        while len(self._known) > _MEMO_MESSAGES:
            self._known.popitem(last=False)
        return form


def with_reasoning(form: WireObject, message: BaseMessage) -> WireObject:
    """Return a wire form with the reasoning that a message carries, as the chat model sends it back where asked to."""
    reasoning = message.additional_kwargs.get("reasoning_content")
    if form is NO_FORM or not isinstance(reasoning, str) or not reasoning:
        return form
    return {**form, **dict.fromkeys(REASONING_KEYS, reasoning)}


def sends_reasoning(messages: Sequence[WireObject]) -> bool:
    """Say whether a request carries earlier reasoning."""
    return not all(map(_REASONING.isdisjoint, messages))


def without_reasoning(messages: Sequence[WireObject]) -> tuple[WireObject, ...]:
    """Return wire forms without reasoning; those that have none stay the same objects."""
    return tuple(
        message
        if _REASONING.isdisjoint(message)
        else {key: value for key, value in message.items() if key not in _REASONING}
        for message in messages
    )


def _plain_form(message: BaseMessage) -> WireObject | None:
    """Return the wire form of the plainest messages at once; `None` for the others."""
    if type(message) is ToolMessage and isinstance(message.content, str) and not message.additional_kwargs:
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    role = _PLAIN_ROLES.get(type(message))
    if role is None or not isinstance(message.content, str) or message.name or message.additional_kwargs:
        return None
    stored = vars(message)
    if stored.get("invalid_tool_calls"):
        return None
    if calls := stored.get("tool_calls"):
        wired = _wired_calls(calls)
        return None if wired is None else {"role": role, "tool_calls": wired, "content": message.content or None}
    return {"role": role, "content": message.content}


def _wired_calls(calls: Sequence[ToolCall]) -> list[WireObject] | None:
    """Return tool calls as they are sent; `None` for arguments that are no JSON."""
    try:
        return [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": _arguments(call["args"])},
            }
            for call in calls
        ]
    except (TypeError, ValueError, RecursionError):
        return None


def as_messages(value: object) -> list[BaseMessage] | None:
    """Return what a node wrote to a message channel as messages, or `None` when it is no message at all."""
    values: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    try:
        return [item if isinstance(item, BaseMessage) else convert_to_messages([item])[0] for item in values]
    except (ValueError, TypeError, NotImplementedError, KeyError):
        return None


def text_of(fields: Fields, hole: Hole) -> str | None:
    """Return the text that stands in a hole, or `None` when the state does not say."""
    value = _look_up(fields, hole.path)
    if hole.form in (Form.LAST, Form.FIRST):
        return _content(value, hole.form)
    if hole.form is Form.JOINED:
        if isinstance(value, list) and not value:
            return ""
        return join(items, hole.separator) if (items := items_of(value)) else None
    if hole.form is Form.COUNT:
        return str(len(value)) if isinstance(value, list | tuple) else None
    if hole.form is Form.TEXT:
        return _plain(value)
    return _json(value, indent=2 if hole.form is Form.INDENTED else None)


def texts_in(fields: Fields) -> Iterator[tuple[Hole, str]]:
    """Yield every text that the state's values may show up as, with the hole it would stand in; lists unjoined."""
    for path, value in _paths(fields):
        if isinstance(value, list):
            yield Hole(path, Form.COUNT), str(len(value))
        if is_messages(value):
            for form in (Form.LAST, Form.FIRST):
                if text := _content(value, form):
                    yield Hole(path, form), text
            continue
        if text := _plain(value):
            yield Hole(path, Form.TEXT), text
        if isinstance(value, list | dict) and value:
            for form, indent in ((Form.JSON, None), (Form.INDENTED, 2)):
                if text := _json(value, indent=indent):
                    yield Hole(path, form), text


def lists_in(fields: Fields) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the lists whose items may stand joined in a text: strings, numbers, contents of messages."""
    for path, value in _paths(fields):
        if items := items_of(value):
            yield path, items


def join(items: Sequence[str], separator: str) -> str:
    """Join texts; `{n}` in the separator becomes the number of the item behind it."""
    if "{n}" not in separator:
        return separator.join(items)
    head, *rest = items
    return head + "".join(separator.replace("{n}", str(n)) + item for n, item in enumerate(rest, 2))


def items_of(value: object) -> list[str] | None:
    """Return the items of a list as texts, or `None` when they are no texts or too many."""
    if not isinstance(value, list | tuple) or not value or len(value) > MAX_ITEMS:
        return None
    texts = [_content_text(item) if isinstance(item, BaseMessage) else _plain(item) for item in value]
    found = [text for text in texts if text]
    return found if len(found) == len(value) and sum(map(len, found)) <= MAX_TEXT_CHARS else None


def _paths(fields: Fields) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in islice(fields.items(), MAX_FIELDS):
        yield (name,), value
        if type(value) is dict:
            for key, inner in islice(tuple(value.items())[:MAX_ITEMS], MAX_ITEMS):
                if type(key) is str and isinstance(inner, (*_ATOMS, list)):
                    yield (name, key), inner


def _look_up(fields: Fields, path: tuple[str, ...]) -> Any:
    value: Any = fields.get(path[0])
    for key in path[1:]:
        value = value.get(key) if type(value) is dict else None
    return value


def _plain(value: object) -> str | None:
    """Return what an f-string would show."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARS else None
    if isinstance(value, _ATOMS):
        return str(value)
    if type(value) in (list, dict) and _is_small(value):
        return str(value)
    return None


def _json(value: object, *, indent: int | None) -> str | None:
    if type(value) not in (list, dict) or not _is_small(value):
        return None
    try:
        return json.dumps(value, indent=indent)
    except (TypeError, ValueError):
        return None


def _is_small(value: object) -> bool:
    """Whether a value is of JSON's kinds and within bounds, looked at without reading more than the bound."""
    stack, chars = [value], 0
    for _ in range(_JSON_NODES):
        if not stack:
            return True
        item = stack.pop()
        if isinstance(item, str):
            chars += len(item)
        elif type(item) is dict and len(item) <= MAX_ITEMS:
            stack += [*item.keys(), *item.values()]
        elif type(item) is list and len(item) <= MAX_ITEMS:
            stack += item
        elif item is not None and not isinstance(item, _ATOMS):
            return False
        if chars > MAX_TEXT_CHARS:
            return False
    return False


def _content(value: object, form: Form) -> str | None:
    if not is_messages(value):
        return None
    messages: Sequence[BaseMessage] = value  # type: ignore[assignment]
    return _content_text(messages[-1] if form is Form.LAST else messages[0])


def _content_text(message: BaseMessage) -> str | None:
    content = message.content
    return content if isinstance(content, str) and len(content) <= MAX_TEXT_CHARS else None
