"""No tier: everything above runs the same with it, without prefetches."""

from __future__ import annotations

from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.tiers.base import PrefetchReport, TierHealth


class NullTier:
    """Holds nothing.  Safe on any loop."""

    @property
    def name(self) -> str:
        """The adapter's name."""
        return "null"

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def health(self) -> TierHealth:
        """Say that there is no tier."""
        return TierHealth(alive=False, chunk_tokens=None, detail="no tier is configured")

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        """Find nothing, at once."""
        del prefix
        return PrefetchReport(found_chunks=0, total_chunks=0, elapsed_s=0.0)

    async def clear_host(self) -> None:
        """Do nothing."""

    def identify(self, kv_identity: str | None) -> None:
        """Do nothing."""
        del kv_identity
