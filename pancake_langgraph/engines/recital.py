"""One greedy answer with its chances, from a chosen place: how vLLM is asked for it, and how its answer is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pancake_langgraph._errors import MalformedStream
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines.base import Recital
from pancake_langgraph.engines.pool_hints import HINTS_FIELD, PARAMS_FIELD


def recital_body(
    model: str | None, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None, priority: int
) -> dict[str, Any]:
    """Return the request."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prefix.token_ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "priority": priority,
    }
    if prefix.cache_salt is not None:
        body["cache_salt"] = prefix.cache_salt
    if tier_salt is not None:
        body[PARAMS_FIELD] = {HINTS_FIELD: {"tier_salt": tier_salt}}
    return body


def read_recital(answer: object) -> Recital:
    """Return what was answered.  A chance that is no number is kept: it is what is looked for.

    Raises:
        MalformedStream: if the answer has another form.
    """
    try:
        if not isinstance(answer, Mapping):
            raise TypeError
        chances = answer["choices"][0]["logprobs"]
        tokens = tuple(str(token) for token in chances["tokens"])
        logprobs = tuple(math.nan if value is None else float(value) for value in chances["token_logprobs"])
        first = sorted((float(value) for value in chances["top_logprobs"][0].values()), reverse=True)
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        raise MalformedStream("completion: got no chances of tokens; is this a vLLM server?") from exc
    if not tokens or len(tokens) != len(logprobs):
        raise MalformedStream(f"completion: got {len(tokens)} tokens with {len(logprobs)} chances")
    margin = first[0] - first[1] if len(first) > 1 else math.inf
    return Recital(tokens, logprobs, margin, cached if isinstance(cached, int) else None)
