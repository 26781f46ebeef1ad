"""What one would write first: partitions of whole vectors in a file, the last used ones in memory."""

from __future__ import annotations

import importlib
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PartitionCache:
    """Searches the `nprobe` nearest partitions, reading those that are not in an LRU cache of `max_bytes`.

    For one thread.
    """

    def __init__(self, index: Any, base: NDArray[np.float32], path: Path, max_bytes: int) -> None:
        """Write the partitions of a Faiss IVF index over `base` to `path`."""
        faiss = importlib.import_module("faiss")
        self._centers = index.quantizer.reconstruct_n(0, index.nlist)
        self._rows: list[NDArray[np.int64]] = []
        self._starts: list[int] = []
        self._dim, self._max_bytes, self._nprobe = base.shape[1], max_bytes, 32
        self._cached: OrderedDict[int, NDArray[np.float32]] = OrderedDict()
        self._bytes = 0
        start = 0
        with path.open("wb") as stream:
            for number in range(index.nlist):
                size = index.invlists.list_size(number)
                rows = (
                    faiss.rev_swig_ptr(index.invlists.get_ids(number), size).copy() if size else np.empty(0, np.int64)
                )
                stream.write(base[rows].tobytes())
                self._rows.append(rows)
                self._starts.append(start)
                start += size * self._dim * 4
            stream.flush()
            os.fsync(stream.fileno())
        self._file = os.open(path, os.O_RDONLY)

    def set_nprobe(self, nprobe: int) -> None:
        """Set how many partitions a search looks through."""
        self._nprobe = nprobe

    def search(self, vector: NDArray[np.float32], k: int) -> list[int]:
        """Return the rows of the best, best first."""
        near = np.argsort(-(self._centers @ vector))[: self._nprobe]
        scores = np.concatenate([self._partition(int(number)) @ vector for number in near])
        rows = np.concatenate([self._rows[int(number)] for number in near])
        return rows[np.argsort(-scores)[:k]].tolist()  # type: ignore[no-any-return] # numpy says Any

    def drop_pages(self) -> None:
        """Ask the system to forget what it has cached of the file; what is cached here stays."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _partition(self, number: int) -> NDArray[np.float32]:
        if (found := self._cached.get(number)) is not None:
            self._cached.move_to_end(number)
            return found
        size = len(self._rows[number]) * self._dim * 4
        read = np.frombuffer(os.pread(self._file, size, self._starts[number]), dtype=np.float32)
        partition = read.reshape(-1, self._dim)
        self._cached[number] = partition
        self._bytes += size
        while self._bytes > self._max_bytes and self._cached:
            _, dropped = self._cached.popitem(last=False)
            self._bytes -= dropped.nbytes
        return partition
