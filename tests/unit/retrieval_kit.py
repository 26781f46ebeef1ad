"""A small exact engine that tests can hold up, and that records what it is asked."""

import threading
from collections.abc import Sequence

import numpy as np

from pancake_langgraph._errors import InvalidQuery
from pancake_langgraph.retrieval.base import EngineStats, Hit, Item, ItemId, Namespace, Query, Vector, View

DIM = 8


def vector(seed: int, dim: int = DIM) -> Vector:
    found = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    return found / np.float32(np.linalg.norm(found))


def item(seed: int, namespace: Namespace = ("notes",)) -> Item:
    return Item(ItemId(namespace, str(seed)), {"seed": seed}, (vector(seed),))


class SmallEngine:
    """Answers by looking at everything.  `calls` has the seeds of the first numbers of each call's queries."""

    def __init__(self, items: Sequence[Item] = (), dim: int = DIM) -> None:
        self.dim = dim
        self.stored = {entry.id: entry for entry in items}
        self.calls: list[list[Query]] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.poison: dict[int, BaseException] = {}

    def put(self, items: Sequence[Item]) -> None:
        self.stored |= {entry.id: entry for entry in items}

    def delete(self, ids: Sequence[ItemId]) -> int:
        return sum(self.stored.pop(name, None) is not None for name in ids)

    def get(self, ids: Sequence[ItemId]) -> list[Item | None]:
        return [self.stored.get(name) for name in ids]

    def search(self, queries: Sequence[Query]) -> list[list[Hit]]:
        self.calls.append(list(queries))
        self.began.release()
        if not self.gate.wait(30):
            raise RuntimeError("the test never opened the gate")
        for query in queries:
            if query.limit in self.poison:
                raise self.poison[query.limit]
            if query.vector.shape != (self.dim,):
                raise InvalidQuery(f"got {query.vector.shape}, allowed is ({self.dim},)")
        return [self._best(query) for query in queries]

    def _best(self, query: Query) -> list[Hit]:
        seen = [
            entry
            for entry in self.stored.values()
            if any(entry.id.namespace[: len(prefix)] == prefix for prefix in query.view.prefixes)
            and (query.view.allowed is None or entry.id in query.view.allowed)
        ]
        hits = [Hit(entry, float(max(v @ query.vector for v in entry.vectors))) for entry in seen if entry.vectors]
        hits.sort(key=lambda hit: (-hit.score, hit.item.id.namespace, hit.item.id.key))
        return hits[query.offset : query.offset + query.limit]

    def items(self, view: View, *, limit: int | None = None, offset: int = 0) -> list[Item]:
        return list(self.stored.values())[offset:][:limit]

    def namespaces(self) -> list[Namespace]:
        return sorted({name.namespace for name in self.stored})

    def stats(self) -> EngineStats:
        return EngineStats(len(self.stored), len(self.stored))

    def close(self) -> None:
        pass
