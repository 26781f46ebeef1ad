"""From what a server or a socket said to the typed tree of `pancake_langgraph._errors`.

Messages carry statuses, names, numbers and addresses.  A server's own words are quoted only when nothing of the
prompt is in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pancake_langgraph._errors import (
    ContextOverflow,
    EngineError,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    ModelNotFound,
    Unsupported,
)
from pancake_langgraph.wire.json_text import decoded

_MAX_DETAIL_CHARS: Final = 300
_SHINGLE_CHARS: Final = 16
_MAX_PROMPT_CHARS: Final = 2_000_000

_OVERFLOW: Final = re.compile(
    r"context (?:length|size|window)|max_model_len|maximum model length|exceed_context_size|prompt is too long"
    r"|context_length_exceeded|longer than the (?:maximum|model)",
    re.IGNORECASE,
)
_WINDOW: Final = (
    re.compile(r'"n_ctx"\s*:\s*(\d+)'),
    re.compile(
        r"(?:context (?:length|window|size)|max_model_len|maximum model length)[^0-9]{0,60}?(\d+)", re.IGNORECASE
    ),
)
_PROMPT: Final = (
    re.compile(r"(?:prompt|input|messages)[^0-9.]{0,40}?(\d+)(?: input)? tokens", re.IGNORECASE),
    re.compile(r"(\d+) (?:input )?tokens? (?:in the (?:messages|prompt)|from the input)", re.IGNORECASE),
    re.compile(r"input \((\d+) tokens\)", re.IGNORECASE),
    re.compile(r'"n_prompt_tokens"\s*:\s*(\d+)'),
)
_ASKED: Final = (re.compile(r"(\d+) (?:output tokens|tokens? for the completion|in the completion)", re.IGNORECASE),)
_TOOL_PARSER: Final = re.compile(r"enable-auto-tool-choice|tool-call-parser", re.IGNORECASE)
_ROLES: Final = re.compile(r"roles? must alternate|system (?:message|role)|Conversation roles", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known about the call that failed.

    `prompt_texts` is used only to keep those texts out of messages.
    """

    url: str
    model: str = ""
    max_tokens: int | None = None
    served_models: tuple[str, ...] | None = None
    prompt_texts: tuple[str, ...] = ()


def error_from_response(status_code: int, body: str, facts: CallFacts) -> EngineError:
    """Return the typed error for an HTTP answer of 400 or more."""
    text = _server_words(body)
    detail = safe_detail(text, facts.prompt_texts)
    if status_code in (400, 413, 422) and _OVERFLOW.search(body):
        return _overflow(status_code, body, facts)
    if _TOOL_PARSER.search(text):
        return Unsupported(
            f"the server at {facts.url} was started without a tool parser, so it cannot choose tools by itself; start "
            "it with --enable-auto-tool-choice --tool-call-parser NAME (for Hermes-like models: hermes), or force a "
            "tool with tool_choice"
        )
    if status_code == 404:
        return not_found(facts, named_model=bool(facts.model) and "model" in text.lower())
    if status_code in (408, 504):
        return EngineTimeout(f"the server at {facts.url} answered {status_code}: it gave up waiting.{detail}")
    if status_code >= 500:
        return EngineFault(
            f"the server at {facts.url} failed with {status_code}.{detail} Its log says why; the call can be repeated.",
            status_code=status_code,
        )
    return EngineRejected(
        f"the server at {facts.url} refused the request with {status_code}.{detail}{_remedy(status_code, text)}",
        status_code=status_code,
    )


def not_found(facts: CallFacts, *, named_model: bool) -> EngineError:
    """Return the error for 404: an unknown model, or an address that is no API root."""
    if named_model:
        served = facts.served_models
        known = f"it serves {', '.join(map(repr, served))}" if served else "what it serves is listed at its /models"
        return ModelNotFound(
            f"the server at {facts.url} does not serve the model {facts.model!r}; {known}; set model= to one of them",
            status_code=404,
        )
    return EngineRejected(
        f"the server at {facts.url} has no such route (404); base_url must be the API root, usually ending in /v1",
        status_code=404,
    )


