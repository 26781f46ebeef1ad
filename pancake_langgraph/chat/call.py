"""Sending one call and playing its answer, once for threads and once for event loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from langchain_core.outputs import ChatGenerationChunk
from langchain_core.utils.utils import LC_ID_PREFIX

from pancake_langgraph._errors import EngineError, EngineFault, EngineRejected, EngineUnavailable, ModelNotFound
from pancake_langgraph.chat.answer import Answer
from pancake_langgraph.chat.events import EventReader, translate
from pancake_langgraph.chat.facts import CheckContext, ServerFacts, tokenize_body, wants_count, wants_window
from pancake_langgraph.chat.failures import for_langchain
from pancake_langgraph.chat.link import Link, as_timeout, transport_errors
from pancake_langgraph.chat.watch import Watch
from pancake_langgraph.wire.bodies import flatten, prompt_texts
from pancake_langgraph.wire.errors import CallFacts, error_from_response, not_found, overflow_before_sending
from pancake_langgraph.wire.json_text import encoded

if TYPE_CHECKING:
    from pancake_langgraph.chat_model import PancakeChatModel

_BACKOFF_S: Final = 0.2


@dataclass(slots=True)
class Call:
    """One call, ready to be sent, and what comes of it."""

    body: dict[str, Any]
    answer: Answer
    facts: CallFacts
    link: Link
    server: ServerFacts
    watch: Watch
    timeout: Any
    headers: Mapping[str, str]
    query: Mapping[str, Any]
    max_retries: int
    check_context: CheckContext
    keep_headers: bool

    @classmethod
    def prepare(cls, payload: Mapping[str, Any], server: ServerFacts, watch: Watch, model: PancakeChatModel) -> Call:
        """Make the final body and show it to the observers."""
        link = server.link
        body = watch.request(flatten(payload))
        max_tokens = body.get("max_tokens")
        facts = CallFacts(
            url=link.config.base_url,
            model=str(body.get("model") or ""),
            max_tokens=max_tokens if isinstance(max_tokens, int) else None,
            prompt_texts=prompt_texts(body),
        )
        timeout = as_timeout(payload.get("timeout", link.config.timeout))
        if model.stream_chunk_timeout:
            timeout.read = model.stream_chunk_timeout
        return cls(
            body=body,
            answer=Answer(body, facts, watch),
            facts=facts,
            link=link,
            server=server,
            watch=watch,
            timeout=timeout,
            headers=payload.get("extra_headers") or {},
            query=payload.get("extra_query") or {},
            max_retries=model.max_retries or 0,
            check_context=model.check_context,
            keep_headers=model.include_response_headers,
        )

    def request(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments for a client's `stream`."""
        content = encoded(self.body)
        return {
            "method": "POST",
            "url": self.link.config.url("chat/completions"),
            "content": content,
            "headers": {**headers, **self.headers},
            "params": {**self.link.config.query, **self.query} or None,
            "timeout": (self.timeout.connect, self.timeout.read, self.timeout.write, self.timeout.pool),
        }

    def note_headers(self, headers: Any) -> None:
        """Keep the answer's headers where the application asked for them."""
        if self.keep_headers:
            self.answer.headers = {str(key): str(value) for key, value in dict(headers).items()}

    def backoff_s(self, error: EngineError, *, attempt: int, started: bool) -> float | None:
        """Return how long to wait before sending again, or `None` not to."""
        again = isinstance(error, EngineUnavailable | EngineFault) or (
            isinstance(error, EngineRejected) and error.status_code == 429
        )
        if started or not again or attempt >= self.max_retries:
            return None
        return _BACKOFF_S * 2.0**attempt

    def overflow(self, window_tokens: int, prompt_tokens: int | None) -> EngineError | None:
        """Return the error for a counted prompt that does not fit."""
        if prompt_tokens is None or prompt_tokens + (self.facts.max_tokens or 0) <= window_tokens:
            return None
        return for_langchain(
            overflow_before_sending(self.facts, prompt_tokens=prompt_tokens, window_tokens=window_tokens)
        )


def play(call: Call, run_manager: Any) -> Iterator[ChatGenerationChunk]:
    """Send the call and give back its chunks, telling callbacks and observers.

    Closing the generator closes the socket.
    """
    try:
        _check_window(call)
        for chunk in _chunks(call):
            if run_manager is not None:
                _name(chunk, run_manager)
                run_manager.on_llm_new_token(chunk.text, chunk=chunk, logprobs=_logprobs(chunk))
            yield chunk
        call.watch.end(call.answer.usage, call.answer.finish_reason)
    finally:
        call.watch.end(None, None)


