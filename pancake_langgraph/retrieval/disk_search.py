"""Searches a state: the likeliest rows from codes or all visible ones, exact products, the best over all sources.

Products in float32 choose; the score of what may be chosen is computed again in double precision, so that equal vectors
have equal scores wherever they lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pancake_langgraph.retrieval.base import Hit, ItemId, Query
from pancake_langgraph.retrieval.checks import CheckedView, best_first, checked_query
from pancake_langgraph.retrieval.coarse import CoarseSearch
from pancake_langgraph.retrieval.delta import DeltaView
from pancake_langgraph.retrieval.disk_items import (
    Source,
    allowed_in_delta,
    allowed_rows,
    entry_of,
    hashes_of_allowed,
)
from pancake_langgraph.retrieval.faiss_codes import Codes
from pancake_langgraph.retrieval.index_state import State
from pancake_langgraph.retrieval.masks import Bits, ViewKey, bits_at, packed, unpacked
from pancake_langgraph.retrieval.planner import Probe, Recall, Scan, plan
from pancake_langgraph.retrieval.segment_view import SegmentView, live_rows, view_mask

Floats = NDArray[np.float32]
Ordinals = NDArray[np.int64]

#: What float32 may lose at each step of a product, in lengths of both vectors.
_ROUNDING: Final = 2.0**-24
#: Products beyond this are not rounded to float32.
_LARGEST: Final = 1e37
_CHUNK_ROWS: Final = 1 << 15
_CHUNK_PRODUCTS: Final = 1 << 23


@dataclass(frozen=True, slots=True)
class Settings:
    """How searches go about it."""

    recall: Recall
    exact_rows: int
    coarse: CoarseSearch


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A query that was checked."""

    vector: Floats
    view: CheckedView
    key: ViewKey
    limit: int
    offset: int

    @classmethod
    def of(cls, query: Query, dim: int) -> Asked:
        """Check a query.

        Raises:
            InvalidQuery: if it cannot be answered.
        """
        vector, view = checked_query(query, dim)
        return cls(vector, view, ViewKey.of(query.view, view), query.limit, query.offset)

    @property
    def wanted(self) -> int:
        """How many of the best it takes."""
        return self.offset + self.limit if self.limit else 0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Items of one source and their scores."""

    scores: NDArray[np.float64]
    ordinals: Ordinals


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Vectors to compare with: `where` picks rows of `vectors`, `items` are the items of the picked."""

    vectors: Floats
    where: Ordinals | None
    items: Ordinals


def search(state: State, asked: Sequence[Asked], settings: Settings) -> list[list[Hit]]:
    """Answer queries; those with the same view are answered together.

    Raises:
        DamagedPart: if something that has to be read is damaged.
    """
    answers: list[list[Hit]] = [[] for _ in asked]
    groups: dict[tuple[ViewKey, frozenset[ItemId] | None], list[int]] = {}
    for at, one in enumerate(asked):
        if one.limit:
            groups.setdefault((one.key, one.view.allowed), []).append(at)
    for members in groups.values():
        together = [asked[at] for at in members]
        for at, hits in zip(members, _Search(state, together, settings).run(), strict=True):
            answers[at] = hits
    return answers