def overflow_before_sending(facts: CallFacts, *, prompt_tokens: int, window_tokens: int) -> ContextOverflow:
    """Return the error for a prompt that was counted and does not fit."""
    return ContextOverflow(
        f"the prompt has {prompt_tokens} tokens and {facts.max_tokens} more were asked for, but the window of "
        f"{facts.model!r} is {window_tokens} tokens (counted with the server's tokenizer; nothing was sent); "
        "shorten or summarize the history, or lower max_tokens",
        status_code=400,
    )


def unreachable(facts: CallFacts, reason: str) -> EngineUnavailable:
    """Return the error for a server that does not accept connections."""
    return EngineUnavailable(
        f"no model server answers at {facts.url} ({reason}); start one with `pancake up` or `vllm serve MODEL --port "
        "PORT`, or set base_url= (or PANCAKE_BASE_URL) to where it listens"
    )


def cut_stream(facts: CallFacts, reason: str) -> EngineUnavailable:
    """Return the error for an answer that ended before it was complete."""
    return EngineUnavailable(
        f"the server at {facts.url} ended the answer before it was complete ({reason}); if its process has died its "
        "log says why; the call can be repeated from the last checkpoint"
    )


def timed_out(facts: CallFacts, reason: str) -> EngineTimeout:
    """Return the error for a server that gave no sign of life within the limit."""
    return EngineTimeout(
        f"the server at {facts.url} sent nothing within the limit ({reason}); raise timeout= if it is only busy"
    )


def safe_detail(text: str, prompt_texts: Sequence[str]) -> str:
    """Return ` It says: …` for a server's own words, or nothing when they repeat the prompt."""
    words = " ".join(text.split())[:_MAX_DETAIL_CHARS]
    if not words:
        return ""
    budget = _MAX_PROMPT_CHARS
    shingles = {words[at : at + _SHINGLE_CHARS] for at in range(max(1, len(words) - _SHINGLE_CHARS + 1))}
    for prompt in prompt_texts:
        flat = " ".join(prompt.split())
        budget -= len(flat)
        if budget < 0 or (len(flat) >= 4 and flat in words) or any(shingle in flat for shingle in shingles):
            return " Its words are left out, since they repeat the prompt."
    return f" It says: {words}"


def _overflow(status_code: int, body: str, facts: CallFacts) -> ContextOverflow:
    window = _first(_WINDOW, body)
    prompt = _first(_PROMPT, body)
    asked = _first(_ASKED, body) or facts.max_tokens
    parts = [
        f"the prompt has {prompt} tokens" if prompt is not None else "prompt and output do not fit",
        f"{asked} more were asked for" if asked is not None else "",
        f"the window of {facts.model!r} is {window} tokens" if window is not None else "",
    ]
    return ContextOverflow(
        f"{', '.join(part for part in parts if part)} (the server at {facts.url} refused with {status_code}); shorten "
        "or summarize the history, or lower max_tokens",
        status_code=status_code,
    )


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int | None:
    for pattern in patterns:
        if match := pattern.search(text):
            return int(match.group(1))
    return None


def _server_words(body: str) -> str:
    """Return the message inside the usual error shapes; nothing for HTML."""
    try:
        data: Any = decoded(body)
    except ValueError:
        return "" if "<" in body[:200] else body
    for key in ("error", "message", "detail"):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
    if isinstance(data, Mapping):
        data = data.get("message") or data.get("detail") or ""
    return data if isinstance(data, str) else ""


def _remedy(status_code: int, text: str) -> str:
    if status_code in (401, 403):
        return " Set api_key= (or PANCAKE_API_KEY) to the key the server was started with."
    if status_code == 429:
        return " It is asked too often; send fewer calls at once."
    if _ROLES.search(text):
        return " Its chat template is strict about roles; set strict_roles=True."
    return " The request must be changed before it is sent again."
