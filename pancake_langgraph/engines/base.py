"""The engine port: what the runtime may ask of a model server.

Adapters: `null` (knows nothing, does nothing), `fake` (deterministic, virtual clock), `openai` (any server that
speaks the OpenAI routes), `vllm` (everything).  One contract suite runs over all of them.

All methods are coroutines and belong to the event loop on which `open` ran.  Cancelling the task that awaits `warm`
or iterates `chat` closes the socket, which is how a server learns that the work is no longer wanted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from pancake_langgraph._types import Prompt, TokenPrefix, Usage
from pancake_langgraph.engines.pool_hints import HintAnswer, PoolHints


class TierState(StrEnum):
    """What an engine was told of its tier: nothing yet, that its answers are right, or not to read it."""

    UNPROVEN = "unproven"
    PROVEN = "proven"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine said (or showed) that it can do.  `None` means "not known".

    `pool_hints` says that hints on its pool are carried out and answered, for `hold_cap_tokens` at most.  `kv_identity`
    is the name under which the tier keeps this engine's KV; `tier_state` is a `TierState`, of an
    engine that takes such orders.
    """

    engine: str
    version: str | None = None
    model: str | None = None
    max_model_len_tokens: int | None = None
    block_size_tokens: int | None = None
    pool_tokens: int | None = None
    tokenizer: bool = False
    token_prompts: bool = False
    prompt_token_ids: bool = False
    priority: bool = False
    cache_salt: bool = False
    kv_events: bool = False
    pool_hints: bool = False
    hold_cap_tokens: int | None = None
    kv_identity: str | None = None
    tier_state: str | None = None
    tool_parser: bool | None = None
    prefix_caching: bool | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat call.  `extra` is merged into the request body last."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    cache_salt: str | None = None
    tool_choice: Any = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """One piece of a streamed answer.

    Any field may be absent (`None`).  `tool_name` is set on the piece that first names a tool; `usage` at most once,
    on the last piece; `prompt_token_ids` at most once, on the first piece, where the engine returns them.
    """

    text: str | None = None
    reasoning: str | None = None
    tool_index: int | None = None
    tool_name: str | None = None
    tool_arguments: str | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What a warm-up did: `prompt_tokens` read, of which `cached_tokens` were there already (`None` = not said).

    `answers` has one entry for each hint it carried, none where the engine takes no hints.
    """

    prompt_tokens: int
    cached_tokens: int | None
    elapsed_s: float
    answers: tuple[HintAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class Residency:
    """How much of a prefix lies in the engine's own pool.

    `known` is false when the engine gives no events (or some were lost): `resident_tokens` is then 0 and means nothing.
    `allocated_tokens` counts all tokens whose blocks were ever stored, so that the difference between two readings says
    how far the pool has turned over in between.
    """

    known: bool
    resident_tokens: int = 0
    allocated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """One snapshot.  `running` and `waiting` count requests in the server (`None` = not known)."""

    chats: int
    warms: int
    warms_cancelled: int
    running: int | None = None
    waiting: int | None = None
    pool_used_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Recital:
    """One greedy answer, with its chances.

    `logprobs` has one entry per token; `margin` is how much likelier the first token was than the next likely one;
    `cached_tokens` is `None` when the server does not say.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    margin: float
    cached_tokens: int | None


@runtime_checkable
class Engine(Protocol):
    """A model server as the runtime sees it."""

    @property
    def name(self) -> str:
        """The adapter's name: `null`, `fake`, `openai` or `vllm`."""
        ...

    async def open(self) -> None:
        """Open connections.  Idempotent.  Does not fail when the server is away."""
        ...

    async def close(self) -> None:
        """Release everything.  Idempotent, bounded in time."""
        ...

    async def probe(self) -> Capabilities:
        """Ask the server what it can do.

        Raises:
            EngineUnavailable: if it cannot be reached.
            ModelNotFound: if it does not serve the configured model.
        """
        ...

    def chat(self, request: ChatRequest) -> AsyncIterator[ChatDelta]:
        """Stream one answer.

        Raises:
            EngineError: typed as in `pancake_langgraph._errors`.
        """
        ...

    async def tokenize(self, prompt: Prompt, *, add_generation_prompt: bool) -> tuple[int, ...]:
        """Render `prompt` with the engine's own template and tokenizer.

        Raises:
            Unsupported: if the server has no tokenizer route.
        """
        ...

    async def warm(self, prefix: TokenPrefix, *, priority: int, hints: PoolHints | None = None) -> WarmReport:
        """Bring the KV of `prefix` into the engine's pool with a one-token request.

        Larger `priority` numbers are served later.  Cancel the awaiting task to give the work up.  `hints` travel with
        the request; an engine that takes none ignores them and answers none.

        Raises:
            Unsupported: if the engine takes no token prompts.
            EngineError: on any failure of the server.
        """
        ...

    async def residency(self, prefix: TokenPrefix) -> Residency:
        """Say how many leading tokens of `prefix` are in the pool, as far as events tell.  Never raises."""
        ...

    async def statistics(self) -> EngineStatistics:
        """Return counters of this adapter and, where the server exports them, of the server.  Never raises."""
        ...


@runtime_checkable
class ReportsEvictions(Protocol):
    """An engine that says when its pool has changed, so that nobody has to ask again and again."""

    def add_residency_listener(self, callback: Callable[[], None]) -> None:
        """Call `callback` on the engine's loop after each change of the pool; it must return at once."""
        ...


@runtime_checkable
class CountsRestarts(Protocol):
    """An engine that notices, without being asked, that its server was started anew."""

    @property
    def restarts(self) -> int:
        """How often that was seen since `open`; what a probe found before may not hold any more."""
        ...


@runtime_checkable
class ReadsTier(Protocol):
    """An engine that can be asked where it takes KV from, and told not to take it from the tier."""

    async def recite(self, prefix: TokenPrefix, *, max_tokens: int, tier_salt: str | None = None) -> Recital:
        """Answer greedily.

        `tier_salt` looks in the tier under another salt than in the pool.  That is granted only where both are salts of
        known answers, see `tiers.naming.CANARY_SALT`.

        Raises:
            EngineError: on any failure of the server.
        """
        ...

    async def judge_tier(self, *, is_right: bool) -> bool:
        """Tell the engine whether its tier may be read; return whether it said that it took note.

        Raises:
            EngineError: on any failure of the server.
        """
        ...
