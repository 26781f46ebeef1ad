"""What every store promises about many that write, read and remove at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pancake_langgraph._errors import ThreadDeleted
from pancake_langgraph.checkpoint.rows import Removal, Spot, ThreadContent
from pancake_langgraph.checkpoint.sqlite_store import SqliteStore
from pancake_langgraph.checkpoint.store import StaleNeed, Store
from tests.contract.store_kit import (
    MakeStore,
    digest,
    is_empty,
    listed,
    put,
    put_writes,
    row,
    write,
)

# -- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_one_thread", [True, False])
def test_eight_writers_lose_nothing(store: Store, is_one_thread: bool) -> None:
    def work(number: int) -> None:
        thread_id = "t" if is_one_thread else f"t{number}"
        for step in range(50):
            checkpoint_id = f"{step:03}-{number}"
            put(store, thread_id, row(checkpoint_id, run_id=f"r{number}"), {digest(step): b"%d" % step})
            put_writes(store, thread_id, write(checkpoint_id, "task", 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    names = ["t"] if is_one_thread else [f"t{number}" for number in range(8)]
    assert sorted(store.threads()) == names
    every = {(f"{step:03}-{number}") for step in range(50) for number in range(8)}
    contents = [store.read_thread(name) for name in names]
    assert {each.spot.checkpoint_id for content in contents for each in content.rows} == every
    assert {each.spot.checkpoint_id for content in contents for each in content.writes} == every
    assert all(len(content.elements) == 50 for content in contents)
    assert [sorted(store.threads_of_run(f"r{number}")) for number in range(8)] == [
        ["t"] if is_one_thread else [f"t{number}"] for number in range(8)
    ]


def test_two_stores_write_to_one_thread(shared: MakeStore) -> None:
    stores = [shared(), shared()]

    def work(number: int) -> None:
        for step in range(50):
            put(stores[number], "t", row(f"{step:03}-{number}"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert len(listed(stores[0], "t", limit=1_000)) == 100


def test_stores_that_open_a_new_file_at_one_moment_wait_for_each_other(tmp_path: Path) -> None:
    for number in range(50):
        stores = [SqliteStore(str(tmp_path / f"{number}.db")) for _ in range(4)]
        together = threading.Barrier(len(stores))

        def write_first(each: int, stores: list[SqliteStore] = stores, together: threading.Barrier = together) -> None:
            together.wait()
            put(stores[each], "t", row(f"{each:03}"))

        with ThreadPoolExecutor(len(stores)) as pool:
            list(pool.map(write_first, range(len(stores))))
        assert len(listed(stores[0], "t")) == len(stores)
        for store in stores:
            store.close()


def window(number: int) -> list[bytes]:
    return [digest(each) for each in range(max(0, number - 9), number + 1)]


def test_a_reader_sees_old_or_new_and_never_half(store: Store) -> None:
    num_puts, done = 300, threading.Event()

    def write_all() -> None:
        try:
            for number in range(num_puts):
                needs = Spot("", f"{number - 1:05}") if number else None
                put(store, "t", row(f"{number:05}", body=b"%d" % number), {digest(number): b"e"}, needs=needs)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        last = -1
        while not done.is_set():
            latest = store.get_checkpoint("t", "", None)
            if latest is not None:
                number = int(latest.body)
                assert number >= last
                last = number
                assert set(store.get_elements("t", window(number))) == set(window(number))
            some = [int(each) for each in listed(store, "t", None, limit=20)]
            assert some == list(range(some[0], some[-1] - 1, -1)) if some else True
            content = store.read_thread("t")
            assert len(content.rows) == len(content.elements)
        writing.result()
    assert len(listed(store, "t", limit=1_000)) == num_puts


def test_rewrites_and_puts_at_once_lose_nothing(store: Store) -> None:
    """Every put leans on the one before; a rewriter keeps cutting the tail with the elements that only it needed."""
    done = threading.Event()

    def write_all() -> None:
        try:
            for number in range(150):
                new, needs = {digest(number): b"e"}, Spot("", f"{number - 1:05}") if number else None
                try:
                    put(store, "t", row(f"{number:05}", body=b"%d" % number), new, needs=needs)
                except StaleNeed:
                    every = dict.fromkeys(window(number), b"e")
                    put(store, "t", row(f"{number:05}", body=b"%d" % number), every)
        finally:
            done.set()

    def decide(content: ThreadContent) -> Removal:
        newest = max(each.spot.checkpoint_id for each in content.rows)
        gone = frozenset(each.spot for each in content.rows if each.spot.checkpoint_id != newest)
        return Removal(gone, frozenset(), frozenset(content.elements) - set(window(int(newest))))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        while not done.is_set():
            store.rewrite_thread("t", decide)
            latest = store.get_checkpoint("t", "", None)
            if latest is not None:
                found = store.read_thread("t")
                for each in found.rows:
                    assert set(window(int(each.body))) <= set(found.elements)
            done.wait(0.01)
        writing.result()
    store.rewrite_thread("t", decide)
    assert listed(store, "t") == ["00149"]
    assert set(store.get_elements("t", window(149))) == set(window(149))


def test_deleting_during_a_run_leaves_nothing(store: Store) -> None:
    started = threading.Event()

    def run() -> int:
        for number in range(1, 10_000):
            try:
                put(store, "t", row(f"{number:05}", f"{number - 1:05}" if number > 1 else None), {digest(number): b"e"})
                put_writes(store, "t", write(f"{number:05}", "task", 0))
            except ThreadDeleted:
                return number
            if number == 5:
                started.set()
        return -1

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        started.wait()
        store.delete_thread("t", deletion_id="99999")
        assert running.result() > 5
    assert is_empty(store, "t")
