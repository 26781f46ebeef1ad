"""A known answer, asked for from every place that KV may come from: does the tier give back what was put in?

A prompt of more than one chunk is answered four times: computed anew (cold), from the engine's pool (L0), from the
tier's host memory (L1), and, where nothing else can lose by it, from its disk (L2).  Copies are bit-exact, so that
answers from equally many cached tokens are equal to the last digit.  Against the cold answer the engine itself may
differ: in bfloat16 sums are taken in another order after a hit.  There, chances may differ by a tolerance.  An engine
that works for others meanwhile differs from itself as well, so that a difference is looked at again before it counts:
it is wrong only if it shows every time, and to the last digit only where the pool twice gives the same answer.

Asking costs the engine some hundred prompt tokens, at the lowest priority.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pancake_langgraph._errors import EngineRejected
from pancake_langgraph._types import TokenPrefix
from pancake_langgraph.engines.base import ReadsTier, Recital
from pancake_langgraph.tiers.base import Tier
from pancake_langgraph.tiers.naming import CANARY_SALT, with_codec

#: The prompt fills at least so many chunks and tokens; the answer's first tokens lie behind them.
MIN_CHUNKS: Final = 2
MIN_TOKENS: Final = 512
ANSWER_TOKENS: Final = 8

#: Log-probabilities from the same number of cached tokens: copies are exact, printing rounds.
EXACT_TOLERANCE: Final = 1e-3
#: Log-probabilities of a hit against a cold prompt, where the engine itself differs in bfloat16.
COLD_TOLERANCE: Final = 0.5

#: How often places are asked again before a wrong answer counts: beside one other request, 3 of 8 first answers of an
#: engine in bfloat16 differed from its own pool by 0.0016 on a CPU.
RETRIALS: Final = 4

#: Status of a request that could not be answered for what it says; others (no right, too many) say nothing of the tier.
_CANNOT_ANSWER: Final = 400

_ATTEMPTS_S: Final = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


class Place(StrEnum):
    """Where an answer's KV came from."""

    COLD = "cold"
    POOL = "L0"
    HOST = "L1"
    DISK = "L2"


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """What came of it.

    `is_right` is false only if an answer was wrong, and `reason` says then what differed.  `places` are those that
    gave an answer; a place that is not among them had nothing, which costs time and no words.  `seconds` are the times
    of the answers, in the order of `places`; they say something only where nothing else went on.
    """

    is_right: bool
    reason: str
    places: tuple[Place, ...]
    elapsed_s: float
    seconds: tuple[float, ...] = ()

    @property
    def slow_places(self) -> tuple[Place, ...]:
        """Places of the tier that took longer than computing anew."""
        took_s = dict(zip(self.places, self.seconds, strict=False))
        cold_s = took_s.get(Place.COLD, math.inf)
        return tuple(place for place in (Place.HOST, Place.DISK) if took_s.get(place, 0.0) > cold_s)


