"""Right after a start: does the cache server give back what it was given, and sooner than computing it?"""

from __future__ import annotations

import asyncio
from typing import Protocol

from pancake_langgraph.engines.base import Capabilities, ReadsTier
from pancake_langgraph.engines.vllm import VllmEngine
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.canary import CanaryReport, Place
from pancake_langgraph.tiers.lmcache import LMCacheTier
from pancake_langgraph.tiers.proving import Tokenizes, prove_tier


class ProvableEngine(ReadsTier, Tokenizes, Protocol):
    """An engine that can be asked for the known answer, and told what came of it."""


def prove_started_tier(base_url: str, *, model: str, tier_url: str, model_key: str) -> CanaryReport | None:
    """Ask engine and cache server, both just started, for the known answer; `None` if they cannot be asked.

    The cache server's host memory is emptied meanwhile, to look at its disk.  Where even the host memory takes longer
    than computing, twice in a row, the engine is told not to read the tier.  Not from inside an event loop.

    Raises:
        EngineError: if the engine fails.
        TierError: if the cache server cannot be reached.
    """
    return asyncio.run(_prove(base_url, model=model, tier_url=tier_url, model_key=model_key))


async def _prove(base_url: str, *, model: str, tier_url: str, model_key: str) -> CanaryReport | None:
    engine, tier = VllmEngine(base_url, model=model), LMCacheTier(tier_url, model_key)
    await engine.open()
    await tier.open()
    try:
        return await prove_at_start(engine, tier, await engine.probe())
    finally:
        await tier.close()
        await engine.close()


async def prove_at_start(engine: ProvableEngine, tier: Tier, found: Capabilities) -> CanaryReport | None:
    """Prove right and worth its time; see `prove_started_tier`."""
    report = await prove_tier(engine, tier, found, clear_host=True)
    if report is not None and report.is_right and report.slow_places:
        report = await prove_tier(engine, tier, found, clear_host=True)  # the first one may have met a cold start
        if report is not None and Place.HOST in report.slow_places:
            await engine.judge_tier(is_right=False)
    return report
