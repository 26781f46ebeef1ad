"""Record what a real vLLM server answers, for `WireServer` to replay.

Run against a server that serves SmolLM2-135M-Instruct with a tool parser:
`python tests/data/record_vllm_answers.py http://127.0.0.1:8011/v1 small tests/data/vllm_answers.json`.
Ids, times and token counts are kept as they came: they are part of the shape.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx

_ROOT = re.compile(r'"root":"[^"]*"')

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PING = {
    "type": "function",
    "function": {"name": "ping", "description": "No arguments.", "parameters": {"type": "object", "properties": {}}},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "degrees": {"type": "integer", "enum": [1, 2]},
    },
    "required": ["city", "degrees"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Say hello in one short sentence."}]
COUNT = [{"role": "user", "content": "Count: one two three four five six."}]


def requests(model: str) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Return name -> (path, JSON body or `None` for a GET)."""
    chat = "/v1/chat/completions"
    base = {"model": model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return {
        "chat": (chat, {**base, "messages": ASK, "max_tokens": 24}),
        "chat_again": (
            chat,
            {**base, "messages": [{"role": "system", "content": "word " * 200}, *ASK], "max_tokens": 4},
        ),
        "chat_cached": (
            chat,
            {**base, "messages": [{"role": "system", "content": "word " * 200}, *ASK], "max_tokens": 4},
        ),
        "chat_token_ids": (chat, {**base, "messages": ASK, "max_tokens": 3, "return_token_ids": True}),
        "chat_no_usage": (chat, {"model": model, "temperature": 0, "stream": True, "messages": ASK, "max_tokens": 3}),
        "chat_unstreamed": (chat, {"model": model, "temperature": 0, "messages": ASK, "max_tokens": 8}),
        "logprobs": (chat, {**base, "messages": ASK, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}),
        "stop": (chat, {**base, "messages": COUNT, "max_tokens": 40, "stop": ["e"]}),
        "length": (chat, {**base, "messages": COUNT, "max_tokens": 2}),
        "tool_named": (
            chat,
            {
                **base,
                "messages": ASK,
                "max_tokens": 40,
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
        ),
        "tool_required": (
            chat,
            {**base, "messages": ASK, "max_tokens": 60, "tools": [WEATHER], "tool_choice": "required"},
        ),
        "tool_required_no_arguments": (
            chat,
            {**base, "messages": ASK, "max_tokens": 60, "tools": [PING], "tool_choice": "required"},
        ),
        "tool_cut_short": (
            chat,
            {
                **base,
                "messages": ASK,
                "max_tokens": 3,
                "tools": [WEATHER],
                "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
            },
        ),
        "json_schema": (
            chat,
            {
                **base,
                "messages": ASK,
                "max_tokens": 60,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "w", "schema": SCHEMA, "strict": True},
                },
            },
        ),
        "choice": (
            chat,
            {**base, "messages": ASK, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}},
        ),
        "unknown_model": (chat, {**base, "model": "no-such-model", "messages": ASK, "max_tokens": 4}),
        "overflow": (chat, {**base, "messages": ASK, "max_tokens": 100_000}),
        "overflow_prompt": (
            chat,
            {**base, "messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 10},
        ),
        "bad_request": (chat, {**base, "messages": [{"role": "user", "content": 12}], "max_tokens": 4}),
        "bad_temperature": (chat, {**base, "messages": ASK, "temperature": -3}),
        "wrong_path": ("/chat/completions", {**base, "messages": ASK}),
        "completion": (
            "/v1/completions",
            {"model": model, "prompt": [1, 2, 3], "max_tokens": 1, "temperature": 0},
        ),
        "tokenize_messages": ("/tokenize", {"model": model, "messages": ASK, "add_generation_prompt": True}),
        "tokenize_prompt": ("/tokenize", {"model": model, "prompt": "hello world", "add_special_tokens": False}),
        "models": ("/v1/models", None),
        "version": ("/version", None),
        "health": ("/health", None),
    }


def record(root: str, model: str) -> dict[str, Any]:
    """Ask everything once and return name -> request and raw answer."""
    answers: dict[str, Any] = {}
    with httpx.Client(base_url=root, timeout=120) as client:
        for name, (path, body) in requests(model).items():
            reply = client.get(path) if body is None else client.post(path, json=body)
            shown = body if body is None or len(json.dumps(body)) < 2000 else {**body, "messages": "(long)"}
            answers[name] = {
                "path": path,
                "request": shown,
                "status": reply.status_code,
                "content_type": reply.headers.get("content-type", ""),
                "body": _ROOT.sub('"root":"SmolLM2-135M-Instruct"', reply.text),  # a path of the recording machine
            }
    return answers


if __name__ == "__main__":
    base_url, served, target = sys.argv[1:4]
    recorded = record(base_url.removesuffix("/v1"), served)
    Path(target).write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
