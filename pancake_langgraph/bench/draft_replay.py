"""What drafts of queries are worth, counted: agents' searches replayed over the partitions of an index.

Nothing is read and nothing waits: what is to be brought up for a draft is there when its search comes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.draft import DraftSettings, Locate, Outlook
from pancake_langgraph.retrieval.partitions import PartitionId


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One search of an agent, and the draft that was there before it; `None` where there was none."""

    agent: str
    draft: Vector | None
    vector: Vector


@dataclass(frozen=True, slots=True)
class Replayed:
    """What happened: bytes that searches needed, that were in memory by then, and that were read ahead of searches.

    `fetched` partitions were brought up for a search, `useful` ones of them were needed; `most_bytes` is what memory
    held at most.
    """

    searches: int
    needed_bytes: int
    hit_bytes: int
    ahead_bytes: int = 0
    fetched: int = 0
    useful: int = 0
    most_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the bytes needed that was in memory."""
        return self.hit_bytes / self.needed_bytes

    @property
    def precision(self) -> float:
        """Share of the partitions brought up for a search that it needed; 0 when there were none."""
        return self.useful / self.fetched if self.fetched else 0.0

    @property
    def read_bytes(self) -> float:
        """Bytes read from disk for a search on average, ahead of it and in it."""
        return (self.ahead_bytes + self.needed_bytes - self.hit_bytes) / self.searches


def replay(steps: Sequence[Step], locate: Locate, settings: DraftSettings, *, ahead: int = 0) -> Replayed:
    """Replay searches with the drafts before them; `ahead` other searches come between a draft and its own."""
    made = Outlook(settings)
    needed = hits = ahead_bytes = fetched = useful = most = 0
    for drafted, searching in _shifted(steps, ahead):
        if drafted is not None:
            plan = made.expect(drafted.agent, drafted.draft, locate)
            made.arrived([partition.id for partition in plan.warm])
            ahead_bytes += sum(partition.num_bytes for partition in plan.warm)
            most = max(most, made.warm_bytes)
        if searching is not None:
            wanted = locate(searching.vector, settings.per_query)
            found = made.used(searching.agent, searching.vector, wanted, moment=made.moment)
            made.arrived([partition.id for partition in found.plan.warm])  # kept of what the search has just read
            needed, hits = needed + found.needed_bytes, hits + found.hit_bytes
            fetched, useful = fetched + found.fetched, useful + found.useful
            most = max(most, made.warm_bytes)
    return Replayed(len(steps), needed, hits, ahead_bytes, fetched, useful, most)


def replay_lru(steps: Sequence[Step], locate: Locate, settings: DraftSettings) -> Replayed:
    """Replay searches over a cache of what was used last, as large as the budget; drafts are not looked at."""
    kept: OrderedDict[PartitionId, int] = OrderedDict()
    needed = hits = held = most = 0
    for step in steps:
        for partition in locate(step.vector, settings.per_query):
            needed += partition.num_bytes
            hit_bytes = kept.pop(partition.id, 0)
            hits += hit_bytes
            held += partition.num_bytes - hit_bytes
            kept[partition.id] = partition.num_bytes
        while held > settings.budget_bytes:
            held -= kept.popitem(last=False)[1]
        most = max(most, held)
    return Replayed(len(steps), needed, hits, most_bytes=most)


def _shifted(steps: Sequence[Step], ahead: int) -> Iterator[tuple[Step | None, Step | None]]:
    """Yield what is drafted and what is searched for at the same time."""
    waiting: deque[Step] = deque()
    for step in steps:
        waiting.append(step)
        yield step, waiting.popleft() if len(waiting) > ahead else None
    for step in waiting:
        yield None, step
