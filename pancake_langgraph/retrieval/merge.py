"""Flushes what waits in memory into segments, and merges segments: one at a time, beside writes and searches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from pancake_langgraph._errors import RetrievalError
from pancake_langgraph.retrieval.delta import DeltaView
from pancake_langgraph.retrieval.disk import write_trouble
from pancake_langgraph.retrieval.feeds import Feed, feed_of_delta, feed_of_segment, still_live
from pancake_langgraph.retrieval.index_core import IndexCore
from pancake_langgraph.retrieval.loading import healed, tidy
from pancake_langgraph.retrieval.manifest import SEGMENTS, TOMBSTONES, SegmentEntry, check_embedder
from pancake_langgraph.retrieval.planner import SegmentSize, choose_merge
from pancake_langgraph.retrieval.segment import Segment
from pancake_langgraph.retrieval.segment_build import BuildPlan, BuildStopped, Built, SegmentBuild
from pancake_langgraph.retrieval.segment_view import SegmentView

_T = TypeVar("_T")


class Merger:
    """Thread-safe.  `failure` says why the last flush or merge could not be written, if so."""

    def __init__(self, core: IndexCore, *, flush_rows: int, plan: BuildPlan) -> None:
        """Work on an index; a flush has about `flush_rows` rows."""
        self._core, self._flush_rows, self._plan = core, flush_rows, plan
        self._one_at_a_time = threading.Lock()
        #: Whether segments that could not be opened stay in the manifest, for whoever restores them.
        self._keeps_damaged = True
        self.failure: str | None = None

    def close(self) -> None:
        """Return when nothing is under way; it has been told to stop."""
        with self._one_at_a_time:
            pass

    def flush(self) -> None:
        """Turn what waits in memory and in the logs into a segment.

        Raises:
            RetrievalError: if it could not be written; it waits on, and nothing is lost.
        """
        with self._one_at_a_time:
            self._guarded(self._flush)

    def merge_once(self) -> bool:
        """Merge the segments that should be merged next; return whether there were any.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        with self._one_at_a_time:
            return self._guarded(self._merge_next)

    def compact(self) -> None:
        """Flush, and write everything into one segment without tombstones.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        with self._one_at_a_time:
            self._guarded(self._flush)
            self._guarded(self._merge_all)

    def name_embedder(self, fingerprint: str) -> None:
        """Note the embedder in a new manifest, unless another was noted meanwhile.

        Raises:
            EmbedderMismatch: if so.
            RetrievalError: if it could not be written; the index is what it was.
        """
        core = self._core
        with self._one_at_a_time:
            core.check()
            check_embedder(core.root, core.manifest, None, fingerprint)
            if core.manifest.fingerprint is None:
                try:
                    core.publish(core.manifest.next(fingerprint=fingerprint))
                except OSError as error:
                    raise write_trouble(error, f"{core.root}: the embedder could not be noted") from error

    def rewrite(self) -> None:
        """Flush, write everything into one segment whether that is due or not, and give up what could not be opened.

        Raises:
            RetrievalError: if it could not be written; the index is what it was.
        """
        with self._one_at_a_time:
            self._guarded(self._flush)
            self._keeps_damaged = False
            self._guarded(lambda: self._merge(tuple(self._core.index.segments)))
            self._keeps_damaged = True

    def _guarded(self, work: Callable[[], _T]) -> _T:
        core = self._core
        core.check()
        try:
            done = healed(work, core.index.drop, core.damage, core.lock)
        except BuildStopped:
            raise RetrievalError(f"{core.root}: the engine was closed while it merged") from None
        except OSError as error:
            self.failure = str(write_trouble(error, f"{core.root}: flush or merge failed"))
            raise RetrievalError(self.failure) from error
        self.failure = None
        return done

    def _flush(self) -> None:
        core = self._core
        with core.lock:
            floor = core.rotate()
            frozen = core.index.freeze()
        if floor == core.manifest.log_floor:
            return
        core.disk.point("flush:frozen")
        feeds = [feed for feed in map(feed_of_delta, frozen) if len(feed.ordinals)]
        # What was flushed is scanned, and merged soon: codes would be made for nothing.
        plan = replace(self._plan, coded_rows=1 << 62)
        built = self._build(feeds, plan) if feeds else None
        self._swap((), frozen, built, floor)

    def sizes(self) -> list[SegmentSize]:
        """Return the sizes of the segments, under the lock."""
        return [
            SegmentSize(name, view.segment.entry.num_items, view.num_dead_items)
            for name, view in self._core.index.segments.items()
        ]

    def _merge_next(self) -> bool:
        with self._core.lock:
            names = choose_merge(self.sizes(), unit=self._flush_rows)
        if names:
            self._merge(names)
        return bool(names)

    def _merge_all(self) -> None:
        with self._core.lock:
            views = dict(self._core.index.segments)
        if len(views) == 1:
            [view] = views.values()
            rows = view.num_rows
            wants_codes = rows >= self._plan.coded_rows and view.segment.codes is None
            if not view.num_dead_items and not wants_codes:
                return
        if views:
            self._merge(tuple(views))

    def _merge(self, names: Sequence[str]) -> None:
        core = self._core
        with core.lock:
            views = [core.index.segments[name] for name in names]
        feeds = [feed for feed in map(feed_of_segment, views) if len(feed.ordinals)]
        core.disk.point("merge:begun")
        built = self._build(feeds, self._plan) if feeds else None
        self._swap(names, (), built, core.manifest.log_floor)

    def _build(self, feeds: Sequence[Feed], plan: BuildPlan) -> tuple[Built, Sequence[Feed]]:
        core = self._core
        name = f"{core.manifest.next_segment:06d}"
        for left in (name, f"{name}.tmp"):  # by a swap or build that failed
            core.disk.remove(core.root / SEGMENTS / left)
        build = SegmentBuild(
            core.root,
            name,
            feeds,
            dim=core.manifest.dim,
            plan=plan,
            disk=core.disk,
            go_on=lambda: not core.closing.is_set(),
        )
        return build.run(), feeds

    def _swap(
        self, gone: Sequence[str], frozen: Sequence[DeltaView], built: tuple[Built, Sequence[Feed]] | None, floor: int
    ) -> None:
        """Publish a manifest with a new segment in the place of others, and search it from now on."""
        core = self._core
        segment = Segment(core.root, built[0].entry, core.manifest.dim) if built else None
        with core.lock:
            views = {name: view for name, view in core.index.segments.items() if name not in gone}
            if segment is not None and built is not None:
                views[segment.entry.name] = self._caught_up(segment, built)
            writer, end, seq = core.log, core.log.end, core.log_seq
        # A tombstone must not be kept when the operation that made it is lost with the end of the log.
        writer.wait(end)
        entries = [self._with_tombstones(view) for view in views.values()]
        skipped = [
            entry for entry in core.manifest.segments if self._keeps_damaged and entry.name not in core.index.segments
        ]
        manifest = core.manifest.next(
            segments=tuple(sorted((*skipped, *entries), key=lambda entry: entry.name)),
            log_floor=floor,
            seq=seq,
            next_segment=core.manifest.next_segment + (built is not None),
        )
        core.publish(manifest)
        with core.lock:
            new = self._caught_up(segment, built) if segment is not None and built is not None else None
            core.index.replace(gone, [view.delta for view in frozen], new)
        core.disk.point("swap:done")
        tidy(core.root, core.manifest, core.disk)

    def _caught_up(self, segment: Segment, built: tuple[Built, Sequence[Feed]]) -> SegmentView:
        """Return a new segment with tombstones for what died while it was built."""
        view = SegmentView.of(segment)
        for feed, new in zip(built[1], built[0].moves, strict=True):
            view = view.without(new[~still_live(feed, self._core.index.state)])
        return view

    def _with_tombstones(self, view: SegmentView) -> SegmentEntry:
        core = self._core
        entry = view.segment.entry
        published = next((one for one in core.manifest.segments if one.name == entry.name), None)
        if published is not None and published.num_dead == view.num_dead_items:
            return published
        if not view.num_dead_items:
            return entry
        name = f"{entry.name}-{core.manifest.number + 1:06d}.bits"
        mark = core.disk.write(core.root / TOMBSTONES / name, (np.ascontiguousarray(view.dead_items).data,))
        core.disk.sync_folder(core.root / TOMBSTONES)
        return replace(entry, dead=mark, num_dead=view.num_dead_items)
