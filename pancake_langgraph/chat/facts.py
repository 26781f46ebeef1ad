"""What a server says about itself: its models, their windows, its tokenizer."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

from pancake_langgraph._errors import EngineError, MalformedStream
from pancake_langgraph.chat.events import translate
from pancake_langgraph.chat.link import Link, transport_errors
from pancake_langgraph.wire.bodies import prompt_texts
from pancake_langgraph.wire.errors import CallFacts, error_from_response
from pancake_langgraph.wire.json_text import decoded, encoded

logger = logging.getLogger(__name__)

CheckContext = Literal["auto", "always", "never"]

_ASK_TIMEOUT_S: Final = 10.0
_RETRY_AFTER_S: Final = 30.0
_NO_ROUTE: Final = frozenset({403, 404, 405, 501})
_ESTIMATE_CHARS_PER_TOKEN: Final = 4
_CAREFUL_CHARS_PER_TOKEN: Final = 3
_SMALL_TOKENS: Final = 1024
_MAX_MODELS: Final = 1024


class ServerFacts:
    """Asks once and remembers.  Shared by all copies of one chat model; safe to use from several threads."""

    def __init__(self, link: Link) -> None:
        """Know nothing yet."""
        self.link = link
        self._windows: dict[str, int | None] = {}
        self._asked = False
        self._failed_at_s: float | None = None
        self._no_tokenizer = False
        self._warned = False

    def known_window(self, model: str) -> int | None:
        """Return the model's window in tokens if it is known already; never asks."""
        return self._windows.get(model)

    def served_models(self) -> tuple[str, ...]:
        """Return the names the server serves.

        Raises:
            EngineError: if it cannot be asked.
        """
        if not self._asked:
            self._learn_models(self._get("models"))
        return tuple(self._windows)

    async def aserved_models(self) -> tuple[str, ...]:
        """Return the names the server serves.

        Raises:
            EngineError: if it cannot be asked.
        """
        if not self._asked:
            self._learn_models(await self._aget("models"))
        return tuple(self._windows)

    def window(self, model: str) -> int | None:
        """Return the model's window in tokens, or `None` when the server does not say or does not answer."""
        if model not in self._windows and self._may_ask():
            try:
                self.served_models()
            except EngineError as exc:
                self._remember_failure(exc)
        return self._windows.get(model)

    async def awindow(self, model: str) -> int | None:
        """Return the model's window in tokens, or `None` when the server does not say or does not answer."""
        if model not in self._windows and self._may_ask():
            try:
                await self.aserved_models()
            except EngineError as exc:
                self._remember_failure(exc)
        return self._windows.get(model)

    def tokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return token ids for a `/tokenize` body, or `None` when the server has no such route.

        Raises:
            EngineError: if the server cannot be asked or refuses.
        """
        if self._no_tokenizer:
            return None
        try:
            status, text = self._post(self._tokenize_url, body)
        except transport_errors() as exc:
            raise translate(exc, self._facts(body), started=False) from exc
        return self._tokens(status, text, body)

    async def atokenize(self, body: Mapping[str, Any]) -> list[int] | None:
        """Return token ids as `tokenize` does."""
        if self._no_tokenizer:
            return None
        try:
            client = await self.link.async_client()
            reply = await client.post(
                self._tokenize_url,
                content=encoded(body),
                headers=await self.link.async_headers(),
                timeout=_ASK_TIMEOUT_S,
            )
        except transport_errors() as exc:
            raise translate(exc, self._facts(body), started=False) from exc
        return self._tokens(reply.status_code, reply.text, body)

    def estimate(self, chars: int) -> int:
        """Return a rough token count for a text length, warning once that it is one."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "the server at %s has no /tokenize route: token counts are estimates (%d characters per token)",
                self.link.config.base_url,
                _ESTIMATE_CHARS_PER_TOKEN,
            )
        return math.ceil(chars / _ESTIMATE_CHARS_PER_TOKEN)

    @property
    def _tokenize_url(self) -> str:
        return f"{self.link.config.root_url}/tokenize"

    def _facts(self, body: Mapping[str, Any]) -> CallFacts:
        model = str(body.get("model") or "")
        return CallFacts(self.link.config.base_url, model=model, prompt_texts=prompt_texts(body))

    def _may_ask(self) -> bool:
        return not self._asked and (self._failed_at_s is None or time.monotonic() - self._failed_at_s > _RETRY_AFTER_S)

    def _remember_failure(self, exc: EngineError) -> None:
        self._failed_at_s = time.monotonic()
        logger.debug("the server did not say what it serves: %s", type(exc).__name__)

    def _get(self, path: str) -> dict[str, Any]:
        try:
            reply = self.link.client().get(
                self.link.config.url(path), headers=self.link.headers(), timeout=_ASK_TIMEOUT_S
            )
        except transport_errors() as exc:
            raise translate(exc, self._facts({}), started=False) from exc
        return self._object(reply.status_code, reply.text)

    async def _aget(self, path: str) -> dict[str, Any]:
        try:
            client = await self.link.async_client()
            headers = await self.link.async_headers()
            reply = await client.get(self.link.config.url(path), headers=headers, timeout=_ASK_TIMEOUT_S)
        except transport_errors() as exc:
            raise translate(exc, self._facts({}), started=False) from exc
        return self._object(reply.status_code, reply.text)

    def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        reply = self.link.client().post(url, content=encoded(body), headers=self.link.headers(), timeout=_ASK_TIMEOUT_S)
        return reply.status_code, reply.text

    def _object(self, status_code: int, text: str) -> dict[str, Any]:
        if status_code >= 400:
            raise error_from_response(status_code, text, self._facts({}))
        try:
            value = decoded(text)
        except ValueError as exc:
            raise MalformedStream(f"the server at {self.link.config.base_url} answered with no JSON") from exc
        if not isinstance(value, dict):
            raise MalformedStream(f"the server at {self.link.config.base_url} answered with no JSON object")
        return value

    def _learn_models(self, reply: Mapping[str, Any]) -> None:
        for entry in list(reply.get("data") or ())[:_MAX_MODELS]:
            if isinstance(entry, Mapping) and isinstance(entry.get("id"), str):
                window = entry.get("max_model_len")
                self._windows[entry["id"]] = window if isinstance(window, int) and window > 0 else None
        self._asked = True

    def _tokens(self, status_code: int, text: str, body: Mapping[str, Any]) -> list[int] | None:
        if status_code in _NO_ROUTE and "model" not in text.lower():
            self._no_tokenizer = True
            return None
        if status_code >= 400:
            raise error_from_response(status_code, text, self._facts(body))
        reply = self._object(status_code, text)
        tokens, count = reply.get("tokens"), reply.get("count")
        if not isinstance(tokens, list) or not isinstance(count, int):
            self._no_tokenizer = True  # another server's route of the same name
            return None
        window = reply.get("max_model_len")
        if isinstance(window, int) and len(self._windows) < _MAX_MODELS:
            self._windows.setdefault(str(body.get("model")), window)
        return tokens


