"""The engine that knows nothing: everything above runs the same with it, without warm-ups."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pancake_langgraph._errors import Unsupported
from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines.base import (
    Capabilities,
    ChatDelta,
    ChatRequest,
    EngineStatistics,
    Residency,
    WarmReport,
)
from pancake_langgraph.engines.pool_hints import PoolHints


class NullEngine:
    """Answers every chat with nothing and can do nothing else.  Safe on any loop."""

    def __init__(self) -> None:
        """Count from zero."""
        self._chats = 0

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "null"

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def probe(self) -> Capabilities:
        """Return capabilities that name nothing."""
        return Capabilities(engine=self.name, notes=("the null engine carries no hints",))

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Stream an answer without text that ends with `stop`; its usage is unknown."""
        self._chats += 1
        del request
        yield ChatDelta(text="")
        yield ChatDelta(finish_reason="stop")

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """Refuse.

        Raises:
            Unsupported: always.
        """
        del prompt, add_generation_prompt
        raise Unsupported("tokenize: the null engine has no tokenizer; use engine='vllm'")

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        """Refuse.

        Raises:
            Unsupported: always.
        """
        del prefix, priority, hints
        raise Unsupported("warm: the null engine has no pool; use engine='vllm'")

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Say that nothing is known."""
        del prefix
        return Residency(known=False)

    async def statistics(self) -> EngineStatistics:
        """Return how many chats were asked for."""
        return EngineStatistics(chats=self._chats, warms=0, warms_cancelled=0)
