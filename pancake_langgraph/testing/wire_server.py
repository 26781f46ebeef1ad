"""A small real HTTP server that speaks the OpenAI chat routes and does what a test tells it."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Self

from pancake_langgraph.testing.wire_replies import Act, Reply, Step, text_stream

#: Makes the answer to one request from its path and JSON body.
Brain = Callable[[str, Mapping[str, Any]], Reply]

_MAX_RECORDS: Final = 10_000
_POLL_S: Final = 0.005
_CHAT: Final = "/v1/chat/completions"


@dataclass(slots=True)
class Received:
    """One request as it came, and how its answer ended.  Times are monotonic seconds."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    connection: int
    started_s: float
    ended_s: float | None = None
    hung_up_s: float | None = None
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Connection:
    """One TCP connection.  Times are monotonic seconds."""

    number: int
    opened_s: float
    closed_s: float | None = None


class WireServer:
    """Serves on a free loopback port in threads of its own, as a context manager.

    `script` answers chat and completion requests: a list of replies used in order (running out answers 500 and is
    kept in `faults`), or a function of path and body.  Without one, every chat is answered "Hello there."  The other
    routes (`/v1/models`, `/tokenize`, `/health`, `/version`) answer for themselves; `routes` replaces single ones.
    Tokens are words: deterministic, and not those of any model.
    """

    def __init__(
        self,
        script: Sequence[Reply] | Brain | None = None,
        *,
        model: str = "small",
        served: Sequence[str] | None = None,
        window_tokens: int | None = 4096,
        enforce_window: bool = True,
        strict_roles: bool = False,
        tokenizer: bool = True,
        any_model: bool = False,
        routes: Mapping[str, Reply | Brain] | None = None,
    ) -> None:
        """Describe the server; nothing is opened before it is entered."""
        self.served = tuple(served or (model,))
        self.window_tokens = window_tokens
        self.enforce_window = enforce_window
        self.strict_roles = strict_roles
        self.tokenizer = tokenizer
        self.any_model = any_model
        self.routes = dict(routes or {})
        self.requests: deque[Received] = deque(maxlen=_MAX_RECORDS)
        self.connections: deque[Connection] = deque(maxlen=_MAX_RECORDS)
        self.faults: deque[str] = deque(maxlen=_MAX_RECORDS)
        self.stopping = threading.Event()
        self._brain = script if callable(script) else None
        self._script: deque[Reply] | None = None if script is None or callable(script) else deque(script)
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.wire = self
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="wire-server", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close every connection and wait for the threads.  Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        self.stopping.set()
        server.shutdown()
        for connection in list(self._sockets):
            _shut(connection)
        server.server_close()
        if self._thread is not None:
            self._thread.join()

    @property
    def root_url(self) -> str:
        """Address without a path."""
        if self._server is None:
            raise RuntimeError("the server is not running; use it as a context manager")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def base_url(self) -> str:
        """Address of the API, ending in `/v1`."""
        return f"{self.root_url}/v1"

    @property
    def chats(self) -> list[Received]:
        """Chat requests so far, in order of arrival."""
        return [request for request in list(self.requests) if request.path == _CHAT]

    @property
    def num_open(self) -> int:
        """Connections open now."""
        return sum(connection.closed_s is None for connection in list(self.connections))

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float = 5.0) -> bool:
        """Wait until `condition()` holds; it is looked at whenever something happens.  Returns whether it does."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def answer(self, request: Received) -> Reply:
        """Return the reply to a request."""
        route = self.routes.get(request.path)
        if route is not None:
            return route(request.path, request.body) if callable(route) else route
        if request.path in (_CHAT, "/v1/completions"):
            return self._refusal(request) or self._scripted(request)
        return self._plain(request)

    def changed(self) -> None:
        """Wake those who wait."""
        with self._changed:
            self._changed.notify_all()

    def _scripted(self, request: Received) -> Reply:
        if self._brain is not None:
            return self._brain(request.path, request.body)
        if self._script is not None:
            with self._changed:
                reply = self._script.popleft() if self._script else None
            if reply is None:
                self.faults.append(f"no reply left for {request.path}")
                return Reply.error(500, "the script has no reply left", kind="ScriptExhausted")
            return reply
        prompt = self.count(request.body)
        usage = {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}
        return text_stream(["Hello", " there."], model=str(request.body.get("model")), usage=usage)

    def _refusal(self, request: Received) -> Reply | None:
        body = request.body
        model = body.get("model")
        if model not in self.served and not self.any_model:
            served = ", ".join(self.served)
            words = f"The model `{model}` does not exist. Valid aliases: {served}."
            return Reply.error(404, words, kind="NotFoundError")
        if self.strict_roles and (problem := _role_problem(body.get("messages") or ())):
            return Reply.error(400, problem)
        prompt, asked = self.count(body), int(body.get("max_tokens") or 0)
        if self.window_tokens is not None and self.enforce_window and prompt + asked > self.window_tokens:
            return Reply.error(
                400,
                f"This model's maximum context length is {self.window_tokens} tokens. However, you requested {asked} "
                f"output tokens and your prompt contains at least {prompt} input tokens.",
            )
        return None

    def _plain(self, request: Received) -> Reply:
        if request.path == "/v1/models":
            window = {} if self.window_tokens is None else {"max_model_len": self.window_tokens}
            return Reply.json(
                {"object": "list", "data": [{"id": name, "object": "model"} | window for name in self.served]}
            )
        if request.path == "/tokenize" and self.tokenizer:
            tokens = self.tokens(request.body)
            return Reply.json({"count": len(tokens), "max_model_len": self.window_tokens, "tokens": tokens})
        if request.path == "/health":
            return Reply(body=b"")
        if request.path == "/version":
            return Reply.json({"version": "wire"})
        return Reply.json({"detail": "Not Found"}, status=404)

    def count(self, body: Mapping[str, Any]) -> int:
        """Return the number of prompt tokens as this server counts them."""
        return len(self.tokens(body))

    @staticmethod
    def tokens(body: Mapping[str, Any]) -> list[int]:
        """Return one id per word; a message adds one for its role."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return [int(token) for token in prompt]
        words = str(prompt or "").split()
        for message in body.get("messages") or ():
            content = message.get("content")
            texts = content if isinstance(content, list) else [{"text": content}]
            words.append(str(message.get("role")))
            words += " ".join(str(part.get("text") or "") for part in texts).split()
        return [zlib.crc32(word.encode()) % 50_000 for word in words]


