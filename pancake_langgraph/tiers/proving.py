"""Before a tier is used: ask the engine for the known answer, and tell it whether it may read the tier."""

from __future__ import annotations

import logging
from typing import Protocol

from pancake_langgraph._types import Prompt
from pancake_langgraph.engines.base import Capabilities, ReadsTier
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.canary import ANSWER_TOKENS, CanaryReport, canary_text, canary_tokens, run_canary

logger = logging.getLogger(__name__)


class Tokenizes(Protocol):
    """The part of an engine that turns the canary's text into tokens."""

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """See `pancake_langgraph.engines.base.Engine.tokenize`."""
        ...


async def prove_tier(
    engine: Tokenizes, tier: Tier, found: Capabilities, *, clear_host: bool = False
) -> CanaryReport | None:
    """Run the canary if this engine can be asked for it; return `None` if it cannot, and log why.

    An engine whose tier gives a wrong answer is told not to read it any more, and this is logged as an error.
    `clear_host` as for `run_canary`.

    Raises:
        EngineError: if the engine fails.
        TierError: if the tier cannot be reached.
    """
    health = await tier.health()
    chunk_tokens = health.chunk_tokens
    if not isinstance(engine, ReadsTier) or found.tier_state is None or chunk_tokens is None:
        logger.info("the tier is used unproven: engine or cache server cannot be asked for a known answer")
        return None
    window_tokens = found.max_model_len_tokens
    if window_tokens is not None and window_tokens < canary_tokens(chunk_tokens) + ANSWER_TOKENS:
        logger.info("the tier is used unproven: %d tokens do not fit two chunks of %d", window_tokens, chunk_tokens)
        return None
    tier.identify(found.kv_identity)
    prompt = Prompt.of([{"role": "user", "content": canary_text(chunk_tokens)}])
    token_ids = await engine.tokenize(prompt, add_generation_prompt=False)
    report = await run_canary(engine, tier, token_ids, chunk_tokens=chunk_tokens, clear_host=clear_host)
    took_note = await engine.judge_tier(is_right=report.is_right)
    if not report.is_right:
        left = "" if took_note else "; the engine goes on reading it: restart it without the tier"
        logger.error(
            "the tier is switched off: %s%s; look at its disk and memory, then restart both", report.reason, left
        )
    return report
