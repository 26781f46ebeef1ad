"""Pool hints of the fake engine: the same rules as inside vLLM, in the plainest form."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pancake_langgraph._clock import Clock
from pancake_langgraph._types import HintState, HintVerb, TokenPrefix
from pancake_langgraph.engines.fake_pool import LruBlockPool
from pancake_langgraph.engines.pool_hints import HintAnswer, HoldHint, PoolHints, RetireHint

_MAX_HEARD: Final = 1000


@dataclass(frozen=True, slots=True)
class _Held:
    hashes: tuple[int, ...]
    rank: tuple[int, int]
    expires_s: float


class FakePoolHints:
    """Keeps the free blocks of a pool in the order that hints ask for.  Not thread-safe."""

    def __init__(self, pool: LruBlockPool, clock: Clock, *, cap_ratio: float) -> None:
        """Hold at most `cap_ratio` of the blocks."""
        self._pool, self._clock = pool, clock
        self._cap_blocks = int(pool.num_blocks * cap_ratio)
        self._held: dict[str, _Held] = {}
        self._known: dict[str, tuple[int, ...]] = {}
        self._number = 0
        #: What carriers said, oldest first.
        self.heard: deque[PoolHints] = deque(maxlen=_MAX_HEARD)
        pool.before_use = self._arrange

    def begin(self, hints: PoolHints) -> list[HintAnswer]:
        """Do what comes before the carrier is served."""
        self.heard.append(hints)
        return [*map(self._release, hints.release), *map(self._retire, hints.retire)]

    def end(self, hints: PoolHints, prefix: TokenPrefix) -> list[HintAnswer]:
        """Do what comes when the carrier was served."""
        return [] if hints.hold is None else [self._hold(hints.hold, prefix)]

    def _hold(self, hint: HoldHint, prefix: TokenPrefix) -> HintAnswer:
        size = self._pool.block_size_tokens
        self._held.pop(hint.hint_id, None)
        self._drop_expired()
        wanted = self._pool.hashes_of(prefix.token_ids[: hint.num_tokens], prefix.cache_salt)
        taken = tuple(self._fitting(hash_ for hash_ in wanted if self._pool.holds(hash_)))
        if not taken:
            is_lost = bool(wanted) and not self._pool.holds(wanted[0])
            return HintAnswer(HintVerb.HOLD, hint.hint_id, HintState.MISSING if is_lost else HintState.REJECTED, 0)
        self._number += 1
        self._held[hint.hint_id] = _Held(taken, (hint.priority, -self._number), self._clock.now_s() + hint.ttl_s)
        self._known[hint.hint_id] = taken
        state = HintState.ACCEPTED if len(taken) == hint.num_tokens // size else HintState.CLIPPED
        return HintAnswer(HintVerb.HOLD, hint.hint_id, state, len(taken) * size)

    def _fitting(self, wanted: Iterator[int]) -> Iterator[int]:
        owned = {hash_ for held in self._held.values() for hash_ in held.hashes}
        room = self._cap_blocks - len(owned)
        for hash_ in wanted:
            room -= hash_ not in owned
            if room < 0:
                return
            yield hash_

    def _release(self, hint_id: str) -> HintAnswer:
        held = self._held.pop(hint_id, None)
        if held is None:
            return HintAnswer(HintVerb.RELEASE, hint_id, HintState.MISSING, 0)
        num_tokens = len(held.hashes) * self._pool.block_size_tokens
        return HintAnswer(HintVerb.RELEASE, hint_id, HintState.ACCEPTED, num_tokens)

    def _retire(self, hint: RetireHint) -> HintAnswer:
        self._held.pop(hint.hint_id, None)
        keep = -(-hint.keep_tokens // self._pool.block_size_tokens)
        spared = {hash_ for held in self._held.values() for hash_ in held.hashes}
        going = set(self._known.pop(hint.hint_id, ())[keep:]) - spared
        num_gone = self._pool.arrange(lambda hash_: (-1, 0) if hash_ in going else (0, 0)) if going else 0
        state = HintState.ACCEPTED if num_gone else HintState.MISSING
        return HintAnswer(HintVerb.RETIRE, hint.hint_id, state, num_gone * self._pool.block_size_tokens)

    def _drop_expired(self) -> None:
        now_s = self._clock.now_s()
        self._held = {name: held for name, held in self._held.items() if held.expires_s > now_s}

    def _arrange(self) -> None:
        self._drop_expired()
        ranks: dict[int, tuple[int, int]] = {}
        for held in self._held.values():
            for hash_ in held.hashes:
                ranks[hash_] = max(ranks.get(hash_, held.rank), held.rank)
        if ranks:
            self._pool.arrange(lambda hash_: (1 + ranks[hash_][0], ranks[hash_][1]) if hash_ in ranks else (0, 0))
