"""Turns expected prompts into tokens, with the engine's own template and tokenizer."""

from __future__ import annotations

import logging

from pancake_langgraph._errors import EngineError, EngineRejected
from pancake_langgraph.engines.base import Engine
from pancake_langgraph.prompts.prediction import with_other_ends
from pancake_langgraph.prompts.prefix import common_prefix_tokens
from pancake_langgraph.runtime.expectations import Expectation
from pancake_langgraph.runtime.state import State

logger = logging.getLogger(__name__)

#: A pause expected to be shorter than this is not worth a request.
MIN_PAUSE_S = 0.2


class Renderer:
    """Gives expected calls their token prefixes.  Lives on the runtime's loop."""

    def __init__(self, state: State, engine: Engine) -> None:
        """Ask `engine`, which others open and close."""
        self._state = state
        self._engine = engine

    async def render(self, expectation: Expectation) -> None:
        """Find out the tokens of an expected prompt, as far as they are certain, if that is not yet known.

        Raises:
            EngineError: if the engine does not answer; it is asked again then.
        """
        resolved = self._state.resolved
        if resolved is None or expectation.rendered:
            return
        block = resolved.block_size_tokens
        if expectation.base_ids is not None:
            if expectation.prefix is None:
                expectation.set_tokens(expectation.base_ids, block)
            eta_at_s = expectation.eta_at_s
            if eta_at_s is not None and eta_at_s - self._state.clock.now_s() < MIN_PAUSE_S:
                return
        expectation.rendered = True
        try:
            token_ids = await self._tokens_of(expectation)
        except EngineRejected as exc:  # this prompt cannot be rendered; the engine is well
            logger.debug("a predicted prompt was not tokenized: %s", type(exc).__name__)
            return
        except EngineError:
            expectation.rendered = False
            raise
        base = expectation.base_ids
        if base is not None:
            shared = common_prefix_tokens(base, token_ids)
            if shared < len(base):  # the template rewrote what was already read: only the shared part is certain
                token_ids = token_ids[:shared]
        expectation.set_tokens(token_ids, block)

    async def _tokens_of(self, expectation: Expectation) -> tuple[int, ...]:
        """Return the tokens of a predicted prompt that are certain."""
        if not expectation.is_cut:
            return tuple(await self._engine.tokenize(expectation.prompt, add_generation_prompt=False))
        one, other = [
            tuple(await self._engine.tokenize(prompt, add_generation_prompt=False))
            for prompt in with_other_ends(expectation.prompt)
        ]
        return one[: max(common_prefix_tokens(one, other) - 1, 0)]