async def run_canary(
    engine: ReadsTier,
    tier: Tier,
    token_ids: tuple[int, ...],
    *,
    chunk_tokens: int,
    clear_host: bool,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> CanaryReport:
    """Ask from every place and compare.

    `token_ids` are those of `canary_text`, at least `canary_tokens(chunk_tokens)`.  With `clear_host` the tier's host
    memory is emptied to look at its disk: only right after the tier's start, when nobody has anything there.

    Raises:
        EngineError: if the engine fails, refuses the prompt when nothing is cached, or refuses for another reason.
        TierError: if the tier cannot be reached.
    """
    started_s = time.monotonic()
    ids = token_ids[: canary_tokens(chunk_tokens)]
    first, second, third = (TokenPrefix(ids, _new_salt()) for _ in range(3))
    asked = _Asked(engine)
    await asked.ask(Place.COLD, first)  # nobody has used this salt before
    try:
        await asked.ask(Place.POOL, first)
        if await _is_stored(tier, first, pause):
            await asked.ask(Place.HOST, second, tier_salt=first.cache_salt)
            if clear_host:
                await tier.clear_host()
                if await _is_stored(tier, first, pause):
                    await asked.ask(Place.DISK, third, tier_salt=first.cache_salt)
    except EngineRejected as exc:  # what it answered cold; chances that are no numbers cannot be put into JSON
        if exc.status_code != _CANNOT_ANSWER:
            raise
        places = tuple(asked.recitals)
        reason = f"after answers from {', '.join(places)} the engine gave none ({type(exc).__name__})"
        return CanaryReport(is_right=False, reason=reason, places=places, elapsed_s=time.monotonic() - started_s)
    stored_tokens = canary_chunks(chunk_tokens) * chunk_tokens
    found = asked.found(stored_tokens)
    problem = find_mismatch(found)
    for _ in range(RETRIALS if problem is not None else 0):
        if await _ask_again(asked, first, stored_tokens) is None:
            problem = None
            break
    return CanaryReport(
        problem is None,
        problem or f"equal answers from {', '.join(found)}",
        tuple(found),
        time.monotonic() - started_s,
        tuple(asked.seconds[place] for place in found),
    )


async def _ask_again(asked: _Asked, first: TokenPrefix, stored_tokens: int) -> str | None:
    """Ask all places once more, each for the very KV that it gave before; return what is still wrong."""

    def unused() -> TokenPrefix:
        return TokenPrefix(first.token_ids, _new_salt())

    again = _Asked(asked.engine)
    try:
        await again.ask(Place.COLD, unused())
        await again.ask(Place.POOL, first)
        for place in (Place.HOST, Place.DISK):  # what came from the disk lies in host memory now: the same bytes
            if place in asked.recitals:
                await again.ask(place, unused(), tier_salt=first.cache_salt)
        before = again.recitals[Place.POOL]
        await again.ask(Place.POOL, first)
    except EngineRejected as exc:
        if exc.status_code != _CANNOT_ANSWER:
            raise
        return f"asked again, the engine gave no answer ({type(exc).__name__})"
    is_steady = _against_hit(before, again.recitals[Place.POOL]) is None
    return find_mismatch(again.found(stored_tokens), is_steady=is_steady)


def _new_salt() -> str:
    return with_codec(f"{CANARY_SALT}{secrets.token_hex(8)}", "exact")  # whatever the tier's own codec is


class _Asked:
    """Asks for recitals, and keeps what was said and how long it took."""

    def __init__(self, engine: ReadsTier) -> None:
        self.engine = engine
        self.recitals: dict[Place, Recital] = {}
        self.seconds: dict[Place, float] = {}

    async def ask(self, place: Place, prefix: TokenPrefix, *, tier_salt: str | None = None) -> None:
        started_s = time.monotonic()
        said = await self.engine.recite(prefix, max_tokens=ANSWER_TOKENS, tier_salt=tier_salt)
        self.recitals[place], self.seconds[place] = said, time.monotonic() - started_s

    def found(self, stored_tokens: int) -> dict[Place, Recital]:
        """Return the answers that came from where they were looked for."""
        return {place: said for place, said in self.recitals.items() if _is_from_cache(place, said, stored_tokens)}


def canary_text(chunk_tokens: int) -> str:
    """Return what the canary reads: a count, which every language model goes on with alike, and is sure of.

    It has at least `canary_tokens(chunk_tokens)` tokens.
    """
    numbers = ", ".join(str(number) for number in range(1, canary_tokens(chunk_tokens)))
    return f"Count without a pause, and leave no number out: {numbers}"


def canary_tokens(chunk_tokens: int) -> int:
    """Return how long the prompt is: whole chunks and a few tokens more, which are computed in every case."""
    return canary_chunks(chunk_tokens) * chunk_tokens + min(8, chunk_tokens - 1)


def canary_chunks(chunk_tokens: int) -> int:
    """Return how many whole chunks the prompt has."""
    return max(MIN_CHUNKS, -(-MIN_TOKENS // chunk_tokens))


def find_mismatch(recitals: Mapping[Place, Recital], *, is_steady: bool = True) -> str | None:
    """Return what is wrong with a set of answers, `None` if nothing is.  Pure.

    `is_steady` says that the engine gives the same answer twice, so that copies can be held to the last digit.
    """
    for place, said in recitals.items():
        if not all(math.isfinite(value) for value in said.logprobs):
            return f"the answer from {place} has chances that are no numbers"
    cold = recitals[Place.COLD]
    for place, said in recitals.items():
        if place is not Place.COLD and (problem := _against_cold(cold, said)) is not None:
            return f"the answer from {place} differs from the cold one: {problem}"
    hits = [(place, said) for place, said in recitals.items() if place is not Place.COLD and is_steady]
    for number, (place, said) in enumerate(hits):
        for other, also in hits[:number]:
            if said.cached_tokens == also.cached_tokens and (problem := _against_hit(also, said)) is not None:
                return f"the answers from {other} and {place} differ: {problem}"
    return None


async def _is_stored(tier: Tier, prefix: TokenPrefix, pause: Callable[[float], Awaitable[None]]) -> bool:
    """Whether the tier has all chunks; stores end a moment after the answer."""
    for wait_s in _ATTEMPTS_S:
        await pause(wait_s)
        report = await tier.prefetch(prefix)
        if report.total_chunks and report.found_chunks >= report.total_chunks:
            return True
    return False


def _is_from_cache(place: Place, said: Recital, stored_tokens: int) -> bool:
    return place is Place.COLD or said.cached_tokens is None or said.cached_tokens >= stored_tokens


def _against_cold(cold: Recital, said: Recital) -> str | None:
    """Compare up to the first token that differs; such a one may be a tie that fell the other way."""
    for number, (expected, got) in enumerate(zip(cold.tokens, said.tokens, strict=False)):
        difference = abs(cold.logprobs[number] - said.logprobs[number])
        if difference > COLD_TOLERANCE:
            return f"token {number} is {difference:.2f} less or more likely"
        if expected != got:
            is_tie = number > 0 or cold.margin <= COLD_TOLERANCE
            return None if is_tie else f"token {number} is another one"
    return None


def _against_hit(first: Recital, second: Recital) -> str | None:
    if first.tokens != second.tokens:
        return "other tokens from the same number of cached ones"
    difference = max((abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True)), default=0.0)
    return f"chances differ by {difference:.4f}" if difference > EXACT_TOLERANCE else None
