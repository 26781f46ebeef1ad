"""Bench `retrieval-load`: searches that somebody waits for, while a bulk job keeps the same index busy.

It starts no model server.  Everything is embedded before the clock starts.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.agent_memory import AGENTS
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.pinning import one_core
from pancake_langgraph.bench.retrieval import Samples, engine_facts, prepared_set, scratch_folder, vector_result
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import K, Neighbors, OpenEngine, fill_engine, recall
from pancake_langgraph.bench.settled_heap import settled_heap
from pancake_langgraph.bench.statistics import describe_ratios, median, percentile
from pancake_langgraph.bench.vector_sets import Embed, VectorSet, by_turns, nearest
from pancake_langgraph.retrieval.base import Hit, Query, VectorEngine
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.scheduler import SearchScheduler

#: Searches, one after the other, that tell how many the engine can do.
_TRIALS: Final = 50
_P95: Final = 95.0


class LoadArm(StrEnum):
    """Names of the arms, in the order they are printed."""

    FIRST_COME = "first-come"
    PANCAKE = "pancake"


LOAD_ARM_TEXT: Final[Mapping[LoadArm, str]] = {
    LoadArm.FIRST_COME: "one queue, first come first served, each batch of the bulk job in one call of the engine",
    LoadArm.PANCAKE: (
        f"SearchScheduler, interactive before bulk, which is cut into pieces of {LaneSettings().bulk_chunk}"
    ),
}

Submit = Callable[[Sequence[Query]], "Future[list[list[Hit]]]"]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to run.

    In a repeat an arm answers `searches` that come at random times, as many a second as keep the engine busy for
    `load` of the time; the rest is for a bulk job, which asks `bulk_batch` queries, waits for them, and asks the next.
    """

    chunks: int = 100_000
    repeats: int = 5
    searches: int = 1_000
    load: float = 0.2
    bulk_batch: int = 256
    arms: tuple[LoadArm, ...] = tuple(LoadArm)
    corpus: Path | None = None
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if self.chunks < 500 or self.repeats < 1 or self.searches < 1 or self.bulk_batch < 1 or not self.arms:
            raise ConfigError(
                f"got {self.chunks} chunks, {self.repeats} repeats of {self.searches} searches, {self.bulk_batch} "
                f"queries a batch and {len(self.arms)} arms, allowed are 500 chunks or more, and 1 or more of the "
                "others"
            )
        if not 0 < self.load < 1:
            raise ConfigError(f"load: got {self.load}, allowed is between 0 and 1; take less for a slow engine")


@dataclass(frozen=True, slots=True)
class Queues:
    """Two ways to ask one engine; both return at once."""

    interactive: Submit
    bulk: Submit


@contextmanager
def opened_queues(arm: LoadArm, engine: VectorEngine) -> Iterator[Queues]:
    """Begin an arm's thread, which ends with the block."""
    if arm is LoadArm.PANCAKE:
        with SearchScheduler(engine) as scheduler:
            yield Queues(
                partial(scheduler.submit, priority=Priority.INTERACTIVE),
                partial(scheduler.submit, priority=Priority.BULK),
            )
        return
    with ThreadPoolExecutor(1, thread_name_prefix="first-come") as pool:

        def submit(queries: Sequence[Query]) -> Future[list[list[Hit]]]:
            return pool.submit(engine.search, queries)

        yield Queues(submit, submit)


def run_retrieval_load(plan: LoadPlan, on_progress: Progress, *, embed: Embed, open_engine: OpenEngine) -> BenchResult:
    """Run all arms over one index.

    Args:
        plan: What to run.
        on_progress: Told what happens, at least when something takes long.
        embed: The embedder of text.
        open_engine: Opens our engine in an empty folder, for vectors of a length.

    Raises:
        ConfigError: if there is too little text.
        RetrievalError: if our engine fails.
    """
    vectors = prepared_set(plan.chunks, plan.corpus, embed, on_progress)
    with (
        one_core() as core,
        scratch_folder(plan.folder) as folder,
        closing(open_engine(folder / "pancake", vectors.dim)) as engine,
    ):
        fill_engine(engine, vectors, on_progress)
        alone_s = _search_alone_s(engine, vectors)
        per_s = plan.load / alone_s
        samples = _run_arms(plan, vectors, engine, per_s, on_progress)
        facts = engine_facts(engine)
    return vector_result(
        "retrieval-load",
        plan.repeats,
        samples,
        pairs=[(LoadArm.FIRST_COME, LoadArm.PANCAKE)] if len(plan.arms) == len(LoadArm) else [],
        notes=_notes(plan, vectors, per_s, core),
        summary={
            "search_alone_p50_s": alone_s,
            "interactive_per_s": per_s,
            "bulk_batch": plan.bulk_batch,
            **interactive_p95(samples),
            "pancake_stats": facts,
            "source": vectors.source,
        },
    )


def interactive_p95(samples: Samples) -> dict[str, Any]:
    """Return the 95th percentile of `search_s` of each arm, and the spread of its ratio over the paired repeats."""
    found: dict[str, Any] = {
        "interactive_p95_s": {
            str(arm): percentile([value for row in metrics["search_s"] for value in row], _P95)
            for arm, metrics in samples.items()
        }
    }
    if set(LoadArm) <= set(samples):
        pairs = zip(*(samples[arm]["search_s"] for arm in LoadArm), strict=True)
        ratios = [percentile(first, _P95) / percentile(second, _P95) for first, second in pairs]
        found["interactive_p95 first-come/pancake"] = asdict(describe_ratios(ratios))
    return found


