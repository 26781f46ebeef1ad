"""What searches for drafts have found, until an agent searches for just that.  Pure: no threads, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from pancake_langgraph.retrieval.base import Hit, Query
from pancake_langgraph.retrieval.result_cache import Question, question_key

#: Agents whose answers are held, and items of each answer; whole documents are in them.
MAX_AGENTS: Final = 32
MAX_HITS: Final = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    text: str
    key: Hashable
    hits: list[Hit]


class Rehearsals:
    """Answers by agent, each of which is given once at most.  Not thread-safe.

    An answer is that of one state of an engine, which a `mark` stands for (see `MarksChanges`); under another mark it
    is not given.  It is given for the very query only: same vector, view, limit and offset.  Of an agent's drafts a
    longer one takes the place of its own beginnings, and of others the last stays.  All answers are of one state; they
    are let go of when another one is seen.
    """

    def __init__(self, *, max_agents: int = MAX_AGENTS, max_hits: int = MAX_HITS) -> None:
        """Hold answers of the `max_agents` agents that drafted last, of up to `max_hits` items each."""
        self._max_agents, self._max_hits = max_agents, max_hits
        self._answers: OrderedDict[str, tuple[_Answer, ...]] = OrderedDict()
        self._mark: object | None = None

    def __len__(self) -> int:
        """Return how many answers are held."""
        return sum(map(len, self._answers.values()))

    def keep(self, agent: str, text: str, key: Hashable | None, hits: list[Hit], mark: object) -> None:
        """Hold what was found for a draft; `text` is the draft's, empty where only a vector is known.

        `key` is what `key_of` said before the search; `None`, for a query that cannot be compared, is not held.
        """
        self._see(mark)
        if key is None or len(hits) > self._max_hits:
            return
        stays = [one for one in self._answers.pop(agent, ()) if one.key != key and not _begins(one.text, text)]
        self._answers[agent] = (*stays[-1:], _Answer(text, key, hits))
        if len(self._answers) > self._max_agents:
            self._answers.popitem(last=False)

    def take(self, agent: str, query: Query, mark: object | None) -> list[Hit] | None:
        """Return what was found for an agent's query, and hold it no longer; `None` where that is not known."""
        self._see(mark)
        if not (answers := self._answers.get(agent, ())):
            return None
        key = key_of(query)
        found = next((one for one in answers if one.key == key), None)
        if found is None:
            return None
        if len(answers) > 1:
            self._answers[agent] = tuple(one for one in answers if one is not found)
        else:
            del self._answers[agent]
        return found.hits

    def clear(self) -> None:
        """Hold nothing any more."""
        self._answers.clear()

    def _see(self, mark: object | None) -> None:
        if mark is None or mark is not self._mark:
            self.clear()
        self._mark = mark


def key_of(query: Query) -> Hashable | None:
    """Return what equal queries share, and no two others; `None` where the filter is not made of plain values."""
    return question_key(Question.of(query))


def _begins(old: str, new: str) -> bool:
    """Return whether `new` is a longer version of `old`."""
    return bool(old) and new.startswith(old)
