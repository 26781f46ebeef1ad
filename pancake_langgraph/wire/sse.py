"""Server-sent events from bytes, split anywhere."""

from __future__ import annotations

from typing import Final

from pancake_langgraph._errors import MalformedStream

#: The data of the event that ends a stream.
DONE: Final = "[DONE]"

_MAX_LINE_BYTES: Final = 16 * 1024 * 1024


class EventDecoder:
    """Collects bytes and gives back the `data` of whole events.

    Lines end at LF or CRLF only: other Unicode line separators are ordinary text inside JSON strings.  Bytes are
    decoded per line, so a network split inside a multi-byte character does no harm.  Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Return the data of every event that `chunk` completes.

        Raises:
            MalformedStream: if a line is not UTF-8 or has no end within 16 MiB.
        """
        self._buffer += chunk
        events: list[str] = []
        start = 0
        while (end := self._buffer.find(b"\n", start)) >= 0:
            self._line(bytes(self._buffer[start:end]).removesuffix(b"\r"), events)
            start = end + 1
        del self._buffer[:start]
        if len(self._buffer) > _MAX_LINE_BYTES:
            raise MalformedStream(f"the server sent a line of more than {_MAX_LINE_BYTES} bytes in an event stream")
        return events

    def finish(self) -> list[str]:
        """Return what is complete when the stream ends without the empty line that closes an event."""
        events: list[str] = []
        if self._buffer:
            self._line(bytes(self._buffer), events)
            self._buffer.clear()
        self._line(b"", events)
        return events

    def _line(self, line: bytes, events: list[str]) -> None:
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data.clear()
            return
        name, _, value = line.partition(b":")
        if name != b"data":
            return  # comments, event names, ids and retry times carry nothing here
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise MalformedStream("the server sent bytes that are not UTF-8 in an event stream") from exc
        self._data.append(text.removeprefix(" "))
