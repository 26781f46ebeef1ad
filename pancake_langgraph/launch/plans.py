"""What to start: frozen plans with a default, a unit and a range for every field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import SplitResult, urlsplit

from pancake_langgraph._errors import ConfigError
from pancake_langgraph.tiers.naming import KVCodec

Device = Literal["auto", "cpu", "gpu"]
Dtype = Literal["bfloat16", "float32", "float16", "auto"]
DiskAdapter = Literal["verified", "plain"]

_MIN_POOL_BYTES = 1_000_000
#: What the engine takes.
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: got {value}, allowed is {low} to {high}")


def split_redis_url(url: str) -> SplitResult:
    """Return the parts of `redis://[USER:PASSWORD@]HOST:PORT`.

    Raises:
        ConfigError: if it is another kind of address.  The message does not repeat it: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme == "redis" and bool(parts.hostname) and parts.port is not None
        fits = fits and parts.path in ("", "/") and not parts.query and not parts.fragment
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError("l3_url: got another kind of address, allowed is redis://[USER:PASSWORD@]HOST:PORT")
    return parts


def _require_port(name: str, port: int | None) -> None:
    if port is not None:
        _require_range(name, port, 1, 65535)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The KV cache server: host memory (L1) over a folder on disk (L2) and a shared Redis or Valkey (L3).

    Raises:
        ConfigError: if a field is out of range.
    """

    l1_bytes: int = 400_000_000
    """Host memory in bytes; on CPU all of it is taken at start, in shared memory.  At least 16 MB."""
    l2_dir: Path | None = None
    """Folder of the disk tier; it survives.  `None`: a folder of the run, removed at the end."""
    l2: bool = True
    """Whether there is a disk tier at all."""
    l2_adapter: DiskAdapter = "verified"
    """What writes and reads it.  `verified`: serves only what is proven right, and keeps the cap.  `plain`: LMCache's
    own, which checks nothing and has no cap."""
    l2_bytes: int = 10_000_000_000
    """Most bytes in that folder, over all servers that use it and with what earlier runs left; at least 16 MB."""
    l2_key_file: Path | None = None
    """File with the key that encrypts the disk tier, 32 bytes or 64 hexadecimal digits.  `None`: checksums only."""
    l2_codec: KVCodec = "exact"
    """How KV is packed below host memory, on disk and in L3, where a model asks for nothing else: as it is, or in 8 or
    4 bits per number, which changes it a little."""
    l3_url: str | None = None
    """A Redis or Valkey that several cache servers may share, `redis://[USER:PASSWORD@]HOST:PORT`.  `None`: none.  It
    keeps everything that the disk tier keeps, is asked where that has nothing, and takes `l2_key_file`, too."""
    chunk_tokens: int = 64
    """Tokens per stored chunk; a multiple of the engine's block size."""
    port: int | None = None
    """Loopback port of the engine protocol.  `None`: a free one."""
    http_port: int | None = None
    """Loopback port of health and prefetch.  `None`: a free one."""
    mq_timeout_s: float = 2.0
    """How long an engine waits for an answer before it computes instead, in seconds."""
    heartbeat_s: float = 1.0
    """How often an engine asks whether the server lives, in seconds."""
    ready_timeout_s: float = 120.0
    """How long a start may take, in seconds."""

    def __post_init__(self) -> None:
        """Check every range."""
        _require_range("l1_bytes", self.l1_bytes, 16_000_000, 2**50)
        _require_range("l2_bytes", self.l2_bytes, 16_000_000, 2**60)
        if self.l2_key_file is not None and self.l2_adapter != "verified":
            raise ConfigError(
                f"l2_key_file: got {self.l2_key_file} with l2_adapter {self.l2_adapter!r}; use 'verified'"
            )
        if self.l2_key_file is not None and not self.l2_key_file.is_file():
            raise ConfigError(
                f"l2_key_file: got {self.l2_key_file}, allowed is a file; make one with `openssl rand -hex 32`"
            )
        self._check_below_host()
        _require_range("chunk_tokens", self.chunk_tokens, 16, 4096)
        _require_range("mq_timeout_s", self.mq_timeout_s, 0.1, 300.0)
        _require_range("heartbeat_s", self.heartbeat_s, 0.1, 300.0)
        _require_range("ready_timeout_s", self.ready_timeout_s, 1.0, 3600.0)
        _require_port("port", self.port)
        _require_port("http_port", self.http_port)
        if self.port is not None and self.port == self.http_port:
            raise ConfigError(f"port and http_port: got {self.port} for both, allowed are two different ports")

    def _check_below_host(self) -> None:
        if self.l2_codec not in get_args(KVCodec):
            raise ConfigError(f"l2_codec: got {self.l2_codec!r}, allowed are {', '.join(get_args(KVCodec))}")
        if self.l2_codec != "exact" and self.l2_adapter != "verified":
            raise ConfigError(f"l2_codec: got {self.l2_codec!r} with l2_adapter {self.l2_adapter!r}; use 'verified'")
        if self.l3_url is not None:
            split_redis_url(self.l3_url)


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The model server, and the KV cache server beside it when `tier` is given.

    Raises:
        ConfigError: if a field is out of range, contradicts another, or a file is missing.
    """

    model_dir: Path
    """Folder with safetensors, configuration and tokenizer."""
    served_model_name: str = "small"
    """Name that clients send."""
    dtype: Dtype = "bfloat16"
    """Number format of weights and KV; float32 where answers must not depend on cache hits."""
    kv_pool_bytes: int = 200_000_000
    """Size of the engine's own KV pool in bytes; it must hold one request of `max_model_len_tokens`."""
    block_size_tokens: int = 64
    """Tokens per block of the pool; a multiple of 32 on CPU, of 16 on GPU."""
    max_model_len_tokens: int = 4096
    """Longest prompt plus answer in tokens."""
    max_num_batched_tokens: int = 256
    """Tokens per engine step: bounds how long one step can block a foreground call."""
    long_prefill_threshold_tokens: int = 128
    """Tokens per step of a long prefill: leaves room for others in each step."""
    num_threads: int = 1
    """OpenMP threads of the CPU engine; as many as there are cores slows everything down."""
    chat_template: Path | None = None
    """Template file that replaces the model's own."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """LoRA adapters: the name that clients send as the model, and the folder."""
    max_adapter_rank: int = 16
    """Highest rank of an adapter: 8, 16, 32, 64, 128, 256, 320 or 512."""
    tool_call_parser: str | None = "hermes"
    """The engine's tool parser; `None` switches automatic tool choice off."""
    tier: TierPlan | None = None
    """The KV cache server; `None`: the engine's pool only."""
    hold_cap_ratio: float = 0.75
    """Share of the engine's pool that hints may hold, 0 to 0.9; 0 takes no hints.  Needs a tier."""
    kv_events: bool = True
    """Whether the engine publishes what its pool stores and drops."""
    dev_routes: bool = False
    """Whether the engine serves its development routes (`/reset_prefix_cache` among them); for tests and benches."""
    engine_port: int | None = None
    """Loopback port of the model server.  `None`: a free one."""
    run_dir: Path | None = None
    """Folder for logs.  `None`: a new one in the cache folder."""
    device: Device = "auto"
    """Where the engine runs.  `auto`: as the installed engine says."""
    ready_timeout_s: float = 300.0
    """How long a start may take, in seconds."""

    def __post_init__(self) -> None:
        """Check every range, and what depends on something else."""
        _require_range("kv_pool_bytes", self.kv_pool_bytes, _MIN_POOL_BYTES, 2**50)
        _require_range("block_size_tokens", self.block_size_tokens, 16, 1024)
        _require_range("max_model_len_tokens", self.max_model_len_tokens, 64, 2**24)
        _require_range("max_num_batched_tokens", self.max_num_batched_tokens, 32, 2**20)
        _require_range("long_prefill_threshold_tokens", self.long_prefill_threshold_tokens, 1, 2**20)
        _require_range("hold_cap_ratio", self.hold_cap_ratio, 0.0, 0.9)
        _require_range("num_threads", self.num_threads, 1, 1024)
        _require_range("ready_timeout_s", self.ready_timeout_s, 1.0, 3600.0)
        _require_port("engine_port", self.engine_port)
        if self.block_size_tokens % 16:
            raise ConfigError(f"block_size_tokens: got {self.block_size_tokens}, allowed are multiples of 16")
        if self.long_prefill_threshold_tokens > self.max_num_batched_tokens:
            raise ConfigError(
                f"long_prefill_threshold_tokens: got {self.long_prefill_threshold_tokens}, "
                f"allowed is at most max_num_batched_tokens ({self.max_num_batched_tokens})"
            )
        if self.tier is not None and self.tier.chunk_tokens % self.block_size_tokens:
            raise ConfigError(
                f"tier.chunk_tokens: got {self.tier.chunk_tokens}, "
                f"allowed are multiples of block_size_tokens ({self.block_size_tokens})"
            )
        self._check_adapters()
        if not self.served_model_name.strip():
            raise ConfigError("served_model_name: got an empty name, allowed is any other")
        if not (self.model_dir / "config.json").is_file():
            raise ConfigError(
                f"model_dir: got {self.model_dir}, allowed is a folder with config.json; "
                "run `pancake models prepare` for the small test model"
            )
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"chat_template: got {self.chat_template}, allowed is an existing file")

    def _check_adapters(self) -> None:
        if self.max_adapter_rank not in _ADAPTER_RANKS:
            raise ConfigError(f"max_adapter_rank: got {self.max_adapter_rank}, allowed are {_ADAPTER_RANKS}")
        names = [self.served_model_name, *(name for name, _ in self.adapters)]
        if len(set(names)) < len(names):
            raise ConfigError(f"adapters: got the names {names[1:]}, allowed are names that no other model has")
        for name, folder in self.adapters:
            if not name.strip() or "=" in name:
                raise ConfigError(f"adapters: got the name {name!r}, allowed is any other without `=`")
            if not (folder / "adapter_config.json").is_file():
                raise ConfigError(f"adapters: got {folder}, allowed is a folder with adapter_config.json")
