"""HTTP to a model server: deadlines, sockets that close when the waiting task is cancelled, typed errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from pancake_langgraph._errors import ConfigError, EngineError, EngineUnavailable, MalformedStream
from pancake_langgraph.config.address import require_http_address
from pancake_langgraph.wire.errors import CallFacts, cut_stream, error_from_response, timed_out, unreachable
from pancake_langgraph.wire.json_text import decoded, encoded
from pancake_langgraph.wire.sse import DONE, EventDecoder

logger = logging.getLogger(__name__)

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_MAX_CONNECTIONS: Final = 64
_CLOSE_TIMEOUT_S: Final = 2.0
_JSON_TYPE: Final = {"content-type": "application/json"}


def server_root(base_url: str) -> str:
    """Return the server's root of an OpenAI base URL (with or without `/v1`).

    Raises:
        ConfigError: if it is not an HTTP address.
    """
    return require_http_address("base_url", base_url).rstrip("/").removesuffix("/v1").rstrip("/")


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

    @property
    def facts(self) -> CallFacts:
        """What errors about this server name."""
        return _facts_of(self.root, None)

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
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Yield each chunk of a server-sent stream, and `None` for the end mark; closing the iterator hangs up.

        Raises:
            EngineTimeout: if no byte comes for `stall_s`, or the answer is not complete after `total_s`.
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        until = asyncio.get_running_loop().time() + total_s
        async with aclosing(self._raw_stream(route, body, stall_s, until)) as chunks:
            decoder = EventDecoder()
            async for chunk in chunks:
                for data in decoder.feed(chunk):
                    yield _chunk_of(data)
            for data in decoder.finish():
                yield _chunk_of(data)

    async def _raw_stream(
        self, route: str, body: dict[str, Any], stall_s: float, until: float
    ) -> AsyncGenerator[bytes, None]:
        client, facts = self._opened(), _facts_of(self.root, body)
        request = client.build_request("POST", route, content=encoded(body), headers=_JSON_TYPE)
        try:
            async with asyncio.timeout(_time_left(stall_s, until)):
                response = await client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    async with asyncio.timeout(self._deadline_s):
                        await response.aread()
                    raise error_from_response(response.status_code, response.text, facts)
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
            raise _transport_error(exc, facts, limit_s=stall_s) from exc

    async def _call(
        self, method: str, route: str, body: dict[str, Any] | None, deadline_s: float | None
    ) -> httpx.Response:
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        facts = _facts_of(self.root, body)
        try:
            async with asyncio.timeout(limit_s):
                response = await self._opened().request(
                    method, route, content=None if body is None else encoded(body), headers=_JSON_TYPE
                )
        except (httpx.TransportError, TimeoutError, httpx.InvalidURL, httpx.DecodingError) as exc:
            raise _transport_error(exc, facts, limit_s=limit_s) from exc
        if not response.is_success:
            raise error_from_response(response.status_code, response.text, facts)
        return response

    def _opened(self) -> httpx.AsyncClient:
        self.open()
        if self._client is None:
            raise EngineUnavailable(f"no connection pool for {self.root}; call `open` first")
        return self._client


def error_in_stream(payload: Any, facts: CallFacts) -> EngineError:
    """Return the typed error for an error object in the middle of a stream."""
    code = payload.get("code") if isinstance(payload, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return error_from_response(status, json.dumps({"error": payload}), facts)


def _transport_error(exc: Exception, facts: CallFacts, *, limit_s: float) -> EngineError:
    if isinstance(exc, TimeoutError | httpx.TimeoutException):
        return timed_out(facts, f"{limit_s:g} s")
    if isinstance(exc, httpx.ConnectError | httpx.InvalidURL):
        return unreachable(facts, str(exc) or type(exc).__name__)
    return cut_stream(facts, type(exc).__name__)


def _facts_of(root: str, body: dict[str, Any] | None) -> CallFacts:
    """Gather what errors may name, and the texts that they must not repeat."""
    body = body or {}
    texts = (
        message["content"]
        for message in body.get("messages") or ()
        if isinstance(message, Mapping) and isinstance(message.get("content"), str)
    )
    return CallFacts(
        url=f"{root}/v1",
        model=str(body.get("model") or ""),
        max_tokens=body.get("max_tokens"),
        prompt_texts=tuple(texts),
    )


def _decoded(response: httpx.Response, route: str) -> Any:
    try:
        return decoded(response.content)
    except ValueError as exc:
        raise MalformedStream(f"{route}: got an answer that is not JSON; is this a model server?") from exc


def _chunk_of(data: str) -> dict[str, Any] | None:
    if data.strip() == DONE:
        return None
    try:
        chunk = decoded(data)
    except ValueError as exc:
        raise MalformedStream(f"stream: got {len(data)} characters that are not JSON, allowed is a chat chunk") from exc
    if not isinstance(chunk, dict):
        raise MalformedStream(f"stream: got a JSON {type(chunk).__name__}, allowed is an object")
    return chunk


def _time_left(stall_s: float, until: float) -> float:
    return max(0.0, min(stall_s, until - asyncio.get_running_loop().time()))