class _Server(ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 256
    wire: WireServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep what went wrong for the test instead of printing it."""
        self.wire.faults.append(repr(sys.exception()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        wire = self.server.wire
        self._record = Connection(len(wire.connections), time.monotonic())
        wire.connections.append(self._record)
        wire._sockets.add(self.connection)
        wire.changed()

    def finish(self) -> None:
        wire = self.server.wire
        wire._sockets.discard(self.connection)
        try:
            super().finish()
        finally:
            self._record.closed_s = time.monotonic()
            wire.changed()

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Say nothing."""

    def _serve(self, raw: bytes) -> None:
        wire = self.server.wire
        request = Received(
            self.command, self.path.partition("?")[0], dict(self.headers), raw, self._record.number, time.monotonic()
        )
        try:
            body = json.loads(raw) if raw else {}
        except ValueError:
            body = {}
        request.body = body if isinstance(body, dict) else {}
        wire.requests.append(request)
        wire.changed()
        try:
            self._send(wire.answer(request), request)
        except ConnectionError:
            self._hang_up(request)
        finally:
            request.ended_s = time.monotonic()
            wire.changed()

    def _send(self, reply: Reply, request: Received) -> None:
        if reply.delay_s and not self._pause(reply.delay_s, request):
            return
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        for name, value in reply.headers:
            self.send_header(name, value)
        if reply.body is not None:
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if all(self._step(step, reply, request) for step in reply.steps):
            self.wfile.write(b"0\r\n\r\n")

    def _step(self, step: Step, reply: Reply, request: Received) -> bool:
        """Do one step; return whether the answer goes on."""
        if isinstance(step, float | int):
            return self._pause(float(step), request)
        if step is Act.HANG:
            return self._pause(float("inf"), request)
        if step is Act.CUT:
            self.close_connection = True
            _shut(self.connection)
            return False
        data = step if isinstance(step, bytes) else f"data: {json.dumps(step)}\n\n".encode()
        size = reply.piece_bytes or len(data) or 1
        for start in range(0, len(data), size):
            part = data[start : start + size]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        return not self._gone(request)

    def _pause(self, seconds: float, request: Received) -> bool:
        """Wait; return false as soon as the client has hung up or the server stops."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self._gone(request) or self.server.wire.stopping.wait(min(_POLL_S, left_s)):
                self.close_connection = True
                return False
        return not self._gone(request)

    def _gone(self, request: Received) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            gone = not self.connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            gone = True
        if gone:
            self._hang_up(request)
        return gone

    def _hang_up(self, request: Received) -> None:
        self.close_connection = True
        if request.hung_up_s is None:
            request.hung_up_s = time.monotonic()
            self.server.wire.changed()


def _role_problem(messages: Sequence[Mapping[str, Any]]) -> str | None:
    for position, message in enumerate(messages):
        role = message.get("role")
        if role == "system" and position > 0:
            return "Only one system message is allowed, and it must be the first"
        if position and role == messages[position - 1].get("role") and role != "tool":
            return "Conversation roles must alternate"
    return None


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # closed already
