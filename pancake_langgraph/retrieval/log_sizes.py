"""How long the logs were when the index was last closed: one that is shorter then is damaged, and no crash was it.

The sizes are lower bounds.  Logs only grow, so that they stay true whatever a later writer does before a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import xxhash

from pancake_langgraph._errors import CorruptIndex
from pancake_langgraph.retrieval.disk import Disk, size_of
from pancake_langgraph.retrieval.log import EMPTY_LOG_BYTES, LogTail

logger = logging.getLogger(__name__)

CLOSED: Final = "CLOSED"
_CHUNK: Final = 1 << 20
_decode: Final = msgspec.json.Decoder(dict[int, int]).decode


def read_sizes(root: Path) -> Mapping[int, int]:
    """Return by number what each log has at least, in bytes; nothing for an index that was never closed.

    Raises:
        CorruptIndex: if that is not what was written.
    """
    path = root / CLOSED
    try:
        body, _, seal = path.read_bytes().rstrip(b"\n").rpartition(b" ")
    except FileNotFoundError:
        return {}
    if xxhash.xxh3_64_hexdigest(body).encode() != seal:
        raise CorruptIndex(f"{path}: its checksum does not fit")
    return _decode(body)


def note_sizes(root: Path, logs: Iterable[Path], disk: Disk) -> None:
    """Write down how long logs are, which have to be on the device; what was noted before is not taken back.

    Where it cannot be written this is logged and no more: all that was stored is in the logs.
    """
    try:
        before = read_sizes(root)
    except (CorruptIndex, OSError):
        before = {}
    sizes = {int(log.stem): max(before.get(int(log.stem), 0), size_of(log)) for log in logs}
    if sizes == before:
        return
    body = msgspec.json.encode(sizes)
    temporary = root / f"{CLOSED}.tmp"
    try:
        disk.write(temporary, (body, b" ", xxhash.xxh3_64_hexdigest(body).encode(), b"\n"))
        disk.rename(temporary, root / CLOSED)
    except OSError as error:
        logger.warning(
            "%s could not be written (%s); a damaged end of the log would be taken for that of a crash",
            root / CLOSED,
            error.strerror or error,
        )


def trouble_of(tail: LogTail, path: Path, *, is_last: bool, closed_size: int) -> str | None:
    """Say what is wrong with a log of which `tail` is all that is whole; `None` if nothing is.

    The end of the last one may be torn by a crash, but not before `closed_size`.
    """
    if tail.damage is not None:
        return tail.damage
    if not is_last and tail.end < size_of(path):
        return f"{path}: it is damaged at byte {tail.end}"
    if tail.end < closed_size:
        return f"{path}: it is whole up to byte {tail.end} only, and had {closed_size} when the index was closed"
    return None


def put_aside(path: Path, end: int, disk: Disk) -> None:
    """Copy what stands behind `end` of a log, the torn record of a crash, to a file beside it, and say so.

    Nothing of it was acknowledged, so that it may be lost where there is no room for it.
    """
    more = size_of(path) - end
    if more <= 0 or end < EMPTY_LOG_BYTES:
        return
    aside = path.with_name(f"{path.stem}-{end}.cut")
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(end)
            disk.write(aside, iter(lambda: file.read(_CHUNK), b""))
    except OSError as error:
        logger.warning("%s: its last %d bytes are no whole record and are cut off (%s)", path, more, error)
    else:
        logger.warning("%s: its last %d bytes are no whole record and are cut off; see %s", path, more, aside)
