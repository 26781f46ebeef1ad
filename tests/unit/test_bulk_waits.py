"""Imports wait for room in a full queue; whoever somebody waits for is told at once that there is none."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from langgraph.store.base import PutOp

from pancake_langgraph import PancakeStore, PancakeVectorStore
from pancake_langgraph._errors import RetrievalError, RetrievalOverloaded, RetrievalTimeout
from pancake_langgraph.retrieval.embedding import BatchedEmbeddings
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.worker import BatchWorker
from tests.embedders import WordEmbedder

LIMIT_S = 30.0
BULK = Priority.BULK
SMALL = LaneSettings(max_batch=4, bulk_chunk=4, max_queued=6)


class Work:
    """Gives items back; waits for its gate, and remembers what it was given."""

    def __init__(self) -> None:
        self.served: list[int] = []
        self.began, self.gate = threading.Semaphore(0), threading.Event()

    def __call__(self, batch: Sequence[int]) -> list[int]:
        self.served += batch
        self.began.release()
        assert self.gate.wait(LIMIT_S)
        return list(batch)


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def worker(work: Work) -> Iterator[BatchWorker[int, int]]:
    """A worker that is busy with item 0 and has a full lane for bulk, until the gate is opened."""
    with BatchWorker[int, int]("test", work, settings=SMALL) as made:
        made.submit([0], priority=Priority.INTERACTIVE)
        assert work.began.acquire(timeout=LIMIT_S)
        made.submit([1, 2, 3, 4, 5, 6], priority=BULK)
        yield made
        work.gate.set()


def until(is_so: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


def test_bulk_waits_for_room_and_is_done_in_the_order_it_came(worker: BatchWorker[int, int], work: Work) -> None:
    jobs = [[10 * number + at for at in range(5)] for number in range(1, 5)]
    with ThreadPoolExecutor(len(jobs)) as callers:
        waiting: list[Future[list[int]]] = []
        for number, job in enumerate(jobs):
            waiting.append(callers.submit(worker.run, job, priority=BULK))
            until(lambda: worker.stats().queued_items == 6 + 5 * (number + 1))  # noqa: B023 - used at once
        assert work.served == [0]
        work.gate.set()
        assert [one.result(LIMIT_S) for one in waiting] == jobs
    assert [item for item in work.served if item % 10 == 0] == [0, 10, 20, 30, 40]
    assert sorted(work.served) == sorted([*range(7), *(item for job in jobs for item in job)])
    stats = worker.stats()
    assert (stats.refused_jobs, stats.finished_jobs, stats.queued_items) == (0, 6, 0)


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.PREFETCH])
async def test_what_is_urgent_is_refused_in_a_full_lane(
    worker: BatchWorker[int, int], work: Work, priority: Priority
) -> None:
    worker.submit(range(100, 106), priority=priority)
    with pytest.raises(RetrievalOverloaded, match="6 are allowed"):
        worker.run([7], priority=priority)
    with pytest.raises(RetrievalOverloaded, match="6 are allowed"):
        await worker.arun([7], priority=priority)
    with pytest.raises(RetrievalOverloaded, match="6 bulk items wait"):
        worker.submit([7], priority=BULK)  # nobody waits for it, so that it would only pile up
    assert worker.stats().refused_jobs == 3


async def test_tasks_wait_for_room_as_threads_do(worker: BatchWorker[int, int], work: Work) -> None:
    tasks = [asyncio.create_task(worker.arun([10 + number], priority=BULK)) for number in range(20)]
    await asyncio.sleep(0)
    assert worker.stats().queued_items == 26
    work.gate.set()
    assert await asyncio.gather(*tasks) == [[10 + number] for number in range(20)]
    assert work.served[-20:] == list(range(10, 30))


async def test_who_waits_for_room_waits_as_long_as_it_says(worker: BatchWorker[int, int], work: Work) -> None:
    with pytest.raises(RetrievalTimeout):
        await worker.arun([50], priority=BULK, timeout_s=0.01)
    with pytest.raises(RetrievalTimeout):
        await asyncio.to_thread(worker.run, [51], priority=BULK, timeout_s=0.01)
    task = asyncio.create_task(worker.arun([52], priority=BULK))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: worker.stats().queued_items == 6)
    kept = asyncio.create_task(worker.arun([53], priority=BULK, timeout_s=LIMIT_S))
    await asyncio.sleep(0)
    work.gate.set()
    assert await kept == [53]
    assert not {50, 51, 52} & set(work.served)
    stats = worker.stats()
    assert (stats.late_jobs, stats.cancelled_jobs) == (2, 1)


async def test_who_waits_for_room_hears_of_the_end(worker: BatchWorker[int, int], work: Work) -> None:
    task = asyncio.create_task(worker.arun([50], priority=BULK))
    with ThreadPoolExecutor(1) as callers:
        waiting = callers.submit(worker.run, [51], priority=BULK)
        until(lambda: worker.stats().queued_items == 7)
        await asyncio.sleep(0)
        until(lambda: worker.stats().queued_items == 8)
        closing = asyncio.create_task(asyncio.to_thread(worker.close))
        with pytest.raises(RetrievalError, match="closed"):
            await asyncio.wait_for(task, LIMIT_S)
        work.gate.set()
        with pytest.raises(RetrievalError, match="closed"):
            waiting.result(LIMIT_S)
    await closing
    assert work.served == [0]


def test_imports_side_by_side_fit_through_a_small_queue() -> None:
    gate, began = threading.Event(), threading.Semaphore(0)

    class Slow(WordEmbedder):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            began.release()
            assert gate.wait(LIMIT_S)
            return super().embed_documents(texts)

    settings = LaneSettings(max_queued=50)
    with BatchedEmbeddings(Slow(), settings=settings, dim=16) as embeddings, ThreadPoolExecutor(8) as callers:
        documents = PancakeVectorStore(embeddings, fingerprint="one")
        memory = PancakeStore(index={"dims": 16, "embed": embeddings, "fields": ["text"]}, fingerprint="one")

        def write(number: int) -> int:
            texts = [f"text {at} of import {number}" for at in range(40)]
            if number % 2:
                return len(documents.add_texts(texts))
            puts = [PutOp(("notes",), f"{number}-{at}", {"text": text}) for at, text in enumerate(texts)]
            return len(memory.batch(puts))

        waiting = [callers.submit(write, number) for number in range(8)]
        assert began.acquire(timeout=LIMIT_S)
        until(lambda: embeddings.stats().worker.queued_items == 8 * 40 - 32)
        gate.set()
        assert [one.result(LIMIT_S) for one in waiting] == [40] * 8
        assert embeddings.stats().worker.refused_jobs == 0
        assert len(memory.search(("notes",), limit=1000)) == 160
        documents.close()
        memory.close()
