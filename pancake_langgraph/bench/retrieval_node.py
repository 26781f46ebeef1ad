"""Bench `retrieval-node`: how long a graph's node waits for a search whose index has to be read from disk.

The arms share one model server and one index; `node_program` is what each of them runs.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.arms import Arm, ArmRun
from pancake_langgraph.bench.cold_index import ColdIndex
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.node_program import ANSWER_TOKENS, NodeRun, Question, run_node
from pancake_langgraph.bench.retrieval import engine_facts, prepared_set, scratch_folder
from pancake_langgraph.bench.runner import Repeats, build_result, gap_closed, run_arms, samples_of
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import OpenEngine, fill_engine
from pancake_langgraph.bench.servers import OneEngine, ServesArms
from pancake_langgraph.bench.slow_disk import limited_reads
from pancake_langgraph.bench.statistics import compare_arms, percentile
from pancake_langgraph.bench.vector_sets import QUERY_WORDS, Embed, VectorSet, clustered_set, embedded, first_words
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.launch.stack import EngineProcess
from pancake_langgraph.retrieval.base import Vector

NODE_ARMS: Final = (Arm.PLAIN, Arm.PANCAKE, Arm.ORACLE)
NODE_ARM_TEXT: Final[Mapping[Arm, str]] = {
    Arm.PLAIN: "ChatOpenAI, the store hears of nothing before it is searched",
    Arm.PANCAKE: "PancakeChatModel attached, `@phase(retrieves=store)` on the node that searches",
    Arm.ORACLE: "ChatOpenAI, all that the search reads is in memory before the program starts",
}
#: Points of the sweep: how many words of what is searched for the user wrote.
_SWEEP_WORDS: Final = (8, 13)

StartEngine = Callable[[], AbstractContextManager[EngineProcess]]
Samples = dict[str, dict[str, list[list[float]]]]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What to run.

    The index is that of `large_rows` vectors, 0 for the `chunks` of text alone.  In a repeat an arm runs `programs`,
    one after the other, each in a thread of its own.  With `sweep_repeats`, as many of them are run again for users
    who write only the first words of what is searched for.  `reads_per_s` are slower disks, each of which all repeats
    are run on once more.
    """

    chunks: int = 100_000
    large_rows: int = 0
    repeats: int = 5
    sweep_repeats: int = 0
    reads_per_s: tuple[int, ...] = ()
    programs: int = 48
    arms: tuple[Arm, ...] = NODE_ARMS
    corpus: Path | None = None
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if self.large_rows and self.large_rows < self.chunks:
            raise ConfigError(
                f"large_rows: got {self.large_rows} for {self.chunks} chunks, allowed are as many or more, or 0"
            )
        if min(self.reads_per_s, default=1) < 1:
            raise ConfigError(f"reads_per_s: got {self.reads_per_s}, allowed are numbers from 1 on")
        if self.chunks < 500 or self.repeats < 1 or self.programs < 1 or not self.arms:
            raise ConfigError(
                f"got {self.chunks} chunks, {self.repeats} repeats of {self.programs} programs with {len(self.arms)} "
                "arms, allowed are 500 chunks or more, and 1 or more of the others"
            )


@dataclass(frozen=True, slots=True)
class _Point:
    """What is varied: how many words the user wrote, and how many reads a second the disk gives (0: as it is)."""

    words: int
    repeats: int
    reads_per_s: int = 0

    @property
    def name(self) -> str:
        """What progress calls it."""
        disk = f", {self.reads_per_s} reads a second" if self.reads_per_s else ""
        return f"retrieval-node-{self.words}{disk}"


@dataclass(frozen=True, slots=True)
class _Bench:
    """All that every point has in common; the index's files lie below `folder`."""

    plan: NodePlan
    vectors: VectorSet
    index: ColdIndex
    folder: Path
    servers: ServesArms
    on_progress: Progress


