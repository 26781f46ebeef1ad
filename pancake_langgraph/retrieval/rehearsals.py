"""What searches for drafts have found, until an agent searches for just that.  Pure: no threads, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from pancake_langgraph.retrieval.base import Hit, Query
from pancake_langgraph.retrieval.result_cache import Question, question_key

#: Agents whose answers are held; documents of found items are in them.
_MAX_AGENTS: Final = 64
_MAX_HITS: Final = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    text: str
    key: Hashable
    hits: list[Hit]
    mark: object


class Rehearsals:
    """Answers by agent, each of which is given once at most.  Not thread-safe.

    An answer is that of one state of an engine, which a `mark` stands for (see `MarksChanges`); under another mark it
    is not given.  It is given for the very query only: same vector, view, limit and offset.  Of an agent's drafts a
    longer one takes the place of its own beginnings, and of others the last stays, as in the plans of `Outlook`.
    """

    def __init__(self, *, max_agents: int = _MAX_AGENTS, max_hits: int = _MAX_HITS) -> None:
        """Hold answers of the `max_agents` agents that drafted last, of up to `max_hits` items each."""
        self._max_agents, self._max_hits = max_agents, max_hits
        self._answers: OrderedDict[str, tuple[_Answer, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return how many answers are held."""
        return sum(map(len, self._answers.values()))

    def keep(self, agent: str, text: str, query: Query, hits: list[Hit], mark: object) -> None:
        """Hold what was found for a draft; `text` is the draft's, empty where only a vector is known."""
        for other in [name for name, answers in self._answers.items() if answers[-1].mark is not mark]:
            del self._answers[other]
        key = question_key(Question.of(query))
        if key is None or len(hits) > self._max_hits:
            return
        stays = [one for one in self._answers.pop(agent, ()) if one.key != key and not _begins(one.text, text)]
        self._answers[agent] = (*stays[-1:], _Answer(text, key, hits, mark))
        if len(self._answers) > self._max_agents:
            self._answers.popitem(last=False)

    def take(self, agent: str, query: Query, mark: object) -> list[Hit] | None:
        """Return what was found for an agent's query, and hold it no longer; `None` where that is not known."""
        answers = self._answers.get(agent, ())
        if not answers or answers[-1].mark is not mark:
            return None
        key = question_key(Question.of(query))
        found = next((one for one in answers if one.key == key), None)
        if found is None:
            return None
        self._put(agent, [one for one in answers if one is not found])
        return found.hits

    def clear(self) -> None:
        """Hold nothing any more."""
        self._answers.clear()

    def _put(self, agent: str, answers: Sequence[_Answer]) -> None:
        if answers:
            self._answers[agent] = tuple(answers)
        else:
            del self._answers[agent]


def _begins(old: str, new: str) -> bool:
    """Return whether `new` is a longer version of `old`."""
    return bool(old) and new.startswith(old)
