"""Frozen values that cross layers.  This module imports nothing of ours.

Units stand in the names: `_s` seconds, `_tokens`, `_bytes`, `_blocks`; `p_` is a probability in [0, 1].
What is made or looked up several times in each model call is a named tuple, which costs a third of a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, NewType

NodeId = NewType("NodeId", str)
ThreadId = NewType("ThreadId", str)
ActionId = NewType("ActionId", str)
SpanId = NewType("SpanId", str)

#: One message or one tool schema in the OpenAI chat wire form (JSON object).
WireObject = Mapping[str, Any]

#: Stands for the namespace of an agent that runs outside any graph.
ROOT_NAMESPACE = ""


class AgentKey(NamedTuple):
    """Names one agent: a node (or `create_agent` sub-graph) that calls a chat model with one system prompt.

    A node name alone is ambiguous: one node can call two prompts, and every sub-agent of some libraries runs under
    the same node.  `namespace` is the checkpoint namespace with task ids removed (`"supervisor|agent"`), `name` the
    `lc_agent_name` when there is one, `prompt_hash` a short hash over the leading system messages and the tools.
    """

    namespace: str
    name: str
    prompt_hash: str

    def __str__(self) -> str:
        """Return `namespace`, with the agent name in brackets where it adds something."""
        label = self.namespace or "model"
        return f"{label}[{self.name}]" if self.name and self.name not in label else label


class Outcome(StrEnum):
    """How an action ended.  Every action gets exactly one."""

    USED = "used"
    LATE = "late"
    WASTED = "wasted"
    FAILED = "failed"
    REJECTED = "rejected"


class ActionKind(StrEnum):
    """What an action does."""

    WARM = "warm"
    HOLD = "hold"
    PREFETCH = "prefetch"


class HintVerb(StrEnum):
    """What a hint asks of the engine's pool: keep until later, keep no longer, evict first."""

    HOLD = "hold"
    RELEASE = "release"
    RETIRE = "retire"


class HintState(StrEnum):
    """What became of a hint on the engine's pool.  Every hint gets exactly one.

    `clipped`: less was taken than asked; `deferred`: it comes into force when the blocks are free; `rejected`: no room
    under the cap; `missing`: the blocks are not there any more.
    """

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    REJECTED = "rejected"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts that a server reported for one call.

    `cached_tokens` is `None` when the server did not say; it is never 0 for "unknown".
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class Prompt(NamedTuple):
    """What one model call reads, in wire form: `messages` and `tools` in order, before templating."""

    messages: tuple[WireObject, ...]
    tools: tuple[WireObject, ...] = ()

    @staticmethod
    def of(messages: Sequence[WireObject], tools: Sequence[WireObject] | None = None) -> Prompt:
        """Build a prompt from any sequences; the objects are shared, not copied."""
        return Prompt(tuple(messages), tuple(tools or ()))


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """Token ids an engine will read first, in order, with the salt that separates its cache entries."""

    token_ids: tuple[int, ...]
    cache_salt: str | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prefix in tokens."""
        return len(self.token_ids)


class Candidate(NamedTuple):
    """One agent that may run next.

    `node` is the graph node (namespaced with `|` inside sub-graphs), `p_next` its calibrated probability,
    `steps` the number of super-steps until it starts (1 = the next one), `eta_s` the median time until it starts,
    `eta_p10_s` and `eta_p90_s` the times that it starts before with a chance of 10 and 90 percent (`None` when nothing
    is known), `reason` one short phrase for the decision log.
    """

    node: NodeId
    p_next: float
    steps: int
    eta_s: float | None
    reason: str
    eta_p10_s: float | None = None
    eta_p90_s: float | None = None
