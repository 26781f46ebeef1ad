"""Evidence from a streamed answer: which value of which argument leads to which node."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pancake_langgraph.forecast.counts import CountTable, smooth

#: Values of one field that are told apart; a field with more of them is free text and tells nothing.
MAX_VALUES = 48
#: Fields that are watched.
MAX_FIELDS = 512
#: A value that is the name of a node most likely means that node.
_P_NAMESAKE = 0.9
_NAMESAKE_STRENGTH = 2.0
_RECENT = 0.2
_LEAST_P = 1e-3
_TRUSTED = 0.1

Field = tuple[str, str, str]


class Clue(NamedTuple):
    """A value that a model has written completely: argument `field` of a call of `tool`.

    `tool` is empty for a field of an answer that is a JSON object itself; `field` and `value` are empty for the bare
    fact that `tool` is called.
    """

    tool: str
    field: str = ""
    value: str = ""


@dataclass(slots=True)
class _Record:
    """How much better a field has foretold lately than what was expected without it (nats), and its values so far."""

    advantage: float = 0.0
    num_values: int = 0


class ClueTable:
    """Learns where the values of streamed fields lead.  Bounded; values are kept as hashes only.  Not thread-safe."""

    def __init__(self, *, decay: float, max_keys: int, max_targets: int) -> None:
        """Start empty; bounds as in `CountTable`."""
        self._counts = CountTable(decay=decay, max_keys=max_keys, max_targets=max_targets)
        self._records: OrderedDict[Field, _Record] = OrderedDict()

    def __len__(self) -> int:
        """Return how many fields are watched."""
        return len(self._records)

    def observe(self, node: str, clues: Iterable[Clue], target: str, expected: Mapping[str, float]) -> None:
        """Learn that `node` led to `target` after `clues`; `expected` were the chances without them."""
        base = max(expected.get(target, 0.0), _LEAST_P)
        for clue in dict.fromkeys(clues):
            name = node, clue.tool, clue.field
            record = self._record(name)
            if _is_free(record):
                continue
            key = _key(node, clue)
            row = self._counts.row(key)
            if row or _namesakes(clue, expected):
                chance = max(_chances(clue, row, expected).get(target, 0.0), _LEAST_P)
                record.advantage += _RECENT * (math.log(chance / base) - record.advantage)
            if not row:
                record.num_values += 1
            self._counts.observe(key, target)

    def shares(
        self, node: str, clues: Sequence[Clue], expected: Mapping[str, float]
    ) -> tuple[Mapping[str, float], Clue] | None:
        """Return the chances of targets after the clue that foretells best, and the clue; `None` if none tells."""
        best: tuple[float, Mapping[str, float], Clue] | None = None
        for clue in clues:
            row = self._counts.row(_key(node, clue))
            if not row and not _namesakes(clue, expected):
                continue
            record = self._records.get((node, clue.tool, clue.field), _Record())
            if _is_free(record) or record.advantage < -_TRUSTED:
                continue
            # What was said last is the most special: a tool's name first, then its arguments.
            if best is None or record.advantage >= best[0]:
                best = record.advantage, _chances(clue, row, expected), clue
        return None if best is None else (best[1], best[2])

    def knows(self, node: str, clue: Clue) -> bool:
        """Whether a value has been seen at `node` before, in a field that is no free text."""
        record = self._records.get((node, clue.tool, clue.field))
        return record is not None and not _is_free(record) and bool(self._counts.row(_key(node, clue)))

    def to_rows(self) -> dict[str, Any]:
        """Return all that was learnt as a JSON-able value; no value that a model wrote is in it."""
        fields = [[*name, record.advantage, record.num_values] for name, record in self._records.items()]
        return {"values": self._counts.to_rows(), "fields": fields}

    def load_rows(self, rows: Mapping[str, Any]) -> None:
        """Replace all that was learnt by a value of `to_rows`; the bounds hold.

        Raises:
            ValueError: if the rows do not fit.
        """
        self._records.clear()
        for node, tool, field, advantage, num_values in rows["fields"]:
            record = self._record((str(node), str(tool), str(field)))
            record.advantage, record.num_values = float(advantage), int(num_values)
        self._counts.load_rows(rows["values"])

    def add_rows(self, rows: Mapping[str, Any]) -> None:
        """Add what another process learnt, a value of `to_rows`.

        Raises:
            ValueError: if the rows do not fit.
        """
        for node, tool, field, advantage, num_values in rows["fields"]:
            name = str(node), str(tool), str(field)
            is_known = name in self._records
            record = self._record(name)
            record.advantage = (record.advantage + float(advantage)) / 2 if is_known else float(advantage)
            record.num_values = max(record.num_values, int(num_values))
        self._counts.add_rows(rows["values"])

    def _record(self, name: Field) -> _Record:
        record = self._records.setdefault(name, _Record())
        self._records.move_to_end(name)
        if len(self._records) > MAX_FIELDS:
            self._records.popitem(last=False)
        return record


def _is_free(record: _Record) -> bool:
    """Whether a field holds free text: more values than there are ways to go, and no use so far."""
    return record.num_values > MAX_VALUES and record.advantage <= _TRUSTED


def _chances(clue: Clue, row: Mapping[str, float], expected: Mapping[str, float]) -> Mapping[str, float]:
    named = _namesakes(clue, expected)
    if not named:
        return smooth(row, expected, 1.0)
    total = sum(expected[target] for target in named) or 1.0
    prior = {target: p * (1.0 - _P_NAMESAKE) for target, p in expected.items()}
    for target in named:
        prior[target] += _P_NAMESAKE * (expected[target] / total if expected[target] else 1.0 / len(named))
    return smooth(row, prior, _NAMESAKE_STRENGTH)


def _namesakes(clue: Clue, expected: Mapping[str, float]) -> list[str]:
    """Return the targets that the value names: a node, or the sub-graph that it is inside of."""
    return [target for target in expected if clue.value in target.split("|")] if clue.value else []


def _key(node: str, clue: Clue) -> tuple[str, ...]:
    digest = (
        hashlib.blake2b(clue.value.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if clue.value else ""
    )
    return (node, clue.tool, clue.field, digest)