def run_retrieval_node(
    plan: NodePlan, on_progress: Progress, *, embed: Embed, open_engine: OpenEngine, start_engine: StartEngine
) -> BenchResult:
    """Run all arms on one model server and one index.

    Args:
        plan: What to run.
        on_progress: Told what happens, at least when something takes long.
        embed: The embedder of text.
        open_engine: Opens our engine in an empty folder, for vectors of a length.
        start_engine: Gives the model server, which is started once the index is there.

    Raises:
        ConfigError: if there is too little text, or reads of the disk cannot be limited.
        LaunchError: if the model server does not start.
        RetrievalError: if our engine fails.
    """
    for reads_per_s in plan.reads_per_s:  # said now and not after minutes of preparation
        with limited_reads(plan.folder or Path(tempfile.gettempdir()), reads_per_s):
            pass
    vectors = prepared_set(plan.chunks, plan.corpus, embed, on_progress)
    if plan.large_rows:
        vectors = clustered_set(vectors, plan.large_rows, on_progress, folder=cache_dir() / "bench")
    known = _known(plan, vectors, embed, on_progress)
    with (
        scratch_folder(plan.folder) as folder,
        closing(open_engine(folder / "pancake", vectors.dim)) as engine,
    ):
        fill_engine(engine, vectors, on_progress, value=lambda row: _document(vectors, row))
        facts = {"pancake_stats": engine_facts(engine), "source": vectors.source}
        index = ColdIndex(engine, folder, known)
        with start_engine() as served:
            bench = _Bench(plan, vectors, index, folder, OneEngine(served), on_progress)
            return asyncio.run(_measured(bench, facts))


def _document(vectors: VectorSet, row: int) -> dict[str, Any]:
    """Return what lies beside a vector; those that come from no text have that of another one."""
    return {"row": row, "text": vectors.texts[row % len(vectors.texts)]}


def _known(plan: NodePlan, vectors: VectorSet, embed: Embed, on_progress: Progress) -> dict[str, Vector]:
    """Return the vectors of all that is written or searched for."""
    known = dict(zip(vectors.query_texts, vectors.queries, strict=True))
    chosen = [text for repeat in range(plan.repeats) for text in _texts(plan, vectors, repeat)]
    for words in _SWEEP_WORDS if plan.sweep_repeats else ():
        drafts = sorted({first_words(text, words) for text in chosen})
        known |= zip(drafts, embedded(drafts, embed, on_progress, folder=cache_dir() / "bench"), strict=True)
    return known


