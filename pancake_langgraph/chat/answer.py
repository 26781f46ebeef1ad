"""One answer: events in, LangChain chunks out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph._types import Usage
from pancake_langgraph.chat.drafting import OWN_TEXT, Drafting
from pancake_langgraph.chat.watch import Watch
from pancake_langgraph.engines.pool_hints import HINTS_FIELD, PARAMS_FIELD
from pancake_langgraph.wire.bodies import tool_names
from pancake_langgraph.wire.call_text import looks_like_tool_call
from pancake_langgraph.wire.deltas import JoinedCall, SurrogateJoiner, ToolCallJoiner, ToolPiece
from pancake_langgraph.wire.errors import CallFacts, cut_stream
from pancake_langgraph.wire.fields import MAX_FIELDS, FieldScanner
from pancake_langgraph.wire.usage import read_usage, usage_metadata

logger = logging.getLogger(__name__)

PROVIDER = "pancake"


class Answer:
    """Builds the chunks of one streamed answer.

    Text, reasoning and tool-call pieces never share a chunk; usage comes once, on the last chunk.  Not thread-safe.
    """

    def __init__(self, body: Mapping[str, Any], facts: CallFacts, watch: Watch) -> None:
        """Expect the answer to `body`."""
        self.finish_reason: str | None = None
        self.calls: list[JoinedCall] = []
        self.headers: dict[str, str] | None = None
        self._body = body
        self._facts = facts
        self._watch = watch
        self._joiner = ToolCallJoiner(id_seed=f"call-{watch.run_id.hex[:16]}")
        self._text, self._reasoning = SurrogateJoiner(), SurrogateJoiner()
        self._seen_text: list[str] = []
        self._seen_reasoning: list[str] = []
        self._scanners: dict[int, tuple[str, FieldScanner]] = {OWN_TEXT: ("", FieldScanner())}
        self._fields_left = MAX_FIELDS if watch.wants_fields else 0
        self._drafting = Drafting(watch)
        self._choices = 0
        self._raw_usage: Mapping[str, Any] | None = None
        self._model = ""
        self._extras: dict[str, Any] = {}
        self._fingerprint: str | None = None

    @property
    def usage(self) -> Usage | None:
        """The last token counts that the server reported."""
        return read_usage(self._raw_usage)

    def feed(self, event: Mapping[str, Any]) -> list[ChatGenerationChunk]:
        """Take one event.

        Raises:
            MalformedStream: if it is not what the wire format allows.
        """
        self._raw_usage = event.get("usage") or self._raw_usage
        self._model = event.get("model") or self._model
        self._fingerprint = event.get("system_fingerprint") or self._fingerprint
        self._note(event)
        choices = event.get("choices") or ()
        if not isinstance(choices, list | tuple) or not all(isinstance(choice, Mapping) for choice in choices):
            raise MalformedStream("`choices` of a streamed event is not a list of objects")
        chunks: list[ChatGenerationChunk] = []
        for choice in choices:
            if choice.get("index") in (0, None):
                self._choices += 1
                self._watch.first_piece(_token_ids(event))
                chunks += self._choice(choice)
        return chunks

    def finish(self, *, done: bool) -> list[ChatGenerationChunk]:
        """End the answer; `done` says whether the server said so.

        Raises:
            EngineUnavailable: if the answer was cut.
            MalformedStream: if there was no answer.
        """
        if not done and self.finish_reason is None:
            raise cut_stream(self._facts, "the stream ended without a finish reason")
        if not self._choices:
            raise MalformedStream(f"the server at {self._facts.url} ended the answer without a single choice")
        chunks = [_chunk(content=self._text.finish()), _chunk(reasoning=self._reasoning.finish())]
        pieces, self.calls = self._joiner.finish(self.finish_reason)
        chunks += [self._piece_chunk(piece) for piece in pieces]
        return [*(chunk for chunk in chunks if chunk is not None), self._last()]

    def repair(self, message: AIMessage) -> None:
        """Give the whole message's invalid calls their arguments as they came, and the reason."""
        broken = [call for call in self.calls if call.problem is not None]
        if broken:
            message.invalid_tool_calls = [
                InvalidToolCall(
                    type="invalid_tool_call", name=call.name, args=call.arguments, id=call.id, error=call.problem
                )
                for call in broken
            ]

    def llm_output(self) -> dict[str, Any]:
        """Return what LangChain keeps per result."""
        usage = self.usage
        output: dict[str, Any] = {"model_name": self._model or self._body.get("model"), "model_provider": PROVIDER}
        if usage is not None:
            output["token_usage"] = {
                "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
        return output

    def _note(self, event: Mapping[str, Any]) -> None:
        if isinstance(event.get("id"), str):
            self._extras["request_id"] = event["id"]
        params = event.get(PARAMS_FIELD)
        if isinstance(params, Mapping):  # what we say to the engine, and what it answers, is none of the message's
            params = {name: value for name, value in params.items() if name != HINTS_FIELD} or None
        if params is not None:
            self._extras[PARAMS_FIELD] = params
        ids = _token_ids(event)
        if ids is not None:
            self._extras["num_prompt_token_ids"] = len(ids)

    def _choice(self, choice: Mapping[str, Any]) -> list[ChatGenerationChunk]:
        delta = choice.get("delta")
        if delta is not None and not isinstance(delta, Mapping):
            raise MalformedStream(f"`delta` of a streamed choice is {type(delta).__name__}, allowed is an object")
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        chunks = self._delta(delta or {})
        logprobs = choice.get("logprobs")
        if logprobs:
            if not chunks:
                chunks.append(_empty())
            chunks[0].generation_info = {**(chunks[0].generation_info or {}), "logprobs": logprobs}
        return chunks

    def _delta(self, delta: Mapping[str, Any]) -> list[ChatGenerationChunk]:
        reasoning = self._reasoning.feed(_string(delta, "reasoning") or _string(delta, "reasoning_content"))
        text = self._text.feed(_string(delta, "content"))
        self._seen_reasoning.append(reasoning)
        self._seen_text.append(text)
        entries = delta.get("tool_calls") or ()
        if not isinstance(entries, list | tuple):
            raise MalformedStream(f"`tool_calls` of a delta is {type(entries).__name__}, allowed is a list")
        self._scan(OWN_TEXT, text)
        self._drafting.feed(OWN_TEXT, text)
        pieces = self._joiner.feed(entries)
        for piece in pieces:
            if piece.name:
                self._watch.tool_name(piece.name)
                self._scanners[piece.index] = piece.name, FieldScanner()
                self._drafting.begin_call(piece.index, piece.name)
            self._scan(piece.index, piece.arguments)
            self._drafting.feed(piece.index, piece.arguments)
        chunks = [_chunk(reasoning=reasoning), _chunk(content=text), *map(self._piece_chunk, pieces)]
        refusal = _string(delta, "refusal")
        if refusal:
            chunks.append(ChatGenerationChunk(message=_message(additional_kwargs={"refusal": refusal})))
        return [chunk for chunk in chunks if chunk is not None]

    def _scan(self, index: int, text: str) -> None:
        """Look for fields that this piece completes, as long as somebody wants to know and few were told."""
        if not text or self._fields_left <= 0 or index not in self._scanners:
            return
        tool, scanner = self._scanners[index]
        for name, value in () if scanner.is_done else scanner.feed(text):
            if self._fields_left > 0:
                self._fields_left -= 1
                self._watch.field(tool, name, value)

    def _piece_chunk(self, piece: ToolPiece) -> ChatGenerationChunk:
        call = ToolCallChunk(
            type="tool_call_chunk", index=piece.index, id=piece.id, name=piece.name, args=piece.arguments
        )
        return ChatGenerationChunk(message=_message(tool_call_chunks=[call]))

    def _last(self) -> ChatGenerationChunk:
        message = _message(usage_metadata=usage_metadata(self._raw_usage), chunk_position="last")
        extras = {**self._extras, **self._flags()}
        if extras:
            message.response_metadata[PROVIDER] = extras
        info: dict[str, Any] = {"finish_reason": self.finish_reason, "model_name": self._model}
        if self._fingerprint:
            info["system_fingerprint"] = self._fingerprint
        if self.headers is not None:
            info["headers"] = self.headers
        return ChatGenerationChunk(message=message, generation_info=info)

    def _flags(self) -> dict[str, Any]:
        """Notice what is quietly wrong; each finding is one log line without a word of the prompt or the answer."""
        flags: dict[str, Any] = {}
        text, reasoning = "".join(self._seen_text), "".join(self._seen_reasoning)
        names = tool_names(self._body.get("tools"))
        if names and not self.calls and looks_like_tool_call(f"{text}\n{reasoning}", names):
            flags["unparsed_tool_call"] = True
            logger.warning("%s wrote a tool call as plain text; check the server's --tool-call-parser", self._model)
        if (
            self._body.get("stop")
            and reasoning
            and not text.strip()
            and not self.calls
            and self.finish_reason == "stop"
        ):
            flags["empty_after_reasoning"] = True
            logger.warning("%s reasoned but answered nothing: a stop string may lie inside its reasoning", self._model)
        if self._body.get("parallel_tool_calls") is False and len(self.calls) > 1:
            flags["parallel_tool_calls_ignored"] = True
            logger.warning("%s made %d calls at once although that was switched off", self._model, len(self.calls))
        broken = {call.id: call.problem for call in self.calls if call.problem is not None}
        if broken:
            flags["invalid_tool_calls"] = broken
            logger.warning("%s made %d tool calls that cannot be executed", self._model, len(broken))
        return flags


def _message(**fields: Any) -> AIMessageChunk:
    return AIMessageChunk(content=fields.pop("content", ""), response_metadata={"model_provider": PROVIDER}, **fields)


def _chunk(*, content: str = "", reasoning: str = "") -> ChatGenerationChunk | None:
    if reasoning:
        return ChatGenerationChunk(message=_message(additional_kwargs={"reasoning_content": reasoning}))
    return ChatGenerationChunk(message=_message(content=content)) if content else None


def _empty() -> ChatGenerationChunk:
    return ChatGenerationChunk(message=_message())


def _string(delta: Mapping[str, Any], key: str) -> str:
    value = delta.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise MalformedStream(f"`{key}` of a delta is {type(value).__name__}, allowed is a string or null")
    return value


def _token_ids(event: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = event.get("prompt_token_ids")
    # An extra that only serves hints: one that is no list of ids counts as not given.
    return tuple(ids) if isinstance(ids, list) and ids and set(map(type, ids)) == {int} else None
