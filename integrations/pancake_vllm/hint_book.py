"""Decides what is held in the engine's pool and keeps the free queue in that order.

    given up first  [ retired | all others, least recently used first | held, lowest priority first ]  given up last

Holding is nothing but a place in this order: held blocks stay free, so that whoever needs them gets them, after all
others and lowest priority first.  Nothing is pinned and nothing can leak.

The cost of a step is the number of blocks that were freed since the last one: these stand at the end of the queue,
behind the held ones, and are moved before them.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pancake_vllm.hint_words import Answer, HintState, Hold, Retire, Verb
from pancake_vllm.pool_order import Block, PoolOrder

#: Held blocks stay free for whoever needs them; the rest of the pool keeps what others have read.
DEFAULT_CAP_RATIO: Final = 0.75
#: Contexts held at a time, and as many that were released and may still be retired.
MAX_HINTS: Final = 1024
#: Blocks by which a context may end elsewhere when it is read again.
END_BLOCKS: Final = 2
#: Hashes remembered of released contexts, in multiples of the pool.
_MAX_POOLS_REMEMBERED: Final = 4
#: How long a retirement waits for blocks that are in use.
_DEFER_S: Final = 60.0
#: Steps of one look back from the end of the queue that are always allowed.
_MIN_WALK: Final = 1024


@dataclass(slots=True, eq=False)
class _Held:
    """One hint in force; `line` are its blocks in the queue, the first to go first.

    `num_wanted` are the blocks that it was to hold; `is_whole` says that it holds them all, and that what is read
    behind them is new.
    """

    hint_id: str
    hashes: tuple[Hashable, ...]
    priority: int
    number: int
    expires_s: float
    num_wanted: int
    is_whole: bool = False
    line: deque[Block] = field(default_factory=deque)

    @property
    def rank(self) -> tuple[int, int]:
        """What decides who is given up first: among equals the one that was held last.

        Pauses of one kind take about as long, so that who has waited longest comes back next.
        """
        return self.priority, -self.number


class HintBook:
    """The hints in force.  Not thread-safe: belongs to the scheduler.  Times are seconds on one monotonic clock."""

    def __init__(self, order: PoolOrder, *, cap_ratio: float = DEFAULT_CAP_RATIO, max_hints: int = MAX_HINTS) -> None:
        """Hold at most `cap_ratio` of the blocks of `order`."""
        self._order = order
        self._cap_blocks = int(order.num_blocks * cap_ratio)
        self._max_hints = max_hints
        self._numbers = 0
        self._held: dict[str, _Held] = {}
        self._region: list[_Held] = []
        self._owners: dict[Hashable, list[_Held]] = {}
        self._placed: dict[int, _Held] = {}
        self._released: OrderedDict[str, tuple[Hashable, ...]] = OrderedDict()
        self._num_remembered = 0
        self._retiring: dict[Hashable, float] = {}
        self._seen: Block | None = None
        self._next_expiry_s = float("inf")
        self.lapsed = 0

    @property
    def held_tokens(self) -> int:
        """Tokens held now, each block counted once."""
        return len(self._owners) * self._order.block_size_tokens

    @property
    def cap_tokens(self) -> int:
        """Most tokens that may be held."""
        return self._cap_blocks * self._order.block_size_tokens

    @property
    def block_size_tokens(self) -> int:
        """Tokens per block."""
        return self._order.block_size_tokens

    @property
    def num_hints(self) -> int:
        """Hints in force."""
        return len(self._held)

    def hashes_of(self, hint_id: str) -> tuple[Hashable, ...]:
        """Return what a hint holds, nothing when it is not in force."""
        held = self._held.get(hint_id)
        return () if held is None else held.hashes

    def whole_behind(self, hashes: Sequence[Hashable], num_blocks: int) -> str | None:
        """Return the hint that holds, whole, the context whose first `num_blocks` of `hashes` are in the pool.

        The two ends may differ by `END_BLOCKS`: an answer that was generated is read back in slightly other tokens.
        `None` where no hint holds it, or where more of it than that was held and is lost.
        """
        for count in range(min(num_blocks, len(hashes)), max(num_blocks - END_BLOCKS - 1, 0), -1):
            for held in self._owners.get(hashes[count - 1], ()):
                if held.is_whole and len(held.hashes) - count <= END_BLOCKS:
                    return held.hint_id
        return None

    # -- hints ----------------------------------------------------------------------------------------------------

    def say_whole(self, hint_id: str) -> None:
        """Take in that what is read behind a hint's context is new; ignored where some of that is not held."""
        held = self._held.get(hint_id)
        if held is not None and len(held.hashes) == held.num_wanted:
            held.is_whole = True

    def hold(self, hint: Hold, hashes: Sequence[Hashable], *, now_s: float) -> Answer:
        """Hold the leading blocks of `hashes`; an id in force is replaced.

        Lower priorities are given up for it where the cap leaves no room.
        """
        if hint.hint_id in self._held:
            self._drop(self._held[hint.hint_id])
        asked = hint.num_tokens // self._order.block_size_tokens
        wanted = tuple(hashes[:asked])
        num_cached = next((n for n, h in enumerate(wanted) if self._order.find(h) is None), len(wanted))
        if not num_cached:
            return Answer(Verb.HOLD, hint.hint_id, HintState.MISSING if asked else HintState.REJECTED)
        taken = wanted[: self._make_room(wanted[:num_cached], hint.priority)]
        if not taken:
            return Answer(Verb.HOLD, hint.hint_id, HintState.REJECTED)
        self._numbers += 1
        is_whole = hint.is_whole and len(taken) == len(wanted)
        self._add(
            _Held(hint.hint_id, taken, hint.priority, self._numbers, now_s + hint.ttl_s, len(wanted), is_whole=is_whole)
        )
        state = HintState.ACCEPTED if len(taken) == asked else HintState.CLIPPED
        return Answer(Verb.HOLD, hint.hint_id, state, len(taken) * self._order.block_size_tokens)

    def release(self, hint_id: str) -> Answer:
        """End a hold; its blocks count as just used."""
        held = self._held.get(hint_id)
        if held is None:
            return Answer(Verb.RELEASE, hint_id, HintState.MISSING)
        self._drop(held)
        return Answer(Verb.RELEASE, hint_id, HintState.ACCEPTED, len(held.hashes) * self._order.block_size_tokens)

    def retire(self, hint: Retire, *, now_s: float) -> Answer:
        """End a hold, or take one that has ended, and let its blocks go first; never those that others hold."""
        if (held := self._held.get(hint.hint_id)) is not None:
            self._drop(held)
        hashes = self._forget(hint.hint_id)
        free: list[Block] = []
        num_deferred = 0
        for block_hash in hashes[-(-hint.keep_tokens // self._order.block_size_tokens) :]:
            block = self._order.find(block_hash)
            if block is None or block_hash in self._owners:
                continue
            if block.ref_cnt == 0:
                free.append(block)
            elif len(self._retiring) < self._order.num_blocks:
                self._retiring[block_hash] = now_s + _DEFER_S
                self._next_expiry_s = min(self._next_expiry_s, now_s + _DEFER_S)
                num_deferred += 1
        self._move_first(free[::-1])
        state = HintState.DEFERRED if num_deferred else HintState.ACCEPTED if free else HintState.MISSING
        return Answer(Verb.RETIRE, hint.hint_id, state, (len(free) + num_deferred) * self._order.block_size_tokens)

    # -- what happens in the engine -------------------------------------------------------------------------------

    def allocated(self, block_ids: Iterable[int]) -> None:
        """Note that a request has taken these blocks: where they stood in the queue they stand no more."""
        if not self._held and not self._retiring:
            return
        for block_id in block_ids:
            self._placed.pop(block_id, None)
            if self._seen is not None and self._seen.block_id == block_id:
                self._seen = None

    def settle(self, *, now_s: float) -> None:
        """End what has expired, and put the blocks freed since the last time where they belong."""
        if now_s >= self._next_expiry_s:
            self._expire(now_s)
        if not self._held and not self._retiring:
            self._seen = None
            return
        last = self._order.last()
        if last is not None and (last is self._seen or self._is_in_place(last)):
            return
        self._gather(now_s)
        self._seen = self._order.last()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _add(self, held: _Held) -> None:
        self._forget(held.hint_id)
        self._held[held.hint_id] = held
        insort(self._region, held, key=lambda h: h.rank)
        for block_hash in held.hashes:
            self._owners.setdefault(block_hash, []).append(held)
        self._next_expiry_s = min(self._next_expiry_s, held.expires_s)
        self._place(held)

    def _make_room(self, wanted: Sequence[Hashable], priority: int) -> int:
        """Return how many leading blocks of `wanted` fit under the cap; lower priorities make way."""
        num_fitting = self._fitting(wanted)
        if num_fitting < len(wanted):
            self._purge()
            num_fitting = self._fitting(wanted)
        while num_fitting < len(wanted) and self._region and self._region[0].priority < priority:
            self._shorten(self._region[0], len(wanted) - num_fitting)
            num_fitting = self._fitting(wanted)
        if len(self._held) >= self._max_hints:
            if self._region[0].priority > priority:
                return 0
            self._lapse(self._region[0])
        return num_fitting

    def _fitting(self, wanted: Sequence[Hashable]) -> int:
        room = self._cap_blocks - len(self._owners)
        for count, block_hash in enumerate(wanted):
            if block_hash not in self._owners:
                if room <= 0:
                    return count
                room -= 1
        return len(wanted)

    def _purge(self) -> None:
        """Forget what the pool has lost; a context is of use up to its first lost block.

        Contexts are given up from their ends: one whose end is there is not looked at further, since this runs inside
        the engine's step.
        """
        for held in tuple(self._region):
            if self._order.find(held.hashes[-1]) is not None:
                continue
            alive = next((n for n, h in enumerate(held.hashes) if self._order.find(h) is None), len(held.hashes))
            for block_hash in held.hashes[alive:]:
                self._disown(block_hash, held)
            held.hashes, held.is_whole = held.hashes[:alive], False
            if not alive:
                self._lapse(held)

    def _shorten(self, held: _Held, num_blocks: int) -> None:
        """Give up the end of a held context, all of it if it is not longer."""
        kept = held.hashes[: max(len(held.hashes) - num_blocks, 0)]
        if not kept:
            self._lapse(held)
            return
        self._drop(held)
        self._add(_Held(held.hint_id, kept, held.priority, held.number, held.expires_s, held.num_wanted))

    def _lapse(self, held: _Held) -> None:
        self.lapsed += 1
        self._drop(held)

    def _expire(self, now_s: float) -> None:
        for held in [held for held in self._region if held.expires_s <= now_s]:
            self._lapse(held)
        self._retiring = {h: until_s for h, until_s in self._retiring.items() if until_s > now_s}
        ends_s = [*(held.expires_s for held in self._region), *self._retiring.values()]
        self._next_expiry_s = min(ends_s, default=float("inf"))

    def _drop(self, held: _Held) -> None:
        """Take a hint out; its blocks go before all held ones, or to another hint that holds them too."""
        del self._held[held.hint_id]
        self._region.remove(held)
        loose = [block for block in held.line if self._is_its(block, held)]
        others: dict[int, _Held] = {}
        for block_hash in held.hashes:
            self._disown(block_hash, held)
            if (owner := self._owner(block_hash)) is not None:
                others[owner.number] = owner
        for block in loose:
            del self._placed[block.block_id]
        anchor = self._first_held()
        for block in loose:
            self._order.move_before(block, anchor)
        for other in sorted(others.values(), key=lambda h: h.rank):
            self._place(other)
        self._remember(held.hint_id, held.hashes)

    def _disown(self, block_hash: Hashable, held: _Held) -> None:
        owners = self._owners.get(block_hash)
        if owners is not None and held in owners:
            owners.remove(held)
            if not owners:
                del self._owners[block_hash]

    def _owner(self, block_hash: Hashable | None) -> _Held | None:
        owners = self._owners.get(block_hash) if block_hash is not None else None
        return max(owners, key=lambda h: h.rank) if owners else None

    def _place(self, held: _Held) -> None:
        """Put all free blocks that this hint decides about at its place in the order, the end of the chain first."""
        blocks: list[Block] = []
        for block_hash in reversed(held.hashes):
            block = self._order.find(block_hash)
            if block is not None and block.ref_cnt == 0 and self._owner(block_hash) is held:
                blocks.append(block)
        for block in blocks:
            self._placed[block.block_id] = held
        held.line = deque(blocks)
        position = self._region.index(held)
        anchor = self._first_held(self._region[position + 1 :])
        for block in blocks:
            self._order.move_before(block, anchor)

    def _first_held(self, region: Sequence[_Held] | None = None) -> Block | None:
        """Return the held block that goes first."""
        for held in self._region if region is None else region:
            while held.line:
                if self._is_its(held.line[0], held):
                    return held.line[0]
                held.line.popleft()
        return None

    def _is_its(self, block: Block, held: _Held) -> bool:
        return self._placed.get(block.block_id) is held and self._is_in_place(block)

    def _is_in_place(self, block: Block) -> bool:
        """Whether a block stands where this book has put it; one that was given up holds something else now."""
        held = self._placed.get(block.block_id)
        if held is None:
            return False
        if (
            block.ref_cnt == 0
            and (block_hash := self._order.hash_of(block)) is not None
            and self._owns(held, block_hash)
        ):
            return True
        del self._placed[block.block_id]
        return False

    def _owns(self, held: _Held, block_hash: Hashable) -> bool:
        return held in self._owners.get(block_hash, ())

    def _gather(self, now_s: float) -> None:
        fresh: list[Block] = []
        block, num_left = self._order.last(), max(_MIN_WALK, len(self._owners))
        while block is not None and block is not self._seen and not self._is_in_place(block):
            if not num_left:  # the mark is gone: look at the held ones themselves
                for held in tuple(self._region):
                    self._place(held)
                break
            num_left -= 1
            fresh.append(block)
            block = self._order.before(block)
        owners: dict[int, _Held] = {}
        others: list[Block] = []
        retired: list[Block] = []
        for block in fresh:
            block_hash = self._order.hash_of(block)
            owner = self._owner(block_hash)
            if owner is not None and block_hash is not None and self._order.find(block_hash) is block:
                owners[owner.number] = owner
            elif block_hash is not None and self._retiring.pop(block_hash, 0.0) > now_s:
                retired.append(block)
            else:
                others.append(block)
        self._move_first(list(reversed(retired)))
        for held in sorted(owners.values(), key=lambda h: h.rank):
            self._place(held)
        anchor = self._first_held()
        if anchor is not None:
            for block in reversed(others):
                self._order.move_before(block, anchor)

    def _move_first(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._placed.pop(block.block_id, None)
        if blocks:
            self._order.move_first(blocks)

    def _remember(self, hint_id: str, hashes: tuple[Hashable, ...]) -> None:
        self._forget(hint_id)
        self._released[hint_id] = hashes
        self._num_remembered += len(hashes)
        while len(self._released) > self._max_hints or (
            self._num_remembered > _MAX_POOLS_REMEMBERED * self._order.num_blocks
        ):
            _, gone = self._released.popitem(last=False)
            self._num_remembered -= len(gone)

    def _forget(self, hint_id: str) -> tuple[Hashable, ...]:
        hashes = self._released.pop(hint_id, ())
        self._num_remembered -= len(hashes)
        return hashes