async def aplay(call: Call, run_manager: Any) -> AsyncGenerator[ChatGenerationChunk, None]:
    """Send the call and give back its chunks as `play` does; cancelling closes the socket."""
    try:
        await _acheck_window(call)
        chunks = _achunks(call)
        try:
            async for chunk in chunks:
                if run_manager is not None:
                    _name(chunk, run_manager)
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk, logprobs=_logprobs(chunk))
                yield chunk
        finally:
            await chunks.aclose()
        call.watch.end(call.answer.usage, call.answer.finish_reason)
    finally:
        call.watch.end(None, None)


def _chunks(call: Call) -> Iterator[ChatGenerationChunk]:
    attempt = 0
    while True:
        started = False
        try:
            with call.link.client().stream(**call.request(call.link.headers())) as reply:
                reader = _reader(call, reply)
                if reader is None:
                    raise _refusal(call, reply.status_code, reply.read())
                for data in reply.iter_bytes():
                    started = True
                    for event in reader.feed(data):
                        yield from call.answer.feed(event)
                yield from _rest(call, reader)
            return
        except ModelNotFound as exc:
            raise _with_served(call, _served(call)) from exc
        except _failures() as exc:
            error = exc if isinstance(exc, EngineError) else translate(exc, call.facts, started=started)
            wait_s = call.backoff_s(error, attempt=attempt, started=started)
            if wait_s is None:
                if error is exc:
                    raise
                raise error from exc
        attempt += 1
        time.sleep(wait_s)


async def _achunks(call: Call) -> AsyncGenerator[ChatGenerationChunk, None]:
    attempt = 0
    while True:
        started = False
        try:
            client = await call.link.async_client()
            async with client.stream(**call.request(await call.link.async_headers())) as reply:
                reader = _reader(call, reply)
                if reader is None:
                    raise _refusal(call, reply.status_code, await reply.aread())
                async for data in reply.aiter_bytes():
                    started = True
                    for event in reader.feed(data):
                        for chunk in call.answer.feed(event):
                            yield chunk
                for chunk in _rest(call, reader):
                    yield chunk
            return
        except ModelNotFound as exc:
            raise _with_served(call, await _aserved(call)) from exc
        except _failures() as exc:
            error = exc if isinstance(exc, EngineError) else translate(exc, call.facts, started=started)
            wait_s = call.backoff_s(error, attempt=attempt, started=started)
            if wait_s is None:
                if error is exc:
                    raise
                raise error from exc
        attempt += 1
        await asyncio.sleep(wait_s)


def _failures() -> tuple[type[Exception], ...]:
    return (EngineError, *transport_errors())


def _rest(call: Call, reader: EventReader) -> Iterator[ChatGenerationChunk]:
    for event in reader.end():
        yield from call.answer.feed(event)
    yield from call.answer.finish(done=reader.done)


def _reader(call: Call, reply: Any) -> EventReader | None:
    """Return a reader for a good answer, `None` for a refusal."""
    if reply.status_code >= 400:
        return None
    call.note_headers(reply.headers)
    return EventReader(reply.headers.get("content-type", ""), call.facts)


def _refusal(call: Call, status_code: int, body: bytes) -> EngineError:
    return for_langchain(error_from_response(status_code, body.decode("utf-8", "replace"), call.facts))


def _served(call: Call) -> tuple[str, ...] | None:
    try:
        return call.server.served_models()
    except EngineError:
        return None  # only a help in a message


async def _aserved(call: Call) -> tuple[str, ...] | None:
    try:
        return await call.server.aserved_models()
    except EngineError:
        return None  # only a help in a message


def _with_served(call: Call, served: tuple[str, ...] | None) -> EngineError:
    return not_found(replace(call.facts, served_models=served), named_model=True)


def _check_window(call: Call) -> None:
    if not wants_window(call.check_context, call.body):
        return
    window = call.server.window(call.facts.model)
    if window is not None and wants_count(call.check_context, call.body, window):
        tokens = call.server.tokenize(tokenize_body(call.body))
        error = call.overflow(window, None if tokens is None else len(tokens))
        if error is not None:
            raise error


async def _acheck_window(call: Call) -> None:
    if not wants_window(call.check_context, call.body):
        return
    window = await call.server.awindow(call.facts.model)
    if window is not None and wants_count(call.check_context, call.body, window):
        tokens = await call.server.atokenize(tokenize_body(call.body))
        error = call.overflow(window, None if tokens is None else len(tokens))
        if error is not None:
            raise error


def _name(chunk: ChatGenerationChunk, run_manager: Any) -> None:
    """Give the chunk the id that its whole message will have, so that streamed and whole are known as one."""
    if chunk.message.id is None:
        chunk.message.id = f"{LC_ID_PREFIX}-{run_manager.run_id}"


def _logprobs(chunk: ChatGenerationChunk) -> Any:
    return (chunk.generation_info or {}).get("logprobs")