def _search_alone_s(engine: VectorEngine, vectors: VectorSet) -> float:
    """Return how long a search takes when nobody else is there, the first ones not counted."""
    queries = [Query(vector, limit=K) for vector in vectors.queries[:_TRIALS]]
    for query in queries:
        engine.search([query])
    taken_s: list[float] = []
    for query in queries:
        started_s = time.perf_counter()
        engine.search([query])
        taken_s.append(time.perf_counter() - started_s)
    return median(taken_s)


def _run_arms(plan: LoadPlan, vectors: VectorSet, engine: VectorEngine, per_s: float, on_progress: Progress) -> Samples:
    trace = by_turns(vectors, AGENTS, -(-plan.searches * plan.repeats // AGENTS), seed=5)
    truth = nearest(vectors.base, vectors.queries[trace], K, on_progress)
    samples: Samples = {arm: {} for arm in plan.arms}
    for repeat in range(plan.repeats):
        shift = repeat % len(plan.arms)
        places = range(repeat * plan.searches, (repeat + 1) * plan.searches)
        due_s = arrivals_s(plan.searches, per_s, seed=repeat)
        asked = [Query(vectors.queries[trace[place]], limit=K) for place in places]
        for arm in [*plan.arms[shift:], *plan.arms[:shift]]:
            on_progress(f"retrieval-load: repeat {repeat + 1} of {plan.repeats}, {arm}")
            with settled_heap(), opened_queues(arm, engine) as queues:
                job = BulkJob(queues.bulk, [Query(vector, limit=K) for vector in vectors.inserts], plan.bulk_batch)
                search_s, hits = ask_beside(job, queues.interactive, asked, due_s)
            figures = {
                "search_s": search_s,
                "recall": _recalls(hits, truth[places.start : places.stop]),
                "bulk_per_s": [job.per_s],
            }
            for metric, values in figures.items():
                samples[arm].setdefault(metric, []).append(values)
    return samples


def _recalls(hits: Sequence[Sequence[Hit]], truth: Neighbors) -> list[float]:
    return [recall([int(hit.item.id.key) for hit in found], rows) for found, rows in zip(hits, truth, strict=True)]


def arrivals_s(count: int, per_s: float, *, seed: int) -> list[float]:
    """Return the times, from 0 on, at which somebody asks: independent of each other, `per_s` on average."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(per_s) for _ in range(count)))


class BulkJob:
    """Asks a batch, waits for it and asks the next, round and round, from one thread until it is told to stop."""

    def __init__(self, submit: Submit, queries: Sequence[Query], batch: int) -> None:
        """Ask nothing yet."""
        self._submit, self._batch = submit, batch
        self._queries = itertools.cycle(queries)
        self._stop = threading.Event()
        self._begun = threading.Event()
        self.num_answered, self.wall_s = 0, 0.0

    @property
    def per_s(self) -> float:
        """Answers over the time from the first question to the last answer."""
        return self.num_answered / self.wall_s

    def work(self) -> None:
        """Do one batch at least, and others until `stop`."""
        started_s = time.perf_counter()
        try:
            while not (self._stop.is_set() and self.num_answered):
                waiting = self._submit(list(itertools.islice(self._queries, self._batch)))
                self._begun.set()
                self.num_answered += len(waiting.result())
        finally:
            self.wall_s = time.perf_counter() - started_s
            self._begun.set()  # whoever waits for it must not wait for one that failed

    def wait_begun(self) -> None:
        """Return when the first batch was asked."""
        self._begun.wait()

    def stop(self) -> None:
        """Have it end with the batch that it waits for."""
        self._stop.set()


def ask_beside(
    job: BulkJob, submit: Submit, queries: Sequence[Query], due_s: Sequence[float]
) -> tuple[list[float], list[list[Hit]]]:
    """Ask each query at its time, beside a bulk job; return how long each took, from when it was due, and its hits."""
    ended_s = [0.0] * len(queries)
    answered = threading.Semaphore(0)

    def note(place: int, _: object) -> None:
        ended_s[place] = time.perf_counter()
        answered.release()

    with ThreadPoolExecutor(1, thread_name_prefix="bulk-job") as pool:
        working = pool.submit(job.work)
        try:
            job.wait_begun()
            started_s = time.perf_counter()
            asked: list[Future[list[list[Hit]]]] = []
            for place, query in enumerate(queries):
                time.sleep(max(0.0, started_s + due_s[place] - time.perf_counter()))
                asked.append(submit((query,)))
                asked[-1].add_done_callback(partial(note, place))
            for _ in queries:
                answered.acquire()
        finally:
            job.stop()
        working.result()
    hits = [future.result()[0] for future in asked]
    return [end_s - started_s - at_s for end_s, at_s in zip(ended_s, due_s, strict=True)], hits


def _notes(plan: LoadPlan, vectors: VectorSet, per_s: float, core: int | None) -> tuple[str, ...]:
    pinned = "on one core that all threads were held on" if core is not None else "with one thread per library"
    return (
        *(f"{arm}: {LOAD_ARM_TEXT[arm]}." for arm in plan.arms),
        f"One engine in all arms, {pinned}, over {vectors.source}.",
        (
            f"Interactive searches come at random, {per_s:.0f} a second on average: what takes {plan.load:g} of the "
            "engine's time where each is asked alone."
        ),
        "search_s is that of interactive searches, from when each was due; one that is asked late counts from then.",
        f"The bulk job asks {plan.bulk_batch} queries at once, waits for all, and asks the next: it never pauses.",
        "Python's collector passes over what was there before an arm ran: a full pass would stop all threads.",
        "bulk_per_s counts its answers until its last one, which comes after the last interactive search.",
    )
