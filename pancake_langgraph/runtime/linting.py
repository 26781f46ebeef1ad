"""Hands each finished call to the prefix lint."""

from __future__ import annotations

import logging

from pancake_langgraph.runtime.state import Call, State

logger = logging.getLogger(__name__)


def lint_call(state: State, call: Call) -> None:
    """Compare a call with the one before; calls that the engine never answered have put nothing into its cache."""
    if not call.began:
        return
    try:
        state.lint.observe(
            call.prompt, agent=str(call.agent), thread=call.place.thread_id, token_ids=call.token_ids or None
        )
    except Exception as exc:  # noqa: BLE001 - the lint only tells: what follows a call must not suffer; counted
        logger.log(state.count_bug(), "a call could not be linted: %s", type(exc).__name__)
