"""An index on disk between processes and threads: one writer, many readers, forks, merges beside all of it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from pancake_langgraph._errors import IndexLocked, RetrievalError
from pancake_langgraph.retrieval.base import Query, View
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine
from tests.contract.index_kit import WAIT_S, output_of, start
from tests.index_children import Unsynced, an_id, an_item, contents, small, vector

READERS = [
    {"recall": "exact"},
    {"recall": "fast", "exact_rows": 1},
    {"recall": "balanced", "exact_rows": 3},
    {"on_corrupt": "skip"},
]


def test_four_readers_with_settings_of_their_own_see_whole_generations_of_a_busy_writer(tmp_path: Path) -> None:
    engine = small(str(tmp_path), flush_rows=30)
    processes = [start("reader", str(tmp_path), json.dumps(settings)) for settings in READERS]
    try:
        read_and_write(engine, processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        engine.close()


def read_and_write(engine: DiskVectorEngine, processes: list[subprocess.Popen[str]]) -> None:
    """Write generations until every reader has seen the last."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
    keys = [f"a{number}" for number in range(6)]
    for generation in range(150):
        engine.put([an_item(key, generation) for key in keys])
        engine.put([an_item(f"s{generation}", generation)])
        if generation % 10 == 9:
            engine.settle()
        if generation % 70 == 69:
            engine.compact()
    engine.put([an_item(key, 1000) for key in keys])
    for process in processes:
        assert "looked" in output_of(process)
    assert len(contents(engine)) == 156


def test_a_reader_sees_what_was_acknowledged_before_it_looks(tmp_path: Path) -> None:
    writer = small(str(tmp_path), flush_rows=4)
    reader = small(str(tmp_path), read_only=True)
    wanted: dict[str, int] = {}
    for number in range(40):
        key = f"{'as'[number % 2]}{number % 7}"
        if number % 9 == 8:
            writer.delete([an_id(key)])
            wanted.pop(key, None)
        else:
            writer.put([an_item(key, number)])
            wanted[key] = number
        if number % 11 == 10:
            writer.compact()
        assert contents(reader) == wanted
    writer.close()
    assert contents(reader) == wanted
    for call in (lambda: reader.put([an_item("x", 1)]), lambda: reader.delete([an_id("x")]), reader.compact):
        with pytest.raises(RetrievalError, match="read_only"):
            call()
    reader.close()


@pytest.mark.parametrize("at", ["the build", "the new log"])
def test_a_reader_follows_a_writer_whose_flushes_fail(tmp_path: Path, at: str) -> None:
    class NoFlush(Unsynced):
        def point(self, name: str) -> None:
            if name == "flush:frozen" and at == "the build":
                raise OSError(errno.ENOSPC, "No space left on device")

        def sync_folder(self, folder: Path) -> None:
            if folder.name == "wal" and wanted and at == "the new log":
                raise OSError(errno.ENOSPC, "No space left on device")

    wanted: dict[str, int] = {}
    writer = small(str(tmp_path), flush_rows=100, disk=NoFlush())
    reader = small(str(tmp_path), read_only=True)
    for number in range(6):
        writer.put([an_item(f"a{number}", number)])
        wanted[f"a{number}"] = number
        assert contents(reader) == wanted
        with pytest.raises(RetrievalError, match="no room"):
            writer.settle()
        assert contents(reader) == contents(writer) == wanted
    writer.close()
    writer = small(str(tmp_path), flush_rows=100)
    writer.compact()
    assert contents(reader) == contents(writer) == wanted
    writer.close()
    reader.close()


def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path: Path) -> None:
    engine = small(str(tmp_path))
    with pytest.raises(IndexLocked, match=rf"this very process \({os.getpid()}\) writes .* close\(\) it first"):
        small(str(tmp_path))
    said = output_of(start("try_to_write", str(tmp_path)))
    assert said.startswith("IndexLocked")
    assert f"process {os.getpid()} writes" in said
    engine.put([an_item("a", 1)])
    engine.close()
    assert output_of(start("try_to_write", str(tmp_path))) == "opened\n"


def test_a_forked_child_is_told_to_open_its_own_and_takes_no_lock_with_it(tmp_path: Path) -> None:
    engine = small(str(tmp_path))
    engine.put([an_item("a", 1)])
    reading, writing = os.pipe()
    holding, letting_go = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover -- the child's coverage is not collected
        os.close(letting_go)
        try:
            engine.put([an_item("b", 2)])
        except RetrievalError as error:
            os.write(writing, str(error).encode())
        engine.close()
        os.read(holding, 1)
        os._exit(0)
    try:
        assert f"opened by process {os.getpid()}" in os.read(reading, 10_000).decode()
        engine.put([an_item("c", 3)])
        assert contents(engine) == {"a": 1, "c": 3}
        engine.close()
        small(str(tmp_path)).close()  # the child still lives
    finally:
        os.close(letting_go)
        os.waitpid(child, 0)
        for fd in (reading, writing, holding):
            os.close(fd)


def test_eight_threads_write_delete_and_search_while_segments_are_flushed_and_merged(tmp_path: Path) -> None:
    engine = small(str(tmp_path), merge="background", flush_rows=20, coded_rows=40)
    faults: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                value = number * 1000 + turn
                engine.put([an_item(f"s{number}-{turn}", value)])
                if turn % 4 == 3:
                    assert engine.delete([an_id(f"s{number}-{turn - 1}")]) == 1
                for known in range(max(0, turn - 3), turn + 1):
                    there = known % 4 != 2 or known == turn
                    [hits] = engine.search([Query(vector(number * 1000 + known), View(), limit=1)])
                    assert (hits[0].item.value["n"] == number * 1000 + known) == there or known == turn - 1
                assert engine.get([an_id(f"s{number}-{turn}")])[0] is not None
        except BaseException as error:
            faults.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert faults == []
    wanted = {f"s{n}-{turn}": n * 1000 + turn for n in range(8) for turn in range(40) if turn % 4 != 2}
    assert contents(engine) == wanted
    engine.close()
    engine = small(str(tmp_path))
    assert contents(engine) == wanted
    engine.close()


def test_a_flush_is_begun_in_the_background_when_enough_waits(tmp_path: Path) -> None:
    engine = small(str(tmp_path), merge="background", flush_rows=10)
    for number in range(200):
        engine.put([an_item(f"s{number}", number)])
    done = threading.Event()
    for _ in range(WAIT_S * 20):
        if engine.stats().delta_vectors < 10:
            break
        done.wait(0.05)
    assert engine.stats().delta_vectors < 10
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pancake-index-merge"]
