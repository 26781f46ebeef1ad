"""The known answer: what counts as wrong, and what only as missing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest

from pancake_langgraph._errors import EngineRejected
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines.base import Recital
from pancake_langgraph.tiers.base import PrefetchReport, TierHealth
from pancake_langgraph.tiers.canary import (
    RETRIALS,
    CanaryReport,
    Place,
    canary_chunks,
    canary_tokens,
    find_mismatch,
    run_canary,
)

CHUNK = 32
NUM_CHUNKS = canary_chunks(CHUNK)
STORED = NUM_CHUNKS * CHUNK


def recital(
    *tokens: str, chance: float = -0.1, margin: float = 3.0, cached: int | None = STORED, first: float | None = None
) -> Recital:
    chances = [chance] * len(tokens)
    if first is not None:
        chances[0] = first
    return Recital(tokens, tuple(chances), margin, cached)


RIGHT = recital("7", "8", "9")
COLD = recital("7", "8", "9", cached=0)


def test_equal_answers_are_right() -> None:
    assert find_mismatch({Place.COLD: COLD, Place.POOL: RIGHT, Place.HOST: RIGHT, Place.DISK: RIGHT}) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_chance_that_is_no_number_is_wrong(value: float) -> None:
    bad = recital("7", "8", "9", first=value)
    assert "no numbers" in str(find_mismatch({Place.COLD: COLD, Place.HOST: bad}))


def test_copies_that_differ_in_the_last_digits_are_wrong_though_the_words_agree() -> None:
    problem = find_mismatch({Place.COLD: COLD, Place.POOL: RIGHT, Place.DISK: recital("7", "8", "9", chance=-0.12)})
    assert problem is not None
    assert "L0 and L2" in problem


def test_a_hit_may_differ_from_the_cold_answer_as_far_as_the_engine_itself_does() -> None:
    hit = recital("7", "8", "9", chance=-0.2)
    assert find_mismatch({Place.COLD: COLD, Place.POOL: hit, Place.HOST: hit}) is None
    tie = recital("7", "8", "ten", chance=-0.2)
    assert find_mismatch({Place.COLD: COLD, Place.POOL: tie}) is None


def test_another_first_token_is_wrong_unless_it_was_a_tie() -> None:
    other = recital("six", "8", "9")
    assert "another one" in str(find_mismatch({Place.COLD: COLD, Place.HOST: other}))
    unsure = recital("7", "8", "9", margin=0.2, cached=0)
    assert find_mismatch({Place.COLD: unsure, Place.HOST: other}) is None


def test_a_much_less_likely_token_is_wrong() -> None:
    assert "likely" in str(find_mismatch({Place.COLD: COLD, Place.POOL: recital("7", "8", "9", chance=-2.0)}))


def test_answers_from_other_numbers_of_cached_tokens_are_not_held_to_the_last_digit() -> None:
    fewer = recital("7", "8", "9", chance=-0.12, cached=STORED + 32)
    assert find_mismatch({Place.COLD: COLD, Place.POOL: fewer, Place.HOST: RIGHT}) is None


# -- asking -------------------------------------------------------------------------------------------------------


class Tiers:
    """A tier in memory that stores after some looks, and may keep less on disk."""

    name = "memory"

    def __init__(self, *, looks: int = 1, has_disk: bool = True) -> None:
        self.looks, self.has_disk = looks, has_disk
        self.is_cleared = False

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def health(self) -> TierHealth:
        return TierHealth(alive=True, chunk_tokens=CHUNK, detail="ok")

    def identify(self, kv_identity: str | None) -> None:
        pass

    async def clear_host(self) -> None:
        self.is_cleared = True

    async def prefetch(self, prefix: TokenPrefix) -> PrefetchReport:
        self.looks -= 1
        there = self.looks <= 0 and (self.has_disk or not self.is_cleared)
        return PrefetchReport(NUM_CHUNKS if there else 0, NUM_CHUNKS, 0.0)


class Parrot:
    """An engine that answers as it is told for each place."""

    def __init__(self, tier: Tiers, said: Callable[[Place], Recital]) -> None:
        self.tier, self.said = tier, said
        self.asked: list[tuple[Place, TokenPrefix, str | None]] = []

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        place = Place.POOL if tier_salt is None else (Place.DISK if self.tier.is_cleared else Place.HOST)
        place = place if self.asked else Place.COLD
        self.asked.append((place, prefix, tier_salt))
        return self.said(place)

    async def judge_tier(self, *, is_right: bool) -> bool:
        return True


def run(engine: Parrot, tier: Tiers, *, clear_host: bool = True) -> CanaryReport:
    async def pause(_: float) -> None:
        pass

    ids = tuple(range(canary_tokens(CHUNK) + 100))
    return asyncio.run(run_canary(engine, tier, ids, chunk_tokens=CHUNK, clear_host=clear_host, pause=pause))


def right(place: Place) -> Recital:
    return COLD if place is Place.COLD else RIGHT


def test_every_place_is_asked_once_and_none_finds_its_answer_in_the_pool() -> None:
    tier = Tiers(looks=3)
    engine = Parrot(tier, right)
    report = run(engine, tier)
    assert report.is_right
    assert report.places == (Place.COLD, Place.POOL, Place.HOST, Place.DISK)
    assert [place for place, _, _ in engine.asked] == list(report.places)
    (_, cold, _), (_, pool, _), (_, host, host_salt), (_, disk, disk_salt) = engine.asked
    assert cold == pool
    assert len({cold.cache_salt, host.cache_salt, disk.cache_salt}) == 3
    assert host_salt == disk_salt == cold.cache_salt
    assert all(salt.endswith("!exact") for salt in (host_salt, pool.cache_salt, cold.cache_salt))
    assert cold.num_tokens == canary_tokens(CHUNK) > STORED


def test_the_host_memory_is_left_alone_unless_it_is_new() -> None:
    tier = Tiers()
    report = run(Parrot(tier, right), tier, clear_host=False)
    assert not tier.is_cleared
    assert report.places == (Place.COLD, Place.POOL, Place.HOST)


def test_a_tier_that_has_nothing_is_missing_and_not_wrong() -> None:
    tier = Tiers(looks=1_000)
    report = run(Parrot(tier, right), tier)
    assert report.is_right
    assert report.places == (Place.COLD, Place.POOL)
    tier = Tiers(has_disk=False)
    assert run(Parrot(tier, right), tier).places == (Place.COLD, Place.POOL, Place.HOST)


def test_a_place_whose_answer_was_computed_after_all_does_not_count() -> None:
    tier = Tiers()
    report = run(Parrot(tier, lambda place: COLD if place in (Place.COLD, Place.HOST) else RIGHT), tier)
    assert report.is_right
    assert Place.HOST not in report.places


def test_a_wrong_answer_from_disk_is_told() -> None:
    tier = Tiers()
    report = run(Parrot(tier, lambda place: recital("x", "y", "z") if place is Place.DISK else right(place)), tier)
    assert not report.is_right
    assert "L2" in report.reason


class Busy(Parrot):
    """An engine that works for others: some answers differ in the last digits, the n-th as `noise` says."""

    def __init__(self, tier: Tiers, noise: Callable[[int], float]) -> None:
        super().__init__(tier, right)
        self.noise = noise

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        said = await super().recite(prefix, max_tokens=max_tokens, tier_salt=tier_salt)
        chance = -0.1 - self.noise(len(self.asked))
        return Recital(said.tokens, (chance,) * len(said.tokens), said.margin, STORED if len(self.asked) > 1 else 0)


def test_an_engine_that_works_for_others_is_asked_again_and_not_believed_to_read_wrong() -> None:
    tier = Tiers()
    once = Busy(tier, lambda number: 0.02 if number == 3 else 0.0)  # only the first look at the host memory
    assert run(once, tier, clear_host=False).is_right
    assert len(once.asked) > 3
    tier = Tiers()
    assert run(Busy(tier, lambda number: 0.01 * (number % 7)), tier, clear_host=False).is_right


def test_copies_that_differ_every_time_while_the_pool_does_not_are_wrong() -> None:
    tier = Tiers()
    bad = recital("7", "8", "9", chance=-0.12)
    engine = Parrot(tier, lambda place: bad if place is Place.HOST else right(place))
    report = run(engine, tier, clear_host=False)
    assert not report.is_right
    assert "L0 and L1" in report.reason
    salts = [salt for place, _, salt in engine.asked if place is Place.HOST]
    assert len(salts) == 1 + RETRIALS
    assert len(set(salts)) == 1  # the very object that was wrong is looked at again


def test_the_prompt_has_two_chunks_and_some_hundred_tokens_at_least() -> None:
    assert [canary_chunks(chunk) for chunk in (16, 64, 256, 512, 1024)] == [32, 8, 2, 2, 2]


def test_a_place_that_takes_longer_than_computing_is_slow() -> None:
    places = (Place.COLD, Place.POOL, Place.HOST, Place.DISK)
    report = CanaryReport(is_right=True, reason="", places=places, elapsed_s=2.0, seconds=(0.5, 0.9, 0.4, 0.6))
    assert report.slow_places == (Place.DISK,)
    assert CanaryReport(is_right=True, reason="", places=(), elapsed_s=0.0).slow_places == ()


@pytest.mark.parametrize(("status_code", "is_told"), [(400, True), (401, False), (404, False), (429, False)])
def test_only_an_answer_that_cannot_be_given_speaks_against_the_tier(status_code: int, is_told: bool) -> None:
    def refuse(place: Place) -> Recital:
        if place is Place.HOST:
            raise EngineRejected("no", status_code=status_code)
        return right(place)

    tier = Tiers()
    if is_told:
        assert not run(Parrot(tier, refuse), tier).is_right
    else:
        with pytest.raises(EngineRejected):
            run(Parrot(tier, refuse), tier)
