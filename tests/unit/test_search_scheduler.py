"""Searches of many over one engine: batches, priorities, deadlines, errors, ends."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import pancake_langgraph
from pancake_langgraph._clock import VirtualClock
from pancake_langgraph._errors import InvalidQuery, RetrievalError, RetrievalOverloaded, RetrievalTimeout
from pancake_langgraph.retrieval.base import Hit, Query, VectorEngine
from pancake_langgraph.retrieval.lanes import LaneSettings, Priority
from pancake_langgraph.retrieval.scheduler import SearchScheduler
from tests.unit.retrieval_kit import SmallEngine, item, vector

LIMIT_S = 30.0


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine([item(n) for n in range(40)])


@pytest.fixture
def scheduler(engine: SmallEngine) -> Iterator[SearchScheduler]:
    with SearchScheduler(engine) as made:
        yield made
        engine.gate.set()


def test_an_idle_thread_ends_and_the_next_search_starts_another(
    scheduler: SearchScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pancake_langgraph.retrieval.worker._IDLE_S", 0.0)
    for _ in range(3):
        assert len(scheduler.search(query(1))) == 3
        thread = scheduler._worker._thread
        if thread is not None:
            thread.join(LIMIT_S)
        assert scheduler._worker._thread is None


def query(seed: int, limit: int = 3) -> Query:
    return Query(vector(seed), limit=limit)


def wrong() -> Query:
    return Query(vector(1, dim=3))


def keys(hits: list[Hit]) -> list[str]:
    return [hit.item.id.key for hit in hits]


def hold(engine: SmallEngine, scheduler: SearchScheduler) -> Future[Any]:
    """Keep the engine busy with one query until its gate is opened."""
    engine.gate.clear()
    busy = scheduler.submit([query(0)], priority=Priority.INTERACTIVE)
    assert engine.began.acquire(timeout=LIMIT_S)
    return busy


def sizes(engine: SmallEngine) -> list[int]:
    return [len(call) for call in engine.calls]


async def settled() -> None:
    """Let what was just started on this loop come as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


# -- batches --------------------------------------------------------------------------------------------------------


def test_the_small_engine_keeps_the_port() -> None:
    assert isinstance(SmallEngine(), VectorEngine)


