"""Tokens, template and answers of the fake engine.  Pure and stable across processes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pancake_langgraph._types import Prompt, WireObject

_PIECE = re.compile(r" ?\w{1,8}|\s|[^\w\s]")
_VOCABULARY: Final = 40_000
_FIRST_WORD: Final = 100
#: Tokens that stand for themselves, below all words.
SPECIAL: Final[Mapping[str, int]] = {
    name: number
    for number, name in enumerate(
        ("<end>", "<tools>", "<call>", "<arguments>", "system", "user", "assistant", "tool"), 1
    )
}
_WORDS: Final = ("plan", "read", "note", "fact", "draft", "check", "source", "result", "step", "reason", "detail")


@dataclass(frozen=True, slots=True)
class FakeToolCall:
    """One call of a scripted answer."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """One scripted answer: reasoning first, then text, then tool calls."""

    text: str = ""
    tool_calls: tuple[FakeToolCall, ...] = ()
    reasoning: str | None = None


def pieces_of(text: str) -> list[str]:
    """Cut text into pieces, one token each; joined they give the text again."""
    return _PIECE.findall(text)


def tokens_of(text: str) -> list[int]:
    """Return one stable token id per piece of `text`."""
    return [_token(piece) for piece in pieces_of(text)]


def render(prompt: Prompt, *, add_generation_prompt: bool) -> list[int]:
    """Render a prompt: tools first, then each message in order, so that a longer conversation only appends.

    Reasoning and ids of tool calls leave no trace, as with most templates.
    """
    tokens: list[int] = []
    if prompt.tools:
        tokens += [SPECIAL["<tools>"], *tokens_of(canonical_json(list(prompt.tools))), SPECIAL["<end>"]]
    for message in prompt.messages:
        role = str(message.get("role"))
        tokens.append(SPECIAL.get(role, SPECIAL["user"]))
        tokens += tokens_of(text_of(message))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            tokens += call_tokens(str(function.get("name")), str(function.get("arguments")))
        tokens.append(SPECIAL["<end>"])
    if add_generation_prompt:
        tokens.append(SPECIAL["assistant"])
    return tokens


def call_tokens(name: str, arguments: str) -> list[int]:
    """Return the tokens of one tool call."""
    return [SPECIAL["<call>"], *tokens_of(name), SPECIAL["<arguments>"], *tokens_of(_compact(arguments))]


def text_of(message: WireObject) -> str:
    """Return the text of a message's content, with other parts as JSON."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    return "".join(
        str(part.get("text", "")) if isinstance(part, Mapping) and part.get("type") == "text" else canonical_json(part)
        for part in parts
    )


def words_for(prompt_tokens: Sequence[int], num_words: int) -> str:
    """Return words that depend on nothing but the prompt."""
    seed = hashlib.blake2b(repr(list(prompt_tokens)).encode(), digest_size=32).digest()
    return " ".join(_WORDS[seed[index % len(seed)] % len(_WORDS)] for index in range(num_words))


def example_of(schema: Mapping[str, Any] | None, definitions: Mapping[str, Any] | None = None) -> Any:
    """Return one deterministic value that fits a JSON schema of the kinds that tools and structured output use."""
    if not schema:
        return {}
    known = definitions or schema.get("$defs") or {}
    if isinstance(reference := schema.get("$ref"), str):
        return example_of(known.get(reference.rsplit("/", 1)[-1]), known)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return example_of(schema[choice][0], known)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        return {name: example_of(inner, known) for name, inner in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [example_of(schema.get("items"), known)] * int(schema.get("minItems", 1))
    scalars: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "null": None}
    return scalars.get(kind, "text")


def canonical_json(value: Any) -> str:
    """Return JSON without spaces whose keys keep their order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)


def _token(piece: str) -> int:
    digest = hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return _FIRST_WORD + int.from_bytes(digest, "big") % _VOCABULARY


def _compact(arguments: str) -> str:
    """Let arguments render alike however they are spaced."""
    try:
        return canonical_json(json.loads(arguments))
    except ValueError:
        return arguments
