"""The frame: what stands where in an encoded buffer.  No tensor is computed in here.

    header   40 bytes, little endian: magic `PKVC`, version, codec, dtype, kind, layers, tokens, width, key group,
             value group, base tokens, payload bytes, CRC-32 of the 36 bytes before it
    digest   16 bytes, in deltas only: BLAKE2b-128 of the frame the delta continues
    payload  exact: keys, values.  int8: key scales, value scales, keys, values.
             int4: key scales, value scales, key zeros, value zeros, keys, values

Scales are bfloat16, zeros and 8-bit codes int8.  4-bit codes take `ceil(width / 2)` bytes per token: byte `j` holds
channel `j` in its low half and channel `j + ceil(width / 2)` in its high half (0 past the end).

Bytes of a frame, with `n(size, group) = max(1, size // group)` groups (0 for an empty axis; the last group takes the
rest, so that it has up to `2 * group - 1` members), L layers, T tokens, W channels:

    exact  40 + 2 L T W itemsize
    int8   40 + 2 L T W           + 2 L (n(T, 32) W + T n(W, 64))
    int4   40 + 2 L T ceil(W / 2) + 3 L (n(T, 32) W + T n(W, 32))

The payload carries no checksum: who stores frames seals them.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import torch

from pancake_kernels.errors import FrameDamaged, FrameUnknown, TensorRefused

MAGIC: Final = b"PKVC"
VERSION: Final = 1
HEADER_BYTES: Final = 40
DIGEST_BYTES: Final = 16
#: Tokens of one key group.  Deltas start at its multiples.
KEY_GROUP: Final = 32
_FULL, _DELTA = 0, 1
_MAX_COUNT: Final = 2**32 - 1
_FIELDS: Final = struct.Struct("<4s4B3I2HIQ")
_CRC: Final = struct.Struct("<I")
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Mode(StrEnum):
    """How KV is kept: its bytes as they are, or 8 or 4 bits per element with scales."""

    EXACT = "exact"
    INT8 = "int8"
    INT4 = "int4"


_MODES: Final = (Mode.EXACT, Mode.INT8, Mode.INT4)
#: Channels of one value group.
_VALUE_GROUP: Final = {Mode.EXACT: 0, Mode.INT8: 64, Mode.INT4: 32}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape that keys and values share: `[layers, tokens, width]`, width = KV heads times head size."""

    layers: int
    tokens: int
    width: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says about itself.  `shape.tokens` counts the tokens in this frame, without those of a base."""

    mode: Mode
    dtype: torch.dtype
    shape: KVShape
    key_group: int
    value_group: int
    #: Tokens of the base that stay in front of this frame's; None for a full frame.
    base_tokens: int | None = None

    @property
    def payload_start(self) -> int:
        """Return the offset of the payload in bytes."""
        return HEADER_BYTES + (0 if self.base_tokens is None else DIGEST_BYTES)

    @property
    def payload_bytes(self) -> int:
        """Return the size of the payload."""
        return sum(section.num_bytes for section in sections(self))

    @property
    def frame_bytes(self) -> int:
        """Return the size of the whole frame."""
        return self.payload_start + self.payload_bytes

    def continuing(self, base_tokens: int) -> Header:
        """Return the header of the delta that keeps `base_tokens` tokens of a base in front of it."""
        return replace(self, base_tokens=base_tokens)

    def pack(self) -> bytes:
        """Return the header's 40 bytes."""
        shape = self.shape
        body = _FIELDS.pack(
            MAGIC,
            VERSION,
            _MODES.index(self.mode),
            _DTYPES.index(self.dtype),
            _FULL if self.base_tokens is None else _DELTA,
            shape.layers,
            shape.tokens,
            shape.width,
            self.key_group,
            self.value_group,
            self.base_tokens or 0,
            self.payload_bytes,
        )
        return body + _CRC.pack(zlib.crc32(body))


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of the payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        first, second, third = self.shape
        return first * second * third * int(self.dtype.itemsize)


