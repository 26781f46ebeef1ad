"""Vectors of texts that were embedded before, by the hash of the text."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from pancake_langgraph.retrieval.base import Vector


class TextKind(Enum):
    """What a text is to an embedder: many models embed questions and what is searched differently."""

    QUERY = "query"
    DOCUMENT = "document"


@dataclass(frozen=True, slots=True)
class Text:
    """A text to embed, and as what."""

    kind: TextKind
    content: str


class VectorCache:
    """Remembers the most recently used vectors, at most `max_vectors` of them.  Thread-safe.

    Texts are kept as a cryptographic hash only: nobody can find a text that gets the vector of another one.
    """

    def __init__(self, *, max_vectors: int) -> None:
        """Start empty; with `max_vectors` of zero nothing is remembered."""
        self._max_vectors = max_vectors
        self._vectors: OrderedDict[bytes, Vector] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = 0

    def __len__(self) -> int:
        """Return how many vectors are remembered."""
        return len(self._vectors)

    @property
    def hits(self) -> int:
        """How often `get` found something."""
        return self._hits

    def get(self, text: Text) -> Vector | None:
        """Return the vector of a text, which is then the most recently used one."""
        key = _key(text)
        with self._lock:
            vector = self._vectors.get(key)
            if vector is not None:
                self._vectors.move_to_end(key)
                self._hits += 1
            return vector

    def put(self, text: Text, vector: Vector) -> None:
        """Remember a vector; it must not change any more."""
        key = _key(text)
        with self._lock:
            self._vectors[key] = vector
            self._vectors.move_to_end(key)
            while len(self._vectors) > self._max_vectors:
                self._vectors.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._vectors.clear()


def _key(text: Text) -> bytes:
    # Lone surrogates are no UTF-8, and yet may be in what a user types.
    content = text.content.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16, person=text.kind.value.encode()).digest()
