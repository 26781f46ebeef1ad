"""The known answer on the real engine and cache server: right from every place, and noticed when a place is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pancake_langgraph.engines.vllm import VllmEngine
from pancake_langgraph.launch import Stack, StackPlan, TierPlan
from pancake_langgraph.launch.proving import prove_started_tier
from pancake_langgraph.launch.run_folder import new_run_dir
from pancake_langgraph.tiers.canary import CanaryReport, Place
from pancake_langgraph.tiers.lmcache import LMCacheTier
from pancake_langgraph.tiers.proving import prove_tier

pytestmark = pytest.mark.real

PROMPT = [400 + 11 * position % 9_000 for position in range(300)]


class Spoiler(LMCacheTier):
    """Overwrites what lies on disk when the host memory is emptied."""

    folder = Path()

    async def clear_host(self) -> None:
        await super().clear_host()
        for path in self.folder.glob("*.data"):
            path.write_bytes(bytes(path.stat().st_size))


@pytest.fixture(scope="module")
def stack(one_engine: None, tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine whose cache server has LMCache's own disk adapter, which checks nothing."""
    plan = StackPlan(
        model_dir=tiny_dir,
        dtype="float32",
        kv_pool_bytes=32_000_000,
        tier=TierPlan(l1_bytes=64_000_000, l2_dir=tmp_path_factory.mktemp("l2"), l2_adapter="plain"),
        dev_routes=True,
        run_dir=new_run_dir(),
    )
    with Stack(plan) as started:
        yield started


def prove(stack: Stack) -> CanaryReport | None:
    assert stack.tier_url is not None
    return prove_started_tier(
        stack.base_url, model=stack.served_model_name, tier_url=stack.tier_url, model_key=stack.model_key
    )


async def prove_spoiled(stack: Stack) -> CanaryReport | None:
    assert stack.tier_url is not None
    assert stack.plan.tier is not None
    assert stack.plan.tier.l2_dir is not None
    engine, tier = VllmEngine(stack.base_url), Spoiler(stack.tier_url, stack.model_key, deadline_s=10.0)
    tier.folder = stack.plan.tier.l2_dir
    try:
        return await prove_tier(engine, tier, await engine.probe(), clear_host=True)
    finally:
        await tier.close()
        await engine.close()


def ask(stack: Stack) -> tuple[str, int]:
    body = {"model": stack.served_model_name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    answer = httpx.post(f"{stack.base_url}/completions", json=body, timeout=60).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0


def forget(stack: Stack) -> None:
    assert httpx.post(f"{stack.base_url.removesuffix('/v1')}/reset_prefix_cache", timeout=30).is_success


def test_a_healthy_tier_gives_the_same_answer_from_every_place(stack: Stack) -> None:
    report = prove(stack)
    assert report is not None
    assert report.is_right, report.reason
    assert report.places == (Place.COLD, Place.POOL, Place.HOST, Place.DISK)


async def test_an_engine_leaves_a_tier_alone_that_was_found_wrong_until_it_is_proven_again(stack: Stack) -> None:
    cold, _ = ask(stack)
    forget(stack)
    assert ask(stack) == (cold, 256)
    report = await prove_spoiled(stack)
    assert report is not None
    assert not report.is_right
    assert "L2" in report.reason
    forget(stack)
    assert ask(stack) == (cold, 0)
    engine = VllmEngine(stack.base_url)
    assert (await engine.probe()).tier_state == "off"
    assert await engine.judge_tier(is_right=True)
    await engine.close()
    forget(stack)
    assert ask(stack)[1] == 256
