"""Laying out request bodies: merging extras, and one stable order for tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def deep_merge(base: Mapping[str, Any] | None, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `base` with `extra` laid over it; nested objects are merged, everything else is replaced."""
    merged = dict(base or {})
    for key, value in (extra or {}).items():
        present = merged.get(key)
        both = isinstance(present, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(present, value) if both else value
    return merged


def flatten(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body that goes over the wire: `extra_body` merged into the rest, SDK-only keys removed."""
    body = {key: value for key, value in payload.items() if key not in _NOT_IN_BODY and value is not None}
    return deep_merge(body, payload.get("extra_body"))


def stable_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools sorted by name with sorted keys, so that binding order never moves the prompt's prefix."""
    return [sorted_keys(tool) for tool in sorted(tools, key=_tool_name)]


def sorted_keys(value: Any) -> Any:
    """Return `value` with the keys of every nested object in sorted order; lists keep theirs."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [sorted_keys(item) for item in value]
    return value


def tool_names(tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, ...]:
    """Return the function names of `tools`, in order."""
    return tuple(_tool_name(tool) for tool in tools or ())


def prompt_texts(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return every text of a request body that came from the application, for keeping it out of messages."""
    texts: list[str] = []
    for message in body.get("messages") or ():
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts.extend(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        calls = message.get("tool_calls") or ()
        texts.extend(str((call.get("function") or {}).get("arguments") or "") for call in calls)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        texts.append(prompt)
    return tuple(text for text in texts if text.strip())


_NOT_IN_BODY = frozenset({"extra_body", "extra_headers", "extra_query", "timeout"})


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name") or "")