def num_groups(size: int, group: int) -> int:
    """Return how many groups an axis of `size` has: the last one takes what is left over."""
    return max(1, size // group) if size else 0


def spans(size: int, group: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each group of an axis, ascending."""
    groups = num_groups(size, group)
    for index in range(groups):
        yield index * group, size if index == groups - 1 else (index + 1) * group


def settled_tokens(tokens: int) -> int:
    """Return how many of a thread's first tokens keep their groups when it grows: where its next delta should start."""
    return tokens if tokens % KEY_GROUP == 0 else (num_groups(tokens, KEY_GROUP) - 1) * KEY_GROUP


def header_for(shape: tuple[int, ...], dtype: torch.dtype, mode: Mode | str) -> Header:
    """Return the header of a full frame for keys and values of `shape` and `dtype`.

    Raises:
        TensorRefused: if the shape has not three axes, an axis is too long, or the dtype is none of the three.
        FrameUnknown: if there is no such mode.
    """
    if len(shape) != 3 or not all(0 <= size <= _MAX_COUNT for size in shape):
        raise TensorRefused(
            f"KV of shape {tuple(shape)}: allowed is [layers, tokens, kv_heads * head_size], each below 2**32; "
            "to mend: split keys from values and flatten the heads"
        )
    if dtype not in _DTYPES:
        raise TensorRefused(f"KV of dtype {dtype}: allowed are {', '.join(map(str, _DTYPES))}; to mend: convert it")
    try:
        known = Mode(mode)
    except ValueError as error:
        raise FrameUnknown(f"mode {mode!r}: allowed are {', '.join(_MODES)}") from error
    layers, tokens, width = shape
    key_group = 0 if known is Mode.EXACT else KEY_GROUP
    return Header(known, dtype, KVShape(layers, tokens, width), key_group, _VALUE_GROUP[known])


def encoded_size(shape: tuple[int, ...], dtype: torch.dtype, mode: Mode | str) -> int:
    """Return the exact number of bytes that `encode` makes of keys and values of this shape and dtype.

    Raises:
        TensorRefused: if shape or dtype cannot be encoded.
        FrameUnknown: if there is no such mode.
    """
    return header_for(shape, dtype, mode).frame_bytes


def sections(header: Header) -> Iterator[Section]:
    """Yield the tensors of the payload in their order."""
    layers, tokens, width = header.shape.layers, header.shape.tokens, header.shape.width
    plane = (layers, tokens, width)
    if header.mode is Mode.EXACT:
        yield Section("keys", header.dtype, plane)
        yield Section("values", header.dtype, plane)
        return
    of_keys = (layers, num_groups(tokens, header.key_group), width)
    of_values = (layers, tokens, num_groups(width, header.value_group))
    yield Section("key_scales", torch.bfloat16, of_keys)
    yield Section("value_scales", torch.bfloat16, of_values)
    if header.mode is Mode.INT4:
        yield Section("key_zeros", torch.int8, of_keys)
        yield Section("value_zeros", torch.int8, of_values)
        packed = (layers, tokens, (width + 1) // 2)
        yield Section("keys", torch.uint8, packed)
        yield Section("values", torch.uint8, packed)
    else:
        yield Section("keys", torch.int8, plane)
        yield Section("values", torch.int8, plane)


def views(header: Header, frame: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the payload's tensors as views of `frame` (uint8, one axis, whole frame).

    A tensor whose bytes lie where its dtype cannot be viewed comes as a copy: fit to read, not to write.
    """
    found: dict[str, torch.Tensor] = {}
    start = header.payload_start
    for section in sections(header):
        part = frame[start : start + section.num_bytes]
        if part.storage_offset() % section.dtype.itemsize or part.data_ptr() % section.dtype.itemsize:
            part = part.clone()
        found[section.name] = part.view(section.dtype).view(section.shape)
        start += section.num_bytes
    return found


def parse_header(head: bytes, num_bytes: int) -> Header:
    """Read the first 40 bytes of a buffer that is `num_bytes` long.

    Raises:
        FrameDamaged: if this is no frame, its header was changed, or the length is not what the header says.
        FrameUnknown: if version, codec, dtype or kind is not known here.
    """
    if len(head) < HEADER_BYTES or head[:4] != MAGIC:
        raise FrameDamaged(f"buffer of {num_bytes} bytes: not a KV frame, which begins with {MAGIC!r}; drop it")
    if head[4] != VERSION:
        raise FrameUnknown(
            f"KV frame of version {head[4]}: allowed is {VERSION}; to mend: update the reader, or drop it"
        )
    body = head[: _FIELDS.size]
    if _CRC.unpack(head[_FIELDS.size : HEADER_BYTES])[0] != zlib.crc32(body):
        raise FrameDamaged("KV frame: the header does not match its checksum; drop it")
    _, _, codec, dtype, kind, layers, tokens, width, key_group, value_group, base_tokens, payload = _FIELDS.unpack(body)
    if codec >= len(_MODES) or dtype >= len(_DTYPES) or kind > _DELTA:
        raise FrameUnknown(
            f"KV frame with codec {codec}, dtype {dtype}, kind {kind}: not known here; update the reader"
        )
    mode = _MODES[codec]
    if mode is not Mode.EXACT and not (key_group and value_group):
        raise FrameDamaged(f"KV frame in mode {mode} without group sizes; drop it")
    header = Header(
        mode,
        _DTYPES[dtype],
        KVShape(layers, tokens, width),
        key_group,
        value_group,
        base_tokens if kind == _DELTA else None,
    )
    if header.payload_bytes != payload or header.frame_bytes != num_bytes:
        raise FrameDamaged(f"KV frame of {num_bytes} bytes: its header says {header.frame_bytes}; drop it")
    return header
