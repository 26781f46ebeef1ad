"""A mixture of experts over one graph: ways of looking at the past, each with a long and a short memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pancake_langgraph.forecast.answers import Answers
from pancake_langgraph.forecast.contexts import BACK_OFF, NUM_WAYS, keys_of
from pancake_langgraph.forecast.counts import CountTable, smooth

#: Observations that an expert's fall-back is worth.
PRIOR_STRENGTH = 1.0
NUM_EXPERTS = 2 * NUM_WAYS
_SWITCH_RATE = 0.01
_LEAST_P = 1e-4
_CERTAIN = 1.0
#: Pasts for which the answers of all experts are kept at once.
_MAX_ANSWERS = 128


@dataclass(frozen=True, slots=True)
class Memory:
    """Bounds and forgetting.

    `slow_decay` remembers about a hundred observations (calibrated on random routers), `fast_decay` about five
    (relearns a changed habit in a few runs); which of them is believed is itself learnt per node.
    """

    max_graphs: int = 64
    max_keys: int = 2048
    max_targets: int = 64
    slow_decay: float = 0.99
    fast_decay: float = 0.8


@dataclass(slots=True)
class _Answer:
    """What all experts say after one past, by what the graph declares; `shares` is the mixture, once asked for.

    `keys` are the ways of looking at that past.  An expert that has seen nothing there says what its fall-back says:
    `estimates` has each opinion once, and `says` the number of each expert's.
    """

    keys: Sequence[tuple[str, ...] | None]
    prior: Mapping[str, float]
    estimates: Sequence[Mapping[str, float]]
    says: Sequence[int]
    shares: Mapping[str, float] | None = None


class Experts:
    """Estimates where a node leads, in several ways, and mixes them by how well each has predicted lately.

    Trust moves with every observation and a little of it always goes round (fixed share), so a route that depends on
    history, one that is random and one that has just changed are all served.  Bounded by `Memory`; not thread-safe.
    """

    def __init__(self, memory: Memory) -> None:
        """Start without knowledge."""
        self._max_keys = memory.max_keys
        self._tables = tuple(
            CountTable(decay=decay, max_keys=memory.max_keys, max_targets=memory.max_targets)
            for decay in (memory.slow_decay, memory.fast_decay)
        )
        self._trust: OrderedDict[str, list[float]] = OrderedDict()
        self._answers: Answers[_Answer] = Answers(max_answers=_MAX_ANSWERS)

    def observe(self, node: str, target: str, context: Sequence[str], prior: Mapping[str, float]) -> bool:
        """Learn that `node` led to `target`; `prior` is what the graph declares about it.  Costs O(degree).

        Return whether something about other nodes had to go for it.
        """
        keys: Sequence[tuple[str, ...] | None] = ((node,),)
        is_full = False
        if not (self._is_settled(node, prior) and target in prior):
            answer = self._answer(node, context, prior)
            keys = answer.keys
            chances = [max(estimate.get(target, 0.0), _LEAST_P) for estimate in answer.estimates]
            is_full = self._judge(node, [chances[number] for number in answer.says])
        for table in self._tables:
            for key in reversed(keys):  # the most general one last: it is then the youngest, and kept longest
                if key is not None and table.observe(key, target):
                    is_full = True
        if is_full:
            self._answers.clear()
        else:
            self._answers.forget(node)
        return is_full

    def shares(self, node: str, context: Sequence[str], prior: Mapping[str, float]) -> Mapping[str, float]:
        """Return how observations of `node` split over its targets; what is missing to one is unknown."""
        if self._is_settled(node, prior):
            return prior
        answer = self._answer(node, context, prior)
        if answer.shares is None:
            answer.shares = self._mix(node, answer)
        return answer.shares

    def _answer(self, node: str, context: Sequence[str], prior: Mapping[str, float]) -> _Answer:
        past = tuple(context)
        answer = self._answers.get(node, past)
        if answer is not None and answer.prior is not prior:  # the graph was read anew
            self._answers.forget(node)
            answer = None
        if answer is None:
            answer = self._asked(keys_of(node, past), prior)
            self._answers.put(node, past, answer)
        return answer

    def _is_settled(self, node: str, prior: Mapping[str, float]) -> bool:
        """Whether one target is declared as the only one, and nothing else was ever seen: then the past is no help."""
        return len(prior) == 1 and _CERTAIN in prior.values() and self._tables[0].row((node,)).keys() <= prior.keys()

    def _mix(self, node: str, answer: _Answer) -> Mapping[str, float]:
        estimates = answer.estimates
        if len(estimates) == 1:
            return estimates[0]
        weights = [0.0] * len(estimates)
        for weight, number in zip(self._trust.get(node) or _even(), answer.says, strict=True):
            weights[number] += weight
        mixed: dict[str, float] = {}
        for weight, estimate in zip(weights, estimates, strict=True):
            for target, share in estimate.items():
                mixed[target] = mixed.get(target, 0.0) + weight * share
        return mixed

    def to_rows(self) -> dict[str, Any]:
        """Return all that was learnt as a JSON-able value."""
        slow, fast = self._tables
        return {
            "slow": slow.to_rows(),
            "fast": fast.to_rows(),
            "trust": [[node, list(weights)] for node, weights in self._trust.items()],
        }

    def load_rows(self, rows: Mapping[str, Any]) -> None:
        """Replace all that was learnt by a value of `to_rows`; the bounds hold.

        Raises:
            ValueError: if the rows do not fit.  What was learnt is then undefined: use a fresh object.
        """
        self._answers.clear()
        for name, table in zip(("slow", "fast"), self._tables, strict=True):
            table.load_rows(rows[name])
        self._trust = OrderedDict(_trust_rows(rows["trust"]))
        self._trim()

    def add_rows(self, rows: Mapping[str, Any]) -> None:
        """Add what another process learnt, a value of `to_rows`, to what was learnt here.

        Raises:
            ValueError: if the rows do not fit.
        """
        self._answers.clear()
        for name, table in zip(("slow", "fast"), self._tables, strict=True):
            table.add_rows(rows[name])
        for node, weights in _trust_rows(rows["trust"]):
            own = self._trust.get(node)
            self._trust[node] = [(a + b) / 2 for a, b in zip(own, weights, strict=True)] if own else weights
        self._trim()

    def _asked(self, keys: Sequence[tuple[str, ...] | None], prior: Mapping[str, float]) -> _Answer:
        """Ask every expert of every table, each after the one that it falls back to."""
        estimates: list[Mapping[str, float]] = []
        says: list[int] = []
        from_prior: int | None = None
        for table in self._tables:
            first = len(says)
            for key, back_off in zip(keys, BACK_OFF, strict=True):
                row = table.row(key) if key is not None else None
                if row:
                    below = prior if back_off < 0 else estimates[says[first + back_off]]
                    says.append(len(estimates))
                    estimates.append(smooth(row, below, PRIOR_STRENGTH))
                elif back_off >= 0:
                    says.append(says[first + back_off])
                else:
                    if from_prior is None:
                        from_prior = len(estimates)
                        estimates.append(prior)
                    says.append(from_prior)
        return _Answer(keys, prior, estimates, says)

    def _judge(self, node: str, chances: Sequence[float]) -> bool:
        """Shift trust to the experts that expected what happened; return whether another node's had to go."""
        trust = self._trust.get(node) or _even()
        weights = [weight * p for weight, p in zip(trust, chances, strict=True)]
        total = sum(weights)
        self._trust[node] = [(1 - _SWITCH_RATE) * w / total + _SWITCH_RATE / NUM_EXPERTS for w in weights]
        self._trust.move_to_end(node)
        return self._trim()

    def _trim(self) -> bool:
        is_full = len(self._trust) > self._max_keys
        while len(self._trust) > self._max_keys:
            self._trust.popitem(last=False)
        return is_full


def _trust_rows(rows: Iterable[Any]) -> Iterable[tuple[str, list[float]]]:
    for node, weights in rows:
        if len(weights) != NUM_EXPERTS:
            raise ValueError(f"trust needs {NUM_EXPERTS} weights, got {len(weights)}")
        yield str(node), [float(weight) for weight in weights]


def _even() -> list[float]:
    return [1.0 / NUM_EXPERTS] * NUM_EXPERTS
