"""What the runtime adds to a request of the application: nothing that changes its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from pancake_langgraph.config import Resolved
from pancake_langgraph.engines.pool_hints import PARAMS_FIELD, PoolHints, hints_to_wire
from pancake_langgraph.runtime.hints import HintDesk


class WireExtras(NamedTuple):
    """Fields to merge into the request, and the hints on the pool among them."""

    body: Mapping[str, Any] | None = None
    hints: PoolHints | None = None


def wire_extras(
    resolved: Resolved | None, desk: HintDesk | None, run_id: UUID, payload: Mapping[str, Any]
) -> WireExtras:
    """Return what the request of call `run_id` should say besides.  Called from any thread.

    A call that may ask for a tool carries a hold: should it do so, its agent pauses and will read all of it again.
    """
    if resolved is None:
        return WireExtras()
    body: dict[str, Any] = {"return_token_ids": True} if resolved.ask_token_ids else {}
    hints = None
    if resolved.pool_hints and desk is not None and _may_pause(payload):
        hints = desk.for_call(run_id)
        body[PARAMS_FIELD] = hints_to_wire(hints)
    return WireExtras(body or None, hints)


def _may_pause(payload: Mapping[str, Any]) -> bool:
    return bool(payload.get("tools")) and payload.get("tool_choice") != "none"
