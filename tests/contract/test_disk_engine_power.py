"""What an index on disk holds after the power failed: only what was synced is left, whole files and names alike."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from pancake_langgraph.retrieval.disk import Disk
from pancake_langgraph.retrieval.disk_engine import verify
from tests.index_children import an_id, an_item, carry_out, contents, script, small

#: How often each point is looked at; the first and later ones, spread over the script.
LOOKS = (1, 2, 3, 5, 8, 13, 21, 34)


class VolatileDisk(Disk):
    """Remembers for each file what it held when it was last synced, and for each folder which names."""

    def __init__(self, root: Path) -> None:
        self._root, self._trash = root, root.parent / "trash"
        self._trash.mkdir()
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, int]] = {}
        self._seen: Counter[str] = Counter()
        self.acknowledged = 0
        self.cuts: list[tuple[str, int, Path]] = []

    def sync(self, fd: int) -> None:
        self._files[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def sync_folder(self, folder: Path) -> None:
        with os.scandir(folder) as entries:
            self._folders[folder.stat().st_ino] = {entry.name: entry.inode() for entry in entries}

    def rename(self, source: Path, target: Path) -> None:
        self.remove(target)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        # What is removed lives on elsewhere: otherwise its number could be given to another file.
        if path.exists():
            path.replace(self._trash / str(len(list(self._trash.iterdir()))))

    def point(self, name: str) -> None:
        self._seen[name] += 1
        if self._seen[name] in LOOKS:
            target = self._root.parent / f"cut-{len(self.cuts)}"
            self._restore(self._root.stat().st_ino, target)
            self.cuts.append((name, self.acknowledged, target))

    def _restore(self, folder: int, target: Path) -> None:
        """Write down what a folder would hold after a cut."""
        target.mkdir()
        for name, inode in self._folders.get(folder, {}).items():
            if inode in self._folders or name in ("seg", "wal", "dead"):
                self._restore(inode, target / name)
            else:
                (target / name).write_bytes(self._files.get(inode, b""))


@pytest.mark.parametrize("ack", ["group", "sync"])
def test_a_power_cut_at_any_step_loses_nothing_acknowledged(tmp_path: Path, ack: str) -> None:
    root = tmp_path / "index"
    disk = VolatileDisk(root)
    engine = small(str(root), disk=disk, ack=ack)
    for number, (kind, keys) in enumerate(script()):
        if kind == "put":
            engine.put([an_item(key, number) for key in keys])
        elif kind == "delete":
            engine.delete([an_id(key) for key in keys])
        elif kind == "settle":
            engine.settle()
        else:
            engine.compact()
        disk.acknowledged = number + 1
    engine.close()
    states = carry_out(script())
    assert len(disk.cuts) > 60
    for point, acknowledged, path in disk.cuts:
        after = small(str(path))
        found = contents(after)
        assert found in (states[acknowledged], states[min(acknowledged + 1, len(states) - 1)]), point
        assert verify(path) == [], point
        after.compact()
        after.close()


def test_without_waiting_for_the_device_a_power_cut_leaves_some_earlier_state_whole(tmp_path: Path) -> None:
    class Busy(VolatileDisk):
        """Writes while a segment is built."""

        def point(self, name: str) -> None:
            super().point(name)
            if name in ("build:begun", "flush:frozen", "merge:begun"):
                write()

    def write() -> None:
        written.append(len(written))
        engine.put([an_item(f"k{written[-1]:03d}", written[-1]), an_item("z", written[-1])])

    written: list[int] = []
    disk = Busy(tmp_path / "index")
    engine = small(str(tmp_path / "index"), disk=disk, ack="none", flush_rows=1000)
    for turn in range(12):
        for _ in range(3):
            write()
        engine.settle()
        if turn % 5 == 4:
            engine.compact()
    engine.close()
    assert len(disk.cuts) > 60
    for point, _, path in disk.cuts:
        after = small(str(path), flush_rows=1000)
        found = contents(after)
        last = found.pop("z", -1)
        assert found == {f"k{number:03d}": number for number in range(last + 1)}, point
        after.close()
