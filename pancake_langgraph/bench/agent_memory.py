"""Bench `agent-memory`: 16 agents that search what is shared and their own notes, and note something after each search.

Without a model: one step after the other on one core, all vectors known beforehand.  With a model: the agents run at
once, embed what they ask and note, and call a model in each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.corpus import Progress
from pancake_langgraph.bench.memory_arms import (
    MEMORY_ARM_TEXT,
    AgentMemory,
    MemoryArm,
    PancakeMemory,
    missing_for,
    open_memory,
    vector_of,
)
from pancake_langgraph.bench.pinning import one_core
from pancake_langgraph.bench.retrieval import (
    Samples,
    engine_facts,
    mean_recall,
    missing_notes,
    prepared_set,
    scratch_folder,
    vector_result,
)
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.search_arms import K, OpenEngine, recall
from pancake_langgraph.bench.vector_sets import Embed, VectorSet, by_turns, nearest
from pancake_langgraph.retrieval.log import Ack

AGENTS: Final = 16
#: Slow arms do at least so many steps, whatever the time.
_MIN_STEPS: Final = 3
#: After so many inserts of each agent, what it has noted is searched alone: there are fewer than asked for.
_OWN_INSERTS: Final = 3
_PAIRS: Final = (
    (MemoryArm.LANGCHAIN_FAISS, MemoryArm.PANCAKE),
    (MemoryArm.LANGCHAIN_FAISS_DURABLE, MemoryArm.PANCAKE_DURABLE),
    (MemoryArm.LANGGRAPH_MEMORY, MemoryArm.PANCAKE),
    (MemoryArm.CHROMA, MemoryArm.PANCAKE),
    (MemoryArm.CHROMA, MemoryArm.PANCAKE_DURABLE),
    (MemoryArm.HNSWLIB, MemoryArm.PANCAKE),
)


@dataclass(frozen=True, slots=True)
class AgentMemoryPlan:
    """What to run.

    `chunks` of text are embedded; about 0.76 of them are shared.  In a repeat an arm does `steps`, or fewer if they
    take more than `arm_s` seconds.  Arms whose package is not installed are left out, and a note says so.
    """

    chunks: int = 100_000
    repeats: int = 5
    steps: int = 800
    arm_s: float = 20.0
    arms: tuple[MemoryArm, ...] = tuple(MemoryArm)
    corpus: Path | None = None
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if self.chunks < 500 or self.repeats < 1 or self.steps < 1 or not self.arms:
            raise ConfigError(
                f"got {self.chunks} chunks, {self.repeats} repeats of {self.steps} steps with {len(self.arms)} arms, "
                "allowed are 500 chunks or more, and 1 or more of the others"
            )


class Notes:
    """Which rows each agent has inserted, and the exact answer to what it asks."""

    def __init__(self, vectors: VectorSet, shared: Mapping[int, Any]) -> None:
        """Take the set and, for each query, its nearest shared rows."""
        self._set, self._shared = vectors, shared
        self.own: list[list[int]] = [[] for _ in range(AGENTS)]

    def nearest(self, agent: int, query: int) -> Any:
        """Return the nearest rows that the agent may see, best first."""
        rows = np.concatenate([self._shared[query], np.array(self.own[agent], dtype=np.int64)])
        vectors = np.stack([vector_of(self._set, int(row)) for row in rows])
        return rows[nearest(vectors, self._set.queries[query : query + 1], K)[0]]

    def nearest_own(self, agent: int, query: int) -> Any:
        """Return the nearest of the rows that the agent inserted."""
        rows = np.array(self.own[agent], dtype=np.int64)
        vectors = np.stack([vector_of(self._set, int(row)) for row in rows])
        return rows[nearest(vectors, self._set.queries[query : query + 1], K)[0]]


def run_agent_memory(
    plan: AgentMemoryPlan, on_progress: Progress, *, embed: Embed, open_engine: Callable[[Ack], OpenEngine]
) -> BenchResult:
    """Run all arms.

    Args:
        plan: What to run.
        on_progress: Told what happens, at least when something takes long.
        embed: The embedder of text.
        open_engine: Returns what opens ours for `none` (acknowledged when the system has it) or `group` (on disk).

    Raises:
        ConfigError: if there is too little text.
        RetrievalError: if our engine fails.
    """
    vectors = prepared_set(plan.chunks, plan.corpus, embed, on_progress)
    missing = {arm: package for arm in plan.arms if (package := missing_for(arm)) is not None}
    arms = [arm for arm in plan.arms if arm not in missing]
    with one_core() as core, scratch_folder(plan.folder) as folder, ExitStack() as stack:
        memories: dict[MemoryArm, AgentMemory] = {}
        for arm in arms:
            memories[arm] = open_memory(arm, vectors, folder, on_progress, open_engine)
            stack.callback(memories[arm].close)
        samples, own_share = _run_steps(plan, vectors, memories, on_progress)
        ours = {str(arm): engine_facts(m.engine) for arm, m in memories.items() if isinstance(m, PancakeMemory)}
    return vector_result(
        "agent-memory",
        plan.repeats,
        samples,
        pairs=[pair for pair in _PAIRS if set(pair) <= set(arms)],
        notes=(*_notes(plan, vectors, arms, core), *missing_notes(missing)),
        summary={
            "own_found_share": own_share,
            "mean_recall": mean_recall(samples),
            "pancake_stats": ours,
            "source": vectors.source,
        },
    )


def _run_steps(
    plan: AgentMemoryPlan, vectors: VectorSet, memories: Mapping[MemoryArm, AgentMemory], on_progress: Progress
) -> tuple[Samples, dict[str, float]]:
    turns = -(-plan.steps // AGENTS) * plan.repeats
    trace = by_turns(vectors, AGENTS, turns, seed=4)
    asked = sorted(set(trace))
    found = nearest(vectors.base, vectors.queries[asked], K, on_progress)
    shared = dict(zip(asked, found, strict=True))
    arms = list(memories)
    notes = {arm: Notes(vectors, shared) for arm in arms}
    rows = {arm: iter(range(len(vectors.base), len(vectors.base) + len(vectors.inserts))) for arm in arms}
    own_share = {
        str(arm): _own_share(memories[arm], notes[arm], [next(rows[arm]) for _ in range(AGENTS * _OWN_INSERTS)])
        for arm in arms
    }
    samples: Samples = {arm: {} for arm in arms}
    for repeat in range(plan.repeats):
        shift = repeat % len(arms)
        first = repeat * (turns // plan.repeats) * AGENTS
        for arm in [*arms[shift:], *arms[:shift]]:
            on_progress(f"agent-memory: repeat {repeat + 1} of {plan.repeats}, {arm}")
            chosen = trace[first : first + plan.steps]
            for metric, values in _steps(memories[arm], notes[arm], rows[arm], chosen, plan.arm_s).items():
                samples[arm].setdefault(metric, []).append(values)
    return samples, own_share


def _own_share(memory: AgentMemory, notes: Notes, rows: Sequence[int]) -> float:
    """Let each agent note a few things and ask for them: the share that came back of all there were."""
    for place, row in enumerate(rows):
        memory.insert(place % AGENTS, row)
        notes.own[place % AGENTS].append(row)
    return sum(recall(memory.search_own(agent, 0), notes.nearest_own(agent, 0)) for agent in range(AGENTS)) / AGENTS


def _steps(memory: AgentMemory, notes: Notes, rows: Any, trace: Sequence[int], max_s: float) -> dict[str, list[float]]:
    """Search and insert for the agents by turns; recall is computed between the steps, outside the clock."""
    search_s: list[float] = []
    insert_s: list[float] = []
    recalls: list[float] = []
    for place, query in enumerate(trace):
        agent = place % AGENTS
        row = next(rows, None)
        if row is None or (sum(search_s) + sum(insert_s) > max_s and place >= _MIN_STEPS):
            break
        started_s = time.perf_counter()
        found = memory.search(agent, query)
        searched_s = time.perf_counter()
        memory.insert(agent, row)
        insert_s.append(time.perf_counter() - searched_s)
        search_s.append(searched_s - started_s)
        recalls.append(recall(found, notes.nearest(agent, query)))
        notes.own[agent].append(row)
    if not search_s:
        raise ConfigError("the set has too few texts to insert; ask for more with --chunks, or for fewer steps")
    per_s = len(search_s) / (sum(search_s) + sum(insert_s))
    return {"search_s": search_s, "insert_s": insert_s, "recall": recalls, "searches_per_s": [per_s]}


def _notes(plan: AgentMemoryPlan, vectors: VectorSet, arms: Sequence[MemoryArm], core: int | None) -> tuple[str, ...]:
    pinned = "on one core that all threads were held on" if core is not None else "with one thread per library"
    return (
        *(f"{arm}: {MEMORY_ARM_TEXT[arm]}." for arm in arms),
        f"{AGENTS} agents by turns, each step one search and one insert, one step after the other, {pinned}.",
        f"Shared are {vectors.source}; agents walk through {len(vectors.queries):,} held-out places of documents.",
        "Vectors were known before the clock started: neither an embedder nor a model is in any figure.",
        f"recall counts the true {K} nearest of what the agent may see at that moment.",
        (
            f"An arm did at most {plan.steps:,} steps a repeat and ended after {plan.arm_s:g} s, so slow arms have "
            "fewer values; what was inserted stays for the next repeat."
        ),
        (
            f"own_found_share: each agent had noted {_OWN_INSERTS} things and asked for the {K} nearest of its own; "
            f"the share of the {_OWN_INSERTS} that came back."
        ),
    )
