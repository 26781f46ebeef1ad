"""HTTP to a model server: deadlines, sockets that close when the waiting task is cancelled, typed errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from pancake_langgraph._errors import (
    ConfigError,
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    MalformedStream,
    ModelNotFound,
)
from pancake_langgraph.engines import _compat
from pancake_langgraph.engines._sse import SseDecoder

logger = logging.getLogger(__name__)

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_MAX_MESSAGE_CHARS: Final = 300
_MAX_CONNECTIONS: Final = 64
_CLOSE_TIMEOUT_S: Final = 2.0


def server_root(base_url: str) -> str:
    """Return the server's root of an OpenAI base URL (with or without `/v1`).

    Raises:
        ConfigError: if it is not an HTTP address.
    """
    if not base_url.startswith(("http://", "https://")) or not urlsplit(base_url).hostname:
        raise ConfigError(f"base_url: got {base_url!r}, allowed is an http:// or https:// address")
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_loopback(url: str) -> bool:
    """Return whether the URL points at this machine."""
    return urlsplit(url).hostname in _LOOPBACK


class HttpSession:
    """One pool of connections to one server, bound to the loop that first uses it."""

    def __init__(self, base_url: str, *, api_key: str | None, deadline_s: float) -> None:
        """Prepare without connecting; `deadline_s` bounds every call that does not say otherwise.

        Raises:
            ConfigError: if the address or the deadline is not usable.
        """
        if not 0 < deadline_s <= 3600:
            raise ConfigError(f"deadline_s: got {deadline_s}, allowed is more than 0 up to 3600")
        self.root = server_root(base_url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._deadline_s = deadline_s
        self._client: httpx.AsyncClient | None = None

    def open(self) -> None:
        """Make the connection pool.  Idempotent."""
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self.root,
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=self._deadline_s),  # the deadline stands around each call
                limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=8),
                trust_env=not is_loopback(self.root),  # a proxy from the environment must not see loopback
            )

    async def close(self) -> None:
        """Close all sockets.  Idempotent, bounded in time."""
        client, self._client = self._client, None
        if client is not None:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await client.aclose()
            except TimeoutError:
                logger.debug("connections to the model server did not close within %s s", _CLOSE_TIMEOUT_S)

    async def get_text(self, route: str, *, deadline_s: float | None = None) -> str:
        """Return the body of a GET.

        Raises:
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        return (await self._call("GET", route, None, deadline_s)).text

    async def get_json(self, route: str, *, deadline_s: float | None = None) -> Any:
        """Return the decoded body of a GET.

        Raises:
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        return _decoded(await self._call("GET", route, None, deadline_s), route)

    async def post_json(self, route: str, body: dict[str, Any], *, deadline_s: float | None = None) -> Any:
        """Return the decoded body of a POST; cancelling the task closes the socket.

        Raises:
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        return _decoded(await self._call("POST", route, body, deadline_s), route)

    async def stream_json(
        self, route: str, body: dict[str, Any], *, stall_s: float, total_s: float
    ) -> AsyncIterator[dict[str, Any] | None]:
        """Yield each chunk of a server-sent stream, and `None` for the end mark; closing the iterator hangs up.

        Raises:
            EngineTimeout: if no byte comes for `stall_s`, or the answer is not complete after `total_s`.
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        until = asyncio.get_running_loop().time() + total_s
        async with aclosing(self._raw_stream(route, body, stall_s, until)) as chunks:
            decoder = SseDecoder()
            async for chunk in chunks:
                for data in decoder.feed(chunk):
                    yield _chunk_of(data)
            if (rest := decoder.finish()) is not None:
                yield _chunk_of(rest)

    async def _raw_stream(
        self, route: str, body: dict[str, Any], stall_s: float, until: float
    ) -> AsyncIterator[bytes]:
        client = self._opened()
        request = client.build_request("POST", route, json=body)
        try:
            async with asyncio.timeout(_time_left(stall_s, until)):
                response = await client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    async with asyncio.timeout(self._deadline_s):
                        await response.aread()
                    raise error_for_status(response.status_code, response.text, what=route)
                parts = response.aiter_bytes()
                while True:
                    async with asyncio.timeout(_time_left(stall_s, until)):  # never around a `yield`
                        part = await anext(parts, None)
                    if part is None:
                        return
                    yield part
            finally:
                await response.aclose()
        except (httpx.TransportError, TimeoutError, httpx.InvalidURL) as exc:
            raise _transport_error(exc, what=route, root=self.root, limit_s=stall_s) from exc

    async def _call(
        self, method: str, route: str, body: dict[str, Any] | None, deadline_s: float | None
    ) -> httpx.Response:
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._opened().request(method, route, json=body)
        except (httpx.TransportError, TimeoutError, httpx.InvalidURL, httpx.DecodingError) as exc:
            raise _transport_error(exc, what=route, root=self.root, limit_s=limit_s) from exc
        if not response.is_success:
            raise error_for_status(response.status_code, response.text, what=route)
        return response

    def _opened(self) -> httpx.AsyncClient:
        self.open()
        if self._client is None:
            raise EngineUnavailable(f"no connection pool for {self.root}; call `open` first")
        return self._client


def error_for_status(status: int, body: str, *, what: str) -> EngineError:
    """Return the typed error for an HTTP answer that is not a success."""
    message, param, code = _reason(body)
    text = f"{what}: the server answered {status}: {message}"
    if status >= 500:
        return EngineFault(f"{text}; look at the server's log", status_code=status)
    if param in _compat.OVERFLOW_PARAMS or code in _compat.OVERFLOW_CODES or "maximum context length" in message:
        return ContextOverflow(f"{text}; shorten the prompt or lower max_tokens", status_code=status)
    if status == 404 and param == "model":
        return ModelNotFound(f"{text}; correct the model name", status_code=status)
    if status in (401, 403):
        return EngineRejected(f"{text}; give the right api_key", status_code=status)
    return EngineRejected(text, status_code=status)


def error_in_stream(payload: Any, *, what: str) -> EngineError:
    """Return the typed error for an error object in the middle of a stream."""
    code = payload.get("code") if isinstance(payload, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return error_for_status(status, json.dumps({"error": payload}), what=what)


def _transport_error(exc: Exception, *, what: str, root: str, limit_s: float) -> EngineError:
    if isinstance(exc, TimeoutError | httpx.TimeoutException):
        return EngineTimeout(f"{what}: no answer from {root} within {limit_s:g} s; is the server overloaded or stopped?")
    if isinstance(exc, httpx.ConnectError):
        return EngineUnavailable(f"{what}: cannot connect to {root} ({exc}); start the server or correct base_url")
    if isinstance(exc, httpx.DecodingError | httpx.RemoteProtocolError) and "without sending" not in str(exc):
        return EngineUnavailable(f"{what}: {root} ended or garbled its answer ({exc}); look at the server's log")
    return EngineUnavailable(f"{what}: {root} hung up ({type(exc).__name__}); look at the server's log")


def _reason(body: str) -> tuple[str, str | None, str | None]:
    try:
        decoded = json.loads(body)
    except ValueError:
        return body.strip()[:_MAX_MESSAGE_CHARS] or "no reason given", None, None
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    if not isinstance(error, dict):
        return str(error)[:_MAX_MESSAGE_CHARS], None, None
    message = error.get("message") or error.get("detail") or "no reason given"
    param, code = error.get("param"), error.get("code")
    return (
        str(message)[:_MAX_MESSAGE_CHARS],
        param if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


def _decoded(response: httpx.Response, route: str) -> Any:
    try:
        return response.json()
    except ValueError as exc:
        raise MalformedStream(f"{route}: got an answer that is not JSON; is this a model server?") from exc


def _chunk_of(data: str) -> dict[str, Any] | None:
    if data.strip() == "[DONE]":
        return None
    try:
        chunk = json.loads(data)
    except ValueError as exc:
        raise MalformedStream(f"stream: got {len(data)} characters that are not JSON, allowed is a chat chunk") from exc
    if not isinstance(chunk, dict):
        raise MalformedStream(f"stream: got a JSON {type(chunk).__name__}, allowed is an object")
    return chunk


def _time_left(stall_s: float, until: float) -> float:
    return max(0.0, min(stall_s, until - asyncio.get_running_loop().time()))
