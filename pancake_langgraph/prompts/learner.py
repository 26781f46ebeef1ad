"""Learns the shape of one prompt: several readings live side by side, and real calls decide between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.align import shapes_of
from pancake_langgraph.prompts.fields import WireMemo
from pancake_langgraph.prompts.parts import Known, render
from pancake_langgraph.prompts.shape import PromptShape, compare, cut, sizes_of

MAX_READINGS = 12
#: Calls that must agree before a reading is trusted.
TRUSTED_CALLS = 2
#: Once so many calls agreed with a whole reading, only the best ones are kept; the second is compared with a call that
#: does not agree with the first.
SETTLED_CALLS = 4
SETTLED_READINGS = 2
#: A reading that covers this share of a prompt leaves nothing to look for.
WHOLE_SHARE = 0.995
#: After this many alignments that found nothing better, only every so-manieth call is aligned.
_PATIENCE = 8
_MAX_PAUSE = 64


class Reading(NamedTuple):
    """One possible shape: how many calls in a row confirmed it, in which thread last, what share of it they had."""

    shape: PromptShape
    confirmed: int
    thread_id: str
    share: float

    @property
    def trusted(self) -> bool:
        """Whether enough calls agreed."""
        return self.confirmed >= TRUSTED_CALLS


class ShapeLearner:
    """The readings of one agent's prompts.  Bounded; not thread-safe."""

    def __init__(self, *, literal_head: int = 0, seed: PromptShape | None = None) -> None:
        """Know that the first `literal_head` messages are constant; begin with `seed` where the code was read."""
        self._literal_head = literal_head
        self._readings: list[Reading] = [Reading(seed, TRUSTED_CALLS, "", 1.0)] if seed is not None else []
        self._best: Reading | None = _best_of(self._readings)
        self._calls = 0
        self._fruitless = 0
        self._wait = 0

    def __len__(self) -> int:
        """Return how many readings are kept."""
        return len(self._readings)

    @property
    def calls(self) -> int:
        """How many calls were observed."""
        return self._calls

    def best(self) -> Reading | None:
        """Return the trusted reading that covered most of the last call."""
        return self._best

    def observe(self, messages: Sequence[WireObject], known: Known | None, thread_id: str, memo: WireMemo) -> None:
        """Learn from one call; `known` is the state that its node had read, if it was seen."""
        state = known or Known({})
        call = _Call(messages, sizes_of(messages), state, thread_id, memo)
        self._calls += 1
        if self._is_settled:
            if self._holds(call):
                return
            # What the others agreed with has not been looked at for a while: they have to earn trust anew.
            self._readings[1:] = [reading._replace(confirmed=0) for reading in self._readings[1:]]
        checked = [_checked(reading, call) for reading in self._readings]
        readings = [reading for reading in checked if reading is not None]
        if known is not None and self._is_worth_it(readings):
            readings += self._found(readings, call)
        readings.sort(key=lambda r: (not r.trusted, -r.share, -r.confirmed))
        shapes = [reading.shape for reading in readings]
        self._readings = [r for n, r in enumerate(readings) if r.shape not in shapes[:n]]
        del self._readings[SETTLED_READINGS if self._is_settled else MAX_READINGS :]
        self._best = _best_of(self._readings)

    @property
    def _is_settled(self) -> bool:
        """Whether the first reading has told all of so many calls in a row."""
        first = self._readings[0] if self._readings else None
        return first is not None and first.confirmed >= SETTLED_CALLS and first.share >= WHOLE_SHARE

    def _holds(self, call: _Call) -> bool:
        """Note one more call that the first reading tells all of; return false, and note nothing, where it does not."""
        first = self._readings[0]
        checked = _checked(first, call)
        if checked is None or checked.shape is not first.shape or checked.share < WHOLE_SHARE:
            return False
        self._readings[0] = self._best = checked
        self._fruitless = 0
        return True

    def _is_worth_it(self, readings: Sequence[Reading]) -> bool:
        if any(reading.trusted and reading.share >= WHOLE_SHARE for reading in readings):
            self._fruitless = 0
            return False
        self._fruitless += 1
        if self._fruitless <= _PATIENCE:
            return True
        self._wait -= 1
        if self._wait > 0:
            return False
        self._wait = min(self._fruitless - _PATIENCE, _MAX_PAUSE)
        return True

    def _found(self, readings: Sequence[Reading], call: _Call) -> list[Reading]:
        have = [reading.shape for reading in readings]
        found = []
        for shape in shapes_of(call.messages, call.known.fields, call.memo, literal_head=self._literal_head):
            if shape in have:
                continue
            is_likely = self._calls == 1 and shape.is_common
            share = compare(render(shape.parts, call.known, call.memo), call.messages, call.sizes).share
            found.append(Reading(shape, TRUSTED_CALLS if is_likely else 1, call.thread_id, share))
        return found


def _best_of(readings: Sequence[Reading]) -> Reading | None:
    trusted = [reading for reading in readings if reading.trusted]
    return max(trusted, key=lambda reading: reading.share, default=None)


class _Call(NamedTuple):
    """One real call and the state that its node had read."""

    messages: Sequence[WireObject]
    sizes: Sequence[int]
    known: Known
    thread_id: str
    memo: WireMemo


def _checked(reading: Reading, call: _Call) -> Reading | None:
    """Return the reading after a call: confirmed, cut back to what held, or nothing at all."""
    shape = reading.shape
    rendering = render(shape.parts, call.known, call.memo)
    match = compare(rendering, call.messages, call.sizes)
    if not match.is_whole:
        shape = cut(shape, match, call.known, call.memo)
    if not shape.parts:
        return None
    counts = rendering.is_complete or not match.is_whole
    counts = counts and (shape.is_general or call.thread_id != reading.thread_id)
    thread_id = call.thread_id if counts else reading.thread_id
    return Reading(shape, reading.confirmed + counts, thread_id, match.share)
