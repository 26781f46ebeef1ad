"""A shape of a prompt: parts in order, compared with real calls and cut back to what they confirm."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pancake_langgraph._types import WireObject
from pancake_langgraph.prompts.fields import Fields, Hole, WireMemo, text_of
from pancake_langgraph.prompts.identity import common_messages, common_text
from pancake_langgraph.prompts.parts import Fixed, Known, Part, Rendering, Slice, Text, chars_of

SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True, slots=True)
class PromptShape:
    """The parts of one agent's prompt, from its first message on; the prompt may go on behind the last one."""

    parts: tuple[Part, ...]

    @property
    def is_general(self) -> bool:
        """Whether nothing in it can be one thread's own content: system texts, slices and texts with holes only."""
        return not any(is_literal(part) for part in self.parts)

    @property
    def is_common(self) -> bool:
        """Whether it is the form that most apps have: system messages, then all messages of one field."""
        *head, last = self.parts or (None,)
        heads = all(isinstance(p, Text) and p.role in SYSTEM_ROLES and not p.is_cut for p in head)
        return heads and isinstance(last, Slice) and last.keep.grows and not last.keep.without

    def general_part(self) -> PromptShape:
        """Return the beginning that could hold for any thread."""
        for position, part in enumerate(self.parts):
            if is_literal(part):
                return PromptShape(self.parts[:position])
        return self


def is_literal(part: Part) -> bool:
    """Whether a part is a message without any hole that is no system message."""
    if isinstance(part, Text):
        return part.role not in SYSTEM_ROLES and not any(isinstance(piece, Hole) for piece in part.pieces)
    return isinstance(part, Fixed) and part.message.get("role") not in SYSTEM_ROLES


class Match(NamedTuple):
    """How far a rendering agrees with a real prompt: whole messages, then characters of the next one.

    `is_whole` says that the whole rendering is a beginning of the prompt; `share` is the agreeing part of the prompt.
    """

    messages: int
    chars: int
    is_whole: bool
    share: float


def sizes_of(prompt: Sequence[WireObject]) -> list[int]:
    """Return about how many characters stand before each message of a prompt, and behind the last one."""
    return list(itertools.accumulate(map(chars_of, prompt), initial=0))


def compare(rendering: Rendering, prompt: Sequence[WireObject], sizes: Sequence[int]) -> Match:
    """Compare a rendering with the messages of a real call, whose sizes are `sizes_of` it."""
    messages = rendering.messages
    whole = messages[:-1] if rendering.is_cut else messages
    count = common_messages(whole, prompt)
    chars = 0
    if count < len(messages) and count < len(prompt):
        chars = common_text(messages[count], prompt[count])
    agreed = count == len(messages) or (
        rendering.is_cut and count == len(whole) and chars == len(messages[-1]["content"])
    )
    return Match(count, chars, agreed, (sizes[count] + chars) / (sizes[-1] or 1))


def cut(shape: PromptShape, match: Match, known: Known, memo: WireMemo) -> PromptShape:
    """Return the beginning of a shape that a real call has confirmed."""
    kept: list[Part] = []
    done = 0
    for part in shape.parts:
        size = 1
        if isinstance(part, Slice):
            value = known.fields.get(part.field)
            size = len(part.keep.of(memo.wire(value))) if isinstance(value, list | tuple) else match.messages + 1
        if done + size <= match.messages:
            kept.append(part)
            done += size
            continue
        if done == match.messages and (shorter := _shorter(part, match.chars, known.fields)) is not None:
            kept.append(shorter)
        break
    return PromptShape(tuple(kept))


def _shorter(part: Part, chars: int, fields: Fields) -> Text | None:
    """Return the beginning of a text part; `None` when nothing of it is left."""
    if not isinstance(part, Text):
        return None
    pieces: list[str | Hole] = []
    for piece in part.pieces:
        text = piece if isinstance(piece, str) else text_of(fields, piece) or ""
        if len(text) > chars:
            if isinstance(piece, str) and chars:
                pieces.append(piece[:chars])
            break
        pieces.append(piece)
        chars -= len(text)
    return Text(part.role, tuple(pieces), is_cut=True) if pieces else None
