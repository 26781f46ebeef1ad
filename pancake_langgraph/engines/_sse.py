"""Server-sent events from raw bytes.  Pure.

Lines end at LF or CRLF only: JSON may hold U+2028 and other characters at which Python's own line splitting would cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pancake_langgraph._errors import MalformedStream

#: A line longer than this is not a chat chunk (a chunk may list every prompt token).
MAX_LINE_BYTES: Final = 32 * 1024 * 1024


class SseDecoder:
    """Turns chunks of bytes into the data of complete events.  Not thread-safe."""

    def __init__(self) -> None:
        """Start with an empty buffer."""
        self._pending = bytearray()
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Take `chunk` and yield the data of each event that it completes.

        Raises:
            MalformedStream: if a line grows beyond `MAX_LINE_BYTES` or is not UTF-8.
        """
        start = len(self._pending)
        self._pending += chunk
        begin = 0
        while (end := self._pending.find(b"\n", max(begin, start))) >= 0:
            line = bytes(self._pending[begin:end]).removesuffix(b"\r")
            begin = end + 1
            if (event := self._take(line)) is not None:
                yield event
        del self._pending[:begin]
        if len(self._pending) > MAX_LINE_BYTES:
            raise MalformedStream(f"stream: got a line of more than {MAX_LINE_BYTES} bytes; is this a chat server?")

    def finish(self) -> str | None:
        """Return the data of an event that the server did not close with an empty line, if any."""
        if self._pending:
            line = bytes(self._pending)
            self._pending.clear()
            event = self._take(line)
            if event is not None:
                return event
        return self._take(b"")

    def _take(self, line: bytes) -> str | None:
        if not line:
            if not self._data:
                return None
            data, self._data = b"\n".join(self._data), []
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError as exc:
                raise MalformedStream(f"stream: got bytes that are not UTF-8 ({exc.reason})") from exc
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        return None
