"""The compiled plan as values: what a graph does, in which order, how long it takes, and where a thread may rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgspec

from pancake_langgraph._errors import ConfigError

PLAN_FORMAT: Final = "pancake-plan"
PLAN_VERSION: Final = 1

Source = Literal["declared", "learnt", "topology", "unknown"]
StepKind = Literal["reasoning", "action", "generation", "io", "unknown"]


@dataclass(frozen=True, slots=True)
class Expected:
    """A duration in seconds as quantiles; all `None` where `source` is "unknown".

    `num_samples` says how many measurements are in it; a declared duration has none.
    """

    source: Source = "unknown"
    p10_s: float | None = None
    p50_s: float | None = None
    p90_s: float | None = None
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class Suspension:
    """A point where a thread waits on nothing in the engine, so that its context may be put away.

    `when` is relative to the step; `reason` is "tool" (a tool runs), "interrupt" (a person or program is asked) or
    "join" (other branches are waited for).
    """

    when: Literal["before", "during", "after"]
    reason: Literal["tool", "interrupt", "join"]


@dataclass(frozen=True, slots=True)
class ToolStep:
    """One tool that a step may run."""

    name: str
    kind: StepKind
    kind_source: Source
    blocking: bool
    seconds: Expected


@dataclass(frozen=True, slots=True)
class Step:
    """One node that runs itself, named as in `Topology`.

    `needs` are the steps that can lead to it, all of them where `needs_all` (a join or a deferred node), else any one.
    `blocking` says whether something waits for its end rather than for a slower sibling's.  `may_need` are nodes that
    were declared to run because of it.  `ends` says that the run, or this branch, may end with it, `jumps` that it may
    go where nobody declared, `repeats` that several of it may run at once.  `after_steps` is the least number of
    super-steps from the start (`None` = no declared way leads there), `starts_s` the usual time from the start
    (`None` = some duration before it is unknown).  `has_prompt` says that its prompt was declared.
    """

    id: str
    kind: StepKind
    kind_source: Source
    blocking: bool
    blocking_source: Source
    seconds: Expected
    needs: tuple[str, ...] = ()
    needs_all: bool = False
    may_need: tuple[str, ...] = ()
    suspensions: tuple[Suspension, ...] = ()
    tools: tuple[ToolStep, ...] = ()
    after_steps: int | None = None
    starts_s: float | None = None
    ends: bool = False
    jumps: bool = False
    repeats: bool = False
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Loop:
    """A way back: `source` may be followed by `target`, which came before it."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    """A graph as a DAG of steps, each after all that it needs; ways back stand apart in `loops`.

    `fingerprint` is that of the topology; `notes` say what was declared and cannot be used.
    """

    graph: str
    fingerprint: str
    steps: tuple[Step, ...]
    loops: tuple[Loop, ...] = ()
    notes: tuple[str, ...] = ()

    def step(self, step_id: str) -> Step | None:
        """Return one step, or `None` when there is none of that name."""
        return next((step for step in self.steps if step.id == step_id), None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value that `from_json` takes back."""
        return {"format": PLAN_FORMAT, "version": PLAN_VERSION, **cast("dict[str, Any]", msgspec.to_builtins(self))}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> CompiledPlan:
        """Read what `to_json` gave.

        Raises:
            ConfigError: if the value is no plan, or one of another version.
        """
        found = (value.get("format"), value.get("version")) if isinstance(value, Mapping) else (type(value).__name__,)
        if found != (PLAN_FORMAT, PLAN_VERSION):
            raise ConfigError(
                f"cannot read a plan: got {' '.join(map(str, found))}, allowed is {PLAN_FORMAT} {PLAN_VERSION}. "
                "Write it anew with `pancake explain GRAPH --plan FILE`."
            )
        fields = {key: item for key, item in value.items() if key not in ("format", "version")}
        try:
            return msgspec.convert(fields, CompiledPlan)
        except msgspec.ValidationError as exc:
            raise ConfigError(
                f"cannot read a plan: {exc}. Write it anew with `pancake explain GRAPH --plan FILE`."
            ) from exc
