"""Bench `saver`: what a long conversation costs with each checkpointer, in bytes and in seconds per step.

It starts no engine.  Every turn is one run of a graph of one node on one thread: a human message of about 1 KB goes in,
an answer of the same size comes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from pancake_langgraph._errors import ConfigError, CorruptCheckpoint
from pancake_langgraph.bench.machine import Machine, read_machine
from pancake_langgraph.bench.saver_arms import (
    MEMORY_ARMS,
    QUADRATIC_ARMS,
    SAVER_ARM_TEXT,
    SAVER_PACKAGES,
    OpenSaver,
    SaverArm,
    ValkeyServer,
    check_packages,
    open_arm,
    valkey_for,
)
from pancake_langgraph.bench.saver_figures import RepeatedRuns, SaverRun, build_saver_figures
from pancake_langgraph.bench.saver_recorder import RecordingSaver, bare_writer
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.text import passages

MESSAGE_CHARS: Final = 1024
#: Turns between two looks at how much an arm has stored.
LOOK_EVERY_TURNS: Final = 25
#: Quadratic arms go beyond this many turns in the first repeat only.
SHORT_TURNS: Final = 100
_THREAD: Final[RunnableConfig] = {"configurable": {"thread_id": "bench"}}


@dataclass(frozen=True, slots=True)
class SaverBenchPlan:
    """What to run.

    `marks` are the turns, ascending, at which figures are taken; the last one is how long an arm goes on.  An arm ends
    early when it has stored more than `max_memory_bytes` (arms in main memory) or `max_file_bytes` (arms on disk, or
    half of what is free there).
    """

    marks: tuple[int, ...] = (10, 100, 1_000)
    repeats: int = 5
    arms: tuple[SaverArm, ...] = tuple(SaverArm)
    max_memory_bytes: int = 1_500_000_000
    max_file_bytes: int = 8_000_000_000
    folder: Path | None = field(default=None)

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if not self.marks or list(self.marks) != sorted({*self.marks}) or not 1 <= self.marks[0] <= self.marks[-1]:
            raise ConfigError(f"turns: got {self.marks}, allowed are numbers from 1 on in ascending order")
        if self.repeats < 1 or not self.arms:
            raise ConfigError(f"got {self.repeats} repeats of {len(self.arms)} arms, allowed is 1 or more of each")

    def marks_of(self, arm: SaverArm, repeat: int) -> tuple[int, ...]:
        """Return the marks up to which an arm goes in a repeat."""
        if repeat == 0 or arm not in QUADRATIC_ARMS:
            return self.marks
        return tuple(mark for mark in self.marks if mark <= SHORT_TURNS) or self.marks[:1]

    def limit_bytes(self, arm: SaverArm, folder: Path) -> int:
        """Return how much an arm may store."""
        if arm in MEMORY_ARMS:
            return self.max_memory_bytes
        return min(self.max_file_bytes, shutil.disk_usage(folder).free // 2)


def run_saver_bench(plan: SaverBenchPlan, on_progress: Callable[[str], None]) -> BenchResult:
    """Run every arm once per repeat, in an order that rotates.

    Raises:
        ConfigError: if a package that an arm needs is not installed.
        LaunchError: if the Valkey server does not start.
        CheckpointError: if a saver fails, or loses a message.
    """
    check_packages(plan.arms)
    texts = _texts(2 * plan.marks[-1])
    done: RepeatedRuns = []
    with valkey_for(plan.arms) as valkey:
        for repeat in range(plan.repeats):
            shift = repeat % len(plan.arms)
            runs: dict[SaverArm, SaverRun] = {}
            for arm in [*plan.arms[shift:], *plan.arms[:shift]]:
                marks = plan.marks_of(arm, repeat)
                on_progress(f"saver: repeat {repeat + 1} of {plan.repeats}, {arm}, {marks[-1]:,} turns")
                gc.collect()  # else one arm pays for what another left behind
                runs[arm] = asyncio.run(_run_arm(plan, arm, marks, texts, valkey))
            done.append({arm: runs[arm] for arm in plan.arms})
    return _result(plan, done)


async def _run_arm(
    plan: SaverBenchPlan, arm: SaverArm, marks: Sequence[int], texts: Sequence[str], valkey: ValkeyServer | None
) -> SaverRun:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pancake-bench-", dir=plan.folder)))
        limit_bytes = plan.limit_bytes(arm, folder)
        opened = await stack.enter_async_context(open_arm(arm, folder, valkey))
        bare_write = stack.enter_context(bare_writer(folder))
        return await run_turns(opened, marks, texts, limit_bytes=limit_bytes, bare_write=bare_write)


async def run_turns(
    opened: OpenSaver,
    marks: Sequence[int],
    texts: Sequence[str],
    *,
    limit_bytes: int,
    bare_write: Callable[[], None] | None = None,
) -> SaverRun:
    """Lead one conversation of `marks[-1]` turns, or until more than `limit_bytes` are stored.

    Args:
        opened: An empty saver.
        marks: Turns at which stored bytes are taken, ascending.
        texts: The contents of the messages, two for each turn.
        limit_bytes: Where to stop; looked at from time to time, so the last size may be above it.
        bare_write: Timed for comparison, see `bare_writer`.

    Raises:
        CorruptCheckpoint: if the state does not hold all messages in the end.
    """
    recorder = RecordingSaver(opened.saver, bare_write)
    graph = build_conversation(texts, recorder, is_async=opened.is_async)
    step_s: list[float] = []
    stored: dict[int, int] = {}
    for turn in range(1, marks[-1] + 1):
        recorder.turn = turn
        given: Any = {"messages": [HumanMessage(texts[2 * (turn - 1)])]}
        started_s = time.perf_counter()
        # With "sync" a put never runs beside the graph's own work, so that its time is its own.
        if opened.is_async:
            state = await graph.ainvoke(given, _THREAD, durability="sync")
        else:
            state = graph.invoke(given, _THREAD, durability="sync")
        step_s.append(time.perf_counter() - started_s)
        if turn in marks or turn % LOOK_EVERY_TURNS == 0:
            stored[turn] = opened.stored_bytes()
            if stored[turn] > limit_bytes:
                break
    if [message.content for message in state["messages"]] != list(texts[: 2 * turn]):
        raise CorruptCheckpoint(
            f"{type(opened.saver).__name__}: after {turn} turns the state is not what was put in "
            f"({len(state['messages'])} messages, {2 * turn} expected); its figures would mean nothing"
        )
    return SaverRun(
        calls=tuple(recorder.calls),
        step_s=tuple(step_s),
        stored_bytes={mark: stored[mark] for mark in marks if mark in stored},
        last_bytes=stored[turn],
        bare_writes=tuple(recorder.bare_writes),
    )


def build_conversation(
    texts: Sequence[str], saver: RecordingSaver, *, is_async: bool
) -> CompiledStateGraph[MessagesState, None, MessagesState, MessagesState]:
    """Return a graph of one node that answers the n-th message with text n."""

    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(texts[len(state["messages"])])]}

    async def aanswer(state: MessagesState) -> dict[str, Any]:
        return answer(state)

    builder = StateGraph(MessagesState)
    if is_async:
        builder.add_node("answer", aanswer)
    else:
        builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=saver)


def _texts(count: int) -> tuple[str, ...]:
    """Return different texts of about `MESSAGE_CHARS`."""
    return tuple(passages(MESSAGE_CHARS // 5, seed=seed)[:MESSAGE_CHARS] for seed in range(count))


def _result(plan: SaverBenchPlan, done: RepeatedRuns) -> BenchResult:
    figures = build_saver_figures(done, plan.marks)
    return BenchResult(
        workload="saver",
        version=metadata.version("pancake-langgraph"),
        machine=_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=plan.repeats,
        arms=figures.arms,
        ratios=figures.ratios,
        outcomes={},
        notes=(*(f"{arm}: {SAVER_ARM_TEXT[arm]}." for arm in plan.arms), *_notes(plan), *figures.notes),
        summary=figures.summary,
        sweep=figures.sweep,
    )


def _notes(plan: SaverBenchPlan) -> tuple[str, ...]:
    return (
        f"One thread, one node, two different messages of about {MESSAGE_CHARS:,} characters a turn, durability sync.",
        (
            "stored_bytes: a SQLite file with its write-ahead log written back, the sum of MEMORY USAGE over all keys "
            "of a server, or for memory its encoded values alone."
        ),
        "SQLite commits are on disk when a put returns; the Valkey server keeps nothing on disk.",
        (
            f"sqlite, async-sqlite, memory and plainredis go beyond {SHORT_TURNS} turns in the first repeat only, and "
            f"stop above {plan.max_memory_bytes:,} bytes in memory or {plan.max_file_bytes:,} on disk "
            "(or half of what is free); nothing is extrapolated."
        ),
    )


def _machine() -> Machine:
    machine = read_machine()
    versions = dict(machine.packages)
    for package in SAVER_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return replace(machine, packages=versions)
