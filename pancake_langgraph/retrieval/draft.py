"""Which partitions the next queries will read, and which of these to keep in memory.  Pure: no threads, no I/O.

Agents hardly ever ask for what was asked last, so what was used last is no guide.  A draft of the query is: the words
that it is being made of.  Without one, an agent's next query is likely near its last ones.  What neither tells is kept
by how often it was used.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np

from pancake_langgraph.retrieval.base import Vector
from pancake_langgraph.retrieval.partitions import Partition, PartitionId

#: Finds the nearest partitions of a vector: the `partitions` of an engine.
Locate = Callable[[Vector, int], Sequence[Partition]]

_LARGEST_WEIGHT: Final = 2.0**512


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """How much is brought up, and what is learnt of.

    `budget_bytes` is what all warm partitions may take; a query reads the `per_query` nearest.  An agent's average
    forgets half of itself in `half_life` of its queries, how often a partition was used in `memory` queries of all
    agents.  A draft that no search follows is forgotten after `patience` drafts of others.

    Raises:
        ValueError: for a value that is not over zero.
    """

    budget_bytes: int
    per_query: int = 32
    half_life: float = 1.0
    memory: float = 256.0
    patience: int = 64
    max_agents: int = 4096

    def __post_init__(self) -> None:
        """Check all values."""
        for name in ("budget_bytes", "per_query", "half_life", "memory", "patience", "max_agents"):
            if not (value := getattr(self, name)) > 0:
                raise ValueError(f"cannot prefetch: got {name}={value}, allowed is more than 0. Mend that setting.")


class Standing(IntEnum):
    """Why a partition is worth its memory; more is better."""

    USED = 0
    AVERAGE = 1
    SECOND = 2
    DRAFT = 3


#: What is expected by name, the best first.
_EXPECTED: Final = (Standing.DRAFT, Standing.SECOND, Standing.AVERAGE)
#: How much one search counts in what is learnt of two drafts.
_LEARNING: Final = 0.2


@dataclass(frozen=True, slots=True)
class WarmPlan:
    """What to bring up, most likely first, and what to give up before."""

    warm: tuple[Partition, ...] = ()
    cool: tuple[PartitionId, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """How a query was foreseen, in partitions and bytes.

    Of what it `needed`, `hits` were warm when it came, and `late` were planned for it and not warm in time; of what was
    `fetched` for it, `useful` was needed.
    """

    needed: int
    needed_bytes: int
    hits: int
    hit_bytes: int
    late: int
    fetched: int
    useful: int
    plan: WarmPlan


@dataclass(slots=True)
class _Resident:
    num_bytes: int
    arrived_at: int | None = None


@dataclass(frozen=True, slots=True)
class _Draft:
    """One text of what an agent may ask, and where that lies."""

    text: str
    partitions: tuple[Partition, ...]

    def num_in(self, names: Collection[PartitionId]) -> int:
        """Return how many of its partitions are among `names`."""
        return sum(partition.id in names for partition in self.partitions)


@dataclass(slots=True)
class _Expected:
    number: int
    standings: dict[PartitionId, Standing]
    drafts: tuple[_Draft, ...]
    planned: set[PartitionId] = field(default_factory=set)


def waiting_drafts(waiting: Sequence[str], new: str) -> list[str]:
    """Return which drafts of one agent wait when a new one comes behind those that did.

    The new one takes the place of its own beginnings.  Of other texts the last one stays: a question was asked, a model
    writes something, and nobody knows yet which of both is searched for.
    """
    return [*[text for text in waiting if not new.startswith(text)][-1:], new]


class Averages:
    """Moving averages of what agents ask, for the agents that asked last.  Not thread-safe."""

    def __init__(self, *, half_life: float, max_agents: int) -> None:
        """Forget half of an agent's past in `half_life` of its queries."""
        self._keep = 0.5 ** (1.0 / half_life)
        self._max_agents = max_agents
        self._averages: OrderedDict[str, Vector] = OrderedDict()

    def __len__(self) -> int:
        """Return of how many agents something is known."""
        return len(self._averages)

    def get(self, agent: str) -> Vector | None:
        """Return an agent's average; `None` for one that has not asked yet."""
        return self._averages.get(agent)

    def add(self, agent: str, vector: Vector) -> None:
        """Learn what an agent asked."""
        old = self._averages.pop(agent, None)
        is_new = old is None or old.shape != vector.shape
        mixed = vector if old is None or is_new else self._keep * old + (1.0 - self._keep) * vector
        self._averages[agent] = np.array(mixed, np.float32)
        if len(self._averages) > self._max_agents:
            self._averages.popitem(last=False)


