"""A small HTTP/1.1 server on loopback that notices when a client hangs up.  For tests; one thread, one loop."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pancake_langgraph._errors import LaunchError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_HEAD_BYTES: Final = 64 * 1024
_MAX_BODY_BYTES: Final = 64 * 1024 * 1024
_START_TIMEOUT_S: Final = 10.0
_STOP_TIMEOUT_S: Final = 5.0
_MAX_HANG_UPS: Final = 1000
_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it came in; `body` is the decoded JSON, or an empty object."""

    method: str
    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send back: text or JSON, or pieces of a server-sent stream."""

    status: int = 200
    payload: Any = None
    text: str | None = None
    stream: AsyncIterator[str] | None = field(default=None)


Handler = Callable[[Call], Awaitable[Answer]]


class LoopbackServer:
    """Serves `handler` on a free loopback port, in its own thread and loop, while used as a context."""

    def __init__(self, handler: Handler) -> None:
        """Prepare; nothing listens before the context is entered."""
        self._handler = handler
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._main, name="pancake-loopback-server", daemon=True)
        self._started = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self.hang_ups: deque[str] = deque(maxlen=_MAX_HANG_UPS)
        self.port = 0

    def start(self) -> None:
        """Listen.

        Raises:
            LaunchError: if the server does not come up.
        """
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S) or self.port == 0:
            raise LaunchError(f"loopback server: not up within {_START_TIMEOUT_S:g} s")

    def stop(self) -> None:
        """Close the port and all connections.  Idempotent."""
        if self._loop is not None and self._stopping is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_STOP_TIMEOUT_S)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the server's loop; cancelling the future cancels it.

        Raises:
            LaunchError: if the server is not running.
        """
        if self._loop is None:
            coroutine.close()
            raise LaunchError("loopback server: not started; use it as a context first")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the server's loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(callback)

    def _main(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stopping.wait()
        server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
            while (call := await _read_call(reader)) is not None:
                if not await self._answer_or_notice(call, reader, writer):
                    return
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as exc:
            logger.debug("connection ended: %s", type(exc).__name__)
        except asyncio.CancelledError:  # only `stop` cancels; Python 3.11 would log the cancelled task as a fault
            logger.debug("connection ended: server stopped")
        finally:
            writer.close()

    async def _answer_or_notice(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one call; give it up when the client goes away first.  Return whether to go on reading."""
        answering = asyncio.create_task(self._answer(call, writer))
        hang_up = asyncio.create_task(reader.read(1))  # clients here never send the next request early
        try:
            await asyncio.wait({answering, hang_up}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.hang_ups.append(call.path)
                return False
            answering.result()
            return not hang_up.done()
        finally:
            for task in (answering, hang_up):
                task.cancel()
            await asyncio.gather(answering, hang_up, return_exceptions=True)

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        answer = await self._handler(call)
        if answer.stream is not None:
            await _send_stream(answer, writer)
            return
        body = (answer.text if answer.text is not None else json.dumps(answer.payload)).encode()
        kind = "text/plain; charset=utf-8" if answer.text is not None else "application/json"
        writer.write(_head(answer.status, kind, f"content-length: {len(body)}") + body)
        await writer.drain()


async def _send_stream(answer: Answer, writer: asyncio.StreamWriter) -> None:
    writer.write(_head(answer.status, "text/event-stream; charset=utf-8", "transfer-encoding: chunked"))
    if answer.stream is not None:
        async for piece in answer.stream:
            data = f"data: {piece}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def _head(status: int, kind: str, length: str) -> bytes:
    return f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}\r\ncontent-type: {kind}\r\n{length}\r\n\r\n".encode()


async def _read_call(reader: asyncio.StreamReader) -> Call | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    if length > _MAX_BODY_BYTES:
        raise ValueError(f"body of {length} bytes, allowed are {_MAX_BODY_BYTES}")
    raw = await reader.readexactly(length)
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        body = {}
    return Call(method, path.split("?", 1)[0], body if isinstance(body, dict) else {})