def test_a_search_gives_what_the_engine_gives(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    assert keys(scheduler.search(query(7)))[0] == "7"
    assert [keys(hits)[0] for hits in scheduler.search_many([query(n) for n in range(40)])] == [
        str(n) for n in range(40)
    ]


def test_what_came_while_the_engine_was_busy_is_one_call(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    busy = hold(engine, scheduler)
    waiting = [scheduler.submit([query(n)], priority=Priority.INTERACTIVE) for n in range(70)]
    engine.gate.set()
    assert [keys(future.result(LIMIT_S)[0])[0] for future in waiting[:40]] == [str(n) for n in range(40)]
    waiting[-1].result(LIMIT_S)
    busy.result(LIMIT_S)
    assert sizes(engine) == [1, 64, 6]


def test_bulk_is_asked_in_chunks(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    assert len(scheduler.search_many([query(n) for n in range(100)])) == 100
    assert sizes(engine) == [32, 32, 32, 4]


def test_nothing_to_search_asks_nothing(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    assert scheduler.search_many([]) == []
    assert engine.calls == []


def test_interactive_queries_overtake_bulk(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.gate.clear()
    bulk = scheduler.submit([query(n) for n in range(320)])
    assert engine.began.acquire(timeout=LIMIT_S)
    urgent = scheduler.submit([query(1, limit=5)], priority=Priority.INTERACTIVE)
    draft = scheduler.submit([query(2, limit=6)], priority=Priority.PREFETCH)
    engine.gate.set()
    assert len(bulk.result(LIMIT_S)) == 320
    assert urgent.done()
    assert draft.done()
    assert sizes(engine) == [32, 1, 1, *[32] * 9]
    assert [call[0].limit for call in engine.calls[:3]] == [3, 5, 6]


def test_bulk_is_not_starved_by_queries_that_never_end(engine: SmallEngine) -> None:
    with SearchScheduler(engine, settings=LaneSettings(patience=4)) as scheduler:
        hold(engine, scheduler)
        bulk = scheduler.submit([query(1, limit=9)])
        finished = threading.Event()
        bulk.add_done_callback(lambda _: finished.set())

        def again(_: object) -> None:
            if not finished.is_set():
                following = scheduler.submit([query(0)] * 64, priority=Priority.INTERACTIVE)
                following.add_done_callback(again)

        for _ in range(2):  # one waits always
            again(None)
        engine.gate.set()
        assert bulk.result(LIMIT_S)
    position = [call[0].limit for call in engine.calls].index(9)
    assert position == 5  # after the one that was under way and four more


# -- loops and threads ----------------------------------------------------------------------------------------------


async def test_tasks_that_wait_together_are_answered_together(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    busy = hold(engine, scheduler)
    tasks = [asyncio.create_task(scheduler.asearch(query(n))) for n in range(20)]
    await settled()
    engine.gate.set()
    assert [keys(hits)[0] for hits in await asyncio.gather(*tasks)] == [str(n) for n in range(20)]
    assert sizes(engine) == [1, 20]
    busy.result(LIMIT_S)


def test_several_loops_and_threads_share_a_scheduler(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    async def ask(start: int) -> list[str]:
        found = await asyncio.gather(*(scheduler.asearch(query(n)) for n in range(start, start + 10)))
        return [keys(hits)[0] for hits in found]

    def in_a_loop(start: int) -> list[str]:
        return asyncio.run(ask(start))

    def in_a_thread(start: int) -> list[str]:
        return [keys(scheduler.search(query(n)))[0] for n in range(start, start + 10)]

    with ThreadPoolExecutor(8) as pool:
        starts = [0, 10, 20, 30]
        found = [*pool.map(in_a_loop, starts), *pool.map(in_a_thread, starts)]
    assert found == [[str(n) for n in range(start, start + 10)] for start in starts] * 2


async def test_many_are_awaited_in_their_order(scheduler: SearchScheduler) -> None:
    assert [keys(hits)[0] for hits in await scheduler.asearch_many([query(n) for n in range(40)])] == [
        str(n) for n in range(40)
    ]


def test_a_loop_that_ended_does_not_hurt_others(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.gate.clear()

    async def ask() -> None:
        task = asyncio.create_task(scheduler.asearch(query(1)))
        assert await asyncio.to_thread(engine.began.acquire, timeout=LIMIT_S)
        task.cancel()

    asyncio.run(ask())
    engine.gate.set()
    assert keys(scheduler.search(query(2)))[0] == "2"


# -- cancellation and deadlines -------------------------------------------------------------------------------------


async def test_a_cancelled_task_leaves_the_queue(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    busy = hold(engine, scheduler)
    gone = asyncio.create_task(scheduler.asearch(query(1, limit=7)))
    stays = asyncio.create_task(scheduler.asearch(query(2)))
    await settled()
    gone.cancel()
    await settled()
    assert scheduler.stats().queued_items == 1
    engine.gate.set()
    assert keys(await stays)[0] == "2"
    busy.result(LIMIT_S)
    assert [q.limit for call in engine.calls for q in call] == [3, 3]
    assert scheduler.stats().cancelled_jobs == 1


def test_the_rest_of_a_cancelled_bulk_job_is_not_done(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.gate.clear()
    bulk = scheduler.submit([query(n) for n in range(320)])
    assert engine.began.acquire(timeout=LIMIT_S)
    assert bulk.cancel()
    engine.gate.set()
    scheduler.search(query(1))
    with pytest.raises(CancelledError):
        bulk.result(LIMIT_S)
    assert sizes(engine) == [32, 1]


async def test_a_query_that_waits_too_long_raises_and_is_never_asked(
    engine: SmallEngine, scheduler: SearchScheduler
) -> None:
    busy = hold(engine, scheduler)
    with pytest.raises(RetrievalTimeout, match=r"within 0\.01 s"):
        await scheduler.asearch(query(1, limit=7), timeout_s=0.01)
    with pytest.raises(RetrievalTimeout, match=r"within 0\.02 s"):
        await asyncio.to_thread(scheduler.search, query(1, limit=8), timeout_s=0.02)
    engine.gate.set()
    busy.result(LIMIT_S)
    scheduler.search(query(2))
    assert [q.limit for call in engine.calls for q in call] == [3, 3]
    assert scheduler.stats().late_jobs == 2


def test_a_future_whose_deadline_passes_in_the_queue_fails(engine: SmallEngine) -> None:
    clock = VirtualClock()
    with SearchScheduler(engine, clock=clock) as scheduler:
        hold(engine, scheduler)
        late = scheduler.submit([query(1)], timeout_s=1.0)
        early = scheduler.submit([query(1)], timeout_s=9.0)
        clock.advance(2.0)
        engine.gate.set()
        assert early.result(LIMIT_S)
        with pytest.raises(RetrievalTimeout):
            late.result(LIMIT_S)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_wrong_query_fails_alone(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    busy = hold(engine, scheduler)
    good = [scheduler.submit([query(n)], priority=Priority.INTERACTIVE) for n in range(31)]
    bad = scheduler.submit([wrong()], priority=Priority.INTERACTIVE)
    more = [scheduler.submit([query(n)], priority=Priority.INTERACTIVE) for n in range(31)]
    engine.gate.set()
    for futures in (good, more):
        assert [keys(future.result(LIMIT_S)[0])[0] for future in futures] == [str(n) for n in range(31)]
    with pytest.raises(InvalidQuery, match="got \\(3,\\)"):
        bad.result(LIMIT_S)
    busy.result(LIMIT_S)
    assert len(engine.calls) <= 2 + 2 * 6  # halving, not one by one


def test_a_wrong_query_in_a_job_is_the_jobs_error_and_ends_it(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    with pytest.raises(InvalidQuery):
        scheduler.search_many([wrong(), *(query(n) for n in range(100))])
    asked = {id(q) for call in engine.calls for q in call}
    assert len(asked) == 32
    assert scheduler.stats().failed_jobs == 1


def test_a_query_that_breaks_the_engine_fails_alone(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.poison[9] = ZeroDivisionError("a bug")
    busy = hold(engine, scheduler)
    futures = [scheduler.submit([query(n)], priority=Priority.INTERACTIVE) for n in range(4)]
    bad = scheduler.submit([query(1, limit=9)], priority=Priority.INTERACTIVE)
    engine.gate.set()
    assert [keys(future.result(LIMIT_S)[0])[0] for future in futures] == list("0123")
    with pytest.raises(ZeroDivisionError):
        bad.result(LIMIT_S)
    busy.result(LIMIT_S)


def test_an_engine_that_fails_altogether_is_not_asked_for_each(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.poison[3] = RetrievalError("the disk is gone")
    engine.gate.clear()
    future = scheduler.submit([query(n) for n in range(64)], priority=Priority.INTERACTIVE)
    engine.gate.set()
    with pytest.raises(RetrievalError, match="disk is gone"):
        future.result(LIMIT_S)
    assert sizes(engine) == [64, 1, 1, 1, 1]


def test_the_thread_outlives_what_is_no_exception(engine: SmallEngine, scheduler: SearchScheduler) -> None:
    engine.poison[9] = SystemExit(1)
    with pytest.raises(SystemExit):
        scheduler.search(query(1, limit=9))
    assert scheduler.search(query(1))


def test_an_engine_that_answers_too_little_is_named(
    engine: SmallEngine, scheduler: SearchScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "search", lambda queries: [])
    with pytest.raises(RetrievalError, match="0 answers to 1 queries"):
        scheduler.search(query(1))


def test_too_much_is_refused_and_the_rest_still_done(engine: SmallEngine) -> None:
    with SearchScheduler(engine, settings=LaneSettings(max_queued=10)) as scheduler:
        busy = hold(engine, scheduler)
        waiting = scheduler.submit([query(n) for n in range(8)])
        with pytest.raises(RetrievalOverloaded, match="8 bulk items wait, 10 are allowed, got 3 more"):
            scheduler.submit([query(1)] * 3)
        urgent = scheduler.submit([query(1)] * 10, priority=Priority.INTERACTIVE)
        engine.gate.set()
        assert len(waiting.result(LIMIT_S)) == 8
        assert len(urgent.result(LIMIT_S)) == 10
        busy.result(LIMIT_S)
        assert scheduler.stats().refused_jobs == 1


# -- ends -----------------------------------------------------------------------------------------------------------


async def test_close_fails_what_waits_and_lets_the_running_search_finish(engine: SmallEngine) -> None:
    others = set(threading.enumerate())
    scheduler = SearchScheduler(engine)
    busy = hold(engine, scheduler)
    waiting = scheduler.submit([query(1)])
    task = asyncio.create_task(scheduler.asearch(query(1)))
    await settled()
    waiting.add_done_callback(lambda _: engine.gate.set())  # only when it was failed may the running one go on
    await asyncio.to_thread(scheduler.close)
    assert busy.result(0)
    for future in (waiting, asyncio.wrap_future(waiting), task):
        with pytest.raises(RetrievalError, match="closed"):
            future.result(0) if isinstance(future, Future) else await future
    with pytest.raises(RetrievalError, match="closed"):
        scheduler.search(query(1))
    scheduler.close()
    assert "pancake-search" not in {thread.name for thread in set(threading.enumerate()) - others}


def test_a_search_out_of_its_own_thread_is_refused_instead_of_hanging(
    engine: SmallEngine, scheduler: SearchScheduler
) -> None:
    found: Future[Any] = Future()
    hold(engine, scheduler)

    def ask_again(_: object) -> None:
        try:
            found.set_result(scheduler.search(query(1)))
        except RetrievalError as exc:
            found.set_exception(exc)

    scheduler.submit([query(1)]).add_done_callback(ask_again)
    engine.gate.set()
    with pytest.raises(RetrievalError, match="cannot wait for itself"):
        found.result(LIMIT_S)


FORKS = """
import os
import numpy as np
from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.base import Query
from pancake_langgraph.retrieval.scheduler import SearchScheduler

class Empty:
    def search(self, queries):
        return [[] for _ in queries]

query = Query(np.zeros(3, np.float32))
scheduler = SearchScheduler(Empty())
assert scheduler.search(query) == []
with scheduler._worker._changed:  # as if another thread held the lock at the fork
    pid = os.fork()
    if pid == 0:
        try:
            scheduler.search(query)
        except RetrievalError as exc:
            scheduler.close()
            os._exit(0 if "forked" in str(exc) else 2)
        os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
assert scheduler.search(query) == []
scheduler.close()
"""


def test_a_forked_process_is_told_so() -> None:
    root = Path(pancake_langgraph.__path__[0]).parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", FORKS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
