"""Hints on the engine's own pool: what the runtime says, and how it travels with a request to vLLM.

The wire form is that of `pancake_vllm.hint_words`, which runs inside the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pancake_langgraph._types import HintState, HintVerb

#: Where hints and their answers stand in a request and in its response.
PARAMS_FIELD: Final = "kv_transfer_params"
HINTS_FIELD: Final = "pancake"
#: What asks whether hints are understood: hints without any.
PROBE_PARAMS: Final[dict[str, Any]] = {HINTS_FIELD: {}}
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class HoldHint:
    """Keep the first `num_tokens` of the carrier's prefix for `ttl_s`, under `hint_id`.

    Under need, held contexts are given up after all others, lowest `priority` (0 to 100) first.  `is_whole` says that
    it is all that its thread has read and written: while it is there, nothing of the thread is looked for elsewhere.
    """

    hint_id: str
    num_tokens: int
    ttl_s: float
    priority: int = 0
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class RetireHint:
    """Evict first what `hint_id` held, except its first `keep_tokens`."""

    hint_id: str
    keep_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PoolHints:
    """What one carrier request says about the pool.  Releases and retirements come into force before it is served."""

    hold: HoldHint | None = None
    release: tuple[str, ...] = ()
    retire: tuple[RetireHint, ...] = ()


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What became of one hint; `num_tokens` says how many tokens it is in force for."""

    verb: HintVerb
    hint_id: str
    state: HintState
    num_tokens: int


def hints_to_wire(hints: PoolHints) -> dict[str, Any]:
    """Return the value of the request's `kv_transfer_params`."""
    wire: dict[str, Any] = {}
    if (hold := hints.hold) is not None:
        wire["hold"] = {
            "id": hold.hint_id,
            "num_tokens": hold.num_tokens,
            "ttl_s": hold.ttl_s,
            "priority": hold.priority,
            **({"whole": True} if hold.is_whole else {}),
        }
    if hints.release:
        wire["release"] = list(hints.release)
    if hints.retire:
        wire["retire"] = [{"id": hint.hint_id, "keep_tokens": hint.keep_tokens} for hint in hints.retire]
    return {HINTS_FIELD: wire}


def hints_from_wire(params: object) -> PoolHints | None:
    """Return what `hints_to_wire` has written, `None` when there are no hints; for servers that play an engine.

    Raises:
        KeyError: if a field is missing.
    """
    wire = params.get(HINTS_FIELD) if isinstance(params, Mapping) else None
    if not isinstance(wire, Mapping):
        return None
    hold = wire.get("hold")
    return PoolHints(
        hold=HoldHint(hold["id"], hold["num_tokens"], hold["ttl_s"], hold["priority"], hold.get("whole") is True)
        if hold
        else None,
        release=tuple(wire.get("release", ())),
        retire=tuple(RetireHint(item["id"], item["keep_tokens"]) for item in wire.get("retire", ())),
    )


def answers_to_wire(answers: tuple[HintAnswer, ...]) -> dict[str, Any]:
    """Return the value of the response's `kv_transfer_params`; for servers that play an engine."""
    listed = [
        {"verb": a.verb.value, "id": a.hint_id, "state": a.state.value, "num_tokens": a.num_tokens} for a in answers
    ]
    return {HINTS_FIELD: {"version": _VERSION, "answers": listed}}


def understands_hints(response: object) -> bool:
    """Say whether the response to `PROBE_PARAMS` shows that hints are understood."""
    return _answered(response) is not None


def tier_facts(response: object) -> tuple[str | None, str | None]:
    """Return the engine's KV identity and what it was told of its tier, from any response to a request with hints."""
    params = response.get(PARAMS_FIELD) if isinstance(response, Mapping) else None
    found = params.get(HINTS_FIELD) if isinstance(params, Mapping) else None
    if not isinstance(found, Mapping):
        return None, None
    identity, state = found.get("kv_identity"), found.get("tier")
    return (identity if isinstance(identity, str) else None), (state if isinstance(state, str) else None)


def hold_cap_tokens(response: object) -> int | None:
    """Return how many tokens the engine holds at most, as its answer to hints tells; `None` if it does not."""
    cap = (_answered(response) or {}).get("cap_tokens")
    return cap if isinstance(cap, int) and cap >= 0 else None


def answers_from_wire(response: object) -> tuple[HintAnswer, ...]:
    """Return the answers in a response; those that cannot be read are left out.  Never raises."""
    listed = (_answered(response) or {}).get("answers")
    found: list[HintAnswer] = []
    for item in listed if isinstance(listed, list) else ():
        try:
            found.append(
                HintAnswer(
                    HintVerb(item["verb"]), str(item["id"]), HintState(item["state"]), int(item.get("num_tokens") or 0)
                )
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    return tuple(found)


def _answered(response: object) -> Mapping[str, Any] | None:
    params = response.get(PARAMS_FIELD) if isinstance(response, Mapping) else None
    found = params.get(HINTS_FIELD) if isinstance(params, Mapping) else None
    return found if isinstance(found, Mapping) and found.get("version") == _VERSION else None
