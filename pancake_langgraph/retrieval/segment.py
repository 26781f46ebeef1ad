"""An immutable segment: vectors, documents and codes of items that were flushed or merged together.

Its files are never changed.  They may be removed while it is open: what is open stays readable until it is let go.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from pancake_langgraph._errors import CorruptIndex, RetrievalError
from pancake_langgraph.retrieval.base import ItemId, Namespace
from pancake_langgraph.retrieval.disk import checksum_of
from pancake_langgraph.retrieval.faiss_codes import Codes, load
from pancake_langgraph.retrieval.manifest import REPAIR, SEGMENTS, SegmentEntry
from pancake_langgraph.retrieval.masks import MaskCache, ViewMask
from pancake_langgraph.retrieval.segment_files import (
    CHECKED_IN_PARTS,
    CODES,
    DOC_OFFSETS,
    DOCS,
    EXPIRES,
    HASH_ITEMS,
    HASHES,
    ITEM_NAMESPACES,
    ITEM_ROW_STARTS,
    ITEM_ROWS,
    NAMESPACES,
    RAW,
    ROW_ITEMS,
    SUMS,
    UPDATED,
    Document,
    is_whole,
    let_go,
    mapped,
    num_faults,
    opened,
    row_sums,
)

Ordinals = NDArray[np.int64]
Floats = NDArray[np.float32]
#: Rows further apart than this are read on their own.
_GAP: Final = 8
#: A row that takes longer than this was not in the page cache; so many are read to see that.
_WARM_S: Final = 10e-6
_TRIED_ROWS: Final = 4
_MAX_RANGES: Final = 64
_READ_AHEAD: Final = 1 << 16
#: The vectors of segments up to this size are copied from the mapped file once they were read, which saves a call of
#: the system for each.  What is mapped counts as the process's own memory, so that of larger ones it is left out.
MAPPED_BYTES: Final = 256 << 20


def hash_of(item_id: ItemId) -> int:
    """Return the hash by which an id is looked up; different ids may share one."""
    # No label has this byte in UTF-8, so that none can pass for the end of another.
    labels = [label.encode("utf-8", "surrogatepass") for label in (*item_id.namespace, item_id.key)]
    return xxhash.xxh3_64_intdigest(b"\xff".join(labels))


class DamagedPart(CorruptIndex):
    """Some items of a segment are not what was written; the segment and the items' numbers in it are known."""

    def __init__(self, what: str, segment: str, ordinals: Ordinals) -> None:
        """Say what is damaged."""
        super().__init__(f"{what} is damaged; {REPAIR}")
        self.segment, self.ordinals = segment, ordinals


