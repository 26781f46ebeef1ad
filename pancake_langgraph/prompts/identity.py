"""Who is calling: agent keys from checkpoint namespaces and prompts; message identity across representations."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pancake_langgraph._types import AgentKey, Prompt, WireObject
from pancake_langgraph.prompts.prefix import common_prefix_tokens

#: `json.dumps` would make such an encoder each time.
_as_json = json.JSONEncoder(sort_keys=True, default=str).encode


@functools.lru_cache(maxsize=1024)
def strip_task_ids(checkpoint_ns: str) -> str:
    """Return the namespace without task ids: `"sub:1f0a|agent:77"` becomes `"sub|agent"`."""
    return "|".join(part.split(":", 1)[0] for part in checkpoint_ns.split("|")) if checkpoint_ns else ""


def parent_namespace(checkpoint_ns: str) -> str:
    """Return the namespace of the graph around the node, task ids kept; empty for a root graph's node."""
    return checkpoint_ns.rpartition("|")[0]


def leading_system_messages(messages: Sequence[WireObject]) -> tuple[WireObject, ...]:
    """Return the messages before the first one that is neither `system` nor `developer`."""
    count = 0
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        count += 1
    return tuple(messages[:count])


def agent_key(checkpoint_ns: str, agent_name: str | None, prompt: Prompt) -> AgentKey:
    """Name the agent that makes a call with `prompt`.

    The hash covers the leading system messages and the tools, so that two prompts under one node are two agents.
    """
    body = _as_json([leading_system_messages(prompt.messages), prompt.tools])
    digest = hashlib.blake2b(body.encode(), digest_size=6).hexdigest()
    return AgentKey(strip_task_ids(checkpoint_ns), agent_name or "", digest)


def canonical(message: WireObject) -> str:
    """Return a text that is equal for two wire forms of one message.

    Servers and libraries differ in what they leave out: empty content is `null` or `""`, argument JSON differs in
    spacing.  Those differences vanish here; everything a template can render stays.
    """
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    fields = [message.get("role"), message.get("content") or "", calls, message.get("tool_call_id")]
    return _as_json(fields)


def _canonical_call(call: WireObject) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are no JSON are compared as text
            arguments = json.loads(arguments or "{}")
    return [call.get("id"), function.get("name"), arguments]


def same_message(left: WireObject, right: WireObject) -> bool:
    """Say whether two wire forms are of one message; cheap where they are equal or plainly different."""
    if left is right or left == right:
        return True
    if left.get("role") != right.get("role"):
        return False
    ours, theirs = left.get("content") or "", right.get("content") or ""
    if isinstance(ours, str) and isinstance(theirs, str) and ours != theirs:
        return False
    return canonical(left) == canonical(right)


def common_messages(left: Sequence[WireObject], right: Sequence[WireObject]) -> int:
    """Return how many leading messages the two have in common."""
    count = 0
    for ours, theirs in zip(left, right, strict=False):
        if not same_message(ours, theirs):
            break
        count += 1
    return count


def common_text(left: WireObject, right: WireObject) -> int:
    """Return how many leading characters two messages of one role share; 0 unless both are plain text."""
    ours, theirs = left.get("content"), right.get("content")
    if left.get("role") != right.get("role") or not isinstance(ours, str) or not isinstance(theirs, str):
        return 0
    return common_prefix_tokens(ours, theirs)


def begins_with(prompt: Prompt, head: Prompt, *, is_cut: bool = False) -> bool:
    """Say whether `prompt` begins with all messages of `head`.

    With `is_cut` the last one of `head` is only the beginning of a message.
    """
    whole = head.messages[:-1] if is_cut else head.messages
    if len(head.messages) > len(prompt.messages) or common_messages(prompt.messages, whole) < len(whole):
        return False
    if not is_cut or not head.messages:
        return True
    last = head.messages[-1]
    return common_text(last, prompt.messages[len(whole)]) == len(last["content"])
