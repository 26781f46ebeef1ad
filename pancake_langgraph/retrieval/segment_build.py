"""Builds a segment out of others and of deltas, in a folder that gets its name when everything in it is synced."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval import clusters
from pancake_langgraph.retrieval.base import Namespace
from pancake_langgraph.retrieval.delta import Delta, longest
from pancake_langgraph.retrieval.disk import Buffer, Disk, FileMark
from pancake_langgraph.retrieval.faiss_codes import CodeKind, HnswCodes, IvfCodes, supported
from pancake_langgraph.retrieval.feeds import Feed
from pancake_langgraph.retrieval.manifest import SEGMENTS, SegmentEntry
from pancake_langgraph.retrieval.segment_files import (
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
    row_sums,
)

logger = logging.getLogger(__name__)

Ordinals = NDArray[np.int64]
Floats = NDArray[np.float32]
FLAT: Final = "flat"
#: Vectors that are all shorter, or of which one is longer than its inverse, are not encoded.
_SHORTEST: Final = 1e-12
#: Rows that are looked at for training, for each partition.
_SAMPLE: Final = 40
_CHUNK: Final = 4096
_Scalar = TypeVar("_Scalar", bound=np.generic)
_DOC_CHUNK: Final = 1024
#: Codes of a segment that holds this share of all rows are used on, without training anew.
_REUSE_SHARE: Final = 0.5
_REUSE_GROWTH: Final = 4
#: When codes are used on, partitions of over so many times the mean are cut into parts of about so many times.
_CUT_AT: Final = 4
_CUT_TO: Final = 2
#: How many partitions near each part give it what belongs to it.
_NEAR: Final = 8


class BuildStopped(Exception):
    """The engine closes; what was begun is removed."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """How segments are built: their codes, from how many rows on, and from how many a namespace is cut up."""

    codes: CodeKind
    coded_rows: int
    own_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A segment that lies ready, and for each feed the numbers of its items in the segment."""

    entry: SegmentEntry
    moves: list[Ordinals]


