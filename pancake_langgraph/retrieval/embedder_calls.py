"""Calls of a LangChain embedder: as few as it allows, each answer checked, each failure kept to its own text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from langchain_core.embeddings import Embeddings

from pancake_langgraph._errors import EmbedderMismatch, EmbeddingError
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.vector_cache import TextKind
from pancake_langgraph.retrieval.worker import Failed

#: Texts that tell whether an embedder does the same with questions and documents.
_TRIAL: Final = ("where is the key", "The meeting was moved to Tuesday.")
#: Lengths of differences, beside vectors of length one; batches of half-precision models differ by less.
_TRIAL_TOLERANCE: Final = 0.02
#: Texts asked for alone after their batch failed; when all of these fail as well, it is not the texts.
_MAX_PROOFS: Final = 4


class EmbedderCalls:
    """Asks one embedder, from one thread; only what looks at answers may be called from several."""

    def __init__(self, embedder: Embeddings, *, dim: int | None = None) -> None:
        """Ask `embedder`, whose vectors have to be `dim` long; by default as long as the first one."""
        self._embedder = embedder
        self._wanted_dim = dim
        self._queries_are_documents: bool | None = None
        self.dim = dim
        self.num_calls = 0

    def embed(self, kind: TextKind, texts: Sequence[str]) -> list[Vector | Failed]:
        """Return a vector for each text, read-only; for one that cannot be embedded, why.  Never raises."""
        if not texts:
            return []
        try:
            answers = self._ask(kind, list(texts))
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is for whoever asked
            return [Failed(exc)] if len(texts) == 1 else self._one_by_one(kind, texts)
        return [self.checked(answer) for answer in answers]

    def zero(self) -> Vector | Failed:
        """Return the vector that is like nothing; asks for a text when no length is known yet."""
        if self.dim is None and isinstance(failed := self.embed(TextKind.DOCUMENT, _TRIAL[1:])[0], Failed):
            return failed
        vector = np.zeros(self.dim or 0, np.float32)
        vector.setflags(write=False)
        return vector

    def _one_by_one(self, kind: TextKind, texts: Sequence[str]) -> list[Vector | Failed]:
        """Ask for each alone, unless the embedder turns out to answer nothing at all."""
        found: list[Vector | Failed] = []
        for text in texts:
            if len(found) >= _MAX_PROOFS and all(isinstance(answer, Failed) for answer in found):
                found.append(found[-1])
            else:
                found += self.embed(kind, (text,))
        return found

    def _ask(self, kind: TextKind, texts: list[str]) -> Sequence[Any]:
        if kind is TextKind.DOCUMENT:
            return self._call(self._embedder.embed_documents, texts)
        together = getattr(self._embedder, "embed_queries", None)
        if callable(together):
            return self._call(together, texts)
        if len(texts) > 1 and self._may_ask_as_documents():
            return self._call(self._embedder.embed_documents, texts)
        self.num_calls += len(texts)
        return [self._embedder.embed_query(text) for text in texts]

    def _call(self, method: Callable[[list[str]], Any], texts: list[str]) -> Sequence[Any]:
        self.num_calls += 1
        return self.one_each(method(texts), texts)

    def one_each(self, answer: Any, texts: Sequence[str]) -> Sequence[Any]:
        """Return an answer that has as many parts as there are texts.

        Raises:
            EmbeddingError: if it has not.
        """
        try:
            answers = list(answer)
        except TypeError as exc:
            raise self._refused(type(answer).__name__).error from exc
        if len(answers) != len(texts):
            raise EmbeddingError(
                f"cannot use what the embedder answered: got {len(answers)} vectors for {len(texts)} texts, allowed is "
                f"one for each. Mend {type(self._embedder).__name__}, or use another embedder."
            )
        return answers

    def _may_ask_as_documents(self) -> bool:
        """Whether questions are embedded as documents are, so that many can be asked for in one call."""
        if self._queries_are_documents is None:
            asked = [self.checked(self._embedder.embed_query(text)) for text in _TRIAL]
            stored = [self.checked(answer) for answer in self._call(self._embedder.embed_documents, list(_TRIAL))]
            self.num_calls += len(_TRIAL)
            self._queries_are_documents = all(map(_is_near, asked, stored))
        return self._queries_are_documents

    def checked(self, answer: Any) -> Vector | Failed:
        """Return a vector of the embedder, read-only, or why it cannot be used."""
        try:
            with np.errstate(over="ignore"):  # too large a number becomes infinity, which is seen below
                vector = np.array(answer, dtype=np.float32)
        except (TypeError, ValueError) as exc:
            return self._refused(f"{type(answer).__name__}: {exc}")
        if vector.ndim != 1 or not vector.size:
            return self._refused(f"an array of shape {vector.shape}")
        if not np.isfinite(vector).all():
            return self._refused(f"{np.count_nonzero(~np.isfinite(vector))} of {vector.size} numbers NaN or infinite")
        if self.dim is None:
            self.dim = vector.size
        if vector.size != self.dim:
            if self._wanted_dim is None:
                return self._refused(f"vectors of {self.dim} and of {vector.size} numbers")
            return Failed(
                EmbedderMismatch(
                    f"{type(self._embedder).__name__} is another embedder: got a vector of {vector.size} numbers, "
                    f"allowed are {self.dim}. Use the embedder that the index was made with, or make a new index."
                )
            )
        vector.setflags(write=False)
        return vector

    def _refused(self, got: str) -> Failed:
        return Failed(
            EmbeddingError(
                f"cannot use what the embedder answered: got {got}, allowed is a list of finite numbers, always as "
                f"many. Mend {type(self._embedder).__name__}, or use another embedder."
            )
        )


def _is_near(one: Vector | Failed, other: Vector | Failed) -> bool:
    if isinstance(one, Failed) or isinstance(other, Failed):
        return False
    scale = float(np.linalg.norm(one)) or 1.0
    return float(np.linalg.norm(one - other)) <= _TRIAL_TOLERANCE * scale
