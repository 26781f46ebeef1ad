"""Has the tier proven right by the engine that reads it, and leaves it alone where it was not."""

from __future__ import annotations

import logging

from pancake_langgraph._errors import EngineError, TierError
from pancake_langgraph.engines.base import Capabilities, Engine, TierState
from pancake_langgraph.runtime.state import State
from pancake_langgraph.tiers.base import Tier, TierHealth
from pancake_langgraph.tiers.proving import prove_tier

logger = logging.getLogger(__name__)


class TierWatch:
    """Runs the canary when an engine is found anew and when the tier came back.  Lives on the runtime's loop."""

    def __init__(self, state: State, engine: Engine, tier: Tier) -> None:
        """Watch `tier` for the calls of `engine`, which others open and close."""
        self._state = state
        self._engine = engine
        self._tier = tier
        self._found: Capabilities | None = None
        self._was_away = False

    @property
    def is_due(self) -> bool:
        """Whether the tier's health is to be asked for now: also where it is left alone for its wrong answers."""
        breaker = self._state.tier_breaker
        return breaker.may_try() or breaker.is_locked

    def is_back(self, health: TierHealth) -> bool:
        """Take in the tier's health; say whether it is there again, so that it has to be proven anew.

        One that is left alone for its wrong answers counts as away as soon as it does not answer once: it is being
        mended, and not used meanwhile.
        """
        breaker = self._state.tier_breaker
        if not health.alive:
            self._was_away = True
            breaker.failed(health.detail)
            return False
        is_back = self._was_away if breaker.is_locked else breaker.is_open
        self._was_away = False
        breaker.succeeded()
        return is_back

    async def engine_found(self, found: Capabilities) -> None:
        """Take in what a probe found; somebody else may have proven the tier for this engine already."""
        self._found = found
        self._tier.identify(found.kv_identity)
        if found.tier_state == TierState.OFF:
            self._state.tier_breaker.lock("the engine was told not to read it")
        elif found.tier_state == TierState.UNPROVEN:
            await self._prove(found)
        else:
            self._state.tier_breaker.unlock()

    async def tier_came_back(self) -> None:
        """Ask again: a server that was away may have come back with other contents."""
        if self._found is not None and self._found.tier_state is not None:
            await self._prove(self._found)

    async def _prove(self, found: Capabilities) -> None:
        try:
            report = await prove_tier(self._engine, self._tier, found)
        except (EngineError, TierError) as exc:  # hints fail open: breakers watch both parts
            logger.debug("the tier was not proven: %s", type(exc).__name__)
            return
        except Exception:  # a bug costs the proof; counted
            logger.log(self._state.count_bug(), "proving the tier failed unexpectedly", exc_info=True)
            return
        if report is not None and not report.is_right:
            self._state.tier_breaker.lock(f"wrong answers: {report.reason}")
        elif report is not None:
            self._state.tier_breaker.unlock()
