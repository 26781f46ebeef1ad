"""Ways of looking at where a run has been: each one is a key under which the exits of a node are counted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pancake_langgraph.topology.graph import START

Key = tuple[str, ...]

#: Numbers of nodes before the present one that are counted with it: behind a hub (supervisor, router, tools loop) every
#: second node is the hub itself, so six nodes are three decisions.
ORDERS: tuple[int, ...] = (0, 1, 2, 3, 4, 6)
#: Rounds of a loop that are told apart.
MAX_ROUNDS = 32
#: Nodes before the present one that are looked at, at most; more are of no use.
CONTEXT_NODES = 96

_ROUND, _CALLER = "\x1fround", "\x1fcaller"

#: For each way of looking, the one it falls back to while it has seen nothing: -1 is what the graph declares.
BACK_OFF: tuple[int, ...] = (-1, 0, 1, 2, 3, 4, 0, 6, 0, 8)
NUM_WAYS = len(BACK_OFF)


def keys_of(node: str, context: Sequence[str]) -> tuple[Key | None, ...]:
    """Return the key of each way of looking at `node` after `context` (oldest first); `None` where it does not apply.

    In order: the node with none to six nodes before it; the round of the loop it is in, alone and with the node
    before; who called the graph around it, alone and with the round.  A round is how often the node ran since its
    graph was entered.
    """
    known = len(context)
    orders: list[Key | None] = [(*context[known - n :], node) if n <= known else None for n in ORDERS]
    if not known:
        return (*orders, None, None, None, None)
    num_rounds, caller = _since_entry(node, context)
    lap = f"{_ROUND}{num_rounds}"
    by_round: list[Key | None] = [(lap, node), (lap, context[-1], node)]
    by_caller: list[Key | None] = [None, None]
    if caller is not None:
        by_caller = [(_CALLER, caller, node), (_CALLER, caller, lap, node)]
    return (*orders, *by_round, *by_caller)


class Ways(NamedTuple):
    """The ways of looking that apply after one past.

    `keys` are theirs, the most general one first, and `below` has for each the number of the one that it falls back to.
    `seen_as` has for each of all ways the number of the one that stands for it: itself, or what it falls back to where
    it does not apply.  -1 is what the graph declares.
    """

    keys: tuple[Key, ...]
    below: tuple[int, ...]
    seen_as: tuple[int, ...]


@lru_cache(maxsize=512)
def ways_of(node: str, context: tuple[str, ...]) -> Ways:
    """Return the ways of looking at `node` after `context` (oldest first)."""
    keys: list[Key] = []
    below: list[int] = []
    seen_as: list[int] = []
    for key, back_off in zip(keys_of(node, context), BACK_OFF, strict=True):
        under = -1 if back_off < 0 else seen_as[back_off]
        seen_as.append(under if key is None else len(keys))
        if key is not None:
            keys.append(key)
            below.append(under)
    return Ways(tuple(keys), tuple(below), tuple(seen_as))


def _since_entry(node: str, context: Sequence[str]) -> tuple[int, str | None]:
    """Return how often `node` ran since its graph was entered, and the node that ran before that, if there is one."""
    level, _, _ = node.rpartition("|")
    inside = f"{level}|" if level else ""
    num_rounds = 0
    for before in reversed(context):
        if inside and not before.startswith(inside):
            return num_rounds, None if before == START else before
        if before == node:
            num_rounds = min(num_rounds + 1, MAX_ROUNDS)
    return num_rounds, None
