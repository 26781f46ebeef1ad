"""Answers that stay true until something new is learnt about what they are about."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_A = TypeVar("_A")


class Answers(Generic[_A]):
    """Answers to questions about subjects, forgotten by subject.  Bounded; not thread-safe.

    The same is asked a few times while a node runs and its answer streams; only what is learnt about a node changes
    what is known about it.
    """

    def __init__(self, *, max_answers: int) -> None:
        """Hold at most `max_answers`; one more, and all are forgotten."""
        self._max_answers = max_answers
        self._subjects: dict[Hashable, dict[Hashable, _A]] = {}
        self._num_answers = 0

    def __len__(self) -> int:
        """Return how many answers are known."""
        return self._num_answers

    def get(self, subject: Hashable, question: Hashable) -> _A | None:
        """Return the answer to a question about `subject`; `None` when it is not known."""
        known = self._subjects.get(subject)
        return None if known is None else known.get(question)

    def put(self, subject: Hashable, question: Hashable, answer: _A) -> None:
        """Remember an answer that is not known yet."""
        if self._num_answers >= self._max_answers:
            self.clear()
        self._subjects.setdefault(subject, {})[question] = answer
        self._num_answers += 1

    def forget(self, subject: Hashable) -> None:
        """Forget all answers about `subject`: something new was learnt about it."""
        self._num_answers -= len(self._subjects.pop(subject, ()))

    def clear(self) -> None:
        """Forget everything."""
        self._subjects.clear()
        self._num_answers = 0
