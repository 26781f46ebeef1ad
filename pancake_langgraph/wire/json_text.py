"""JSON to and from a server."""

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


def encoded(body: Any) -> bytes:
    """Return the bytes of a request body, the same from every part of this package, so that tokens agree.

    Half a surrogate pair has no UTF-8 form; it becomes a question mark.
    """
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
