"""An engine of partitions without vectors in them, and a workload of agents that read documents."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from pancake_langgraph._errors import InvalidQuery
from pancake_langgraph.bench.draft_replay import Step
from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.partitions import Partition, PartitionId


class Shelves:
    """Partitions around random centers.  `gate` holds up `warm`; `log` has what was warmed and cooled, in order."""

    def __init__(self, num: int = 64, dim: int = 8, *, sizes: Sequence[int] | None = None, segment: str = "s") -> None:
        random = np.random.default_rng(5)
        self.centers = _unit(random.standard_normal((num, dim)))
        sizes = sizes if sizes is not None else random.integers(50, 150, num).tolist()
        self.parts = [Partition((segment, n), size) for n, size in enumerate(sizes)]
        self.warm_ids: set[PartitionId] = set()
        self.log: list[tuple[str, tuple[PartitionId, ...]]] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    @property
    def total_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def partitions(self, vector: Vector, n: int) -> list[Partition]:
        if vector.shape != self.centers.shape[1:]:
            raise InvalidQuery("wrong length")
        return [self.parts[number] for number in np.argsort(-(self.centers @ vector), kind="stable")[:n]]

    def warm(self, ids: Sequence[PartitionId]) -> int:
        self.began.release()
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        self.log.append(("warm", tuple(ids)))
        read = sum(self.parts[number].num_bytes for name, number in ids if (name, number) not in self.warm_ids)
        self.warm_ids |= set(ids)
        return read

    def cool(self, ids: Sequence[PartitionId]) -> None:
        self.log.append(("cool", tuple(ids)))
        self.warm_ids -= set(ids)

    def is_warm(self, ids: Sequence[PartitionId]) -> list[bool]:
        return [name in self.warm_ids for name in ids]


def readers(*, num_agents: int, num_steps: int, dim: int, seed: int = 3) -> Iterator[Step]:
    """Yield steps of agents, in random order, who read on in a document, or go on to another one.

    Spreads are set so that a draft shares about half of its partitions with its query, and a query a fifth with the
    agent's next one, as measured on real text.
    """
    random = np.random.default_rng(seed)
    documents = _unit(random.standard_normal((200, dim)))
    reads = {agent: int(random.integers(200)) for agent in range(num_agents)}
    for _ in range(num_steps):
        agent = int(random.integers(num_agents))
        if random.random() < 0.15:
            reads[agent] = int(random.integers(200))
        vector = _near(documents[reads[agent]], 0.72, random)
        yield Step(f"agent {agent}", _near(vector, 0.48, random), vector)


def _near(center: Vector, spread: float, random: np.random.Generator) -> Vector:
    return _unit(center + spread * _unit(random.standard_normal(center.shape)))


def _unit(vectors: np.ndarray) -> Vector:
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
