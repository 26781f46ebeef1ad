"""Keys and values in, frame out, and back: what callers use, over one implementation of the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias

import torch

from pancake_kernels.errors import FrameDamaged, TensorRefused, ValuesRefused, WrongBase
from pancake_kernels.kv_codec.backend import Backend, Grouping, Plane
from pancake_kernels.kv_codec.exact import copy_bits
from pancake_kernels.kv_codec.frame import (
    DIGEST_BYTES,
    HEADER_BYTES,
    KEY_GROUP,
    Header,
    Mode,
    header_for,
    parse_header,
    views,
)

#: What a frame may lie in.
Buffer: TypeAlias = torch.Tensor | bytes | bytearray | memoryview
#: Keys, values.
KVPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
#: Views of a frame start where every dtype of a payload can be viewed.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class KVCodec:
    """Encodes and decodes KV on one kind of device.

    Keys and values are `[layers, tokens, kv_heads * head_size]`, both of one shape, dtype (bfloat16, float16, float32)
    and device, with any strides.  Frames are uint8 tensors of one axis, on the same device; for decoding also `bytes`,
    `bytearray` and `memoryview`.  Inputs are only read.  Calls may come from any thread.
    """

    backend: Backend

    def encode(self, keys: torch.Tensor, values: torch.Tensor, mode: Mode | str) -> torch.Tensor:
        """Return the frame of `keys` and `values`, `encoded_size(keys.shape, keys.dtype, mode)` bytes long.

        Raises:
            TensorRefused: if shapes, dtypes or devices do not fit.
            ValuesRefused: if a lossy mode meets NaN, an infinity, or magnitudes beyond about 1e31.
            FrameUnknown: if there is no such mode.
        """
        header = _header_of(keys, values, mode)
        out = torch.empty(header.frame_bytes, dtype=torch.uint8, device=keys.device)
        self._write(header, keys, values, None, out)
        return out

    def encode_into(self, keys: torch.Tensor, values: torch.Tensor, mode: Mode | str, out: torch.Tensor) -> int:
        """Write the frame to the beginning of `out` and return its length in bytes; what follows is left alone.

        Raises:
            TensorRefused: also if `out` is not a uint8 tensor on the same device with enough contiguous room.
            ValuesRefused: as `encode`; `out` then holds no frame.
            FrameUnknown: as `encode`.
        """
        header = _header_of(keys, values, mode)
        size = header.frame_bytes
        flat_room = out.numel() if out.is_contiguous() else 0
        if out.dtype is not torch.uint8 or out.device != keys.device or flat_room < size:
            raise TensorRefused(
                f"output of dtype {out.dtype} on {out.device} with room for {flat_room} bytes: allowed is contiguous "
                f"uint8 on {keys.device} with {size}; to mend: allocate encoded_size(...) bytes there"
            )
        target = out.view(-1)[:size]
        if target.data_ptr() % _ALIGNMENT or target.storage_offset() % _ALIGNMENT:
            target.copy_(self.encode(keys, values, mode))
        else:
            self._write(header, keys, values, None, target)
        return size

    def decode(self, frame: Buffer) -> KVPair:
        """Return keys and values of a full frame, new tensors on the frame's device.

        Raises:
            FrameDamaged: if it is not a frame, or shorter or longer than its header says.
            FrameUnknown: if a later version wrote it, or it uses a codec that is unknown here.
            WrongBase: if it is a delta.
        """
        buffer = as_bytes(frame)
        header = read_header(buffer)
        if header.base_tokens is not None:
            raise WrongBase("KV frame is a delta: it needs its base; to mend: decode_delta(base, delta)")
        return self._read(header, buffer)

    def decode_into(self, frame: Buffer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill `keys` and `values` from a full frame; both must have its shape and dtype, and any strides.

        Raises:
            TensorRefused: if they do not have the frame's shape, dtype and device; nothing is written then.
            FrameDamaged: as `decode`.
            FrameUnknown: as `decode`.
            WrongBase: as `decode`.
        """
        buffer = as_bytes(frame)
        header = read_header(buffer)
        if header.base_tokens is not None:
            raise WrongBase("KV frame is a delta: it needs its base; to mend: decode_delta(base, delta)")
        wanted = (header.shape.layers, header.shape.tokens, header.shape.width)
        for name, tensor in (("keys", keys), ("values", values)):
            if tuple(tensor.shape) != wanted or tensor.dtype is not header.dtype or tensor.device != buffer.device:
                raise TensorRefused(
                    f"{name} of shape {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}: the frame holds "
                    f"{wanted}, {header.dtype}, {buffer.device}; to mend: allocate that, or call decode"
                )
        self._fill(header, buffer, keys, values)

    def encode_delta(
        self, keys: torch.Tensor, values: torch.Tensor, mode: Mode | str, *, base: Buffer, base_tokens: int
    ) -> torch.Tensor:
        """Return a frame of the tokens from `base_tokens` on, to be put on `base`, the frame stored last.

        `keys` and `values` hold all tokens, those of the base too; only the later ones are read.  `base` may be a delta
        itself.  The payload equals that of `encode` over the later tokens, and the frame is 16 bytes longer than
        theirs.  In lossy modes `base_tokens` is a multiple of 32; with `settled_tokens(tokens of the base)` and at
        least 32 later tokens, base and delta together restore the bits that a full frame restores; otherwise a group
        may be cut elsewhere, within the same error bound.

        Raises:
            TensorRefused: if `base_tokens` is not such a multiple or beyond what base or input hold, or if layers,
                width or dtype are not those of the base.
            ValuesRefused: as `encode`.
            FrameDamaged: if the base cannot be read.
            FrameUnknown: if the base cannot be read, or there is no such mode.
        """
        whole = _header_of(keys, values, mode)
        base_bytes = as_bytes(base)
        base_header = read_header(base_bytes)
        held = base_header.shape.tokens + (base_header.base_tokens or 0)
        step = 1 if whole.mode is Mode.EXACT else KEY_GROUP
        if not 0 <= base_tokens <= min(held, whole.shape.tokens) or base_tokens % step:
            raise TensorRefused(
                f"delta from token {base_tokens} on: allowed are multiples of {step} up to what the base ({held}) and "
                f"the input ({whole.shape.tokens}) hold; to mend: round down"
            )
        if not _continues(base_header, whole):
            raise TensorRefused(
                f"delta of {whole.shape}, {whole.dtype}: the base holds {base_header.shape}, {base_header.dtype}; "
                "to mend: encode a full frame"
            )
        tail = replace(whole.shape, tokens=whole.shape.tokens - base_tokens)
        header = replace(whole, shape=tail).continuing(base_tokens)
        out = torch.empty(header.frame_bytes, dtype=torch.uint8, device=keys.device)
        self._write(header, keys[:, base_tokens:], values[:, base_tokens:], digest(base_bytes), out)
        return out

    def decode_delta(self, base: Buffer, *deltas: Buffer) -> KVPair:
        """Return all keys and values of a full frame and the deltas that grew from it, oldest first.

        Raises:
            WrongBase: if a frame does not continue the one before it.
            FrameDamaged: as `decode`, for any of them.
            FrameUnknown: as `decode`, for any of them.
        """
        before = as_bytes(base)
        keys, values = self.decode(before)
        for delta in deltas:
            buffer = as_bytes(delta)
            header = read_header(buffer)
            kept = header.base_tokens
            if kept is None or _stored_digest(buffer) != digest(before):
                raise WrongBase("KV delta: it was made against another frame; drop it, and what continues it")
            if kept > keys.shape[1] or header.shape.width != keys.shape[2] or header.shape.layers != keys.shape[0]:
                raise WrongBase(f"KV delta from token {kept} on does not fit its base of {tuple(keys.shape)}; drop it")
            if header.dtype is not keys.dtype:
                raise WrongBase(f"KV delta of {header.dtype} on a base of {keys.dtype}; drop it")
            more = self._read(header, buffer)
            keys = torch.cat((keys[:, :kept], more[0]), dim=1)
            values = torch.cat((values[:, :kept], more[1]), dim=1)
            before = buffer
        return keys, values

    def _write(
        self, header: Header, keys: torch.Tensor, values: torch.Tensor, base: bytes | None, out: torch.Tensor
    ) -> None:
        head = header.pack() + (base or b"")
        out[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        parts = views(header, out)
        if header.mode is Mode.EXACT:
            copy_bits(keys, parts["keys"])
            copy_bits(values, parts["values"])
            return
        for name, plane, source in _planes(header, parts, keys, values):
            if not source.numel():
                continue
            self.backend.quantize(source, plane)
            if bool(plane.scales.isnan().any()):
                raise ValuesRefused(
                    f"{name} hold NaN, an infinity or magnitudes beyond 1e31: mode {header.mode} takes finite values "
                    "of usual size; to mend: use mode exact"
                )

    def _read(self, header: Header, buffer: torch.Tensor) -> KVPair:
        shape = (header.shape.layers, header.shape.tokens, header.shape.width)
        keys = torch.empty(shape, dtype=header.dtype, device=buffer.device)
        values = torch.empty_like(keys)
        self._fill(header, buffer, keys, values)
        return keys, values

    def _fill(self, header: Header, buffer: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        parts = views(header, buffer)
        if header.mode is Mode.EXACT:
            copy_bits(parts["keys"], keys)
            copy_bits(parts["values"], values)
            return
        for _, plane, out in _planes(header, parts, keys, values):
            if out.numel():
                self.backend.dequantize(plane, out)


def as_bytes(buffer: Buffer) -> torch.Tensor:
    """Return `buffer` as a uint8 tensor of one axis, without copying where that is possible.

    Raises:
        FrameDamaged: if it is no run of bytes.
    """
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype is not torch.uint8 or buffer.dim() != 1:
            raise FrameDamaged(
                f"frame as a tensor of {buffer.dtype} with {buffer.dim()} axes: allowed is uint8, one axis"
            )
        return buffer.contiguous()
    view = memoryview(buffer).cast("B")
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch warns about memory that cannot be written, and would keep the tensor writable.
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def read_header(frame: Buffer) -> Header:
    """Return what a frame says about itself; checks its length too.

    Raises:
        FrameDamaged: if it is not a frame, or shorter or longer than its header says.
        FrameUnknown: if a later version wrote it, or it uses a codec that is unknown here.
    """
    buffer = as_bytes(frame)
    return parse_header(bytes(buffer[:HEADER_BYTES].tolist()), buffer.numel())


def digest(frame: Buffer) -> bytes:
    """Return the 16 bytes by which a delta names its base: BLAKE2b over the whole frame."""
    contents = as_bytes(frame).cpu().numpy()
    return blake2b(contents.data if contents.size else b"", digest_size=DIGEST_BYTES).digest()


def _stored_digest(delta: torch.Tensor) -> bytes:
    return bytes(delta[HEADER_BYTES : HEADER_BYTES + DIGEST_BYTES].tolist())


def _header_of(keys: torch.Tensor, values: torch.Tensor, mode: Mode | str) -> Header:
    if keys.shape != values.shape or keys.dtype is not values.dtype or keys.device != values.device:
        raise TensorRefused(
            f"keys of {tuple(keys.shape)}, {keys.dtype}, {keys.device} beside values of {tuple(values.shape)}, "
            f"{values.dtype}, {values.device}: allowed is the same for both"
        )
    return header_for(tuple(keys.shape), keys.dtype, mode)


def _continues(base: Header, new: Header) -> bool:
    same_plane = (base.shape.layers, base.shape.width) == (new.shape.layers, new.shape.width)
    return same_plane and base.dtype is new.dtype


def _planes(
    header: Header, parts: dict[str, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
) -> tuple[tuple[str, Plane, torch.Tensor], ...]:
    of_keys = Plane(Grouping.PER_CHANNEL, header.key_group, parts["keys"], parts["key_scales"], parts.get("key_zeros"))
    of_values = Plane(
        Grouping.PER_TOKEN, header.value_group, parts["values"], parts["value_scales"], parts.get("value_zeros")
    )
    return ("keys", of_keys, keys), ("values", of_values, values)