class Segment:
    """Reads one segment.  Thread-safe."""

    def __init__(self, root: Path, entry: SegmentEntry, dim: int) -> None:
        """Open all files, and check those that are not checked part by part.

        Raises:
            CorruptIndex: if a file is not what was written; the message names it.
            FileNotFoundError: if the segment is gone.
        """
        self.entry, self.dim = entry, dim
        self.folder = root / SEGMENTS / entry.name
        self._names = {mark.name for mark in entry.files}
        self._check()
        self.namespaces: list[Namespace] = msgspec.json.decode(
            (self.folder / NAMESPACES).read_bytes(), type=list[tuple[str, ...]]
        )
        self.item_namespaces: NDArray[np.int32] = mapped(self.folder / ITEM_NAMESPACES)
        self.updated: NDArray[np.float64] = mapped(self.folder / UPDATED)
        self.expires: NDArray[np.float64] | None = self._optional(EXPIRES)
        self.hashes: NDArray[np.uint64] = mapped(self.folder / HASHES)
        self.hash_items: NDArray[np.int32] = mapped(self.folder / HASH_ITEMS)
        self.doc_offsets: NDArray[np.uint64] = mapped(self.folder / DOC_OFFSETS)
        self.raw: Floats = mapped(self.folder / RAW, dim)
        self._sums: NDArray[np.uint32] = mapped(self.folder / SUMS)
        self._seen = np.zeros(len(self.raw), np.bool_)
        #: Rows that were in the page cache when they were looked at last; none where vectors are always read.
        self._near = np.zeros(len(self.raw) if self.raw.nbytes <= MAPPED_BYTES else 0, np.bool_)
        #: The item of each row, where that is not the row's own number.
        self.row_items: NDArray[np.int32] | None = self._optional(ROW_ITEMS)
        self._item_rows = self._optional(ITEM_ROWS)
        self._item_row_starts = self._optional(ITEM_ROW_STARTS)
        self.codes: Codes | None = load(self.folder / CODES) if CODES in self._names else None
        self.masks: MaskCache[ViewMask] = MaskCache()
        self.ignored: set[int] = set()
        self._raw_fd, self._docs_fd = self._open(RAW), self._open(DOCS)

    def _open(self, name: str) -> int:
        fd = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        return fd

    def _optional(self, name: str) -> Any:
        return mapped(self.folder / name) if name in self._names else None

    def _check(self) -> None:
        for mark in self.entry.files:
            path = self.folder / mark.name
            size = path.stat().st_size
            if size != mark.size:
                raise CorruptIndex(f"{path}: got {size} bytes, written were {mark.size}; {REPAIR}")
            if mark.name not in CHECKED_IN_PARTS and checksum_of(path) != mark.checksum:
                raise CorruptIndex(f"{path}: its checksum does not fit; {REPAIR}")

    def ignore(self, ordinals: Ordinals) -> None:
        """Do not complain about damaged items any more: they are dead in every view from now on."""
        self.ignored.update(ordinals.tolist())
        self._seen[self.rows_of_all(ordinals)] = True

    # -- ids ------------------------------------------------------------------------------------------------------

    def candidates(self, hashed: int) -> Ordinals:
        """Return the items whose id has a hash."""
        wanted = np.uint64(hashed)
        first = int(np.searchsorted(self.hashes, wanted))
        last = first
        while last < len(self.hashes) and self.hashes[last] == wanted:
            last += 1
        return self.hash_items[first:last].astype(np.int64)

    def which_may_hold(self, hashes: NDArray[np.uint64]) -> Ordinals:
        """Return which of some hashes belong to ids of items."""
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.flatnonzero(self.hashes[places] == hashes)

    def all_candidates(self, hashes: NDArray[np.uint64]) -> Ordinals:
        """Return the items whose ids have one of some hashes, and perhaps some of other ids."""
        left = np.searchsorted(self.hashes, hashes)
        right = np.searchsorted(self.hashes, hashes, side="right")
        found = [np.arange(first, last) for first, last in zip(left, right, strict=True) if last > first]
        return self.hash_items[np.concatenate(found)].astype(np.int64) if found else np.empty(0, np.int64)

    def namespace_of(self, ordinal: int) -> Namespace:
        """Return the namespace of an item."""
        namespace: Namespace = self.namespaces[self.item_namespaces[ordinal]]
        return namespace

    # -- documents ------------------------------------------------------------------------------------------------

    def document(self, ordinal: int) -> Document:
        """Read an item's document.

        Raises:
            DamagedPart: if it is damaged; file and place are named.
        """
        return opened(self.sealed_document(ordinal))

    def sealed_document(self, ordinal: int) -> bytes:
        """Read a document as it stands in the file, and check it.

        Raises:
            DamagedPart: if it is damaged; file and place are named.
        """
        start, end = int(self.doc_offsets[ordinal]), int(self.doc_offsets[ordinal + 1])
        try:
            data = os.pread(self._docs_fd, end - start, start)
        except OSError as error:
            raise RetrievalError(f"{self.folder / DOCS}: {error.strerror} at byte {start}") from error
        if not is_whole(data):
            where = f"{self.folder / DOCS}: the document at byte {start}"
            raise DamagedPart(where, self.entry.name, np.array([ordinal]))
        return data

    def announce_documents(self, ordinals: Sequence[int]) -> None:
        """Ask the system to read documents soon."""
        for ordinal in ordinals:
            start, end = int(self.doc_offsets[ordinal]), int(self.doc_offsets[ordinal + 1])
            os.posix_fadvise(self._docs_fd, start, end - start, os.POSIX_FADV_WILLNEED)

    # -- vectors --------------------------------------------------------------------------------------------------

    def rows_of(self, ordinal: int) -> Ordinals:
        """Return the rows of an item."""
        if self._item_rows is None:
            return np.arange(ordinal, ordinal + 1 if ordinal < len(self.raw) else ordinal)
        first, last = self._item_row_starts[ordinal : ordinal + 2]
        rows: Ordinals = self._item_rows[int(first) : int(last)].astype(np.int64)
        return rows

    def rows_of_all(self, ordinals: Ordinals) -> Ordinals:
        """Return the rows of some items, in no order."""
        if self._item_rows is None:
            return ordinals[ordinals < len(self.raw)]
        return np.concatenate([np.empty(0, np.int64), *(self.rows_of(int(one)) for one in ordinals)])

    def vectors(self, rows: Ordinals) -> Floats:
        """Copy scattered rows, and check them.

        They are read by exact ranges, those that follow each other as one; rows of a small segment that were read
        before are taken from the mapped file.

        Raises:
            DamagedPart: if one is damaged or cut off; file and row are named.
        """
        if not len(self._near):
            block = self._read(rows)
        elif (near := self._near[rows]).all():
            block = self._taken(rows)
        else:
            block, far = np.empty((len(rows), self.dim), np.float32), rows[~near]
            block[near], block[~near] = self._taken(rows[near]), self._read(far)
            self._near[far] = True
        self._verify(block, rows)
        return block

    def _taken(self, rows: Ordinals) -> Floats:
        """Copy rows that should be in the page cache; where the first are not, read them all."""
        if os.fstat(self._raw_fd).st_size < self.raw.nbytes:
            return self._read(rows)  # which says so: to touch what is missing would end the process
        faults = num_faults()
        block: Floats = self.raw[rows[:_TRIED_ROWS]]
        block = self.raw[rows] if num_faults() == faults else self._read(rows)
        if num_faults() > faults:
            self._near[rows] = False
        return block

    def _read(self, rows: Ordinals) -> Floats:
        """Read rows by exact ranges; where the first do not come from the page cache, the others are announced."""
        block = np.empty((len(rows), self.dim), np.float32)
        size, at = self.dim * 4, 0
        started_s = time.perf_counter()
        try:
            for run in _runs(rows):
                first, at = at, run
                got = os.preadv(self._raw_fd, [block[first:at].data], int(rows[first]) * size)
                if got < (at - first) * size:
                    end = min(os.fstat(self._raw_fd).st_size // size, int(rows[first]) + got // size)
                    raise self._damaged(np.arange(end, len(self.raw)))
                if first <= _TRIED_ROWS < at and time.perf_counter() - started_s > at * _WARM_S:
                    self.announce(rows[at:])  # they come from the device: let it read them side by side
        except OSError as error:
            raise RetrievalError(f"{self.folder / RAW}: {error.strerror}") from error
        return block

    def gathered(self, rows: Ordinals) -> Floats:
        """Copy rows out of the mapped file, and check them: for many rows that lie close together.

        Raises:
            DamagedPart: if one is damaged.
        """
        self.announce(rows[~self._seen[rows]])
        block: Floats = self.raw[rows]
        self._verify(block, rows)
        return block

    def announce(self, rows: Ordinals) -> int:
        """Ask the system to read rows soon; return their bytes."""
        size = self.dim * 4
        for first, last in _ranges(rows, 0) if len(rows) else ():
            os.posix_fadvise(self._raw_fd, first * size, (last - first) * size, os.POSIX_FADV_WILLNEED)
        return len(rows) * size

    def read_through(self, rows: Ordinals) -> int:
        """Read ascending rows into the system's page cache and return their bytes; damage is not looked for.

        Raises:
            RetrievalError: if the device fails.
        """
        size = self.dim * 4
        self.announce(rows)
        scratch = bytearray(_READ_AHEAD)
        try:
            for first, last in _ranges(rows, 0) if len(rows) else ():
                for at in range(first * size, last * size, len(scratch)):
                    os.preadv(self._raw_fd, [memoryview(scratch)[: min(len(scratch), last * size - at)]], at)
        except OSError as error:
            raise RetrievalError(f"{self.folder / RAW}: {error.strerror}") from error
        return len(rows) * size

    def forget(self, rows: Ordinals) -> None:
        """Tell the system that ascending rows need not be kept in memory."""
        size = self.dim * 4
        if len(self._near):
            self._near[rows] = False
        for first, last in _ranges(rows, 0) if len(rows) else ():
            let_go(self.raw, first * size, last * size)
            os.posix_fadvise(self._raw_fd, first * size, (last - first) * size, os.POSIX_FADV_DONTNEED)

    def scanned(self, rows: Ordinals | None) -> tuple[Floats, Ordinals | None]:
        """Return vectors that hold `rows` (ascending; `None` for all), and where in them the rows are.

        Neighbors are looked at where they lie; scattered rows are copied.

        Raises:
            DamagedPart: if one is damaged.
        """
        if rows is None:
            first, last = 0, len(self.raw)
        elif not len(rows):
            return np.empty((0, self.dim), np.float32), None
        else:
            first, last = int(rows[0]), int(rows[-1]) + 1
        if rows is None or (last - first) <= 2 * len(rows):
            self._read_ahead(first, last)
            block = self.raw[first:last]
            self._verify(block, slice(first, last))
            return block, None if rows is None or len(rows) == last - first else rows - first
        ranges = _ranges(rows, _GAP)
        if len(ranges) > _MAX_RANGES:
            return self.gathered(rows), None
        parts = []
        for start, end in ranges:
            self._read_ahead(start, end)
            self._verify(self.raw[start:end], slice(start, end))
            parts.append(self.raw[start:end])
        block = np.concatenate(parts)
        if len(block) == len(rows):
            return block, None
        lengths = np.array([end - start for start, end in ranges])
        bases = np.cumsum(lengths) - lengths
        starts = np.array([start for start, _ in ranges])
        which = np.searchsorted(starts, rows, side="right") - 1
        return block, rows - starts[which] + bases[which]

    def _read_ahead(self, first: int, last: int) -> None:
        if (last - first) * self.dim * 4 >= _READ_AHEAD:
            size = self.dim * 4
            os.posix_fadvise(self._raw_fd, first * size, (last - first) * size, os.POSIX_FADV_WILLNEED)

    def _verify(self, block: Floats, rows: Ordinals | slice) -> None:
        """Check rows that this process has not seen yet."""
        seen = self._seen[rows]
        if seen.all():
            return
        fresh = np.flatnonzero(~seen)
        wrong = row_sums(block[fresh]) != self._sums[rows][fresh]
        if wrong.any():
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            raise self._damaged(numbers[fresh[wrong]])
        self._seen[rows] = True

    def _damaged(self, rows: Ordinals) -> DamagedPart:
        items = rows if self.row_items is None else self.row_items[rows].astype(np.int64)
        return DamagedPart(f"{self.folder / RAW}: row {rows[0]}", self.entry.name, items)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes: codes, and the arrays that every search touches; the rest stays in files."""
        arrays = self.item_namespaces.nbytes + self._seen.nbytes + self._near.nbytes
        arrays += 0 if self.row_items is None else self.row_items.nbytes
        return arrays + (self.codes.num_bytes if self.codes else 0)


def _runs(rows: Ordinals) -> list[int]:
    """Return where runs of rows that follow each other end: places behind their last one."""
    return [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)] if len(rows) else []


def _ranges(rows: Ordinals, gap: int) -> Sequence[tuple[int, int]]:
    """Return ascending rows as ranges that may hold up to `gap` others between two of them."""
    breaks = np.flatnonzero(np.diff(rows) > gap + 1)
    first = rows[np.concatenate(([0], breaks + 1))]
    last = rows[np.concatenate((breaks, [len(rows) - 1]))] + 1
    return list(zip(first.tolist(), last.tolist(), strict=True))
