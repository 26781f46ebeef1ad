"""The arms: what people use today, ours, and the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from langchain_core.language_models import BaseChatModel
from pydantic import SecretStr

from pancake_langgraph.bench.servers import ServesArms
from pancake_langgraph.config import RuntimeSettings
from pancake_langgraph.launch.stack import EngineProcess
from pancake_langgraph.runtime import Runtime


class Arm(StrEnum):
    """Names of the arms, in the order they are printed."""

    PLAIN = "plain"
    REACTIVE = "reactive"
    PANCAKE = "pancake"
    NO_HINTS = "pancake-no-hints"
    ORACLE = "oracle"


ARM_TEXT: Mapping[Arm, str] = {
    Arm.PLAIN: "ChatOpenAI, prefix caching on, no tier",
    Arm.REACTIVE: "ChatOpenAI, engine + LMCache",
    Arm.PANCAKE: "PancakeChatModel attached, the same engine + LMCache",
    Arm.NO_HINTS: "the same as pancake, but contexts are held by reading them again",
    Arm.ORACLE: "ChatOpenAI, a pool in which everything stays resident",
}


#: The arms with a runtime.
OURS = frozenset({Arm.PANCAKE, Arm.NO_HINTS})


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One arm ready to run once: a way to make models, and the runtime for our arms."""

    arm: Arm
    engine: EngineProcess
    cache_salt: str
    runtime: Runtime | None

    def model(self, *, max_tokens: int) -> BaseChatModel:
        """Return a chat model that answers greedily with at most `max_tokens`."""
        extra: dict[str, Any] = {"cache_salt": self.cache_salt}
        name = self.engine.plan.served_model_name
        if self.arm in OURS:
            from pancake_langgraph.chat_model import PancakeChatModel

            return PancakeChatModel(
                model=name, base_url=self.engine.base_url, temperature=0.0, max_tokens=max_tokens, extra_body=extra
            )
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(
            model=name,
            base_url=self.engine.base_url,
            api_key=SecretStr("EMPTY"),
            temperature=0.0,
            max_completion_tokens=max_tokens,
            streaming=True,
            stream_usage=True,
            max_retries=0,
            extra_body=extra,
        )


def arm_run(arm: Arm, servers: ServesArms, *, cache_salt: str) -> ArmRun:
    """Prepare one run of an arm; the caller closes its runtime."""
    engine = servers.engine_for(arm)
    runtime = Runtime(_settings(servers, engine, pool_hints=arm is Arm.PANCAKE)) if arm in OURS else None
    if runtime is not None:
        runtime.start()
    return ArmRun(arm, engine, cache_salt, runtime)


def _settings(servers: ServesArms, engine: EngineProcess, *, pool_hints: bool) -> RuntimeSettings:
    tier = servers.tier
    return RuntimeSettings(
        engine="vllm",
        base_url=engine.base_url,
        model=engine.plan.served_model_name,
        kv_events_endpoint=engine.kv_events_endpoint,
        kv_replay_endpoint=engine.kv_replay_endpoint,
        tier_url=tier.url if tier else None,
        tier_model=engine.model_key if tier else None,
        pool_hints=pool_hints,
    )
