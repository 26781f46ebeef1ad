"""The engines of one benchmark: three pools that serve one model, one of them with a cache server behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import httpx

from pancake_langgraph._errors import LaunchError
from pancake_langgraph.launch.plans import StackPlan, TierPlan
from pancake_langgraph.launch.proving import prove_started_tier
from pancake_langgraph.launch.stack import EngineProcess, TierProcess

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ServersPlan:
    """What to start.

    `pool_tokens` is the pool of the plain and the tiered engine, `resident_pool_tokens` that of the oracle's, which
    must hold everything.  `kv_token_bytes` converts: 2 * layers * KV heads * head size * bytes per number.
    """

    model_dir: Path
    pool_tokens: int
    resident_pool_tokens: int
    kv_token_bytes: int
    dtype: str = "bfloat16"
    block_size_tokens: int = 32
    chunk_tokens: int = 32
    max_model_len_tokens: int = 4096
    num_threads: int = 1
    l1_bytes: int = 1_000_000_000
    l2: bool = False
    chat_template: Path | None = None

    def engine(self, *, pool_tokens: int, tier: TierPlan | None) -> StackPlan:
        """Return the plan of one engine."""
        return StackPlan(
            model_dir=self.model_dir,
            dtype=self.dtype,  # type: ignore[arg-type]  # checked by StackPlan
            kv_pool_bytes=(pool_tokens + self.block_size_tokens) * self.kv_token_bytes,
            block_size_tokens=self.block_size_tokens,
            max_model_len_tokens=self.max_model_len_tokens,
            num_threads=self.num_threads,
            chat_template=self.chat_template,
            tier=tier,
            dev_routes=True,
        )


class ServesArms(Protocol):
    """What arms are run on."""

    @property
    def tier(self) -> TierProcess | None:
        """The cache server behind the engines, if there is one."""
        ...

    def engine_for(self, arm: str) -> EngineProcess:
        """Return the engine that an arm talks to."""
        ...

    def reset(self, arm: str) -> None:
        """Leave nothing in an arm's pool that another arm has put there."""
        ...


class OneEngine:
    """One engine for all arms, without a cache server; whoever started it ends it."""

    tier: TierProcess | None = None

    def __init__(self, engine: EngineProcess) -> None:
        """Use an engine that runs and has its development routes."""
        self._engine = engine

    def engine_for(self, arm: str) -> EngineProcess:
        """Return the engine."""
        return self._engine

    def reset(self, arm: str) -> None:
        """Empty its pool."""
        reset_pool(self._engine)


class Servers:
    """Starts all engines; a context manager.  Idle engines cost memory and no processor time."""

    def __init__(self, plan: ServersPlan, *, on_progress: Progress) -> None:
        """Choose places; nothing is started."""
        self.plan = plan
        self._on_progress = on_progress
        self._open = contextlib.ExitStack()
        self.tier: TierProcess | None = None
        self._engines: dict[str, EngineProcess] = {}

    def __enter__(self) -> Servers:
        """Start the cache server, then the engines, one after the other."""
        try:
            self._start()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything that was started."""
        self._open.close()

    def _start(self) -> None:
        tier_plan = TierPlan(l1_bytes=self.plan.l1_bytes, chunk_tokens=self.plan.chunk_tokens, l2=self.plan.l2)
        self._on_progress("starting the cache server")
        self.tier = self._open.enter_context(TierProcess(tier_plan))
        small, large = self.plan.pool_tokens, self.plan.resident_pool_tokens
        for name, pool_tokens, tier in (("plain", small, None), ("tiered", small, tier_plan), ("oracle", large, None)):
            self._on_progress(f"starting the {name} engine (pool of {pool_tokens:,} tokens)")
            plan = self.plan.engine(pool_tokens=pool_tokens, tier=tier)
            engine = EngineProcess(plan, tier=self.tier if tier else None, name=f"{name} engine")
            self._engines[name] = self._open.enter_context(engine)
        self._prove()

    def _prove(self) -> None:
        """Have the tier proven before anything is timed, so that no runtime does it inside an arm."""
        engine = self._engines["tiered"]
        if self.tier is None:
            return
        self._on_progress("asking for a known answer from every tier")
        report = prove_started_tier(
            engine.base_url,
            model=engine.plan.served_model_name,
            tier_url=self.tier.url,
            model_key=engine.model_key,
        )
        if report is None or not report.is_right:
            raise LaunchError(f"the cache server gives wrong answers: {report.reason if report else 'not asked'}")

    def engine_for(self, arm: str) -> EngineProcess:
        """Return the engine an arm talks to: all but plain and oracle share the tiered one."""
        return self._engines[arm if arm in ("plain", "oracle") else "tiered"]

    def reset(self, arm: str) -> None:
        """Empty the engine's pool, so that no arm run inherits another's; the oracle's keeps everything, always."""
        if arm == "oracle":
            return
        reset_pool(self.engine_for(arm))


def reset_pool(engine: EngineProcess) -> None:
    """Empty an engine's pool; blocks that are still being stored are waited for."""
    root = engine.base_url.removesuffix("/v1")
    for _ in range(50):
        answer = httpx.post(f"{root}/reset_prefix_cache", timeout=10.0, trust_env=False)
        if answer.is_success and answer.json().get("success", True):
            return
