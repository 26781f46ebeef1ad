"""Who is calling: agent keys from checkpoint namespaces and prompts; message identity across representations."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pancake_langgraph._types import AgentKey, Prompt, WireObject


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
    body = json.dumps([leading_system_messages(prompt.messages), prompt.tools], sort_keys=True, default=str)
    digest = hashlib.blake2b(body.encode(), digest_size=6).hexdigest()
    return AgentKey(strip_task_ids(checkpoint_ns), agent_name or "", digest)


def canonical(message: WireObject) -> str:
    """Return a text that is equal for two wire forms of one message.

    Servers and libraries differ in what they leave out: empty content is `null` or `""`, argument JSON differs in
    spacing.  Those differences vanish here; everything a template can render stays.
    """
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    fields = [message.get("role"), message.get("content") or "", calls, message.get("tool_call_id")]
    return json.dumps(fields, sort_keys=True, default=str)


def _canonical_call(call: WireObject) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # arguments that are no JSON are compared as text
            arguments = json.loads(arguments or "{}")
    return [call.get("id"), function.get("name"), arguments]


def begins_with(prompt: Prompt, head: Prompt) -> bool:
    """Say whether the messages of `prompt` begin with all messages of `head`."""
    if len(head.messages) > len(prompt.messages):
        return False
    return all(canonical(a) == canonical(b) for a, b in zip(prompt.messages, head.messages, strict=False))
