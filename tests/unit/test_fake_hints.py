"""The fake engine carries out hints on its pool as the connector inside vLLM does."""

from __future__ import annotations

from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._types import HintState, TokenPrefix
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.engines.pool_hints import HoldHint, PoolHints, RetireHint

LENGTH = 160


def engine() -> FakeEngine:
    settings = FakeEngineSettings(pool_blocks=40, max_model_len_tokens=640, pool_hints=True, prefill_s_per_token=0.0)
    return FakeEngine(settings, VirtualClock())


def prefix(number: int, length: int = LENGTH) -> TokenPrefix:
    return TokenPrefix(tuple(range(number * 1000, number * 1000 + length)))


async def read(made: FakeEngine, number: int, hints: PoolHints | None = None) -> list[tuple[HintState, int]]:
    report = await made.warm(prefix(number), priority=0, hints=hints)
    return [(answer.state, answer.num_tokens) for answer in report.answers]


def hold(name: str, *, ttl_s: float = 60.0, priority: int = 0) -> PoolHints:
    return PoolHints(hold=HoldHint(name, LENGTH, ttl_s, priority))


async def resident(made: FakeEngine, number: int) -> int:
    return (await made.residency(prefix(number))).resident_tokens


async def press(made: FakeEngine) -> None:
    for number in range(100, 105):
        await made.warm(prefix(number), priority=0)


async def test_what_is_held_stays_until_its_release_or_its_time() -> None:
    made = engine()
    assert await read(made, 1, hold("1")) == [(HintState.ACCEPTED, LENGTH)]
    await read(made, 2)
    await press(made)
    assert (await resident(made, 1), await resident(made, 2)) == (LENGTH, 0)
    assert await read(made, 1, PoolHints(release=("1",))) == [(HintState.ACCEPTED, LENGTH)]
    await press(made)
    await press(made)
    assert await resident(made, 1) == 0
    await read(made, 3, hold("3", ttl_s=5.0))
    assert isinstance(made.clock, VirtualClock)
    made.clock.advance(6.0)
    await press(made)
    assert await resident(made, 3) == 0


async def test_the_cap_clips_and_rejects_and_need_takes_the_lowest_first() -> None:
    made = engine()
    assert await read(made, 1, hold("1", priority=2)) == [(HintState.ACCEPTED, LENGTH)]
    assert await read(made, 2, hold("2", priority=1)) == [(HintState.ACCEPTED, LENGTH)]
    assert await read(made, 3, hold("3")) == [(HintState.REJECTED, 0)]
    await made.warm(prefix(9, 400), priority=0)
    assert await resident(made, 1) == LENGTH
    assert await resident(made, 2) < LENGTH


async def test_what_is_retired_goes_before_older_contexts() -> None:
    made = engine()
    await read(made, 1)
    await read(made, 2, hold("2"))
    await read(made, 3, PoolHints(retire=(RetireHint("2", keep_tokens=16),)))
    await read(made, 4)
    await made.warm(prefix(5, 128), priority=0)
    assert await resident(made, 1) == LENGTH
    assert await resident(made, 2) == 16
