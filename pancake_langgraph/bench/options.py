"""What a user of the benches may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.bench.arms import Arm
from pancake_langgraph.bench.saver import SaverBenchPlan

#: SmolLM2-135M: 30 layers, 3 KV heads of 64, keys and values, two bytes a number (four in float32).
KV_TOKEN_BYTES: Final[Mapping[str, int]] = {"bfloat16": 23_040, "float32": 46_080}
BLOCK_SIZE_TOKENS: Final = 32
#: SmolLM2-135M, or a random model of six million weights.
LiveModel = Literal["small", "tiny"]
LIVE_MODELS: Final[tuple[LiveModel, ...]] = get_args(LiveModel)
AnArm = TypeVar("AnArm", bound=StrEnum)
ARMS: Final = (Arm.PLAIN, Arm.REACTIVE, Arm.PANCAKE, Arm.ORACLE)
HOLD_ARMS: Final = (Arm.PLAIN, Arm.REACTIVE, Arm.PANCAKE, Arm.NO_HINTS)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a user may choose.

    `repeats` counts for the main point; `sweep_repeats` for each other point of a sweep.  `turns` are the lengths of a
    conversation at which `saver` is measured; the settings of engines do not concern it.  `arms` are names of arms of
    the workload, in any order; none means all.
    `runs` of every shape and `cost_runs` are for `forecast`; with `real_routers` it starts an engine for the shapes
    whose routes a model makes.  `prompts` are those of `kv-quality`.
    `chunks` of text and the folder of text (`corpus`) are for all benches of indexes; `searches` of an arm in a repeat
    for those without an engine, `large_rows` of the large set (0 for none) for `retrieval`, `retrieval-node` and
    `agent-memory`.  With `live_s` above 0 the latter also starts an engine and lets agents work with it on the large
    set, so many seconds per arm and repeat; `live_model` says which model they call.  In `retrieval-node` an arm has
    `runs` programs in a repeat, and it is repeated on disks that give so many `reads_per_s`.
    """

    repeats: int = 5
    sweep_repeats: int = 0
    dtype: str = "bfloat16"
    num_threads: int = 1
    chunk_tokens: int = 32
    model_dir: Path | None = None
    turns: tuple[int, ...] = SaverBenchPlan().marks
    arms: tuple[str, ...] = ()
    runs: int = 48
    cost_runs: int = 10_000
    real_routers: bool = False
    prompts: int = 60
    chunks: int = 100_000
    large_rows: int = 1_000_000
    searches: int = 1_000
    corpus: Path | None = None
    live_s: float = 0.0
    live_model: LiveModel = "small"
    reads_per_s: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: if a value is out of range.
        """
        if not 1 <= self.repeats <= 1000 or not 0 <= self.sweep_repeats <= 1000:
            raise ConfigError(f"repeats: got {self.repeats} and {self.sweep_repeats}, allowed are 1 (sweep: 0) to 1000")
        if not 0 < self.chunk_tokens <= 1024 or self.chunk_tokens % BLOCK_SIZE_TOKENS:
            raise ConfigError(
                f"chunk_tokens: got {self.chunk_tokens}, allowed are multiples of {BLOCK_SIZE_TOKENS} up to 1024"
            )
        if not 1 <= self.prompts <= 10_000:
            raise ConfigError(f"prompts: got {self.prompts}, allowed are 1 to 10000")
        if self.live_model not in LIVE_MODELS:
            raise ConfigError(f"live_model: got {self.live_model!r}, allowed are {', '.join(LIVE_MODELS)}")
        if self.dtype not in KV_TOKEN_BYTES:
            raise ConfigError(f"dtype: got {self.dtype!r}, allowed are {', '.join(KV_TOKEN_BYTES)}")


def chosen_arms(every: Sequence[AnArm], names: Sequence[str]) -> tuple[AnArm, ...]:
    """Return the arms called `names` in the order of `every`; all of them if there are no names.

    Raises:
        ConfigError: if a name is not one of them.
    """
    if unknown := sorted(set(names) - set(every)):
        raise ConfigError(f"arms: got {', '.join(unknown)}, allowed for this workload are {', '.join(every)}")
    return tuple(arm for arm in every if not names or arm in names)
