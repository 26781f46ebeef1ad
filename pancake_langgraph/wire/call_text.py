"""Spotting a tool call that a model wrote as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_MARKS: Final = re.compile(
    r"<tool_call>|<\|tool_call|\[TOOL_CALLS\]|<\|python_tag\|>|<function[=\s>]|<function_call|<invoke\s+name=|"
    r"<\|tool▁call▁begin\|>",
)
_NAMED: Final = re.compile(r'"name"\s*:\s*"([^"]{1,128})"')
_ARGUMENTS: Final = re.compile(r'"(?:arguments|parameters)"\s*:')


def looks_like_tool_call(text: str, tool_names: Sequence[str]) -> bool:
    """Say whether `text` holds a call in one of the usual notations, or JSON that names one of `tool_names`.

    Only for flagging: text is never executed.
    """
    if _MARKS.search(text):
        return True
    if not _ARGUMENTS.search(text):
        return False
    return any(match.group(1) in tool_names for match in _NAMED.finditer(text))
