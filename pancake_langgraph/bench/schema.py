"""The one result format of every bench in this project.

`docs/bench-schema.md` is made from the field descriptions in this module and in `machine`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pancake_langgraph._errors import PancakeError
from pancake_langgraph.bench.checks import check_document
from pancake_langgraph.bench.machine import Machine


class BenchSchemaError(PancakeError, ValueError):
    """A document is not a bench result; the message lists every problem with its place."""


@dataclass(frozen=True, slots=True)
class MetricStatistics:
    """Percentiles of all values of one metric in one arm, over all repeats.

    They are percentiles of the values in ascending order for every metric, so for a metric where more is better `p99`
    is the good end.
    """

    p50: float = field(metadata={"doc": "Median."})
    p90: float = field(metadata={"doc": "90th percentile."})
    p99: float = field(metadata={"doc": "99th percentile."})
    n: int = field(metadata={"doc": "Number of values, at least 1."})


@dataclass(frozen=True, slots=True)
class RatioStatistics:
    """Spread of one ratio over the paired repeats.  Above 1 the second arm of the key is better, in every metric."""

    median: float = field(metadata={"doc": "Median over the repeats."})
    min: float = field(metadata={"doc": "Worst repeat for the second arm."})
    max: float = field(metadata={"doc": "Best repeat for the second arm."})


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One workload's result.  Immutable by convention: the mappings must not be changed after construction."""

    workload: str = field(metadata={"doc": "Name of the workload, as in `pancake bench NAME`."})
    version: str = field(metadata={"doc": "Version of pancake-langgraph."})
    machine: Machine = field(metadata={"doc": "Where it ran; see Machine."})
    date: str = field(metadata={"doc": "Day or moment of the run in UTC, ISO 8601."})
    repeats: int = field(metadata={"doc": "Number of paired repeats, at least 1."})
    arms: Mapping[str, Mapping[str, MetricStatistics]] = field(metadata={"doc": "Arm name to metric name to figures."})
    ratios: Mapping[str, RatioStatistics] = field(
        metadata={"doc": "Key `metric.percentile first/second`, for example `ttft_s.p50 plain/pancake`."}
    )
    outcomes: Mapping[str, int] = field(
        metadata={"doc": "Settled actions of the run: used, late, wasted, failed, rejected."}
    )
    notes: tuple[str, ...] = field(metadata={"doc": "Remarks for the reader, one sentence each."})
    summary: Mapping[str, Any] | None = field(
        default=None, metadata={"doc": "Optional: further figures of this workload (free form)."}
    )
    sweep: tuple[Mapping[str, Any], ...] | None = field(
        default=None, metadata={"doc": "Optional: one object per point of a sweep (free form)."}
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; absent optional fields are left out."""
        document: dict[str, Any] = {
            "workload": self.workload,
            "version": self.version,
            "machine": asdict(self.machine),
            "date": self.date,
            "repeats": self.repeats,
            "arms": {arm: {name: asdict(stats) for name, stats in of.items()} for arm, of in self.arms.items()},
            "ratios": {key: asdict(ratio) for key, ratio in self.ratios.items()},
            "outcomes": dict(self.outcomes),
            "notes": list(self.notes),
        }
        if self.summary is not None:
            document["summary"] = dict(self.summary)
        if self.sweep is not None:
            document["sweep"] = [dict(point) for point in self.sweep]
        return document

    def to_json(self) -> str:
        """Return the result as JSON text, checked first.

        Raises:
            BenchSchemaError: if a figure is not allowed, for example not finite.
        """
        document = self.to_dict()
        validate(document)
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> BenchResult:
        """Build a result from a JSON object.

        Raises:
            BenchSchemaError: if it does not follow the schema.
        """
        validate(document)
        sweep = document.get("sweep")
        return BenchResult(
            workload=document["workload"],
            version=document["version"],
            machine=Machine(**document["machine"]),
            date=document["date"],
            repeats=document["repeats"],
            arms={
                arm: {name: MetricStatistics(**stats) for name, stats in of.items()}
                for arm, of in document["arms"].items()
            },
            ratios={key: RatioStatistics(**ratio) for key, ratio in document["ratios"].items()},
            outcomes=dict(document["outcomes"]),
            notes=tuple(document["notes"]),
            summary=document.get("summary"),
            sweep=None if sweep is None else tuple(sweep),
        )

    @staticmethod
    def from_json(text: str) -> BenchResult:
        """Build a result from JSON text.

        Raises:
            BenchSchemaError: if the text is not JSON or does not follow the schema.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as exc:
            raise BenchSchemaError(f"not a bench result: no valid JSON ({exc}); make one with `--json FILE`") from exc
        return BenchResult.from_dict(document)


def validate(document: object) -> None:
    """Check a JSON value against the schema.

    Raises:
        BenchSchemaError: if it does not follow the schema; all problems are listed.
    """
    problems = check_document(
        document,
        required=[name.name for name in fields(BenchResult) if name.name not in ("summary", "sweep")],
        optional=["summary", "sweep"],
        machine_keys=[name.name for name in fields(Machine)],
    )
    if problems:
        raise BenchSchemaError(
            "not a bench result:\n  " + "\n  ".join(problems) + "\nallowed: see docs/bench-schema.md"
        )