def _texts(plan: NodePlan, vectors: VectorSet, repeat: int) -> list[str]:
    """Return what a repeat searches for, the first one for practice: other places of the text in each repeat."""
    every = len(vectors.query_texts)
    count = plan.programs + 1
    stride = max(1, every // (count * plan.repeats))
    return [vectors.query_texts[(repeat * count + number) * stride % every] for number in range(count)]


async def _measured(bench: _Bench, facts: Mapping[str, Any]) -> BenchResult:
    plan = bench.plan
    main_point = _Point(QUERY_WORDS, plan.repeats)
    try:
        main = await _repeats_at(bench, main_point)
        sweep = [_row(main_point, main)]
        sweep += [_row(point, await _repeats_at(bench, point)) for point in _sweep_points(plan)]
    finally:
        await bench.index.close()
    samples = node_samples(main)
    return build_result(
        "retrieval-node",
        main,
        samples,
        notes=_notes(plan, bench.vectors),
        summary={
            **gap_closed(samples, "retrieval_wait_s", base=Arm.PLAIN),
            "drafts": draft_figures(main),
            "searches_with_other_hits": other_hits(main),
            **facts,
        },
        sweep=sorted(sweep, key=lambda row: (-(row["reads_per_s"] or math.inf), row["words_written"])),
    )


def _sweep_points(plan: NodePlan) -> list[_Point]:
    """Return all points but the main one."""
    fewer_words = [_Point(words, min(plan.sweep_repeats, plan.repeats)) for words in _SWEEP_WORDS if plan.sweep_repeats]
    return fewer_words + [_Point(QUERY_WORDS, plan.repeats, reads_per_s) for reads_per_s in plan.reads_per_s]


async def _repeats_at(bench: _Bench, point: _Point) -> Repeats:
    """Run all arms at one point."""
    plan = bench.plan

    def workload(run: ArmRun, repeat: int) -> Awaitable[NodeRun]:
        texts = _texts(plan, bench.vectors, repeat)
        return run_node(
            bench.index, run, [Question(first_words(text, point.words), text) for text in texts], repeat=repeat
        )

    for text in {text for repeat in range(point.repeats) for text in _texts(plan, bench.vectors, repeat)}:
        await bench.index.search(text)  # what a row's first reading checks is no part of any arm
    with limited_reads(bench.folder, point.reads_per_s) if point.reads_per_s else nullcontext():
        return await run_arms(
            bench.servers,
            workload,
            arms=plan.arms,
            repeats=point.repeats,
            point=point.name,
            on_progress=bench.on_progress,
        )


def node_samples(repeats: Repeats) -> Samples:
    """Return `arm -> metric -> values per repeat`."""
    samples = samples_of(repeats, chosen=lambda results, arm: results[arm].run.calls)
    for results in repeats:
        for arm in results:
            samples[str(arm)].setdefault("retrieval_wait_s", []).append(list(_run_of(results[arm].run).waits_s))
    return samples


def draft_figures(repeats: Repeats) -> dict[str, Any] | None:
    """Return what drafts were worth in our arm; `None` if it did not run."""
    stats = [one for results in repeats if Arm.PANCAKE in results for one in _run_of(results[Arm.PANCAKE].run).drafts]
    if not stats:
        return None
    needed = sum(one.needed_bytes for one in stats)
    return {
        "hit_rate": sum(one.hit_bytes for one in stats) / needed if needed else None,
        "read_ahead_bytes_per_search": sum(one.read_bytes for one in stats) / len(stats),
        "late_partitions": sum(one.late for one in stats),
        "searches_without_a_draft_in_time": sum(not one.hits for one in stats),
        "searches_made_beforehand": sum(one.answered for one in stats),
        "failures": sum(one.failures for one in stats),
    }


def other_hits(repeats: Repeats) -> dict[str, int]:
    """Count, for each arm, the searches that found something else than those of the first arm."""
    first = next(iter(repeats[0]))
    return {
        str(arm): sum(
            mine != theirs
            for results in repeats
            for mine, theirs in zip(_run_of(results[arm].run).found, _run_of(results[first].run).found, strict=True)
        )
        for arm in repeats[0]
    }


def _run_of(run: object) -> NodeRun:
    """Return an arm's run as what this workload makes of each."""
    if not isinstance(run, NodeRun):
        raise TypeError(f"got {type(run).__name__}, allowed is a NodeRun; runs of other workloads were given")
    return run


def _row(point: _Point, repeats: Repeats) -> dict[str, Any]:
    """Return one row of the sweep."""
    row: dict[str, Any] = {
        "words_written": point.words,
        "reads_per_s": point.reads_per_s or None,
        "repeats": len(repeats),
        "drafts": draft_figures(repeats),
    }
    samples = node_samples(repeats)
    for arm, metrics in samples.items():
        waits_s = [value for values in metrics["retrieval_wait_s"] for value in values]
        row[f"{arm}_retrieval_wait_p50_s"] = round(percentile(waits_s, 50.0), 6)
        row[f"{arm}_retrieval_wait_p99_s"] = round(percentile(waits_s, 99.0), 6)
    pairs = [pair for pair in ((Arm.PLAIN, Arm.PANCAKE), (Arm.PANCAKE, Arm.ORACLE)) if {*pair} <= {*repeats[0]}]
    waits = {arm: {"retrieval_wait_s": metrics["retrieval_wait_s"]} for arm, metrics in samples.items()}
    compared = compare_arms(waits, pairs=pairs, percentile_names=("p50", "p99"))
    return row | {name: asdict(ratio) for name, ratio in compared.ratios.items()}


def _notes(plan: NodePlan, vectors: VectorSet) -> tuple[str, ...]:
    return (
        *(f"{arm}: {NODE_ARM_TEXT[arm]}." for arm in plan.arms),
        (
            f"One program after the other: a model writes {ANSWER_TOKENS} tokens, then a node searches "
            f"{vectors.source}; one model server for all arms."
        ),
        (
            "Before each program the store is opened anew and the pages of the index's files are dropped from the "
            "system's cache, but for the oracle; arrays that are mapped into memory stay."
        ),
        (
            f"What the node searches for are {QUERY_WORDS} words, of which the user wrote as many as `words_written` "
            "says, in the main point all of them.  A draft that is all of it is searched for beforehand, and the "
            "node gets that answer (`searches_made_beforehand`): the oracle, which has in memory what its search reads "
            "and no more, is no limit then."
        ),
        "How stores are searched is known from a search before each program, for other words.",
        "Vectors of texts were known beforehand, answers lie in their middle: no embedder is in any figure.",
        "A virtual machine's disk may have a cache of its own below, which nobody here can drop.",
        *(
            ("Rows with `reads_per_s` let this process begin so many reads of the disk a second, in all arms.",)
            if plan.reads_per_s
            else ()
        ),
    )
