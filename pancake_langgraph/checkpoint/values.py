"""Between values and elements: encodes what is new of a value, and puts values together from what was fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from pancake_langgraph.checkpoint.chunks import Chunk, chunks_of_new, chunks_of_stored, known_moulds
from pancake_langgraph.checkpoint.codec import Codec
from pancake_langgraph.checkpoint.elements import FANOUT, ElementSink, Fetch, Listed, Ref, open_entries, open_refs
from pancake_langgraph.checkpoint.memory import Latest, Remembered, remember_single
from pancake_langgraph.checkpoint.moulds import Mould
from pancake_langgraph.checkpoint.record import Record
from pancake_langgraph.checkpoint.rows import Spot

_NO_CHUNKS: Final[Sequence[Chunk]] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """A value that was read, and if it is a list how it is stored and what its items were cast from."""

    value: object
    listed: Listed | None = None
    moulds: Sequence[Mould | None] = ()


def stored_value(
    codec: Codec, sink: ElementSink, channel: str, value: object, version: object, known: Remembered | None
) -> Remembered:
    """Encode what is new of a value into `sink`; return how it is stored.

    Raises:
        StateTypeError: if it may not be stored.
    """
    if type(value) is not list:
        if known is not None and known.value is value:
            return replace(known, version=version)
        return remember_single(version, sink.single(codec.encode(value, channel=channel)), value)
    listing = chunks_of_new(
        value,
        () if known is None else known.chunks,
        encode=lambda item: sink.entry(codec.encode(item, channel=channel)),
        leaf=sink.leaf,
    )
    chunks = listing.chunks
    leaves = [leaf for chunk in chunks for leaf in chunk.leaves]
    rest = chunks[-1].entries[len(chunks[-1].leaves) * FANOUT :] if chunks else ()
    num_kept = sum(len(chunk.leaves) for chunk in chunks[: listing.num_shared])
    return Remembered(version, sink.joined(leaves, rest, num_kept=num_kept), chunks=chunks)


def ref_of_value(codec: Codec, sink: ElementSink, channel: str, value: object) -> Ref:
    """Encode a value into `sink`; return the reference to it.

    Raises:
        StateTypeError: if it may not be stored.
    """
    if type(value) is not list:
        return sink.single(codec.encode(value, channel=channel))
    return sink.list_of([sink.entry(codec.encode(item, channel=channel)) for item in value])[0]


def open_values(
    codec: Codec,
    refs: Mapping[str, Ref],
    channels: Mapping[str, str],
    fetch: Fetch,
    known: Mapping[str, Sequence[Chunk]],
) -> Mapping[str, Opened]:
    """Fetch all values at once, with one fetch per level, and put them together.

    Every stored byte is fetched and checked; only decoding is left out where what is behind the same hash is known.

    Args:
        codec: Decodes.
        refs: The values, by key.
        channels: A write's channel by its key; any other key is its channel's name behind one letter.
        fetch: Fetches elements.
        known: The chunks of lists stored before, by key.

    Raises:
        CorruptCheckpoint: if a part is missing or damaged.
        StateTypeError: if a type in it is not allowed.
    """
    raw = open_refs(refs, fetch)
    listed = {key: value for key, value in raw.items() if isinstance(value, Listed)}
    encodings = open_entries([entry for value in listed.values() for entry in value.entries], fetch)
    at, opened = 0, {}
    for key, value in raw.items():
        channel = channels.get(key, key[1:])
        if isinstance(value, Listed):
            part = encodings[at : at + len(value.entries)]
            at += len(part)
            moulds = known_moulds(value.entries, known.get(key, _NO_CHUNKS))
            items = [
                codec.decode(encoding, channel=channel) if mould is None else mould.cast()
                for encoding, mould in zip(part, moulds, strict=True)
            ]
            opened[key] = Opened(items, value, moulds)
        else:
            opened[key] = Opened(codec.decode(value, channel=channel))
    return opened


def latest_of(spot: Spot, record: Record, opened: Mapping[str, Opened], versions: Mapping[str, object]) -> Latest:
    """Return what there is to remember of a checkpoint that was read; its values lie in `opened` under `c…`."""
    channels = {}
    for channel, ref in record.values.items():
        value = opened[f"c{channel}"]
        version = versions.get(channel)
        if value.listed is None:
            channels[channel] = remember_single(version, ref, value.value)
            continue
        items, listed = cast("list[object]", value.value), value.listed
        chunks = chunks_of_stored(items, listed.entries, listed.full_leaves, value.moulds)
        channels[channel] = Remembered(version, ref, chunks=chunks)
    return Latest(spot, channels)
