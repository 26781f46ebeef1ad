"""The definition of the lossy modes, in plain torch: short, slow, and what every other implementation must equal.

Per group, all in float32:

    int8  raw = max|x| / 127                         scale = up(raw)   code = rint(x / scale) in -127..127
    int4  raw = max((max x - min x) / 15, |min x| / 112)
          scale = up(raw)   zero = rint(min x / scale)   code = rint(x / scale) - zero, cut to 0..15
    back  x' = (zero + code) * scale, cut to the finite range of the dtype, rounded to it

`up` rounds up to bfloat16 and to at least 2**-126; rint rounds halves to even; divisions by constants and scales are
multiplications by the float32 reciprocal.  Because a scale is never too small, and a code and a zero count in the same
steps, each element is off by at most half a step (half of the stored scale, and 2**-14 of it for float32's own
rounding), before the result is rounded to its dtype.  The product of code and scale is exact in float32, so the order
of operations changes nothing, and neither does fused multiplication.

Keys are scaled per channel and values per token, as in KIVI (Liu et al., ICML 2024, arXiv:2402.02750): keys have
channels with large values throughout, values have not.
"""

from __future__ import annotations

import torch

from pancake_kernels.kv_codec.backend import (
    CODE_LIMIT,
    MAX_SCALE,
    MIN_SCALE,
    NIBBLE_LIMIT,
    ZERO_LIMIT,
    Plane,
)
from pancake_kernels.kv_codec.frame import spans


class ReferenceBackend:
    """Plain torch on any device."""

    name = "reference"

    def quantize(self, source: torch.Tensor, plane: Plane) -> None:
        """Fill the plane's tensors from `source`; see `Backend`."""
        axis = plane.grouping.axis
        codes = torch.empty(source.shape, dtype=torch.int8, device=source.device)
        for index, (start, stop) in enumerate(spans(source.shape[axis], plane.group)):
            block = source.narrow(axis, start, stop - start).to(torch.float32)
            low = block.amin(axis, keepdim=True)
            high = block.amax(axis, keepdim=True)
            if plane.zeros is None:
                raw = torch.maximum(high, -low) * (1 / CODE_LIMIT)
            else:
                raw = torch.maximum((high - low) * (1 / NIBBLE_LIMIT), low.abs() * (1 / ZERO_LIMIT))
            scale = round_up(raw)
            inverse = 1.0 / scale.to(torch.float32)
            code = (block * inverse).round()
            if plane.zeros is not None:
                zero = (low * inverse).round()
                plane.zeros.narrow(axis, index, 1).copy_(zero)
                code = (code - zero).clamp(0, NIBBLE_LIMIT)
            plane.scales.narrow(axis, index, 1).copy_(scale)
            codes.narrow(axis, start, stop - start).copy_(code.clamp(-CODE_LIMIT, CODE_LIMIT))
        plane.codes.copy_(codes if plane.zeros is None else pack_nibbles(codes))

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        """Fill `out` from the plane's tensors; see `Backend`."""
        axis = plane.grouping.axis
        codes = plane.codes if plane.zeros is None else unpack_nibbles(plane.codes, out.shape[-1])
        largest = torch.finfo(out.dtype).max
        for index, (start, stop) in enumerate(spans(out.shape[axis], plane.group)):
            steps = codes.narrow(axis, start, stop - start).to(torch.float32)
            if plane.zeros is not None:
                steps = steps + plane.zeros.narrow(axis, index, 1)
            restored = steps * plane.scales.narrow(axis, index, 1).to(torch.float32)
            out.narrow(axis, start, stop - start).copy_(restored.clamp(-largest, largest))


def round_up(raw: torch.Tensor) -> torch.Tensor:
    """Return the smallest stored scale (bfloat16) that is no smaller than `raw`; NaN where none may be stored."""
    allowed = torch.where(raw <= MAX_SCALE, raw.clamp(min=MIN_SCALE), torch.nan)
    bits = (allowed.view(torch.int32) + 0xFFFF) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Put the two halves of the last axis into the low and high halves of bytes."""
    width = codes.shape[-1]
    half = (width + 1) // 2
    packed = codes[..., :half].to(torch.uint8)
    packed[..., : width - half] |= codes[..., half:].to(torch.uint8) << 4
    return packed


def unpack_nibbles(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the `width` codes (int8) of each row of bytes."""
    half = packed.shape[-1]
    return torch.cat((packed & 15, packed[..., : width - half] >> 4), dim=-1).to(torch.int8)
