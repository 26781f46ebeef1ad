"""Chat calls on the OpenAI wire: request bodies out, deltas in.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph._types import Usage
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines._http import error_in_stream
from pancake_langgraph.engines.base import ChatDelta, ChatRequest
from pancake_langgraph.wire.errors import CallFacts


def chat_body(request: ChatRequest, *, model: str, with_prompt_token_ids: bool) -> dict[str, Any]:
    """Return the JSON body of a streamed chat call; `request.extra` is merged last."""
    body: dict[str, Any] = {
        "model": model,
        "messages": list(request.prompt.messages),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.prompt.tools:
        body["tools"] = list(request.prompt.tools)
    if request.tool_choice is not None:
        body["tool_choice"] = request.tool_choice
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if with_prompt_token_ids:
        body["return_token_ids"] = True
    return body | request.extra


def usage_of(payload: Any) -> Usage | None:
    """Read a usage object; `None` when the server gave none.

    Raises:
        MalformedStream: if the counts are not numbers.
    """
    if not isinstance(payload, dict):
        return None
    details = payload.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    try:
        return Usage(
            prompt_tokens=int(payload.get("prompt_tokens") or 0),
            completion_tokens=int(payload.get("completion_tokens") or 0),
            cached_tokens=None if cached is None else int(cached),
        )
    except (TypeError, ValueError) as exc:
        raise MalformedStream(f"usage: got counts that are not numbers ({exc})") from exc


class DeltaReader:
    """Turns the chunks of one stream into `ChatDelta`s.  One per call; not thread-safe."""

    def __init__(self, facts: CallFacts) -> None:
        """`facts` are what errors name."""
        self._facts = facts
        self._what = f"the answer of {facts.url}"
        self._usage: Usage | None = None
        self._named: dict[int, str | None] = {}
        self._ids: list[str] = []
        self._sent_ids = False
        self.finished = False

    def read(self, chunk: dict[str, Any]) -> Iterator[ChatDelta]:
        """Yield what one chunk adds.

        Raises:
            EngineError: if the chunk is an error, or not what the wire allows.
        """
        if (error := chunk.get("error")) is not None:
            raise error_in_stream(error, self._facts)
        if (usage := usage_of(chunk.get("usage"))) is not None:
            self._usage = usage  # some servers repeat it in every chunk: the last one counts
        if (ids := self._prompt_token_ids(chunk)) is not None:
            yield ChatDelta(prompt_token_ids=ids)
        choices = chunk.get("choices") or ()
        if not isinstance(choices, list | tuple):
            raise MalformedStream(f"{self._what}: got choices of type {type(choices).__name__}, allowed is a list")
        for choice in choices:
            if not isinstance(choice, dict):
                raise MalformedStream(
                    f"{self._what}: got a choice of type {type(choice).__name__}, allowed is an object"
                )
            if choice.get("index", 0) == 0:
                yield from self._read_choice(choice)

    def last(self) -> ChatDelta | None:
        """Return the usage as the last piece, if the server gave one."""
        return ChatDelta(usage=self._usage) if self._usage is not None else None

    def _read_choice(self, choice: dict[str, Any]) -> Iterator[ChatDelta]:
        delta = choice.get("delta") or {}
        reasoning = next((delta[name] for name in _compat.REASONING_FIELDS if delta.get(name)), None)
        if reasoning:
            yield ChatDelta(reasoning=reasoning)
        if delta.get("content"):
            yield ChatDelta(text=delta["content"])
        for call in delta.get("tool_calls") or ():
            yield from self._read_call(call)
        if (reason := choice.get("finish_reason")) is not None:
            self.finished = True
            yield ChatDelta(finish_reason=str(reason))

    def _read_call(self, call: dict[str, Any]) -> Iterator[ChatDelta]:
        index = self._index_of(call)
        function = call.get("function") or {}
        name = function.get("name") or None
        if name is not None and self._named.get(index) is not None:
            if self._named[index] != name:
                raise MalformedStream(f"{self._what}: got two names for tool call {index}, allowed is one")
            name = None  # some servers repeat the name in every piece
        if name is not None:
            self._named[index] = name
        arguments = function.get("arguments") or None
        if name is not None or arguments is not None:
            yield ChatDelta(tool_index=index, tool_name=name, tool_arguments=arguments)

    def _index_of(self, call: dict[str, Any]) -> int:
        index = call.get("index")
        if isinstance(index, int):
            return index
        call_id = call.get("id")
        if isinstance(call_id, str):
            if call_id not in self._ids:
                self._ids.append(call_id)
            return self._ids.index(call_id)
        if len(self._ids) <= 1:
            return 0
        raise MalformedStream(f"{self._what}: got a tool call piece without index or id among several calls")

    def _prompt_token_ids(self, chunk: dict[str, Any]) -> tuple[int, ...] | None:
        ids = chunk.get("prompt_token_ids")
        if self._sent_ids or not ids:
            return None
        self._sent_ids = True
        return tuple(ids)