class ServedProfile(dict[str, Any]):
    """A model profile whose `max_input_tokens` is asked of the server when it is first read.

    On an event loop nothing is asked, since that would block it: the value is then there once a call has learned it.
    """

    def __init__(self, facts: ServerFacts, model: str) -> None:
        """Start with what every model behind this wire can do."""
        super().__init__(tool_calling=True, structured_output=True)
        self._facts = facts
        self._model = model

    def _learn(self) -> None:
        if dict.__contains__(self, _WINDOW_KEY):
            return
        window = self._facts.known_window(self._model)
        if window is None and not _on_a_loop():
            window = self._facts.window(self._model)
        if window is not None:
            self[_WINDOW_KEY] = window

    def __contains__(self, key: object) -> bool:
        if key == _WINDOW_KEY:
            self._learn()
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        if key == _WINDOW_KEY:
            self._learn()
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, asking the server first where that is needed and possible."""
        if key == _WINDOW_KEY:
            self._learn()
        return super().get(key, default)

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedProfile:
        return ServedProfile(self._facts, self._model)


_WINDOW_KEY: Final = "max_input_tokens"


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def wants_window(mode: CheckContext, body: Mapping[str, Any]) -> bool:
    """Say whether a call is worth asking the server for the window at all."""
    if mode == "never" or not isinstance(body.get("max_tokens"), int) or not _only_text(body):
        return False
    return mode == "always" or careful_tokens(body) > _SMALL_TOKENS


def wants_count(mode: CheckContext, body: Mapping[str, Any], window_tokens: int | None) -> bool:
    """Say whether a call's prompt should be counted before it is sent."""
    if window_tokens is None:
        return False
    return mode == "always" or careful_tokens(body) > window_tokens


def careful_tokens(body: Mapping[str, Any]) -> int:
    """Return a high estimate of prompt plus requested output, in tokens."""
    chars = sum(map(len, prompt_texts(body))) + (len(json.dumps(body["tools"])) if body.get("tools") else 0)
    return chars // _CAREFUL_CHARS_PER_TOKEN + int(body.get("max_tokens") or 0)


def tokenize_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `/tokenize` body for what a chat body asks the model to read."""
    kept = {key: body[key] for key in ("model", "messages", "tools", "chat_template_kwargs") if body.get(key)}
    return {**kept, "add_generation_prompt": True}


def _only_text(body: Mapping[str, Any]) -> bool:
    for message in body.get("messages") or ():
        content = message.get("content")
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            return False
    return True
