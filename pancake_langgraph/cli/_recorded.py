"""Reads recorded requests: one JSON object a line, each the body of a chat call on the OpenAI wire."""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import Prompt
from pancake_langgraph.wire.json_text import decoded

_ALLOWED = 'allowed is one request body a line, as {"messages": [{"role": "user", "content": "…"}], "tools": […]}'
#: What comes from a pipe is kept to be read twice; more than this on the disk, in a file without a name.
_MEMORY_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request: its line in the file from 1, its prompt, and what was recorded beside it."""

    line: int
    prompt: Prompt
    body: Mapping[str, Any]
    agent: str = ""
    thread: str = ""
    timestamp: float | None = None


def read_recorded(path: Path) -> Iterator[Recorded]:
    """Yield the requests of a file, by their timestamps where all have one, else in the order of the lines.

    Every line is checked before the first request is yielded.  A body may stand under `"body"`, as in batch files.
    Holds one request at a time; what comes from a pipe is kept as a whole, on the disk where it is much.

    Raises:
        ConfigError: if a line is no request, naming the line; if there is none at all.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as given, _seekable(given) as file:
        found: list[tuple[float | None, int, int]] = []
        line = 0
        while True:
            offset = file.tell()
            text = file.readline()
            if not text:
                break
            line += 1
            if text.strip():
                found.append((_parsed(text, line).timestamp, offset, line))
        if not found:
            raise ConfigError(f"{path.name}: got no line with a request, {_ALLOWED}; record at least two calls")
        if all(timestamp is not None for timestamp, _, _ in found):
            found.sort(key=lambda entry: (entry[0] or 0.0, entry[2]))
        for _, offset, number in found:
            file.seek(offset)
            yield _parsed(file.readline(), number)


def _seekable(given: IO[bytes]) -> IO[bytes]:
    if given.seekable():
        return given
    kept = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 - the caller closes it
    shutil.copyfileobj(given, kept)
    kept.seek(0)
    return kept


def _parsed(text: bytes, line: int) -> Recorded:
    try:
        value = decoded(text.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError:
        raise _problem(line, "bytes that are no UTF-8", "write the file as UTF-8") from None
    except ValueError as exc:
        where = getattr(exc, "colno", None)
        at = f" (at character {where})" if where else ""
        raise _problem(line, f"no JSON{at}", "write each request on one line with json.dumps") from None
    if not isinstance(value, dict):
        raise _problem(line, f"a JSON {type(value).__name__}", "write the whole request body")
    inner = value.get("body")
    body = inner if "messages" not in value and isinstance(inner, dict) else value
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(messages, list) or not messages:
        raise _problem(line, f"messages of type {type(messages).__name__}", 'give "messages" as a list with an entry')
    for index, message in enumerate(messages):
        _check_message(message, index, line)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise _problem(line, "tools that are no list of objects", 'give "tools" as they were sent, or leave it out')
    return Recorded(
        line=line,
        prompt=Prompt.of(messages, tools),
        body=body,
        agent=_name(value, "agent", line),
        thread=_name(value, "thread", line),
        timestamp=_seconds(value.get("timestamp"), line),
    )


def _check_message(message: object, index: int, line: int) -> None:
    what = f"messages[{index}]"
    mend = "give messages as they were sent"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _problem(line, f"{what} without a role", mend)
    content = message.get("content")
    if not (content is None or isinstance(content, str | list)):
        raise _problem(line, f"{what} with content of type {type(content).__name__}", mend)
    answered = message.get("tool_call_id")
    if not (answered is None or isinstance(answered, str)):
        raise _problem(line, f"{what} with a tool_call_id of type {type(answered).__name__}", mend)
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function") or {}, dict) for call in calls
    ):
        raise _problem(line, f"{what} with tool_calls that are no list of calls", mend)


def _name(value: Mapping[str, Any], key: str, line: int) -> str:
    found = value.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise _problem(line, f"{key} of type {type(found).__name__}", f'give "{key}" as text, or leave it out')
    return found


def _seconds(value: object, line: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # JSON writes integers that no float can hold
            if math.isfinite(seconds := float(value)):
                return seconds
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    raise _problem(
        line, f"a timestamp of type {type(value).__name__} that is no time", "give seconds or ISO 8601, or leave it out"
    )


def _problem(line: int, got: str, mend: str) -> ConfigError:
    return ConfigError(f"line {line}: got {got}, {_ALLOWED}; {mend}")
