"""The tier port: the KV cache outside the engine (L1 host memory, L2 disk)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pancake_langgraph._types import TokenPrefix


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """What a prefetch found: chunks present in any tier out of the prefix's whole chunks, and how long it took."""

    found_chunks: int
    total_chunks: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class TierHealth:
    """Answer of a health probe.  `chunk_tokens` is `None` when the tier does not say."""

    alive: bool
    chunk_tokens: int | None
    detail: str


@runtime_checkable
class Tier(Protocol):
    """A cache server as the runtime sees it.  Coroutines belong to the loop on which `open` ran."""

    @property
    def name(self) -> str:
        """The adapter's name: `null` or `lmcache`."""
        ...

    async def open(self) -> None:
        """Open connections.  Idempotent."""
        ...

    async def close(self) -> None:
        """Release everything.  Idempotent, bounded in time."""
        ...

    async def health(self) -> TierHealth:
        """Ask whether the server answers within its deadline.  Never raises."""
        ...

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        """Bring what the tier holds of `prefix` from disk into host memory.

        Raises:
            TierError: if the server does not answer within the deadline or refuses.
        """
        ...

    async def clear_host(self) -> None:
        """Drop what the tier holds in host memory; what is on disk stays.

        Raises:
            TierError: if the server does not answer within the deadline or refuses.
        """
        ...

    def identify(self, kv_identity: str | None) -> None:
        """Look from now on for KV of the engine that calls itself so; `None`: of one that names no identity."""
        ...
