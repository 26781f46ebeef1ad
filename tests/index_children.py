"""Programs that the tests of the index on disk start as processes of their own.

Usage: python index_children.py PROGRAM [MORE]
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.base import Item, ItemId, Query, View
from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.disk_engine import DiskVectorEngine

DIM = 8
Contents = dict[str, int]


def vector(number: int) -> Any:
    """Return a direction of its own for each number."""
    drawn = np.random.default_rng(number).standard_normal(DIM).astype(np.float32)
    return drawn / np.linalg.norm(drawn)


def an_item(key: str, number: int) -> Item:
    """Return an item in one of two namespaces; its value and vector say its number."""
    at = ("own",) if key < "g" else ("shared", "x")
    return Item(ItemId(at, key), {"n": number, "text": "word " * 20}, (vector(number),), 1.0, float(number))


def an_id(key: str) -> ItemId:
    """Return the id of `an_item`."""
    return an_item(key, 0).id


# -- the script that is killed --------------------------------------------------------------------------------------

Step = tuple[str, tuple[str, ...]]


def script() -> list[Step]:
    """Return what the killed writer does: puts, replacements, deletions, flushes, merges."""
    steps: list[Step] = []
    letters = "abcdefghijklmnopqrst"
    for turn in range(12):
        steps.append(("put", tuple(letters[(turn * 3 + at) % 20] for at in range(3))))
        if turn % 3 == 2:
            steps.append(("delete", (letters[(turn * 2) % 20], letters[(turn * 3) % 20])))
        if turn % 4 == 3:
            steps.append(("settle", ()))
    return [*steps, ("compact", ()), ("put", ("a", "z")), ("settle", ())]


def carry_out(steps: list[Step], done: Contents | None = None) -> list[Contents]:
    """Return what is stored before the first step and after each."""
    now = dict(done or {})
    found = [dict(now)]
    for number, (kind, keys) in enumerate(steps):
        if kind == "put":
            now |= dict.fromkeys(keys, number)
        elif kind == "delete":
            for key in keys:
                now.pop(key, None)
        found.append(dict(now))
    return found


def contents(engine: DiskVectorEngine) -> Contents:
    """Return what is stored, and check that each item is found by its own vector."""
    found = {item.id.key: item.value["n"] for item in engine.items(View())}
    for key, number in found.items():
        [hits] = engine.search([Query(vector(number), View(), limit=30)])
        assert key in {hit.item.id.key for hit in hits if hit.score > 0.999}, f"{key} is not found"
        [item] = engine.get([an_id(key)])
        assert item is not None
        assert np.array_equal(item.vectors[0], vector(number)), f"{key} has another vector"
    assert engine.stats().num_items == engine.stats().num_vectors == len(found)
    return found


class Unsynced(Disk):
    """Does not wait for the device: a killed process loses nothing of what the system has."""

    def sync(self, fd: int) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class KillingDisk(Unsynced):
    """Ends the process without warning when a point is reached for the nth time; `half` is in the middle of a write."""

    def __init__(self, point: str, nth: int) -> None:
        self._point, self._left = point, nth

    def point(self, name: str) -> None:
        if name == self._point:
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)

    def append(self, fd: int, data: Any, offset: int) -> None:
        view = memoryview(data).cast("B")
        if self._point == "half" and self._left == 1:
            super().append(fd, view[: len(view) // 2], offset)
        self.point("half")
        super().append(fd, view, offset)


def small(path: str, **options: Any) -> DiskVectorEngine:
    """Open an index whose segments are so small that a few items make several."""
    defaults: dict[str, Any] = {"merge": "manual", "flush_rows": 6, "coded_rows": 8, "codes": "sq8"}
    defaults["disk"] = Unsynced()
    return DiskVectorEngine(path, **{"dim": DIM, **defaults, **options})


def killed_writer(path: str, point: str, nth: int) -> None:
    """Carry out the script, writing down each step that was acknowledged, until it ends or is killed."""
    acks = os.open(f"{path}.acks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    engine = small(path, disk=KillingDisk(point, nth))
    for number, (kind, keys) in enumerate(script()):
        if kind == "put":
            engine.put([an_item(key, number) for key in keys])
        elif kind == "delete":
            engine.delete([an_id(key) for key in keys])
        elif kind == "settle":
            engine.settle()
        else:
            engine.compact()
        os.write(acks, b".")
    engine.close()


def kills() -> None:
    """Run a killed writer for each line `[path, point, nth]`, in a fork each, and say how it ended."""
    for line in sys.stdin:
        path, point, nth = json.loads(line)
        child = os.fork()
        if child == 0:
            killed_writer(path, point, nth)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(json.dumps(-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)), flush=True)


# -- readers and writers --------------------------------------------------------------------------------------------


def reader(path: str, settings: str) -> None:
    """Read until the writer's last generation is seen; each look has to show one generation, whole."""
    engine = DiskVectorEngine(path, read_only=True, **json.loads(settings))
    print("ready", flush=True)
    seen = -1
    looks = 0
    while True:
        looks += 1
        found = [item.value["n"] for item in engine.items(View((("own",),)))]
        assert len(found) in (0, 6), f"torn: {found}"
        assert len(set(found)) <= 1, f"torn: {found}"
        if not found:
            continue
        assert found[0] >= seen, f"went back from {seen} to {found[0]}"
        seen = found[0]
        [hits] = engine.search([Query(vector(seen), View((("own",),)), limit=6)])
        assert len(hits) == 6, f"got {len(hits)} hits"
        if seen >= 1000:
            break
    engine.close()
    print(f"looked {looks} times", flush=True)


def fill(path: str, limit: str) -> None:
    """Write until files may grow no more, and say what was acknowledged and what the trouble was."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    engine = small(path, flush_rows=10_000, ack="none")
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    acknowledged = 0
    try:
        for number in range(10_000):
            engine.put([an_item(f"k{number:05d}", number)])
            acknowledged += 1
    except RetrievalError as error:
        print(json.dumps([acknowledged, str(error)]), flush=True)


def try_to_write(path: str) -> None:
    """Open an index for writing and say what the trouble was."""
    try:
        small(path).close()
    except RetrievalError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    else:
        print("opened", flush=True)


def forgetful(path: str) -> None:
    """Write, and end without closing."""
    global _kept
    _kept = small(path, flush_rows=100)
    _kept.put([an_item("a", 1)])
    print("put", flush=True)


_kept: DiskVectorEngine | None = None


if __name__ == "__main__":
    programs: dict[str, Callable[..., None]] = {
        program.__name__: program for program in (kills, reader, fill, try_to_write, forgetful)
    }
    programs[sys.argv[1]](*sys.argv[2:])
