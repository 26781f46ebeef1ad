"""From the bytes of one HTTP answer to chat-completion events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pancake_langgraph._errors import EngineError, MalformedStream
from pancake_langgraph.wire.errors import CallFacts, cut_stream, error_from_response, timed_out, unreachable
from pancake_langgraph.wire.json_text import decoded
from pancake_langgraph.wire.sse import DONE, EventDecoder

_MAX_WHOLE_BYTES = 64 * 1024 * 1024


class EventReader:
    """Reads one answer, streamed or whole.  Not thread-safe."""

    def __init__(self, content_type: str, facts: CallFacts) -> None:
        """Expect events, unless `content_type` says that one whole JSON answer comes."""
        self.done = False
        self._facts = facts
        self._content_type = content_type.partition(";")[0].strip().lower()
        self._whole = bytearray() if self._content_type == "application/json" else None
        self._decoder = EventDecoder()
        if self._content_type.startswith("text/html"):
            raise MalformedStream(
                f"the server at {facts.url} answered with a web page, not with an event stream; base_url must be the "
                "API root, usually ending in /v1"
            )

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Return the events that `chunk` completes.

        Raises:
            MalformedStream: if something is no JSON object, or too large.
            EngineError: if the server reports an error inside the stream.
        """
        if self._whole is not None:
            self._whole += chunk
            if len(self._whole) > _MAX_WHOLE_BYTES:
                raise MalformedStream(f"the answer is larger than {_MAX_WHOLE_BYTES} bytes")
            return []
        return self._events(self._decoder.feed(chunk))

    def end(self) -> list[dict[str, Any]]:
        """Return what is left when the body has ended."""
        if self._whole is None:
            return self._events(self._decoder.finish())
        event = self._parse(self._whole.decode("utf-8", "replace"))
        self.done = True
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):  # whoever reads the event says what is wrong with others
                choice["delta"] = choice.get("message") or {}
        return [event]

    def _events(self, data: list[str]) -> list[dict[str, Any]]:
        events = []
        for text in data:
            if self.done:
                break
            if text.strip() == DONE:
                self.done = True
            else:
                events.append(self._parse(text))
        return events

    def _parse(self, text: str) -> dict[str, Any]:
        try:
            event = decoded(text)
        except ValueError as exc:
            raise MalformedStream(
                f"the server at {self._facts.url} sent an event of {len(text)} characters that is no JSON"
            ) from exc
        if not isinstance(event, dict):
            raise MalformedStream(f"the server at {self._facts.url} sent an event that is no JSON object")
        if event.get("error") or event.get("object") == "error":
            raise error_from_response(_status_in(event), text, self._facts)
        return event


def translate(exc: Exception, facts: CallFacts, *, started: bool) -> EngineError:
    """Return the typed error for what a client raised; `started` says whether pieces had come."""
    kinds = {kind.__name__ for kind in type(exc).__mro__}
    reason = type(exc).__name__
    if kinds & {"ConnectError", "ConnectTimeout", "UnsupportedProtocol", "ProxyError", "InvalidURL"} and not started:
        return unreachable(facts, reason)
    if "TimeoutException" in kinds:
        return timed_out(facts, reason)
    return cut_stream(facts, reason)


def _status_in(event: Mapping[str, Any]) -> int:
    error = event.get("error")
    code = error.get("code") if isinstance(error, Mapping) else event.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500
