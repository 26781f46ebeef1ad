"""HTTP connections of one chat model: one client for threads, one per event loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.config.address import require_http_address

_CONNECT_S: Final = 5.0
_READ_S: Final = 600.0
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Where a server is and how to speak to it.

    `api_key` is a text, or a function (plain or async) that gives one; `client` and `async_client` are the
    application's own, used instead of ours and never closed by us.
    """

    base_url: str
    api_key: str | Callable[[], Any] = field(repr=False, default="EMPTY")
    timeout: Any = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    query: Mapping[str, Any] = field(default_factory=dict)
    proxy: str | None = field(default=None, repr=False)
    client: Any = None
    async_client: Any = None

    @property
    def root_url(self) -> str:
        """The server's root: `base_url` without `/v1`."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def url(self, path: str) -> str:
        """Return the address of an API route."""
        return f"{self.base_url.rstrip('/')}/{path.lstrip('/')}"


_ByLoop = dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]]


class Link:
    """Opens clients on first use and closes them with what they belong to.

    The client of an event loop is closed when that loop shuts down its asynchronous generators (`asyncio.run` and test
    runners do), or before, when the link is collected; it is forgotten when the loop is closed.  Safe to use from
    several threads and loops at once.
    """

    def __init__(self, config: LinkConfig) -> None:
        """Remember `config`; open nothing.

        Raises:
            ConfigError: if nothing can be reached under its address.
        """
        require_http_address("base_url", config.base_url)
        self.config = config
        self._lock = threading.Lock()
        self._client: httpx.Client | None = None
        self._by_loop: _ByLoop = {}
        # The finalizer holds the table, so that sockets are never garbage themselves but closed by their own loop.
        weakref.finalize(self, _let_go, self._by_loop).atexit = False

    def client(self) -> Any:
        """Return the client for blocking calls."""
        if self.config.client is not None:
            return self.config.client
        with self._lock:
            if self._client is None:
                self._client = httpx.Client(**self._options())
                weakref.finalize(self, self._client.close)
            return self._client

    async def async_client(self) -> Any:
        """Return the client of the running event loop."""
        if self.config.async_client is not None:
            return self.config.async_client
        loop = asyncio.get_running_loop()
        entry = self._by_loop.get(loop)
        if entry is None:
            for known in [known for known in self._by_loop if known.is_closed()]:
                self._by_loop.pop(known, None)
            client = httpx.AsyncClient(**self._options())
            keeper = _keep(client, loop, self._by_loop)
            entry = self._by_loop.setdefault(loop, (client, keeper))
            await keeper.__anext__()
        return entry[0]

    @property
    def num_loops(self) -> int:
        """How many event loops have a client now."""
        return len(self._by_loop)

    def headers(self) -> dict[str, str]:
        """Return the headers of a blocking call.

        Raises:
            ConfigError: if the key comes from an async function.
        """
        key = self.config.api_key
        value = key() if callable(key) else key
        if inspect.isawaitable(value):
            if inspect.iscoroutine(value):
                value.close()
            raise ConfigError("api_key is an async function, which only ainvoke, astream and abatch can use")
        return self._with_key(str(value))

    async def async_headers(self) -> dict[str, str]:
        """Return the headers of an async call."""
        key = self.config.api_key
        value = key() if callable(key) else key
        return self._with_key(str(await value if inspect.isawaitable(value) else value))

    def _with_key(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **self.config.headers}

    def _options(self) -> dict[str, Any]:
        parts = urlsplit(self.config.base_url)
        return {
            "timeout": as_timeout(self.config.timeout),
            "params": dict(self.config.query),
            "verify": parts.scheme == "https",
            "proxy": self.config.proxy,
            "trust_env": parts.hostname not in _LOOPBACK,
            "limits": httpx.Limits(max_connections=1000, max_keepalive_connections=100, keepalive_expiry=5.0),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return Link(self.config)


async def _keep(
    client: httpx.AsyncClient, loop: asyncio.AbstractEventLoop, by_loop: _ByLoop
) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()
        by_loop.pop(loop, None)


def _let_go(by_loop: _ByLoop) -> None:
    """Close the clients of a link that is gone, each on its own loop."""
    for loop, (_, keeper) in list(by_loop.items()):
        with contextlib.suppress(RuntimeError):  # closed meanwhile: it has closed its client as well
            loop.call_soon_threadsafe(_end, loop, keeper)


def _end(loop: asyncio.AbstractEventLoop, keeper: AsyncGenerator[None, None]) -> None:
    task = loop.create_task(_closed(keeper))
    _closing.add(task)
    task.add_done_callback(_closing.discard)


async def _closed(keeper: AsyncGenerator[None, None]) -> None:
    await keeper.aclose()


#: Keeps the tasks of `_end` alive until they are done.
_closing: set[asyncio.Task[None]] = set()


def as_timeout(timeout: Any) -> httpx.Timeout:
    """Return `timeout` (seconds, (connect, read), or a client library's object) in our client's form.

    The read limit holds between two pieces of an answer, not for the whole.
    """
    if timeout is None:
        return httpx.Timeout(_READ_S, connect=_CONNECT_S)
    if isinstance(timeout, int | float):
        return httpx.Timeout(float(timeout), connect=min(float(timeout), _CONNECT_S))
    if isinstance(timeout, tuple):
        return httpx.Timeout(timeout[1], connect=timeout[0]) if len(timeout) == 2 else httpx.Timeout(timeout)
    return httpx.Timeout(connect=timeout.connect, read=timeout.read, write=timeout.write, pool=timeout.pool)


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the roots of what our client, or a client that the application gave, raises."""
    second = sys.modules.get("httpx2")
    roots: list[type[Exception]] = [httpx.HTTPError, httpx.StreamError, httpx.InvalidURL]
    if second is not None:
        roots += [second.HTTPError, second.StreamError, second.InvalidURL]
    return tuple(roots)
