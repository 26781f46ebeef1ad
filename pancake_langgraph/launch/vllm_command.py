"""From a plan to the model server's command line.  Pure."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.launch.plans import StackPlan
from pancake_langgraph.launch.ports import LOOPBACK
from pancake_langgraph.launch.process import Command

#: Quiet, offline, and hashes that agree between processes.
COMMON_ENV: Final[dict[str, str]] = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONHASHSEED": "0",
    "VLLM_HOST_IP": LOOPBACK,
    "VLLM_NO_USAGE_STATS": "1",
}

#: Unix socket paths end at 107 bytes on Linux (103 elsewhere); the engine adds a 36-character name to the folder.
_MAX_SOCKET_DIR_BYTES: Final = 60


@dataclass(frozen=True, slots=True)
class EnginePlaces:
    """What one start of the engine got: its port, its folder for sockets, and the tier's port (`None`: no tier)."""

    port: int
    socket_dir: Path
    tier_port: int | None = None

    @property
    def kv_events_endpoint(self) -> str:
        """Where the engine publishes KV events."""
        return f"ipc://{self.socket_dir}/kv.sock"

    @property
    def kv_replay_endpoint(self) -> str:
        """Where missed KV events can be asked for."""
        return f"ipc://{self.socket_dir}/kvr.sock"


def vllm_command(plan: StackPlan, places: EnginePlaces, *, device: Literal["cpu", "gpu"]) -> Command:
    """Return arguments and environment that start the model server of `plan`.

    The module is started, not the console script: the CPU wheel's script looks for a distribution that is not there.

    Raises:
        ConfigError: if `places.socket_dir` is too long for Unix sockets, or the block size does not fit the device.
    """
    if len(str(places.socket_dir).encode()) > _MAX_SOCKET_DIR_BYTES:
        raise ConfigError(
            f"socket folder: got {len(str(places.socket_dir))} characters, allowed are {_MAX_SOCKET_DIR_BYTES}; "
            "set TMPDIR to a shorter path"
        )
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(plan.model_dir), "--served-model-name", plan.served_model_name]
    argv += ["--host", LOOPBACK, "--port", str(places.port), "--dtype", plan.dtype]
    argv += ["--max-model-len", str(plan.max_model_len_tokens)]
    argv += ["--kv-cache-memory-bytes", str(plan.kv_pool_bytes), "--block-size", str(plan.block_size_tokens)]
    argv += ["--enable-prompt-tokens-details", "--scheduling-policy", "priority"]
    argv += ["--max-num-batched-tokens", str(plan.max_num_batched_tokens)]
    argv += ["--long-prefill-token-threshold", str(plan.long_prefill_threshold_tokens)]
    if plan.chat_template is not None:
        argv += ["--chat-template", str(plan.chat_template)]
    if plan.tool_call_parser is not None:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", plan.tool_call_parser]
    if plan.adapters:
        argv += ["--enable-lora", "--max-lora-rank", str(plan.max_adapter_rank), "--lora-modules"]
        argv += [f"{name}={folder}" for name, folder in plan.adapters]
    if plan.tier is not None and places.tier_port is not None:
        argv += ["--kv-transfer-config", json.dumps(_kv_transfer(plan, places.tier_port))]
    if plan.kv_events:
        argv += ["--kv-events-config", json.dumps(_kv_events(places))]
    env = dict(COMMON_ENV, VLLM_RPC_BASE_PATH=str(places.socket_dir), TMPDIR=str(places.socket_dir))
    if plan.dev_routes:
        env["VLLM_SERVER_DEV_MODE"] = "1"
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if device == "cpu":
        if plan.block_size_tokens % 32:
            raise ConfigError(f"block_size_tokens: got {plan.block_size_tokens}, allowed on CPU are multiples of 32")
        # Compilation costs minutes at every start for a few per cent; `uni` saves a process and needs both switches.
        argv += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["OMP_NUM_THREADS"] = str(plan.num_threads)
    return Command(tuple(argv), env)


def _kv_transfer(plan: StackPlan, tier_port: int) -> dict[str, object]:
    mq_timeout_s = plan.tier.mq_timeout_s if plan.tier else 2.0
    heartbeat_s = plan.tier.heartbeat_s if plan.tier else 1.0
    return {
        # LMCache's own, except that a cache server lost in the middle of a store does not end the engine.
        "kv_connector": "FailOpenLMCacheConnector",
        "kv_connector_module_path": "pancake_vllm.lmcache_connector",
        "kv_role": "kv_both",
        # With the default policy a lost tier takes the whole engine down.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{LOOPBACK}",
            "lmcache.mp.port": tier_port,
            "lmcache.mp.mq_timeout": mq_timeout_s,
            "lmcache.mp.heartbeat_interval": heartbeat_s,
            "pancake.hold_cap_ratio": plan.hold_cap_ratio,
        },
    }


def _kv_events(places: EnginePlaces) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": places.kv_events_endpoint,
        "replay_endpoint": places.kv_replay_endpoint,
        "topic": "kv",
    }
