"""Bench `forecast`: how well the runtime knows who runs next and what it will read, learning from nothing.

Every shape runs again and again on one runtime, each run in a thread of its own.  The models are scripted behind a
real port; time is virtual (a prompt token takes 1 ms, a token of an answer 20 ms), so that lead times are those of a
slow engine while a run takes milliseconds.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import metadata
from typing import Any, Final

from langchain_core.language_models import BaseChatModel

from pancake_langgraph._clock import Clock, MonotonicClock
from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.forecast_cost import Cost, measure_cost
from pancake_langgraph.bench.forecast_models import ROUTE_TOKENS, RoutingModel
from pancake_langgraph.bench.forecast_score import (
    SETTLED_AFTER,
    Observed,
    by_runs_seen,
    figures,
    in_hindsight,
    mean_of,
    reliability,
)
from pancake_langgraph.bench.forecast_shapes import Parts, Shape, every_shape
from pancake_langgraph.bench.forecast_watch import OverheardForecaster, SharedClock, Witness, WritesSaver, counter
from pancake_langgraph.bench.machine import read_machine
from pancake_langgraph.bench.schema import BenchResult
from pancake_langgraph.bench.statistics import describe
from pancake_langgraph.chat_model import PancakeChatModel
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.engines.base import Capabilities, Engine
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.forecast import create_forecaster
from pancake_langgraph.runtime import Runtime, attach
from pancake_langgraph.testing.bridged_engine import BridgedEngine
from pancake_langgraph.testing.fake_server import FakeEngineServer

Progress = Callable[[str], None]


class ForecastArm(StrEnum):
    """The only arm: there is nothing to compare with."""

    PANCAKE = "pancake"


FORECAST_ARMS: Final = tuple(ForecastArm)

_WINDOW_TOKENS: Final = 8192
_RECURSION_LIMIT: Final = 60
#: Real time between two pieces, so that a streamed piece is seen when it comes and not with the whole answer.
_PIECE_DELAY_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class ForecastPlan:
    """Size of the bench.

    `runs` of every shape on one runtime, `repeats` times from nothing, with other random draws each time; `cost_runs`
    of a small graph for time and memory.  `shapes` are names of shapes; none means all.
    """

    runs: int = 48
    repeats: int = 1
    cost_runs: int = 10_000
    shapes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range or a shape is unknown.
        """
        if not 2 <= self.runs <= 10_000 or not 2 <= self.cost_runs <= 1_000_000:
            raise ConfigError(
                f"runs: got {self.runs} per shape and {self.cost_runs} for the cost, allowed are 2 to 10,000 and "
                "2 to 1,000,000"
            )
        known = [shape.name for shape in every_shape()]
        if unknown := sorted(set(self.shapes) - set(known)):
            raise ConfigError(f"shapes: got {', '.join(unknown)}, allowed are {', '.join(known)}")

    @property
    def settled_after(self) -> int:
        """Runs seen from which the summary counts: 20, or half of a shorter bench."""
        return min(SETTLED_AFTER, self.runs // 2)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a shape runs on: an engine with its server, a model there, and a clock."""

    engine: Engine
    settings: RuntimeSettings
    model: BaseChatModel
    clock: Clock
    work: Callable[[float], None]


@dataclass(slots=True)
class ShapeRuns:
    """All that one shape showed; `failed_signals` counts what the runtime could not take in."""

    shape: Shape
    observed: Observed = field(default_factory=Observed)
    failed_signals: int = 0

    def add(self, observed: Observed, failed_signals: int) -> None:
        """Add one repeat."""
        self.observed = Observed(
            self.observed.decisions + observed.decisions,
            self.observed.calls + observed.calls,
            self.observed.leads + observed.leads,
        )
        self.failed_signals += failed_signals

    def row(self, settled_after: int) -> dict[str, Any]:
        """Return the row of the sweep."""
        row: dict[str, Any] = {
            "shape": self.shape.name,
            "family": self.shape.family,
            "learnable": not self.shape.odds,
            **figures(self.observed.between(settled_after, None)),
        }
        later = Observed(calls=tuple(c for c in self.observed.between(0, 1).calls if c.turn > 0))
        if later.calls:
            row["first_run_prefix_share_from_second_call"] = figures(later)["prefix_share"]
        return {**row, "failed_signals": self.failed_signals, "by_runs_seen": by_runs_seen(self.observed)}


class WatchingOnly(BridgedEngine):
    """A fake engine that cannot be warmed, so that only calls move the virtual clock."""

    @property
    def name(self) -> str:
        """Return the name under which a runtime takes it that nothing is to be done."""
        return "null"

    async def probe(self) -> Capabilities:
        """Say that there are no prompts of tokens."""
        return replace(await super().probe(), token_prompts=False)


async def watch_shape(shape: Shape, ground: Ground, *, runs: int, seed: int) -> tuple[Observed, int]:
    """Run a shape `runs` times on a runtime that knows nothing; return what it showed and the failed signals."""
    forecaster = OverheardForecaster(create_forecaster(), clock=ground.clock, numbers=counter())
    total = ShapeRuns(shape)
    with Runtime(ground.settings, engine=ground.engine, forecaster=forecaster, clock=ground.clock) as runtime:
        runtime.start()
        saver = WritesSaver()
        witness = Witness(runtime, forecaster, clock=ground.clock)
        graph = shape.build(Parts(ground.model, saver, ground.work, seed))
        graph = attach(graph, runtime=runtime)
        for handler in graph.config["callbacks"]:
            witness.precede(handler)
        for number in range(runs):
            witness.begin()
            thread_id = f"{shape.name}-{number}"
            await graph.ainvoke(
                shape.inputs(number + seed * runs),
                {"configurable": {"thread_id": thread_id}, "recursion_limit": _RECURSION_LIMIT},
            )
            total.add(witness.observed(number, saver.written, shape.odds), 0)
            saver.forget(thread_id)
        return total.observed, runtime.statistics().failed_signals


async def watch_scripted(shape: Shape, *, runs: int, seed: int) -> tuple[Observed, int]:
    """Run a shape with its scripted model behind a port of its own, in virtual time."""
    clock = SharedClock()
    engine = FakeEngine(
        FakeEngineSettings(
            pool_blocks=_WINDOW_TOKENS, max_model_len_tokens=_WINDOW_TOKENS, script=shape.script, answer_words=8
        ),
        clock,
    )
    with FakeEngineServer(engine, piece_delay_s=_PIECE_DELAY_S) as server:
        ground = Ground(
            engine=WatchingOnly(server),
            settings=RuntimeSettings(engine="fake"),
            model=PancakeChatModel(model="fake", base_url=server.base_url, max_tokens=64),
            clock=clock,
            work=clock.advance,
        )
        return await watch_shape(shape, ground, runs=runs, seed=seed)


def real_ground(base_url: str, model: str) -> Ground:
    """Return a ground on a running engine; time is real, answers are short, and a model with tools has to choose."""
    from pancake_langgraph.engines.registry import create_engine

    # No seed: with one of a request's own, vLLM 0.32 on CPU stops at a prompt that it reads in two chunks.
    return Ground(
        engine=create_engine("openai", base_url=base_url, model=model),
        settings=RuntimeSettings(engine="openai", base_url=base_url, model=model),
        model=RoutingModel(model=model, base_url=base_url, temperature=1.0, max_tokens=ROUTE_TOKENS),
        clock=MonotonicClock(),
        work=time.sleep,
    )


def run_forecast(plan: ForecastPlan, on_progress: Progress, *, real: tuple[str, str] | None = None) -> BenchResult:
    """Run the bench; `real` is the address and model of an engine on which model-made routes run as well.

    Raises:
        ConfigError: if no shape can run with the packages installed.
    """
    return asyncio.run(_run(plan, on_progress, real))


async def _run(plan: ForecastPlan, on_progress: Progress, real: tuple[str, str] | None) -> BenchResult:
    chosen = [shape for shape in every_shape() if not plan.shapes or shape.name in plan.shapes]
    shapes = [shape for shape in chosen if not missing_packages(shape)]
    if not shapes:
        raise ConfigError(f"no shape can run; install {', '.join(sorted(missing_packages(chosen[0])))}")
    on_progress(f"forecast: cost and memory over {plan.cost_runs:,} runs")
    cost = await measure_cost(plan.cost_runs)  # first: a user's process has not run dozens of other graphs before
    done = [ShapeRuns(shape) for shape in shapes]
    for repeat in range(plan.repeats):
        for runs in done:
            on_progress(f"forecast: repeat {repeat + 1} of {plan.repeats}, {runs.shape.name}")
            runs.add(*await watch_scripted(runs.shape, runs=plan.runs, seed=repeat))
    rows = [runs.row(plan.settled_after) for runs in done]
    by_model: list[dict[str, Any]] = []
    if real is not None:
        routed = [shape for shape in shapes if shape.routes_by_model]
        on_progress(f"forecast: {len(routed)} shapes with a real model, at once")
        by_model = await asyncio.gather(*(_by_model(shape, real_ground(*real), plan, on_progress) for shape in routed))
    left_out = [shape.name for shape in chosen if shape not in shapes]
    return _result(plan, done, rows, by_model, cost, left_out)


async def _by_model(shape: Shape, ground: Ground, plan: ForecastPlan, on_progress: Progress) -> dict[str, Any]:
    """Return the row of a shape whose routes a real model makes."""
    told = ShapeRuns(shape)
    observed, failed_signals = await watch_shape(shape, ground, runs=plan.runs, seed=0)
    told.add(in_hindsight(observed), failed_signals)
    on_progress(f"forecast: {shape.name} with a real model has ended")
    return {**told.row(plan.settled_after), "shape": f"{shape.name}/real"}


def missing_packages(shape: Shape) -> list[str]:
    """Return the distributions that a shape needs and that are not installed."""
    missing = []
    for package in shape.packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            missing.append(package)
    return missing


def summary_of(done: Sequence[ShapeRuns], rows: Sequence[Mapping[str, Any]], *, settled_after: int) -> dict[str, Any]:
    """Return the summary: means over shapes with at least `settled_after` runs seen.

    Hits and Brier score count the shapes whose routes can be learnt; those drawn by lot are under `random`, next to the
    best that is possible.
    """
    learnable = [row for row in rows if row["learnable"]]
    lots = [row for row in rows if not row["learnable"]]
    settled = [runs.observed.between(settled_after, None).decisions for runs in done]
    agents = [row for row in rows if row["family"] == "agent"]
    best = mean_of(lots, "best_top1")
    top1 = mean_of(lots, "top1")
    return {
        "top1": mean_of(learnable, "top1"),
        "top3": mean_of(learnable, "top3"),
        "brier": mean_of(learnable, "brier"),
        "prefix_share": mean_of(rows, "prefix_share"),
        "later_prefix_share": mean_of(rows, "later_prefix_share"),
        "lead_s": mean_of(rows, "lead_s"),
        "runs_seen": settled_after,
        "random": {
            "top1": top1,
            "best_top1": best,
            "top1_over_best": round(top1 / best, 4) if top1 is not None and best else None,
            "brier": mean_of(lots, "brier"),
            "best_brier": mean_of(lots, "best_brier"),
        },
        "agents_first_run_prefix_share_from_second_call": mean_of(agents, "first_run_prefix_share_from_second_call"),
        "reliability": reliability(decision for decisions in settled for decision in decisions),
        "failed_signals": sum(runs.failed_signals for runs in done),
    }


def summary_of_models(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over the shapes that a real model routed; the best predictor knows them in hindsight.

    They stay out of the other figures: their time is real, and nobody can say what may be learnt of them.
    """
    names = ("top1", "best_top1", "top3", "brier", "best_brier", "prefix_share", "later_prefix_share", "lead_s")
    found: dict[str, Any] = {name: mean_of(rows, name) for name in names}
    ratio = found["top1"] / found["best_top1"] if found["top1"] is not None and found["best_top1"] else None
    return {
        "shapes": len(rows),
        **found,
        "top1_over_best": None if ratio is None else round(ratio, 4),
        "failed_signals": sum(row["failed_signals"] for row in rows),
    }


def _result(
    plan: ForecastPlan,
    done: Sequence[ShapeRuns],
    rows: Sequence[Mapping[str, Any]],
    by_model: Sequence[Mapping[str, Any]],
    cost: Cost,
    left_out: Sequence[str],
) -> BenchResult:
    leads = [lead.lead_s for runs in done for lead in runs.observed.between(plan.settled_after, None).leads]
    figures_by_metric = {"observe_s": describe(cost.observe_s)}
    if leads:
        figures_by_metric["lead_s"] = describe(leads)
    notes = [
        f"{len(done)} shapes, {plan.runs} runs each from nothing; figures count runs with {plan.settled_after} seen.",
        "lead_s is virtual: 1 ms per prompt token, 20 ms per token of an answer, 1.5 s per tool.",
        f"observe_s is processor time per model call, over {plan.cost_runs:,} runs of two calls and a tool.",
    ]
    if left_out:
        notes.append(f"Left out, since packages are missing: {', '.join(left_out)}.")
    return BenchResult(
        workload="forecast",
        version=metadata.version("pancake-langgraph"),
        machine=read_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        repeats=plan.repeats,
        arms={ForecastArm.PANCAKE.value: figures_by_metric},
        ratios={},
        outcomes={},
        notes=tuple(notes),
        summary={
            **summary_of(done, rows, settled_after=plan.settled_after),
            **({"real_routers": summary_of_models(by_model)} if by_model else {}),
            "cost": cost.summary(),
        },
        sweep=(*rows, *by_model),
    )
