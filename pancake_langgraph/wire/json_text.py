"""Decoding JSON that a server sent."""

from __future__ import annotations

import json
from typing import Any


def decoded(text: str | bytes, *, strict: bool = True) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is no JSON, or nested deeper than the interpreter can follow.
    """
    try:
        return json.loads(text, strict=strict)
    except RecursionError as exc:
        raise ValueError("the JSON is nested too deeply") from exc
