"""The queue of a batch worker: jobs in lanes of priority, taken in batches.  Pure: no threads, no clock of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Priority(IntEnum):
    """What goes first: a user waits for `INTERACTIVE`, a forecast for `PREFETCH`, nobody in particular for `BULK`."""

    INTERACTIVE = 0
    PREFETCH = 1
    BULK = 2


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """Sizes of a queue.

    `max_batch` items are taken at once, of bulk jobs only `bulk_chunk`, so that what comes meanwhile does not wait for
    long.  A lane holds `max_queued` items; a job that comes to an empty lane is taken however large it is.  A lane that
    has waited while others were served `patience` times is served next: nothing waits for ever.

    Raises:
        ValueError: for a size below one.
    """

    max_batch: int = 64
    bulk_chunk: int = 32
    max_queued: int = 4096
    patience: int = 16

    def __post_init__(self) -> None:
        """Check all sizes."""
        for name in ("max_batch", "bulk_chunk", "max_queued", "patience"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"cannot make a queue: got {name}={value}, allowed is 1 or more. Mend that setting.")


class Job(Generic[_T]):
    """Items that one caller waits for together.

    `deadline_s` is a time of the clock of whoever runs the queue; `None` waits without end.
    """

    __slots__ = ("deadline_s", "items", "num_taken", "priority")

    def __init__(self, items: Sequence[_T], priority: Priority, deadline_s: float | None = None) -> None:
        """Nothing of it is taken yet."""
        self.items = items
        self.priority = priority
        self.deadline_s = deadline_s
        self.num_taken = 0

    @property
    def num_left(self) -> int:
        """Items that were not taken yet."""
        return len(self.items) - self.num_taken

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline has passed."""
        return self.deadline_s is not None and now_s >= self.deadline_s


_J = TypeVar("_J", bound=Job)  # type: ignore[type-arg]


@dataclass(frozen=True, slots=True)
class Share(Generic[_J]):
    """The part of a job that is in a batch: its items from `start` up to `stop`."""

    job: _J
    start: int
    stop: int


class Lanes(Generic[_J]):
    """Jobs that wait, in the order of their priority, then of their coming.  Not thread-safe.

    A job that is too large for one batch goes to the end of its lane after each share, so that large jobs advance side
    by side.
    """

    def __init__(self, settings: LaneSettings) -> None:
        """Start empty."""
        self._settings = settings
        self._lanes: dict[Priority, OrderedDict[int, _J]] = {priority: OrderedDict() for priority in Priority}
        self._num_queued = dict.fromkeys(Priority, 0)
        self._passed_over = dict.fromkeys(Priority, 0)

    def __len__(self) -> int:
        """Return how many items wait."""
        return sum(self._num_queued.values())

    def __iter__(self) -> Iterator[_J]:
        """Yield the jobs that wait."""
        return chain.from_iterable(lane.values() for lane in self._lanes.values())

    def num_queued(self, priority: Priority) -> int:
        """Return how many items of a priority wait."""
        return self._num_queued[priority]

    def has_room(self, job: _J) -> bool:
        """Whether `add` would take the job."""
        queued = self._num_queued[job.priority]
        return not queued or queued + job.num_left <= self._settings.max_queued

    def add(self, job: _J) -> bool:
        """Queue a job with at least one item; return false, and do nothing, where its lane is full."""
        if not self.has_room(job):
            return False
        self._lanes[job.priority][id(job)] = job
        self._num_queued[job.priority] += job.num_left
        return True

    def discard(self, job: _J) -> bool:
        """Forget what is left of a job; return whether anything was."""
        if self._lanes[job.priority].pop(id(job), None) is None:
            return False
        self._num_queued[job.priority] -= job.num_left
        return True

    def take(self, now_s: float) -> tuple[list[Share[_J]], list[_J]]:
        """Return the next batch, and the jobs that were met and whose deadline has passed, which are forgotten.

        Both are empty when nothing waits.  A batch holds items of one priority only.
        """
        shares: list[Share[_J]] = []
        late: list[_J] = []
        while not shares and (priority := self._next()) is not None:
            self._fill(priority, now_s, shares, late)
        return shares, late

    def clear(self) -> list[_J]:
        """Forget all jobs and return them."""
        jobs = list(self)
        for priority, lane in self._lanes.items():
            lane.clear()
            self._num_queued[priority] = self._passed_over[priority] = 0
        return jobs

    def _next(self) -> Priority | None:
        waiting = [priority for priority, lane in self._lanes.items() if lane]
        if not waiting:
            return None
        impatient = [p for p in waiting if self._passed_over[p] >= self._settings.patience]
        return max(impatient, key=self._passed_over.__getitem__) if impatient else waiting[0]

    def _fill(self, priority: Priority, now_s: float, shares: list[Share[_J]], late: list[_J]) -> None:
        lane = self._lanes[priority]
        room = self._settings.bulk_chunk if priority is Priority.BULK else self._settings.max_batch
        room = min(room, self._settings.max_batch)
        while lane and room:
            key, job = next(iter(lane.items()))
            if job.is_late(now_s):
                self.discard(job)
                late.append(job)
                continue
            num = min(room, job.num_left)
            shares.append(Share(job, job.num_taken, job.num_taken + num))
            job.num_taken += num
            self._num_queued[priority] -= num
            room -= num
            if job.num_left:
                lane.move_to_end(key)
            else:
                del lane[key]
        if shares:
            for other, waiting in self._lanes.items():
                self._passed_over[other] = self._passed_over[other] + 1 if waiting and other is not priority else 0
