"""Turns the records of `pancake bench saver` into the documented figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pancake_langgraph.bench.saver_arms import SaverArm
from pancake_langgraph.bench.saver_recorder import BARE_WRITE, BareWrite, SaverCall, SaverOperation
from pancake_langgraph.bench.schema import MetricStatistics, RatioStatistics
from pancake_langgraph.bench.statistics import compare_arms, describe_arms, median

PAIRS: Final = (
    (SaverArm.SQLITE, SaverArm.PANCAKE_SQLITE),
    (SaverArm.ASYNC_SQLITE, SaverArm.PANCAKE_SQLITE),
    (SaverArm.MEMORY, SaverArm.PANCAKE_SQLITE),
    (SaverArm.PLAINREDIS, SaverArm.PANCAKE_VALKEY),
)
#: Turns at the beginning and at the end whose medians are compared for flatness.
EARLY_TURNS: Final = 20
LATE_TURNS: Final = 50


@dataclass(frozen=True, slots=True)
class SaverRun:
    """What one arm did once: its calls, seconds per turn in order, stored bytes by mark and at the end, bare writes."""

    calls: tuple[SaverCall, ...]
    step_s: tuple[float, ...]
    stored_bytes: Mapping[int, int]
    last_bytes: int
    bare_writes: tuple[BareWrite, ...] = ()

    @property
    def turns(self) -> int:
        """Turns it went."""
        return len(self.step_s)

    def seconds(self, operation: SaverOperation, first: int, last: int) -> list[float]:
        """Return the times of one operation in the turns `first` to `last`, both included."""
        return [c.elapsed_s for c in self.calls if c.operation is operation and first <= c.turn <= last]

    def growth(self, operation: SaverOperation) -> float:
        """Return the median of an operation in the last turns over that in the first ones."""
        late = self.seconds(operation, self.turns - LATE_TURNS + 1, self.turns)
        return median(late) / median(self.seconds(operation, 1, EARLY_TURNS))

    def bare_growth(self) -> float | None:
        """Return the same of the bare write; `None` if it was not timed."""
        early = [write.elapsed_s for write in self.bare_writes if write.turn <= EARLY_TURNS]
        late = [write.elapsed_s for write in self.bare_writes if write.turn > self.turns - LATE_TURNS]
        return median(late) / median(early) if early and late else None


#: All runs: one mapping per repeat.
RepeatedRuns = list[dict[SaverArm, SaverRun]]


@dataclass(frozen=True, slots=True)
class SaverFigures:
    """The parts of a result that come from the runs."""

    arms: Mapping[str, Mapping[str, MetricStatistics]]
    ratios: Mapping[str, RatioStatistics]
    notes: tuple[str, ...]
    summary: Mapping[str, Any]
    sweep: tuple[Mapping[str, Any], ...]


def build_saver_figures(repeats: RepeatedRuns, marks: Sequence[int]) -> SaverFigures:
    """Compute all figures.  Arms and ratios count the turns that every arm went in every repeat."""
    common = _common_turns(repeats, marks)
    samples = _samples(repeats, common)
    pairs = [pair for pair in PAIRS if set(pair) <= set(repeats[0])]
    comparison = compare_arms(samples, pairs=pairs, percentile_names=("p50", "p99"))
    return SaverFigures(
        arms=describe_arms(samples),
        ratios=comparison.ratios,
        notes=(
            (
                f"The figures of the arms and the paired ratios count turns 1 to {common:,}, which every arm went in "
                "every repeat; the sweep has the other turns."
            ),
            *comparison.notes,
            *_stop_notes(repeats, marks),
        ),
        summary=_summary(repeats, marks),
        sweep=_sweep(repeats, marks),
    )


def _common_turns(repeats: RepeatedRuns, marks: Sequence[int]) -> int:
    shortest = min(run.turns for runs in repeats for run in runs.values())
    return max((mark for mark in marks if mark <= shortest), default=shortest)


def _samples(repeats: RepeatedRuns, turns: int) -> dict[str, dict[str, list[list[float]]]]:
    samples: dict[str, dict[str, list[list[float]]]] = {}
    for arm in repeats[0]:
        runs = [results[arm] for results in repeats]
        samples[str(arm)] = {str(op): [run.seconds(op, 1, turns) for run in runs] for op in SaverOperation}
        samples[str(arm)]["step_s"] = [list(run.step_s[:turns]) for run in runs]
        samples[str(arm)]["stored_bytes"] = [
            [float(run.stored_bytes[turns])] if turns in run.stored_bytes else [] for run in runs
        ]
    return samples


def _sweep(repeats: RepeatedRuns, marks: Sequence[int]) -> tuple[Mapping[str, Any], ...]:
    """Return one row per mark and arm: medians over the turns since the mark before, and stored bytes at the mark."""
    rows: list[Mapping[str, Any]] = []
    for before, mark in zip((0, *marks), marks, strict=False):
        for arm in repeats[0]:
            runs = [results[arm] for results in repeats if mark in results[arm].stored_bytes]
            row: dict[str, Any] = {"turns": mark, "since_turn": before + 1, "arm": str(arm), "repeats": len(runs)}
            if runs:
                for op in SaverOperation:
                    row[f"{op.removesuffix('_s')}_p50_s"] = _pooled([r.seconds(op, before + 1, mark) for r in runs])
                row["step_p50_s"] = _pooled([run.step_s[before:mark] for run in runs])
                row["stored_bytes"] = round(median([run.stored_bytes[mark] for run in runs]))
            rows.append(row)
    return tuple(rows)


def _summary(repeats: RepeatedRuns, marks: Sequence[int]) -> dict[str, Any]:
    rows = {(row["turns"], row["arm"]): row for row in _sweep(repeats, marks)}
    summary: dict[str, Any] = {}
    for name in ("stored_bytes", "put_p50_s", "step_p50_s"):
        for first, second in PAIRS:
            ratios = {
                str(mark): round(rows[mark, first][name] / rows[mark, second][name], 3)
                for mark in marks
                if rows.get((mark, first), {}).get(name) and rows.get((mark, second), {}).get(name)
            }
            if ratios:
                summary[f"{name} {first}/{second} by turns"] = ratios
    summary["flatness"] = {str(arm): _flatness([results[arm] for results in repeats]) for arm in repeats[0]}
    return summary


def _flatness(runs: Sequence[SaverRun]) -> Mapping[str, Any] | None:
    """Return the median of the last turns over that of the first ones, for the longest runs; `None` if too short.

    `put_over_bare_write` is the growth of a put divided by that of the bare write in the same run.
    """
    turns = max(run.turns for run in runs)
    if turns < EARLY_TURNS + LATE_TURNS:
        return None
    longest = [run for run in runs if run.turns == turns]
    found: dict[str, Any] = {"turns": turns, "repeats": len(longest)}
    for op in SaverOperation:
        found[str(op)] = round(median([run.growth(op) for run in longest]), 3)
    found["step_s"] = round(
        median([median(run.step_s[-LATE_TURNS:]) / median(run.step_s[:EARLY_TURNS]) for run in longest]), 3
    )
    bare = [(run, growth) for run in longest if (growth := run.bare_growth()) is not None]
    if bare:
        found[BARE_WRITE] = round(median([growth for _, growth in bare]), 3)
        found["put_over_bare_write"] = round(median([run.growth(SaverOperation.PUT) / g for run, g in bare]), 3)
    return found


def _stop_notes(repeats: RepeatedRuns, marks: Sequence[int]) -> tuple[str, ...]:
    first = repeats[0]
    return tuple(
        f"{arm} was stopped after {run.turns:,} turns, at {run.last_bytes:,} bytes."
        for arm, run in first.items()
        if run.turns < marks[-1]
    )


def _pooled(values: Sequence[Sequence[float]]) -> float:
    return round(median([value for row in values for value in row]), 6)
