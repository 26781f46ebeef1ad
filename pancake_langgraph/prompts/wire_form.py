"""LangChain messages to wire form, for prediction only: the chat model renders the real request itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from langchain_core.messages import BaseMessage, convert_to_openai_messages

from pancake_langgraph._types import WireObject

logger = logging.getLogger(__name__)


def wire_form(messages: Sequence[BaseMessage]) -> tuple[WireObject, ...] | None:
    """Return the messages as chat objects, or `None` when some content has no wire form.

    An assistant message that only calls tools gets `null` content, as the chat model sends it.
    """
    try:
        converted = convert_to_openai_messages(list(messages))
    except (ValueError, TypeError, KeyError) as exc:  # nothing is predicted from such messages
        logger.debug("messages have no wire form: %s", type(exc).__name__)
        return None
    objects = converted if isinstance(converted, list) else [converted]
    return tuple(_without_noise(message) for message in objects)


def _without_noise(message: WireObject) -> WireObject:
    cleaned = {key: value for key, value in message.items() if key != "name" or message.get("role") != "tool"}
    if cleaned.get("tool_calls") and not cleaned.get("content"):
        cleaned["content"] = None
    return cleaned
