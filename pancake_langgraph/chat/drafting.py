"""Telling the first words of one answer's texts, while it streams, to those who want to know them."""

from __future__ import annotations

from typing import Final

from pancake_langgraph.chat.watch import Watch
from pancake_langgraph.wire.drafts import AnswerDrafts, JsonDrafts

#: Stands for the answer's own text among the indexes of tool calls.
OWN_TEXT: Final = -1
_MAX_TEXTS: Final = 16


class Drafting:
    """The texts of one answer that somebody wants to see early; costs next to nothing where nobody does."""

    def __init__(self, watch: Watch) -> None:
        """Ask who wants to see what."""
        self._watch = watch
        self._wanted = watch.wanted_drafts()
        self._texts: dict[int, tuple[str, AnswerDrafts | JsonDrafts]] = {}
        if "" in self._wanted:
            self._texts[OWN_TEXT] = "", AnswerDrafts()

    def begin_call(self, index: int, tool: str) -> None:
        """Take in that the answer begins a call of a tool."""
        if tool in self._wanted and len(self._texts) < _MAX_TEXTS:
            self._texts[index] = tool, JsonDrafts()

    def feed(self, index: int, piece: str) -> None:
        """Take the next piece of a call's arguments, or of the answer's own text."""
        if not self._texts or (text := self._texts.get(index)) is None:
            return
        tool, drafts = text
        if (found := drafts.feed(piece)) is not None:
            self._watch.draft(tool, found)
