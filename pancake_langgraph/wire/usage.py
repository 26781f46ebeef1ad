"""Token counts from a server's `usage` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pancake_langgraph._types import Usage


def read_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    """Return the counts, or `None` when the server gave none.

    Cached tokens that are null or absent stay unknown (`None`); 0 stays 0.
    """
    if not isinstance(usage, Mapping):
        return None
    prompt = _count(usage.get("prompt_tokens"))
    if prompt is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    return Usage(prompt, _count(usage.get("completion_tokens")) or 0, cached)


def usage_metadata(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the counts in LangChain's `UsageMetadata` form, unknown details left out."""
    known = read_usage(usage)
    if known is None or usage is None:
        return None
    metadata: dict[str, Any] = {
        "input_tokens": known.prompt_tokens,
        "output_tokens": known.completion_tokens,
        "total_tokens": known.prompt_tokens + known.completion_tokens,
    }
    if known.cached_tokens is not None:
        metadata["input_token_details"] = {"cache_read": known.cached_tokens}
    details = usage.get("completion_tokens_details")
    reasoning = _count(details.get("reasoning_tokens")) if isinstance(details, Mapping) else None
    if reasoning is not None:
        metadata["output_token_details"] = {"reasoning": reasoning}
    return metadata


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
