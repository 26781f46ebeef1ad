"""A tier that was just started has to be right, and sooner than computing."""

from __future__ import annotations

import asyncio

import pytest

from pancake_langgraph._types import Prompt, TokenPrefix
from pancake_langgraph.engines.base import Capabilities, Recital, TierState
from pancake_langgraph.launch.proving import prove_at_start
from pancake_langgraph.tiers.base import PrefetchReport, TierHealth
from pancake_langgraph.tiers.canary import Place, canary_chunks
from pancake_langgraph.tiers.null import NullTier

CHUNK = 256
STORED = canary_chunks(CHUNK) * CHUNK
FOUND = Capabilities(engine="vllm", kv_identity="w1", tier_state=TierState.UNPROVEN)
#: Longer than whatever a loaded machine adds to an answer that takes no time.
SLOW_S = 0.3


class Memory(NullTier):
    """A tier that has everything at once."""

    async def health(self) -> TierHealth:
        return TierHealth(alive=True, chunk_tokens=CHUNK, detail="ok")

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        return PrefetchReport(2, 2, 0.0)


class Reader:
    """An engine that takes `slow_s` to read from the tier in each of its proofs, and `SLOW_S` to compute where told."""

    def __init__(self, slow: list[bool]) -> None:
        self.slow = slow
        self.proofs = 0
        self.judged: list[bool] = []
        self.read: set[TokenPrefix] = set()

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        self.proofs += 1
        return tuple(range(STORED + 100))

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        is_cold = tier_salt is None and prefix not in self.read
        self.read.add(prefix)
        if is_cold != self.slow[self.proofs - 1]:
            await asyncio.sleep(SLOW_S)
        return Recital(("7",), (-0.1,), 3.0, 0 if is_cold else STORED)

    async def judge_tier(self, *, is_right: bool) -> bool:
        self.judged.append(is_right)
        return True


@pytest.mark.parametrize(
    ("slow", "judged"), [([False], [True]), ([True, False], [True, True]), ([True, True], [True, True, False])]
)
async def test_a_tier_is_switched_off_only_if_it_loses_time_twice(slow: list[bool], judged: list[bool]) -> None:
    engine = Reader(slow)
    report = await prove_at_start(engine, Memory(), FOUND)
    assert report is not None
    assert report.is_right
    assert (Place.HOST in report.slow_places) is slow[-1]
    assert (engine.proofs, engine.judged) == (len(slow), judged)
