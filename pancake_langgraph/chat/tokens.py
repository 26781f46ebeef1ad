"""Token counting with the server's own tokenizer, as LangChain's methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from langchain_core.messages import BaseMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from pancake_langgraph._errors import Unsupported
from pancake_langgraph.chat.facts import tokenize_body
from pancake_langgraph.wire.bodies import flatten, prompt_texts

if TYPE_CHECKING:
    from pancake_langgraph.chat_model import PancakeChatModel


class TokenCounting:
    """Counts as the server does; where it has no tokenizer, estimates and says so once in the log."""

    def get_token_ids(self: Any, text: str) -> list[int]:
        """Return the ids of a plain text.

        Raises:
            Unsupported: if the server has no tokenizer.
            EngineError: if it cannot be asked.
        """
        if self.custom_get_token_ids is not None:
            return list(self.custom_get_token_ids(text))
        ids: list[int] | None = self.facts.tokenize(_text_body(self, text))
        if ids is None:
            raise Unsupported(
                f"the server at {self.openai_api_base} has no /tokenize route, so there are no token ids; "
                "give custom_get_token_ids, or use get_num_tokens for an estimate"
            )
        return ids

    def get_num_tokens(self: Any, text: str) -> int:
        """Return the number of tokens of a plain text, without any template.

        Raises:
            EngineError: if the server cannot be asked.
        """
        if self.custom_get_token_ids is not None:
            return len(self.custom_get_token_ids(text))
        ids = self.facts.tokenize(_text_body(self, text))
        return int(self.facts.estimate(len(text))) if ids is None else len(ids)

    async def aget_num_tokens(self: Any, text: str) -> int:
        """Return what `get_num_tokens` does, without blocking the event loop."""
        ids = await self.facts.atokenize(_text_body(self, text))
        return int(self.facts.estimate(len(text))) if ids is None else len(ids)

    def get_num_tokens_from_messages(
        self: Any, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> int:
        """Return the tokens the model will read for `messages` and `tools`, template and generation prompt included.

        Raises:
            EngineError: if the server cannot be asked.
        """
        body = _chat_body(self, messages, tools)
        ids = self.facts.tokenize(tokenize_body(body))
        return int(self.facts.estimate(_chars(body))) if ids is None else len(ids)

    async def aget_num_tokens_from_messages(
        self: Any, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return what `get_num_tokens_from_messages` does, without blocking the event loop."""
        body = _chat_body(self, messages, tools)
        ids = await self.facts.atokenize(tokenize_body(body))
        return int(self.facts.estimate(_chars(body))) if ids is None else len(ids)


def _text_body(model: PancakeChatModel, text: str) -> dict[str, Any]:
    return {"model": model.model_name, "prompt": text, "add_special_tokens": False}


def _chat_body(model: PancakeChatModel, messages: Sequence[BaseMessage], tools: Sequence[Any] | None) -> dict[str, Any]:
    bound: dict[str, Any] = {"tools": [convert_to_openai_tool(tool) for tool in tools]} if tools else {}
    return flatten(model._get_request_payload(list(messages), stream=False, **bound))


def _chars(body: dict[str, Any]) -> int:
    return sum(map(len, prompt_texts(body))) + (len(json.dumps(body["tools"])) if body.get("tools") else 0)