class _Search:
    """One search of some vectors in one view."""

    def __init__(self, state: State, asked: Sequence[Asked], settings: Settings) -> None:
        self._state, self._asked, self._settings = state, asked, settings
        self._queries: Floats = np.stack([one.vector for one in asked])
        self._wide = self._queries.astype(np.float64)
        self._lengths = np.sqrt((self._wide * self._wide).sum(axis=1)).tolist()
        self._wanted = max(one.wanted for one in asked)
        self._view, self._key = asked[0].view, asked[0].key
        self._hashes = hashes_of_allowed(self._view, state)

    def run(self) -> list[list[Hit]]:
        sources: list[Source] = [*self._state.deltas, *self._state.segments]
        found = [self._in_delta(one) if isinstance(one, DeltaView) else self._in_segment(one) for one in sources]
        return [_hits(sources, [parts[at] for parts in found], one) for at, one in enumerate(self._asked)]

    def announce(self) -> int:
        """Have the system read the likeliest rows."""
        num_bytes = 0
        for source in self._state.segments:
            _, bits, visible = self._visible(source)
            chosen, codes = self._plan(source, visible), source.segment.codes
            if isinstance(chosen, Probe) and codes is not None:
                likely = self._likely(codes, chosen, bits)[0]
                num_bytes += source.segment.announce(np.sort(likely[likely >= 0]))
        return num_bytes

    # -- sources --------------------------------------------------------------------------------------------------

    def _in_delta(self, source: DeltaView) -> list[Found]:
        if not source.num_rows:
            return self._nothing()
        visible = source.visible(self._view, self._key)
        if self._view.allowed is not None:
            visible = visible & allowed_in_delta(self._view.allowed, source)
        items = source.row_items[: source.num_rows]
        rows = np.flatnonzero(visible[items])
        if not len(rows):
            return self._nothing()
        vectors = source.vectors[: source.num_rows]
        # Products with all rows cost less than copying most of them.
        if len(rows) == len(vectors):
            block = Block(vectors, None, items.astype(np.int64))
        elif 2 * len(rows) >= len(vectors):
            block = Block(vectors, rows, items[rows].astype(np.int64))
        else:
            block = Block(vectors[rows], None, items[rows].astype(np.int64))
        return self._best([block], source.delta.longest, self._everyone())

    def _in_segment(self, source: SegmentView) -> list[Found]:
        rows, bits, visible = self._visible(source)
        if not visible:
            return self._nothing()
        chosen, codes = self._plan(source, visible), source.segment.codes
        if isinstance(chosen, Scan) or codes is None:
            return self._scan(source, rows, bits, visible, self._everyone())
        likely = self._likely(codes, chosen, bits)
        found = [self._rerank(source, likely[at], at) for at in self._everyone()]
        # Where the partitions held too little, nothing but looking at everything will do.
        short = [at for at, one in enumerate(found) if len(one.ordinals) < self._wanted]
        if short:
            for at, one in zip(short, self._scan(source, rows, bits, visible, short), strict=True):
                found[at] = one
        return found

    def _plan(self, source: SegmentView, visible: int) -> Scan | Probe:
        codes = source.segment.codes
        return plan(
            visible=visible,
            rows=source.segment.entry.num_rows,
            wanted=self._wanted,
            lists=codes.num_lists if codes else 0,
            recall=self._settings.recall,
            exact_rows=self._settings.exact_rows,
        )

    def _likely(self, codes: Codes, chosen: Probe, bits: Bits | None) -> Ordinals:
        coarse = self._settings.coarse
        return codes.best(self._queries, count=chosen.candidates, probes=chosen.probes, bits=bits, coarse=coarse)

    def _visible(self, source: SegmentView) -> tuple[Ordinals | None, Bits | None, int]:
        """Return the visible rows as a list or as bits (neither: all), and their number."""
        segment = source.segment
        if self._view.allowed is not None:
            rows = allowed_rows(self._hashes, source)
            if not self._key.shows_all:
                mask = view_mask(self._view, self._key, segment, few=self._settings.exact_rows)
                rows = rows[bits_at(mask.rows, rows)]
            if len(rows) <= self._settings.exact_rows:
                return rows, None, len(rows)
            shown = np.zeros(segment.entry.num_rows, np.bool_)
            shown[rows] = True
            return rows, packed(shown), len(rows)
        if self._key.shows_all:
            if not source.num_dead_rows:
                return None, None, source.num_rows
            bits = _all_bits(segment.entry.num_rows) & ~source.dead_rows
            return None, bits, source.num_rows
        mask = view_mask(self._view, self._key, segment, few=self._settings.exact_rows)
        if mask.few_rows is not None:
            few = mask.few_rows
            if source.num_dead_rows:
                few = few[~bits_at(source.dead_rows, few)]
            return few, None, len(few)
        bits, count = live_rows(mask, source)
        return None, None if count == segment.entry.num_rows else bits, count  # asking for each row takes time

    def _scan(
        self, source: SegmentView, rows: Ordinals | None, bits: Bits | None, visible: int, queries: Sequence[int]
    ) -> list[Found]:
        segment = source.segment
        if rows is None and bits is not None:
            rows = np.flatnonzero(unpacked(bits, segment.entry.num_rows))

        def blocks() -> Iterator[Block]:
            for start in range(0, visible, _CHUNK_ROWS):
                stop = min(start + _CHUNK_ROWS, visible)
                part = np.arange(start, stop) if rows is None else rows[start:stop]
                vectors, where = segment.scanned(part)
                items = part if segment.row_items is None else segment.row_items[part].astype(np.int64)
                yield Block(vectors, where, items)

        return self._best(blocks(), segment.entry.longest, queries)

    def _rerank(self, source: SegmentView, likely: Ordinals, query: int) -> Found:
        """Compare exactly with the likeliest rows."""
        segment = source.segment
        rows = np.sort(likely[likely >= 0])
        items = rows if segment.row_items is None else segment.row_items[rows].astype(np.int64)
        return self._best([Block(segment.vectors(rows), None, items)], segment.entry.longest, [query])[0]

    # -- the best of a source -------------------------------------------------------------------------------------

    def _everyone(self) -> Sequence[int]:
        return range(len(self._asked))

    def _nothing(self) -> list[Found]:
        return [Found(np.empty(0), np.empty(0, np.int64)) for _ in self._asked]

    def _best(self, blocks: Iterable[Block], longest: float, queries: Sequence[int]) -> list[Found]:
        """Return for each query the best `wanted` items, and those with the same score as the last of them."""
        parts: list[list[Found]] = [[] for _ in queries]
        for block in blocks:
            step = max(1, _CHUNK_PRODUCTS // max(1, len(block.vectors)))
            for start in range(0, len(queries), step):
                some = queries[start : start + step]
                with np.errstate(over="ignore", invalid="ignore"):
                    products = self._queries[list(some)] @ block.vectors.T
                if block.where is not None:
                    products = products[:, block.where]
                for at, query in enumerate(some):
                    parts[start + at].append(self._chosen(products[at], block, query, longest))
        return [_cut(one, self._wanted) for one in parts]

    def _chosen(self, products: Floats, block: Block, query: int, longest: float) -> Found:
        """Return the items of a block that may be among the best, with their scores."""
        reach = longest * self._lengths[query]
        if len(products) > self._wanted and reach < _LARGEST:
            threshold = _threshold(products, block.items, self._wanted)
            kept = np.flatnonzero(products >= threshold - 2 * _ROUNDING * len(self._queries[query]) * reach)
        else:
            kept = np.arange(len(products))
        rows = kept if block.where is None else block.where[kept]
        scores = (block.vectors[rows] * self._wide[query]).sum(axis=1)
        small = np.abs(scores) < _LARGEST
        scores[small] = scores[small].astype(np.float32)
        return Found(scores, block.items[kept])


def _threshold(products: Floats, items: Ordinals, wanted: int) -> float:
    """Return a product that at least `wanted` different items reach, the best such as far as items have one row."""
    count = len(products)
    take = wanted
    while True:
        take = min(take, count)
        top = np.argpartition(products, count - take)[count - take :]
        if take == count or len(set(items[top].tolist())) >= wanted:
            return float(products[top].min())
        take *= 2


def _cut(parts: Sequence[Found], wanted: int) -> Found:
    """Join parts: each item once, by its best row; in no order the best `wanted` and those equal to their last."""
    if len(parts) == 1:
        scores, ordinals = parts[0].scores, parts[0].ordinals
    else:
        scores = np.concatenate([np.empty(0), *(part.scores for part in parts)])
        ordinals = np.concatenate([np.empty(0, np.int64), *(part.ordinals for part in parts)])
    if len(set(ordinals.tolist())) < len(ordinals):
        order = np.argsort(-scores, kind="stable")
        _, first = np.unique(ordinals[order], return_index=True)
        scores, ordinals = scores[order[first]], ordinals[order[first]]
    if len(scores) > wanted:
        kept = scores >= np.partition(scores, len(scores) - wanted)[len(scores) - wanted]
        scores, ordinals = scores[kept], ordinals[kept]
    return Found(scores, ordinals)


def _hits(sources: Sequence[Source], found: Sequence[Found], asked: Asked) -> list[Hit]:
    """Return the best over all sources."""
    chosen = [
        (score, source, ordinal)
        for source, part in zip(sources, found, strict=True)
        for score, ordinal in zip(part.scores.tolist(), part.ordinals.tolist(), strict=True)
    ]
    if len(chosen) > asked.wanted:
        last = sorted([score for score, _, _ in chosen], reverse=True)[asked.wanted - 1]
        chosen = [one for one in chosen if one[0] >= last]
    for source in sources:
        if isinstance(source, SegmentView):
            source.segment.announce_documents([ordinal for _, one, ordinal in chosen if one is source])
    entries = [(score, entry_of(source, ordinal)) for score, source, ordinal in chosen]
    entries.sort(key=lambda pair: best_first(pair[0], pair[1].id))
    # Last of all: what leaves the engine is on the list, whatever an index said.
    allowed = asked.view.allowed
    return [
        Hit(entry.item(), score)
        for score, entry in entries[asked.offset : asked.wanted]
        if allowed is None or entry.id in allowed
    ]


def prefetch(state: State, asked: Sequence[Asked], settings: Settings) -> int:
    """Announce the rows that searches would read from segments with codes; return their bytes."""
    num_bytes = 0
    for one in asked:
        if one.limit:
            num_bytes += _Search(state, [one], settings).announce()
    return num_bytes


def _all_bits(count: int) -> Bits:
    bits = np.full(-(-count // 8), 255, np.uint8)
    if count % 8:
        bits[-1] = (1 << count % 8) - 1
    return bits