class SegmentBuild:
    """Builds one segment; used once, by one thread."""

    def __init__(
        self,
        root: Path,
        name: str,
        feeds: Sequence[Feed],
        *,
        dim: int,
        plan: BuildPlan,
        disk: Disk,
        go_on: Callable[[], bool],
    ) -> None:
        """Take over the feeds; `go_on` is asked now and then, and ends the build when it says no."""
        self._root, self._name, self._feeds = root, name, feeds
        self._dim, self._plan, self._disk, self._go_on = dim, plan, disk, go_on
        self._folder = root / SEGMENTS / f"{name}.tmp"
        self._item_base = _bases([len(feed.ordinals) for feed in feeds])
        self._row_base = _bases([len(feed.row_items) for feed in feeds])
        self._num_items, self._num_rows = int(self._item_base[-1]), int(self._row_base[-1])
        self._longest = 0.0
        self._marks: list[FileMark] = []

    def run(self) -> Built:
        """Write everything and return the segment.

        Raises:
            OSError: if it could not be written; nothing is left of it.
            BuildStopped: if it was told not to go on.
            CorruptIndex: if a source is damaged.
        """
        try:
            return self._run()
        except BaseException:
            self._disk.remove(self._folder)
            raise

    def _run(self) -> Built:
        self._folder.mkdir(parents=True)
        kind = self._kind()
        row_items = _joined([feed.row_items + base for feed, base in zip(self._feeds, self._item_base, strict=False)])
        codes, lists, trained = self._train(kind)
        items, rows = self._order(row_items, lists)
        new_item = np.empty(self._num_items, np.int64)
        new_item[items] = np.arange(self._num_items)
        self._disk.point("build:begun")
        self._write_rows(rows, lists, codes)
        self._write_items(items)
        self._write_row_items(new_item[row_items[rows]])
        if codes is not None:
            codes.save(self._folder / CODES)
            self._marks.append(self._disk.mark(self._folder / CODES))
        self._disk.sync_folder(self._folder)
        self._disk.point("build:written")
        self._disk.rename(self._folder, self._root / SEGMENTS / self._name)
        self._disk.point("build:named")
        entry = SegmentEntry(
            self._name, kind, self._num_items, self._num_rows, trained, self._longest, tuple(self._marks)
        )
        moves = [
            new_item[base : base + len(feed.ordinals)] for feed, base in zip(self._feeds, self._item_base, strict=False)
        ]
        return Built(entry, moves)

    def _kind(self) -> str:
        """Return what codes to make: none for few rows, nor where squares of numbers leave float32."""
        if self._num_rows < max(2, self._plan.coded_rows):
            return FLAT
        reach = max(
            feed.origin.longest if isinstance(feed.origin, Delta) else feed.origin.entry.longest for feed in self._feeds
        )
        if reach and not _SHORTEST < reach < 1 / _SHORTEST:
            logger.warning(
                "segment %s gets no codes, so that searches read all of it: its longest vector has the length %g, "
                "allowed are %g to %g; bring vectors to length one",
                *(self._name, reach, _SHORTEST, 1 / _SHORTEST),
            )
            return FLAT
        return supported(self._plan.codes, self._dim)

    # -- order ----------------------------------------------------------------------------------------------------

    def _order(self, row_items: Ordinals, lists: Ordinals) -> tuple[Ordinals, Ordinals]:
        """Return the order of items and of rows.

        Namespaces with few rows lie together, so that they can be read at once; the rest lies by partition.  Items
        without rows come last.  Where no item has several rows, rows and items have the same order.
        """
        table, numbers = self._namespaces()
        rows_in = np.bincount(numbers[row_items], minlength=len(table))
        mixed = (rows_in > self._plan.own_rows) & bool(len(lists))
        group = np.where(mixed[numbers], 0, 1 + numbers)
        num_rows = np.bincount(row_items, minlength=self._num_items)
        first_list = np.zeros(self._num_items, np.int64)
        if len(lists):
            first_list[row_items[::-1]] = np.where(mixed[numbers[row_items]], lists, 0)[::-1]
        items = np.lexsort((first_list, group, num_rows == 0))
        if self._num_rows == 0 or num_rows.max() <= 1:
            row_of = np.empty(self._num_items, np.int64)
            row_of[row_items] = np.arange(self._num_rows)
            return items, row_of[items[: self._num_rows]]
        place = np.empty(self._num_items, np.int64)
        place[items] = np.arange(self._num_items)
        row_list = np.where(mixed[numbers[row_items]], lists, 0) if len(lists) else np.zeros(self._num_rows, np.int64)
        return items, np.lexsort((place[row_items], row_list, group[row_items]))

    def _namespaces(self) -> tuple[list[Namespace], Ordinals]:
        """Return the namespaces in use, sorted, and the number of each item's."""
        used = [set(np.unique(feed.item_namespaces).tolist()) for feed in self._feeds]
        table = sorted({feed.namespaces[at] for feed, numbers in zip(self._feeds, used, strict=True) for at in numbers})
        number = {namespace: at for at, namespace in enumerate(table)}
        parts = [
            np.array([number.get(one, -1) for one in feed.namespaces], np.int64)[feed.item_namespaces]
            for feed in self._feeds
            if len(feed.ordinals)
        ]
        return table, _joined(parts)

    # -- codes ----------------------------------------------------------------------------------------------------

    def _train(self, kind: str) -> tuple[IvfCodes | HnswCodes | None, Ordinals, int]:
        """Return empty codes, the partition of each row, and how many rows the codes were trained for."""
        if kind == FLAT:
            return None, np.empty(0, np.int64), 0
        if kind == "hnsw":
            return HnswCodes.train(self._dim), np.zeros(self._num_rows, np.int64), self._num_rows
        reused = self._reusable(kind)
        if reused is not None:
            codes, trained = reused
            centroids = codes.centroids.copy()
            codes, lists = self._cut(codes, centroids, self._assigned(centroids))
            return codes, lists, trained
        count = clusters.num_partitions(self._num_rows)
        rng = np.random.default_rng(self._num_rows)
        wanted = min(self._num_rows, max(_SAMPLE * count, 256))
        sample = self._read(np.sort(rng.choice(self._num_rows, wanted, replace=False)))
        sample = sample[rng.permutation(len(sample))]
        centroids = clusters.train(sample, count, between=self._continue)
        self._continue()
        codes = IvfCodes.train(kind, centroids, sample, clusters.assign(sample, centroids)[0])  # type: ignore[arg-type]
        return codes, self._assigned(centroids), self._num_rows

    def _reusable(self, kind: str) -> tuple[IvfCodes, int] | None:
        for feed in self._feeds:
            origin = feed.origin
            if isinstance(origin, Delta) or origin.entry.kind != kind or not isinstance(origin.codes, IvfCodes):
                continue
            trained = origin.entry.trained_rows
            if len(feed.row_items) >= _REUSE_SHARE * self._num_rows and self._num_rows <= _REUSE_GROWTH * trained:
                return origin.codes.empty(), trained
        return None

    def _cut(self, codes: IvfCodes, centroids: Floats, lists: Ordinals) -> tuple[IvfCodes, Ordinals]:
        """Cut partitions that have grown far beyond the others into parts; the rest stays as it was trained.

        Rows near a cut go where they belong now, and no others are looked at.
        """
        mean = self._num_rows / len(centroids)
        large = np.flatnonzero(np.bincount(lists, minlength=len(centroids)) > _CUT_AT * mean)
        if not len(large):
            return codes, lists
        rows = np.flatnonzero(np.isin(lists, large))
        count = max(2 * len(large), math.ceil(len(rows) / (_CUT_TO * mean)))
        rng = np.random.default_rng(self._num_rows)
        sample = self._read(np.sort(rng.choice(rows, min(len(rows), _SAMPLE * count), replace=False)))
        parts = clusters.parts(sample, count, between=self._continue)
        if len(parts) <= len(large):
            return codes, lists
        near = np.argsort(-(parts @ centroids.T), axis=1)[:, :_NEAR]
        centroids[large] = parts[: len(large)]
        centroids = np.concatenate((centroids, parts[len(large) :]))
        rows = np.flatnonzero(np.isin(lists, np.union1d(near, large)))
        lists[rows] = self._assigned(centroids, rows)
        return codes.over(centroids), lists

    def _assigned(self, centroids: Floats, rows: Ordinals | None = None) -> Ordinals:
        """Return the partitions of some rows, or of all."""
        rows = np.arange(self._num_rows) if rows is None else rows
        lists = np.empty(len(rows), np.int64)
        for start in range(0, len(rows), _CHUNK):
            self._continue()
            stop = min(start + _CHUNK, len(rows))
            lists[start:stop] = clusters.assign(self._read(rows[start:stop]), centroids)[0]
        return lists

    # -- files ----------------------------------------------------------------------------------------------------

    def _write_rows(self, rows: Ordinals, lists: Ordinals, codes: IvfCodes | HnswCodes | None) -> None:
        sums: list[NDArray[np.uint32]] = []

        def chunks() -> Iterator[Buffer]:
            for start in range(0, len(rows), _CHUNK):
                self._continue()
                wanted = rows[start : start + _CHUNK]
                block = self._read(wanted)
                sums.append(row_sums(block))
                self._longest = max(self._longest, longest(block))
                if codes is not None:
                    codes.add(block, np.arange(start, start + len(block)), lists[wanted])
                yield block.data

        self._write(RAW, chunks())
        self._write_array(SUMS, _joined(sums, np.uint32))

    def _write_items(self, items: Ordinals) -> None:
        table, numbers = self._namespaces()
        self._write(NAMESPACES, (msgspec.json.encode(table),))
        self._write_array(ITEM_NAMESPACES, numbers[items].astype(np.int32))
        self._write_array(UPDATED, _joined([feed.updated for feed in self._feeds], np.float64)[items])
        expires = _joined([feed.expires for feed in self._feeds], np.float64)[items]
        if np.isfinite(expires).any():
            self._write_array(EXPIRES, expires)
        hashes = _joined([feed.hashes for feed in self._feeds], np.uint64)[items]
        order = np.argsort(hashes, kind="stable")
        self._write_array(HASHES, hashes[order])
        self._write_array(HASH_ITEMS, order.astype(np.int32))
        lengths = np.zeros(len(items) + 1, np.uint64)

        def documents() -> Iterator[Buffer]:
            feeds = np.searchsorted(self._item_base, items, side="right") - 1
            for start in range(0, len(items), _DOC_CHUNK):
                self._continue()
                parts = []
                for at in range(start, min(start + _DOC_CHUNK, len(items))):
                    feed = int(feeds[at])
                    part = self._feeds[feed].document(int(items[at] - self._item_base[feed]))
                    lengths[at + 1] = len(part)
                    parts.append(part)
                yield b"".join(parts)

        self._write(DOCS, documents())
        self._write_array(DOC_OFFSETS, np.cumsum(lengths, dtype=np.uint64))

    def _write_row_items(self, row_items: Ordinals) -> None:
        if np.array_equal(row_items, np.arange(len(row_items))):
            return
        self._write_array(ROW_ITEMS, row_items.astype(np.int32))
        self._write_array(ITEM_ROWS, np.argsort(row_items, kind="stable").astype(np.int32))
        counts = np.bincount(row_items, minlength=self._num_items)
        self._write_array(ITEM_ROW_STARTS, np.concatenate(([0], np.cumsum(counts))).astype(np.uint64))

    def _write_array(self, name: str, array: NDArray[np.generic]) -> None:
        self._write(name, (np.ascontiguousarray(array).data,))

    def _write(self, name: str, chunks: Iterator[Buffer] | tuple[Buffer, ...]) -> None:
        self._marks.append(self._disk.write(self._folder / name, chunks))

    def _read(self, rows: Ordinals) -> Floats:
        """Read rows, counted over all feeds."""
        block = np.empty((len(rows), self._dim), np.float32)
        feeds = np.searchsorted(self._row_base, rows, side="right") - 1
        for feed in np.unique(feeds).tolist():
            here = feeds == feed
            block[here] = self._feeds[feed].vectors(rows[here] - self._row_base[feed])
        return block

    def _continue(self) -> None:
        if not self._go_on():
            raise BuildStopped


def _bases(sizes: Sequence[int]) -> Ordinals:
    return np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)))).astype(np.int64)


def _joined(parts: Sequence[NDArray[_Scalar]], kind: type[np.generic] = np.int64) -> NDArray[_Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
