"""Knows what the engine can do: probes it until it answers, and again where it has failed or was started anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pancake_langgraph._errors import PancakeError
from pancake_langgraph.config import EngineFacts, Resolved, resolve
from pancake_langgraph.engines.base import Capabilities, CountsRestarts, Engine
from pancake_langgraph.runtime.state import State
from pancake_langgraph.tiers.base import Tier

logger = logging.getLogger(__name__)

_AGAIN_S = 2.0


class EngineWatch:
    """Opens and probes an engine, and keeps what follows from it in the state.  Lives on the runtime's loop."""

    def __init__(
        self, state: State, engine: Engine, tier: Tier, on_found: Callable[[Capabilities, Resolved], None]
    ) -> None:
        """Probe `engine`, and open `tier` with it; `on_found` is called for each probe that was answered."""
        self._state = state
        self._engine = engine
        self._tier = tier
        self._on_found = on_found
        self._probed_at_restarts = 0
        self._probing = asyncio.Lock()

    async def resolved(self) -> Resolved:
        """Return what runs; probes where nobody has.

        Raises:
            EngineError: if the engine cannot be probed.
        """
        async with self._probing:
            return self._state.resolved or await self._probe()

    async def keep_probing(self) -> None:
        """Probe until the engine answers; until then everything is only observed."""
        told = False
        while self._state.resolved is None:
            try:
                await self.resolved()
            except Exception as exc:  # hints fail open, also where a part is not installed: said once, tried again
                level = logging.DEBUG if told else logging.WARNING
                known = isinstance(exc, PancakeError)
                logger.log(level, "engine not probed, observing only for now: %s", exc, exc_info=not known)
                told = True
                await asyncio.sleep(_AGAIN_S)

    async def look_again(self) -> bool:
        """Probe an engine that had failed or was started anew, as it may have another pool or model; say if it did."""
        breaker = self._state.engine_breaker
        is_due = breaker.is_open or self._restarts() != self._probed_at_restarts
        if self._state.resolved is None or not is_due or not breaker.may_try():
            return False
        try:
            async with self._probing:
                await self._probe()
        except PancakeError as exc:
            breaker.failed(type(exc).__name__)
            return False
        breaker.succeeded()
        return True

    async def _probe(self) -> Resolved:
        await self._engine.open()
        await self._tier.open()
        restarts = self._restarts()
        found = await self._engine.probe()
        self._probed_at_restarts = restarts
        resolved = resolve(self._state.settings, _facts(found))
        if self._state.resolved is None:
            level = logging.INFO if resolved.hold or self._engine.name == "null" else logging.WARNING
            logger.log(level, "pancake runtime on %s: %s", self._engine.name, "; ".join(resolved.reasons))
        self._state.resolved = resolved
        self._on_found(found, resolved)
        return resolved

    def _restarts(self) -> int:
        return self._engine.restarts if isinstance(self._engine, CountsRestarts) else 0


def _facts(found: Capabilities) -> EngineFacts:
    return EngineFacts(
        tokenizer=found.tokenizer,
        token_prompts=found.token_prompts,
        prompt_token_ids=found.prompt_token_ids,
        priority=found.priority,
        kv_events=found.kv_events,
        prefix_caching=found.prefix_caching,
        block_size_tokens=found.block_size_tokens,
        pool_tokens=found.pool_tokens,
        pool_hints=found.pool_hints,
        hold_cap_tokens=found.hold_cap_tokens,
    )
