"""What `pancake threads` prints: tables, JSON, and values cut short."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from langgraph.checkpoint.base import CheckpointTuple
from rich.table import Table
from rich.text import Text

from pancake_langgraph.checkpoint.overview import ChannelSize, HistoryItem, ThreadInfo

_MAX_CHARS = 160


def safe_text(text: object) -> Text:
    """Return text for a terminal: no markup, no control characters."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)))


def in_threads(count: int) -> str:
    """Return a number of threads in words."""
    return f"{count} thread{'' if count == 1 else 's'}"


def in_bytes(count: int) -> str:
    """Return a number of bytes for people, in units of 1,000."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def threads_table(infos: Sequence[ThreadInfo]) -> Table:
    """Return one row for each thread."""
    table = Table(title=in_threads(len(infos)), title_justify="left")
    table.add_column("thread", overflow="fold")
    for column in ("checkpoints", "namespaces", "step"):
        table.add_column(column, justify="right")
    table.add_column("newest")
    table.add_column("size", justify="right")
    for info in infos:
        newest = info.newest_ts or ("cannot be read" if info.problem else "")
        step = "" if info.newest_step is None else str(info.newest_step)
        figures = (str(info.num_checkpoints), str(len(info.namespaces)), step)
        table.add_row(safe_text(info.thread_id), *figures, safe_text(newest[:19]), in_bytes(info.num_bytes))
    return table


def sizes_table(thread_id: str, sizes: Mapping[str, int]) -> Table:
    """Return one row for each channel, largest first."""
    table = Table(title=Text("thread ") + safe_text(thread_id), title_justify="left")
    table.add_column("channel", overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    total = sum(sizes.values())
    for channel, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        table.add_row(safe_text(channel), in_bytes(size), f"{size / max(total, 1):.0%}")
    table.add_row("all", in_bytes(total), "", style="bold")
    return table


def history_lines(item: HistoryItem, found: CheckpointTuple | None) -> Iterable[Text]:
    """Yield one checkpoint's lines; values only where `found` is given."""
    where = f" in {item.checkpoint_ns}" if item.checkpoint_ns else ""
    upcoming = "not known (a type is not allowed)" if item.next_nodes is None else ", ".join(item.next_nodes) or "none"
    yield safe_text(f"{item.checkpoint_id}{where}  step {item.step}  {item.source}  {(item.ts or '')[:19]}")
    yield safe_text(f"  next: {upcoming}; {item.num_writes} pending writes")
    for channel, size in item.channels.items():
        shown = f"  {channel}: {in_bytes(size.num_bytes)}{_items(size)}"
        if found is not None:
            shown += f"  {_short(found.checkpoint['channel_values'].get(channel))}"
        yield safe_text(shown)


def _items(size: ChannelSize) -> str:
    return "" if size.num_items is None else f", {size.num_items} items"


def _short(value: object) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = _MAX_CHARS
    text = short.repr(value)
    return text if len(text) <= 2 * _MAX_CHARS else f"{text[: 2 * _MAX_CHARS]}…"


def history_json(item: HistoryItem, found: CheckpointTuple | None) -> dict[str, Any]:
    """Return one checkpoint for `json.dumps`; values as short text, and only where `found` is given."""
    fields = asdict(item)
    if found is not None:
        fields["values"] = {channel: _short(value) for channel, value in found.checkpoint["channel_values"].items()}
    return fields
