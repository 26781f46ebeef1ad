"""A mixture of experts over one graph: ways of looking at the past, each with a long and a short memory."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pancake_langgraph.forecast.answers import Answers
from pancake_langgraph.forecast.contexts import NUM_WAYS, Ways, ways_of
from pancake_langgraph.forecast.counts import CountTable

#: Observations that an expert's fall-back is worth.
PRIOR_STRENGTH = 1.0
NUM_EXPERTS = 2 * NUM_WAYS
_SWITCH_RATE = 0.01
_GOES_ROUND = _SWITCH_RATE / NUM_EXPERTS
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
    """What was counted after one past, by each memory in all `ways` of looking that apply, and what the graph declares.

    An expert blends its counts with what the way says that it falls back to (see `smooth`).  `shares` is the mixture of
    all experts, once asked for.
    """

    ways: Ways
    prior: Mapping[str, float]
    counts: Sequence[Sequence[Mapping[str, float]]]
    shares: Mapping[str, float] | None = None

    def chances(self, target: str) -> list[float]:
        """Return the chance of a target by each expert."""
        _, below, seen_as = self.ways
        chances: list[float] = []
        for rows in self.counts:
            found = [self.prior.get(target, 0.0)]  # of the way before the first, which is what is declared
            for row, under in zip(rows, below, strict=True):
                p = found[under + 1]
                if row:
                    strength = len(row) if len(row) > PRIOR_STRENGTH else PRIOR_STRENGTH
                    p = (row.get(target, 0.0) + strength * p) / (sum(row.values()) + strength)
                found.append(p)
            chances += [found[number + 1] for number in seen_as]
        return chances

    def mixed(self, trust: Sequence[float]) -> Mapping[str, float]:
        """Return what the experts say together, each trusted so much.

        What of the trust in an expert is not for its counts goes to the way that it falls back to.
        """
        if not any(rows[0] for rows in self.counts):
            return self.prior  # the node was never seen
        _, below, seen_as = self.ways
        mixed: defaultdict[str, float] = defaultdict(float, dict.fromkeys(self.prior, 0.0))
        declared = 0.0
        for first, rows in zip((0, NUM_WAYS), self.counts, strict=True):
            weights = [0.0] * len(rows)
            for number, weight in zip(seen_as, trust[first : first + NUM_WAYS], strict=True):
                weights[number] += weight
            for row, under in zip(reversed(rows), reversed(below), strict=True):
                weight = weights.pop()
                if row:
                    strength = len(row) if len(row) > PRIOR_STRENGTH else PRIOR_STRENGTH
                    per_count = weight / (sum(row.values()) + strength)
                    for target, count in row.items():
                        mixed[target] += per_count * count
                    weight = per_count * strength
                if under < 0:
                    declared += weight
                else:
                    weights[under] += weight
        for target, p in self.prior.items():
            mixed[target] += declared * p
        return dict(mixed)


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
        keys: Sequence[tuple[str, ...]] = ((node,),)
        is_full = False
        if not (self._is_settled(node, prior) and target in prior):
            answer = self._answer(node, context, prior)
            keys = answer.ways.keys
            is_full = self._judge(node, answer.chances(target))
        for table in self._tables:
            for key in reversed(keys):  # the most general one last: it is then the youngest, and kept longest
                if table.observe(key, target):
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
            answer.shares = answer.mixed(self._trust.get(node) or _even())
        return answer.shares

    def _answer(self, node: str, context: Sequence[str], prior: Mapping[str, float]) -> _Answer:
        past = tuple(context)
        answer = self._answers.get(node, past)
        if answer is not None and answer.prior is not prior:  # the graph was read anew
            self._answers.forget(node)
            answer = None
        if answer is None:
            ways = ways_of(node, past)
            answer = _Answer(ways, prior, [table.rows(ways.keys) for table in self._tables])
            self._answers.put(node, past, answer)
        return answer

    def _is_settled(self, node: str, prior: Mapping[str, float]) -> bool:
        """Whether one target is declared as the only one, and nothing else was ever seen: then the past is no help."""
        return len(prior) == 1 and _CERTAIN in prior.values() and self._tables[0].row((node,)).keys() <= prior.keys()

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

    def _judge(self, node: str, chances: Sequence[float]) -> bool:
        """Shift trust to the experts that expected what happened; return whether another node's had to go."""
        trust = self._trust.get(node) or _even()
        weights = [weight * (p if p > _LEAST_P else _LEAST_P) for weight, p in zip(trust, chances, strict=True)]
        kept = (1 - _SWITCH_RATE) / sum(weights)
        self._trust[node] = [weight * kept + _GOES_ROUND for weight in weights]
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
