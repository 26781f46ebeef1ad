"""What a `WireServer` answers: scripted replies, and replays of a real server's recorded ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any


class Act(Enum):
    """What a stream may do besides sending."""

    CUT = "cut"
    """Close the connection in the middle of the answer."""
    HANG = "hang"
    """Send nothing more until the client hangs up or the server stops."""


#: An event as JSON, raw bytes, seconds to wait, or an act.
Step = Mapping[str, Any] | bytes | float | Act


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: either whole (`body`) or a stream (`steps`)."""

    status: int = 200
    body: bytes | None = None
    content_type: str = "application/json"
    steps: tuple[Step, ...] = ()
    delay_s: float = 0.0
    piece_bytes: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def json(value: Any, *, status: int = 200) -> Reply:
        """Answer with one JSON value."""
        return Reply(status=status, body=json.dumps(value, ensure_ascii=False).encode())

    @staticmethod
    def text(value: str, *, status: int = 200, content_type: str = "text/plain") -> Reply:
        """Answer with one text."""
        return Reply(status=status, body=value.encode(), content_type=content_type)

    @staticmethod
    def error(status: int, message: str, *, kind: str = "BadRequestError") -> Reply:
        """Answer with an error in vLLM's shape."""
        return Reply.json({"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status)

    @staticmethod
    def stream(*steps: Step, done: bool = True, delay_s: float = 0.0, piece_bytes: int | None = None) -> Reply:
        """Answer with a stream; `done` adds the end mark, `piece_bytes` splits the bytes on the network."""
        ends: tuple[Step, ...] = (b"data: [DONE]\n\n",) if done else ()
        return Reply(
            content_type="text/event-stream; charset=utf-8",
            steps=(*steps, *ends),
            delay_s=delay_s,
            piece_bytes=piece_bytes,
        )


def event(
    delta: Mapping[str, Any] | None = None,
    *,
    finish_reason: str | None = None,
    usage: Mapping[str, Any] | None = None,
    model: str = "small",
    **extra: Any,
) -> dict[str, Any]:
    """Return a streamed event; without `delta` and `finish_reason` its choices are empty, as of a last usage piece."""
    choices: list[dict[str, Any]] = []
    if delta is not None or finish_reason is not None:
        choices = [{"index": 0, "delta": dict(delta or {}), "logprobs": None, "finish_reason": finish_reason}]
    made: dict[str, Any] = {
        "id": "chatcmpl-wire",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": choices,
    }
    if usage is not None:
        made["usage"] = dict(usage)
    return {**made, **extra}


def tool_delta(
    arguments: str | None = None, *, index: int | None = 0, call_id: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """Return one entry of a delta's `tool_calls`, leaving out what is `None`."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    entry: dict[str, Any] = {"function": function}
    if index is not None:
        entry["index"] = index
    if call_id is not None:
        entry |= {"id": call_id, "type": "function"}
    return entry


def text_stream(
    words: Iterable[str],
    *,
    finish_reason: str = "stop",
    model: str = "small",
    usage: Mapping[str, Any] | None = None,
    delay_s: float = 0.0,
) -> Reply:
    """Answer with text, one event per word, in the order of vLLM's events."""
    steps: list[Step] = [event({"role": "assistant", "content": ""}, model=model)]
    for word in words:
        if delay_s:
            steps.append(delay_s)
        steps.append(event({"content": word}, model=model))
    steps.append(event({}, finish_reason=finish_reason, model=model))
    if usage is not None:
        steps.append(event(usage=usage, model=model))
    return Reply.stream(*steps)


class Recording:
    """A real server's answers, by name, and which of them fits a request."""

    def __init__(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep `answers` as the recorder wrote them."""
        self.answers = answers

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a recording from a file."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def reply(self, name: str) -> Reply:
        """Return the recorded answer called `name`, byte for byte."""
        answer = self.answers[name]
        body = str(answer["body"]).encode()
        whole = Reply(status=int(answer["status"]), content_type=str(answer["content_type"]))
        if "event-stream" in whole.content_type:
            return replace(whole, steps=tuple(part + b"\n\n" for part in body.split(b"\n\n") if part))
        return replace(whole, body=body)

    def __call__(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Return the recorded answer to the same kind of request."""
        return self.reply(self.kind(path, body))

    def kind(self, path: str, body: Mapping[str, Any]) -> str:
        """Name the recorded request that a request is most like."""
        if path == "/tokenize":
            return "tokenize_messages" if "messages" in body else "tokenize_prompt"
        if path == "/v1/completions":
            return "completion"
        if path != "/v1/chat/completions":
            return {"/v1/models": "models", "/version": "version", "/health": "health"}.get(path, "wrong_path")
        choice = body.get("tool_choice")
        ordered = (
            ("unknown_model", body.get("model") not in self._served()),
            ("overflow", (body.get("max_tokens") or 0) > self._window()),
            ("tool_named", bool(body.get("tools")) and isinstance(choice, Mapping)),
            ("tool_required", bool(body.get("tools")) and choice == "required"),
            ("json_schema", bool(body.get("response_format"))),
            ("choice", "structured_outputs" in body),
            ("stop", bool(body.get("stop"))),
            ("chat_token_ids", bool(body.get("return_token_ids"))),
            ("logprobs", bool(body.get("logprobs"))),
            ("chat_unstreamed", not body.get("stream")),
            ("chat_no_usage", not (body.get("stream_options") or {}).get("include_usage")),
        )
        return next((name for name, fits in ordered if fits), "chat")

    def _served(self) -> tuple[str, ...]:
        return tuple(entry["id"] for entry in self._models())

    def _window(self) -> int:
        return int(self._models()[0]["max_model_len"])

    def _models(self) -> Sequence[Mapping[str, Any]]:
        data: Sequence[Mapping[str, Any]] = json.loads(str(self.answers["models"]["body"]))["data"]
        return data