class Frequencies:
    """How often partitions were used, the past counting less and less.  Bounded; not thread-safe."""

    def __init__(self, *, memory: float, max_partitions: int = 65_536) -> None:
        """Let what was used `memory` queries ago count half."""
        # Instead of making old uses less, new ones are made more; only how they compare means anything.
        self._growth = 2.0 ** (1.0 / memory)
        self._max_partitions = max_partitions
        self._weight = 1.0
        self._uses: dict[PartitionId, float] = {}

    def __len__(self) -> int:
        """Return of how many partitions uses are known."""
        return len(self._uses)

    def __getitem__(self, partition: PartitionId) -> float:
        """Return a number that is larger for what was used more; 0 for what was never."""
        return self._uses.get(partition, 0.0)

    def add(self, partitions: Iterable[PartitionId]) -> None:
        """Count one query's partitions."""
        self._weight *= self._growth
        for partition in partitions:
            self._uses[partition] = self._uses.get(partition, 0.0) + self._weight
        if self._weight > _LARGEST_WEIGHT:
            self._uses = {partition: uses / self._weight for partition, uses in self._uses.items()}
            self._weight = 1.0
        if len(self._uses) > self._max_partitions:
            best = sorted(self._uses, key=self._uses.__getitem__, reverse=True)
            self._uses = {partition: self._uses[partition] for partition in best[: self._max_partitions // 2]}


class Outlook:
    """Decides what to bring up for the next queries of many agents, within a budget.  Not thread-safe.

    Drafts go before averages, and these before what is used often.  What is warm for the draft of one agent is not
    given up for that of another: who drafted first will search first.

    An agent may have two drafts that are not versions of one text: a question that was asked, and something that a
    model writes.  Which of both comes nearer to what is searched for is learnt; until then it is the first.
    """

    def __init__(self, settings: DraftSettings) -> None:
        """Know nothing yet."""
        self._settings = settings
        self._averages = Averages(half_life=settings.half_life, max_agents=settings.max_agents)
        self._frequencies = Frequencies(memory=settings.memory)
        self._residents: dict[PartitionId, _Resident] = {}
        self._expected: OrderedDict[str, _Expected] = OrderedDict()
        self._wanted: dict[Standing, Counter[PartitionId]] = {s: Counter() for s in _EXPECTED}
        self._later_is_right = 0.0
        self._num_expected = 0
        self._warm_bytes = 0
        self._moment = 0

    @property
    def warm_bytes(self) -> int:
        """Bytes of what is warm or being brought up; never over the budget."""
        return self._warm_bytes

    @property
    def moment(self) -> int:
        """A number that grows whenever something has become warm; may be read from any thread."""
        return self._moment

    def residents(self) -> list[PartitionId]:
        """Return what has become warm."""
        return [partition for partition, resident in self._residents.items() if resident.arrived_at is not None]

    def expect(self, agent: str, draft: Vector | None, locate: Locate, *, text: str = "") -> WarmPlan:
        """Plan for an agent's next query, of which `draft` is a first version, or nothing is known.

        It takes the place of what was expected of the agent before, unless both are drafts and the `text` of this one
        does not begin with that of the last: then both stay.  All that is to be brought up counts as taken from now on;
        `arrived` says what has become warm, and `lost` what has not.
        """
        before = self._close(agent)
        average = self._averages.get(agent)
        num = self._settings.per_query
        drafts: tuple[_Draft, ...] = () if draft is None else (_Draft(text, tuple(locate(draft, num))),)
        if drafts and text and before is not None:
            drafts = (*[old for old in before.drafts if old.text and not text.startswith(old.text)][-1:], *drafts)
        ranked = drafts[::-1] if self._later_is_right > 0.0 else drafts
        wanted: dict[PartitionId, tuple[Partition, Standing]] = {}
        for one, standing in zip(ranked, (Standing.DRAFT, Standing.SECOND), strict=False):
            for partition in one.partitions:
                wanted.setdefault(partition.id, (partition, standing))
        for partition in locate(average, num) if average is not None else ():
            wanted.setdefault(partition.id, (partition, Standing.AVERAGE))
        plan = self._admit(wanted.values())
        self._num_expected += 1
        expected = _Expected(self._num_expected, {name: standing for name, (_, standing) in wanted.items()}, drafts)
        expected.planned = {partition.id for partition in plan.warm}
        self._expected[agent] = expected
        for name, standing in expected.standings.items():
            self._wanted[standing][name] += 1
        self._forget_abandoned()
        return plan

    def arrived(self, partitions: Iterable[PartitionId]) -> None:
        """Take in that planned partitions are warm now."""
        for name in partitions:
            if (resident := self._residents.get(name)) is not None and resident.arrived_at is None:
                resident.arrived_at = self._moment
        self._moment += 1

    def lost(self, partitions: Iterable[PartitionId]) -> None:
        """Take in that partitions are not warm, or will not be brought up."""
        for name in partitions:
            if (resident := self._residents.pop(name, None)) is not None:
                self._warm_bytes -= resident.num_bytes

    def used(self, agent: str, vector: Vector, needed: Sequence[Partition], *, moment: int) -> Settled:
        """Learn from an agent's query, which came at `moment` and read the partitions `needed`.

        The plan is to keep what it has read, where that is used more than what is kept.
        """
        expected = self._close(agent)
        names = {partition.id for partition in needed}
        warm = [partition for partition in needed if self._was_warm(partition.id, moment)]
        planned = expected.planned if expected is not None else set()
        fetched = {name for name in planned if name in self._residents and self._residents[name].arrived_at is not None}
        late = len(planned & names - {partition.id for partition in warm})
        if expected is not None and len(expected.drafts) > 1:
            first, later = (one.num_in(names) for one in expected.drafts)
            self._later_is_right += _LEARNING * ((later > first) - (later < first) - self._later_is_right)
        self._averages.add(agent, vector)
        self._frequencies.add(names)
        plan = self._admit((partition, Standing.USED) for partition in needed)
        return Settled(
            needed=len(needed),
            needed_bytes=sum(partition.num_bytes for partition in needed),
            hits=len(warm),
            hit_bytes=sum(partition.num_bytes for partition in warm),
            late=late,
            fetched=len(fetched),
            useful=len(fetched & names),
            plan=plan,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _was_warm(self, name: PartitionId, moment: int) -> bool:
        resident = self._residents.get(name)
        return resident is not None and resident.arrived_at is not None and resident.arrived_at < moment

    def _close(self, agent: str) -> _Expected | None:
        expected = self._expected.pop(agent, None)
        for name, standing in expected.standings.items() if expected is not None else ():
            counts = self._wanted[standing]
            counts[name] -= 1
            if counts[name] <= 0:
                del counts[name]
        return expected

    def _forget_abandoned(self) -> None:
        oldest, expected = next(iter(self._expected.items()))
        if expected.number + self._settings.patience < self._num_expected:
            self._close(oldest)

    def _standing(self, name: PartitionId) -> Standing:
        return next((s for s in _EXPECTED if name in self._wanted[s]), Standing.USED)

    def _admit(self, wanted: Iterable[tuple[Partition, Standing]]) -> WarmPlan:
        """Make room for partitions, in their order, by giving up what is worth less."""
        wanted = tuple(wanted)
        best = max((standing for _, standing in wanted), default=Standing.USED)
        stay = {partition.id for partition, standing in wanted if standing is best}
        worth = {n: (self._standing(n), self._frequencies[n]) for n in self._residents if n not in stay}
        victims = sorted(worth, key=worth.__getitem__, reverse=True)  # the least worthy last
        warm: list[Partition] = []
        cool: list[PartitionId] = []
        for partition, standing in wanted:
            if partition.id in self._residents:
                continue
            own = standing, self._frequencies[partition.id]
            room = self._settings.budget_bytes - self._warm_bytes
            given_up = 0
            for name in reversed(victims):
                theirs = worth[name]
                # Of two drafts the earlier one stays, however often its partitions are used.
                is_less = theirs[0] < standing or (theirs[0] is standing is Standing.USED and theirs < own)
                if room >= partition.num_bytes or not is_less:
                    break
                room += self._residents[name].num_bytes
                given_up += 1
            if room < partition.num_bytes:
                continue
            out = [victims.pop() for _ in range(given_up)]
            self.lost(out)
            cool += out
            self._residents[partition.id] = _Resident(partition.num_bytes)
            self._warm_bytes += partition.num_bytes
            warm.append(partition)
        return WarmPlan(tuple(warm), tuple(cool))
