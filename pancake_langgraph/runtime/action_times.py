"""How long the runtime's own requests take on this engine, by what they have to do."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pancake_langgraph.forecast.quantiles import Durations

#: Requests of one kind from which their duration is believed.
MIN_SAMPLES: Final = 3
#: Without a newer request for this long, what was measured counts no more: engines get faster and slower.
MAX_AGE_S: Final = 60.0
_WINDOW: Final = 32


class Work(StrEnum):
    """What a request makes the engine do: nothing but look, copy from a tier, or compute."""

    TOUCH = "touch"
    RESTORE = "restore"
    COMPUTE = "compute"


class ActionTimes:
    """Medians over the last requests.  Not thread-safe; lives on the runtime's loop.

    Touching and restoring take about as long whatever their size (a round trip, and a copy at memory speed); computing
    is counted per token.
    """

    def __init__(self) -> None:
        """Start without knowledge."""
        self._durations = Durations(max_keys=len(Work), window=_WINDOW)
        self._newest_at_s: dict[Work, float] = {}

    def note(self, work: Work, *, num_tokens: int, elapsed_s: float, now_s: float) -> None:
        """Take in that a request was done; `num_tokens` is what it had to bring."""
        self._durations.add(work, elapsed_s / _scale(work, num_tokens))
        self._newest_at_s[work] = now_s

    def expected_s(self, work: Work, *, num_tokens: int, now_s: float) -> float | None:
        """Return how long a request will take; `None` where too few were seen, or none of late.

        Whoever refuses work because it takes too long gets no newer figure: so the last one is not believed for ever.
        """
        found = self._durations.quantiles(work)
        if found is None or found.num_samples < MIN_SAMPLES or now_s - self._newest_at_s[work] > MAX_AGE_S:
            return None
        return found.p50_s * _scale(work, num_tokens)


def _scale(work: Work, num_tokens: int) -> int:
    return max(num_tokens, 1) if work is Work.COMPUTE else 1
