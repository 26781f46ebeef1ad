"""An engine that nobody closed: garbage collection and the end of the process end it as `close` does."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pancake_langgraph._errors import CorruptIndex
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine, verify
from tests.contract.index_kit import WAIT_S, flip, output_of, start
from tests.index_children import Unsynced, an_item, contents, small


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """Have nothing collected by chance."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def merging() -> list[threading.Thread]:
    """Return the threads that merge."""
    return [one for one in threading.enumerate() if one.name == "pancake-index-merge"]


def open_below(folder: Path) -> list[str]:
    """Return what this process has open below a folder."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was that of the listing
            found.append(os.readlink(entry))
    return [name for name in found if name.startswith(str(folder))]


def test_an_engine_that_is_dropped_lets_go_of_lock_files_and_threads(tmp_path: Path) -> None:
    engine = small(str(tmp_path), merge="background", flush_rows=4)
    for number in range(12):
        engine.put([an_item(f"a{number:02d}", number)])
    threads = merging()
    assert threads
    assert open_below(tmp_path)
    del engine
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert open_below(tmp_path) == []
    engine = small(str(tmp_path), flush_rows=1000)
    assert contents(engine) == {f"a{number:02d}": number for number in range(12)}
    engine.close()


def test_one_that_a_cycle_keeps_ends_when_the_index_is_opened_again(tmp_path: Path) -> None:
    def cell(number: int) -> None:
        engine = small(str(tmp_path), flush_rows=100)
        engine.put([an_item(f"a{number}", number)])
        held: list[Any] = [engine]
        held.append(held)

    for number in range(3):
        cell(number)
    engine = small(str(tmp_path), flush_rows=100)
    assert contents(engine) == {"a0": 0, "a1": 1, "a2": 2}
    engine.close()


class Held(Unsynced):
    """Waits at the first flush until it may go on."""

    def __init__(self) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def point(self, name: str) -> None:
        if name == "flush:frozen":
            self.reached.set()
            assert self.may_go_on.wait(WAIT_S)


def test_one_that_merges_when_it_is_dropped_is_waited_for(tmp_path: Path) -> None:
    disk = Held()
    engine = small(str(tmp_path), merge="background", flush_rows=2, disk=disk)
    for number in range(4):
        engine.put([an_item(f"a{number}", number)])
    assert disk.reached.wait(WAIT_S)
    del engine
    found: list[dict[str, int]] = []

    def open_again() -> None:
        again = small(str(tmp_path), flush_rows=100)
        found.append(contents(again))
        again.close()

    opening = threading.Thread(target=open_again)
    opening.start()
    assert found == []
    disk.may_go_on.set()
    opening.join(WAIT_S)
    assert found == [{f"a{number}": number for number in range(4)}]


def test_one_that_is_collected_in_its_own_merge_ends_there(tmp_path: Path) -> None:
    class Dropping(Unsynced):
        def point(self, name: str) -> None:
            if name == "merge:begun" or (name == "flush:frozen" and threading.current_thread() in merging()):
                assert may_drop.wait(WAIT_S)
                held.clear()

    may_drop = threading.Event()
    held: list[DiskVectorEngine] = [small(str(tmp_path), merge="background", flush_rows=2, disk=Dropping())]
    for number in range(4):
        held[0].put([an_item(f"a{number}", number)])
    [thread] = merging()
    may_drop.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    engine = small(str(tmp_path), flush_rows=100)
    assert contents(engine) == {f"a{number}": number for number in range(4)}
    engine.close()


def test_the_end_of_the_process_is_a_close(tmp_path: Path) -> None:
    assert output_of(start("forgetful", str(tmp_path))) == "put\n"
    assert verify(tmp_path) == []
    [log] = (tmp_path / "wal").iterdir()
    flip(log, -5)
    with pytest.raises(CorruptIndex, match=str(log)):
        small(str(tmp_path))
