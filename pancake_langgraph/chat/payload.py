"""From LangChain's payload to the one that goes over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from langchain_core.messages import AIMessage, BaseMessage

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.chat.structured import response_format
from pancake_langgraph.prompts.tool_order import expected_tools, sent_tools
from pancake_langgraph.tiers.naming import KVCodec, with_codec
from pancake_langgraph.wire.bodies import deep_merge
from pancake_langgraph.wire.messages import pair_tool_calls, short_tool_call_ids, strict_roles

if TYPE_CHECKING:
    from pancake_langgraph.chat_model import PancakeChatModel


def with_extras(model: PancakeChatModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take everything that belongs into `extra_body` out of `kwargs`: the model's own, then the call's, merged.

    Raises:
        ConfigError: if the call names a codec that there is not.
    """
    extra = deep_merge(model.extra_body, None)
    for name in ("cache_salt", "priority"):
        value = kwargs.pop(name, None)
        value = getattr(model, name) if value is None else value
        if value is not None:
            extra[name] = value
    if kwargs.pop("return_token_ids", model.return_token_ids):
        extra["return_token_ids"] = True
    extra = deep_merge(extra, kwargs.pop("extra_body", None))
    codec = kwargs.pop("kv_codec", None) or model.kv_codec
    if codec is not None:
        if codec not in get_args(KVCodec):
            raise ConfigError(f"kv_codec: got {codec!r}, allowed are {', '.join(get_args(KVCodec))}")
        extra["cache_salt"] = with_codec(extra.get("cache_salt"), codec)
    return extra


def lay_out(
    model: PancakeChatModel, payload: dict[str, Any], messages: Sequence[BaseMessage], extra: dict[str, Any]
) -> dict[str, Any]:
    """Finish a payload: repaired messages, stable tools, response format, extras.

    Raises:
        ConfigError: if several answers are asked for at once.
    """
    if (payload.get("n") or 1) != 1:
        raise ConfigError(f"n: got {payload['n']!r}, allowed is 1; use batch for several answers")
    wire = list(payload["messages"])
    if model.send_reasoning_back:
        wire = [_with_reasoning(sent, message) for sent, message in zip(wire, messages, strict=True)]
    if model.repair_tool_pairs:
        wire = pair_tool_calls(wire)
    if model.strict_roles:
        wire = strict_roles(wire)
    if model.tool_call_id_style == "alnum9":
        wire = short_tool_call_ids(wire)
    payload["messages"] = wire
    if payload.get("tools"):  # what is sent streams; the rest is only counted or shown
        order = sent_tools if payload.get("stream") else expected_tools
        payload["tools"] = order(payload["tools"], model.tool_order)
    if payload.get("response_format") is not None:
        payload["response_format"] = response_format(payload["response_format"], strict=payload.pop("strict", None))
    if "max_completion_tokens" in payload:
        payload["max_tokens"] = payload.pop("max_completion_tokens")
    if extra:
        payload["extra_body"] = extra
    else:
        payload.pop("extra_body", None)
    return {key: value for key, value in payload.items() if value is not None}


def reasoning_of(message: BaseMessage) -> str:
    """Return the reasoning that a message carries, in any of LangChain's places."""
    kept = message.additional_kwargs.get("reasoning_content")
    if isinstance(kept, str):
        return kept
    if isinstance(message.content, list):
        blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "reasoning"]
        return "".join(str(block.get("reasoning") or "") for block in blocks)
    return ""


def _with_reasoning(sent: dict[str, Any], message: BaseMessage) -> dict[str, Any]:
    reasoning = reasoning_of(message) if isinstance(message, AIMessage) else ""
    return {**sent, "reasoning_content": reasoning, "reasoning": reasoning} if reasoning else sent
