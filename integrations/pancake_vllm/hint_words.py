"""What pool hints look like on the wire, in both directions.

A carrier request has them in `kv_transfer_params`, under `"pancake"`:

    {"hold": {"id": "a7", "num_tokens": 2048, "ttl_s": 12.5, "priority": 50, "whole": true},
     "release": ["a6"],
     "retire": [{"id": "a2", "keep_tokens": 512}]}

`hold` speaks of the beginning of this very request, the others of ids held before.  The answer to the request has one
entry for each hint, in the same place: `{"version": 1, "answers": [...], "held_tokens": 2048, "cap_tokens": 5248}`.
An empty object asks for nothing and is answered all the same, which tells that somebody listens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

FIELD: Final = "pancake"
VERSION: Final = 1

MAX_TTL_S: Final = 3600.0
MAX_PRIORITY: Final = 100
#: Ids that one request may release or retire, each.
MAX_PER_REQUEST: Final = 256
MAX_ID_CHARS: Final = 128


class Verb(StrEnum):
    """What a hint asks for."""

    HOLD = "hold"
    RELEASE = "release"
    RETIRE = "retire"


class HintState(StrEnum):
    """What became of a hint.

    `clipped` says that less was taken than asked, `deferred` that it comes into force when the blocks are free,
    `rejected` that there was no room under the cap or the hint was malformed, `missing` that nothing of it is there.
    """

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the first `num_tokens` of the carrier for `ttl_s`; larger `priority` numbers are given up later.

    `is_whole` says that this is all that the thread has read and written: what it reads behind that will be new.
    """

    hint_id: str
    num_tokens: int
    ttl_s: float
    priority: int
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Retire:
    """Evict first what `hint_id` held, except its first `keep_tokens`, which others read as well."""

    hint_id: str
    keep_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One hint's state; `num_tokens` says how many tokens it is in force for."""

    verb: Verb
    hint_id: str
    state: HintState
    num_tokens: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"verb": self.verb.value, "id": self.hint_id, "state": self.state.value, "num_tokens": self.num_tokens}


@dataclass(frozen=True, slots=True)
class Orders:
    """The hints of one request; `refused` answers those that cannot be read."""

    hold: Hold | None = None
    release: tuple[str, ...] = ()
    retire: tuple[Retire, ...] = ()
    refused: tuple[Answer, ...] = ()


def read_orders(params: object) -> Orders | None:
    """Return the hints in a request's `kv_transfer_params`, `None` when it carries none.  Never raises."""
    given = params.get(FIELD) if isinstance(params, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    refused: list[Answer] = []

    def refuse(verb: Verb, item: object) -> None:
        name = item.get("id") if isinstance(item, Mapping) else item
        refused.append(Answer(verb, _id(name) or "", HintState.REJECTED))

    hold = _hold(given["hold"]) if "hold" in given else None
    if "hold" in given and hold is None:
        refuse(Verb.HOLD, given["hold"])
    release: list[str] = []
    for item in _listed(given.get("release")):
        if (name := _id(item)) is not None:
            release.append(name)
        else:
            refuse(Verb.RELEASE, item)
    retire: list[Retire] = []
    for item in _listed(given.get("retire")):
        order = _retire(item)
        if order is None:
            refuse(Verb.RETIRE, item)
        else:
            retire.append(order)
    return Orders(hold, tuple(release), tuple(retire), tuple(refused))


def _hold(item: object) -> Hold | None:
    if not isinstance(item, Mapping):
        return None
    name, num_tokens, priority = _id(item.get("id")), _whole(item.get("num_tokens")), _whole(item.get("priority", 0))
    if name is None or num_tokens is None or num_tokens < 1 or priority is None:
        return None
    ttl_s = item.get("ttl_s")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s < math.inf:
        return None
    # An integer of JSON may be larger than any float.
    priority, is_whole = max(0, min(priority, MAX_PRIORITY)), item.get("whole") is True
    return Hold(name, num_tokens, float(min(ttl_s, MAX_TTL_S)), priority, is_whole)


def _retire(item: object) -> Retire | None:
    if not isinstance(item, Mapping):
        return None
    name, keep_tokens = _id(item.get("id")), _whole(item.get("keep_tokens", 0))
    return None if name is None or keep_tokens is None or keep_tokens < 0 else Retire(name, keep_tokens)


def _listed(value: object) -> list[Any]:
    return value[:MAX_PER_REQUEST] if isinstance(value, list) else []


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
