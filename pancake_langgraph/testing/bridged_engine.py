"""The engine port onto a fake engine that lives on its server's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines.base import Capabilities, ChatDelta, ChatRequest, EngineStatistics, Residency, WarmReport
from pancake_langgraph.engines.pool_hints import PoolHints
from pancake_langgraph.testing.fake_server import FakeEngineServer


class BridgedEngine:
    """Carries every call to `server.engine` over to the server's loop, so that chat model and runtime share one pool.

    The HTTP side of the server plays the model for chat models; this plays the engine for a runtime.  May be used from
    any one loop.
    """

    def __init__(self, server: FakeEngineServer) -> None:
        """Use a server that is, or will be, running."""
        self._server = server

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self._server.engine.name

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def probe(self) -> Capabilities:
        """Ask the fake engine."""
        return await asyncio.wrap_future(self._server.run(self._server.engine.probe()))

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Give the whole answer, piece by piece, once it is complete."""
        for delta in await asyncio.wrap_future(self._server.run(self._all(request))):
            yield delta

    async def _all(self, request: ChatRequest) -> list[ChatDelta]:
        return [delta async for delta in self._server.engine.chat(request)]

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """Render with the fake template."""
        engine = self._server.engine
        return await asyncio.wrap_future(
            self._server.run(engine.tokenize(prompt, add_generation_prompt=add_generation_prompt))
        )

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        """Warm; cancelling the task cancels the fake engine's work."""
        engine = self._server.engine
        return await asyncio.wrap_future(self._server.run(engine.warm(prefix, priority=priority, hints=hints)))

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Ask the fake pool."""
        return await asyncio.wrap_future(self._server.run(self._server.engine.residency(prefix)))

    async def statistics(self) -> EngineStatistics:
        """Ask the fake engine."""
        return await asyncio.wrap_future(self._server.run(self._server.engine.statistics()))

    def add_residency_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the caller's loop after each change of the pool."""
        loop = asyncio.get_running_loop()
        self._server.on_engine(lambda engine: engine.add_residency_listener(lambda: _tell(loop, callback)))


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
