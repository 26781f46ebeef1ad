"""Embedders for tests: the same text always gives the same vector, and what was asked is counted."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field

import numpy as np
from langchain_core.embeddings import Embeddings


def text_vector(text: str, dim: int) -> list[float]:
    """Return the sum of a vector for each word, so that texts that share words are alike."""
    total = np.zeros(dim)
    for word in text.lower().split():
        seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
        total += np.random.default_rng(seed).standard_normal(dim)
    return [float(number) for number in total]


@dataclass(eq=False)
class WordEmbedder(Embeddings):
    """Embeds by words; `documents` and `queries` are what it was asked for, `threads` who asked."""

    dim: int = 16
    documents: list[list[str]] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.documents.append(list(texts))
        self.threads.append(threading.current_thread().name)
        return [text_vector(text, self.dim) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.queries.append(text)
        self.threads.append(threading.current_thread().name)
        return text_vector(text, self.dim)


@dataclass(eq=False)
class AsyncWordEmbedder(WordEmbedder):
    """Has async methods of its own."""

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.embed_documents(texts)

    async def aembed_query(self, text: str) -> list[float]:
        return self.embed_query(text)


@dataclass(eq=False)
class BrokenEmbedder(WordEmbedder):
    """Answers with `answer`, whatever it is asked."""

    answer: object = None

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.answer  # type: ignore[return-value]

    def embed_query(self, text: str) -> list[float]:
        return self.answer[0] if isinstance(self.answer, list) and self.answer else self.answer  # type: ignore[return-value]
