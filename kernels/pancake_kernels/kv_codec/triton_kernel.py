"""Triton kernels for GPUs.  Importing this module imports Triton; `registry` does it where it is wanted.

Three kernels: the scales (and zeros) of all groups, then codes from elements and scales, packed where there are 4 bits,
and the way back.  Codes, scales and zeros equal the reference's bits: divisions are IEEE ones, halves round to even
through the addition of 1.5 * 2**23, and multiplication is not fused with addition.  bfloat16 goes in and out as its
bits, so that Triton's interpreter, which has no such type of its own, gives the same results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pancake_kernels.kv_codec.backend import (
    CODE_LIMIT,
    MAX_SCALE,
    MIN_SCALE,
    NIBBLE_LIMIT,
    ZERO_LIMIT,
    Grouping,
    Plane,
)
from pancake_kernels.kv_codec.frame import num_groups

#: Added and taken away again, it leaves a float32 below 2**22 rounded to an integer, halves to even.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)
_MAX_SCALE = tl.constexpr(MAX_SCALE)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_PER_CODE = tl.constexpr(1 / CODE_LIMIT)
_PER_NIBBLE = tl.constexpr(1 / NIBBLE_LIMIT)
_PER_ZERO = tl.constexpr(1 / ZERO_LIMIT)
_CODE_LIMIT = tl.constexpr(float(CODE_LIMIT))
_NIBBLE_LIMIT = tl.constexpr(float(NIBBLE_LIMIT))
_NAN_BITS = tl.constexpr(0x7FC0)
#: Lanes and row tiles of one program.
_LANES = 64
_ROWS = 4
_COLUMNS = 128


class TritonBackend:
    """Triton on a GPU, or on any tensors in Triton's interpreter."""

    name = "triton"

    def quantize(self, source: torch.Tensor, plane: Plane) -> None:
        """Fill the plane's tensors from `source`; see `Backend`."""
        elements = source.contiguous()
        layers, tokens, width = elements.shape
        bits = _as_bits(elements)
        per_channel = plane.grouping is Grouping.PER_CHANNEL
        cut, lanes = (tokens, width) if per_channel else (width, tokens)
        groups = num_groups(cut, plane.group)
        zeros = plane.scales if plane.zeros is None else plane.zeros
        longest = max(plane.group, cut - (groups - 1) * plane.group)
        _scale_kernel[(layers, groups, triton.cdiv(lanes, _LANES))](
            bits,
            plane.scales.view(torch.int16),
            zeros,
            tokens,
            width,
            groups,
            group=plane.group,
            members=triton.next_power_of_2(longest),
            lane_block=_LANES,
            per_channel=per_channel,
            packed=plane.zeros is not None,
            enable_fp_fusion=False,
        )
        columns = plane.codes.shape[-1]
        _quantize_kernel[(triton.cdiv(layers * tokens, _ROWS), triton.cdiv(columns, _COLUMNS))](
            bits,
            plane.scales.view(torch.int16),
            zeros,
            plane.codes,
            layers * tokens,
            tokens,
            width,
            groups,
            group=plane.group,
            row_block=_ROWS,
            column_block=_COLUMNS,
            per_channel=per_channel,
            packed=plane.zeros is not None,
            enable_fp_fusion=False,
        )

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        """Fill `out` from the plane's tensors; see `Backend`."""
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        layers, tokens, width = out.shape
        per_channel = plane.grouping is Grouping.PER_CHANNEL
        groups = num_groups(tokens if per_channel else width, plane.group)
        _dequantize_kernel[(triton.cdiv(layers * tokens, _ROWS), triton.cdiv(width, _COLUMNS))](
            plane.codes,
            plane.scales.view(torch.int16),
            plane.scales if plane.zeros is None else plane.zeros,
            _as_bits(target),
            layers * tokens,
            tokens,
            width,
            groups,
            group=plane.group,
            row_block=_ROWS,
            column_block=_COLUMNS,
            per_channel=per_channel,
            half_precision=out.dtype is torch.float16,
            packed=plane.zeros is not None,
            enable_fp_fusion=False,
        )
        if target is not out:
            out.copy_(target)


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return bfloat16 as int16 and the others as they are."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@triton.jit
def _widen(loaded):
    """Return float32 from loaded elements: int16 holds bfloat16's bits."""
    if loaded.dtype == tl.int16:
        return (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return loaded.to(tl.float32)


@triton.jit
def _rint(number):
    """Round to an integer, halves to even."""
    return (number + _ROUNDING) - _ROUNDING


@triton.jit
def _scale_at(scales, offsets, mask):
    """Load stored scales as float32."""
    return _widen(tl.load(scales + offsets, mask=mask, other=0x3F80))


@triton.jit
def _group_offsets(rows, columns, tokens, width, groups, group: tl.constexpr, per_channel: tl.constexpr):
    """Return where the scales of elements lie; `rows` count tokens through all layers."""
    if per_channel:
        index = tl.minimum((rows % tokens) // group, groups - 1)
        return ((rows // tokens) * groups + index) * width + columns
    return rows * groups + tl.minimum(columns // group, groups - 1)


@triton.jit
def _scale_kernel(
    elements,
    scales,
    zeros,
    tokens,
    width,
    groups,
    group: tl.constexpr,
    members: tl.constexpr,
    lane_block: tl.constexpr,
    per_channel: tl.constexpr,
    packed: tl.constexpr,
):
    """One program: one layer, one group of its cut axis, a block of lanes of the other axis."""
    layer = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    lane = tl.program_id(2) * lane_block + tl.arange(0, lane_block)
    member = tl.arange(0, members)
    start = index * group
    if per_channel:
        num_lanes = width
        stop = tl.where(index == groups - 1, tokens, start + group)
        offsets = (layer * tokens + start + member[:, None]) * width + lane[None, :]
        target = (layer * groups + index) * width + lane
    else:
        num_lanes = tokens
        stop = tl.where(index == groups - 1, width, start + group)
        offsets = (layer * tokens + lane[None, :]) * width + start + member[:, None]
        target = (layer * tokens + lane) * groups + index
    lanes_in = lane < num_lanes
    inside = (start + member < stop)[:, None] & lanes_in[None, :]
    block = _widen(tl.load(elements + offsets, mask=inside, other=0))
    # The first member stands in for what lies outside, so that it changes neither end of the range.
    first = _widen(
        tl.load(elements + tl.min(tl.where(inside, offsets, 0x7FFFFFFFFFFFFFFF), axis=0), mask=lanes_in, other=0)
    )
    block = tl.where(inside, block, first[None, :])
    low = tl.min(block, axis=0)
    high = tl.max(block, axis=0)
    if packed:
        raw = tl.maximum((high - low) * _PER_NIBBLE, tl.abs(low) * _PER_ZERO)
    else:
        raw = tl.maximum(high, -low) * _PER_CODE
    # Neither infinities nor NaN equal themselves when taken from themselves.
    refused = tl.max(((block - block) != 0).to(tl.int32), axis=0) > 0
    refused = refused | (raw > _MAX_SCALE)
    allowed = tl.where(refused, 1.0, tl.maximum(raw, _MIN_SCALE))
    bits = (allowed.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    tl.store(scales + target, tl.where(refused, _NAN_BITS, bits).to(tl.int16), mask=lanes_in)
    if packed:
        scale = (bits << 16).to(tl.float32, bitcast=True)
        zero = _rint(tl.where(refused, 0.0, low) * tl.div_rn(1.0, scale))
        tl.store(zeros + target, zero.to(tl.int8), mask=lanes_in)


@triton.jit
def _code(
    elements,
    scales,
    zeros,
    rows,
    columns,
    mask,
    tokens,
    width,
    groups,
    group: tl.constexpr,
    per_channel: tl.constexpr,
    packed: tl.constexpr,
):
    """Return the codes (int32) of elements; 0 outside the mask."""
    where = _group_offsets(rows, columns, tokens, width, groups, group, per_channel)
    scale = _scale_at(scales, where, mask)
    number = _widen(tl.load(elements + rows * width + columns, mask=mask, other=0))
    code = _rint(number * tl.div_rn(1.0, scale))
    if packed:
        code = code - tl.load(zeros + where, mask=mask, other=0).to(tl.float32)
        code = tl.minimum(tl.maximum(code, 0.0), _NIBBLE_LIMIT)
    else:
        code = tl.minimum(tl.maximum(code, -_CODE_LIMIT), _CODE_LIMIT)
    return tl.where(mask, code, 0.0).to(tl.int32)


@triton.jit
def _quantize_kernel(
    elements,
    scales,
    zeros,
    codes,
    num_rows,
    tokens,
    width,
    groups,
    group: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
    per_channel: tl.constexpr,
    packed: tl.constexpr,
):
    """One program: a block of stored bytes, and the one or two elements in each."""
    rows = (tl.program_id(0).to(tl.int64) * row_block + tl.arange(0, row_block))[:, None]
    columns = (tl.program_id(1) * column_block + tl.arange(0, column_block))[None, :]
    stored = (width + 1) // 2 if packed else width
    inside = (rows < num_rows) & (columns < stored)
    code = _code(elements, scales, zeros, rows, columns, inside, tokens, width, groups, group, per_channel, packed)
    if packed:
        second = columns + stored
        both = inside & (second < width)
        high = _code(elements, scales, zeros, rows, second, both, tokens, width, groups, group, per_channel, packed)
        tl.store(codes + rows * stored + columns, (code | (high << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(codes + rows * stored + columns, code.to(tl.int8), mask=inside)


@triton.jit
def _dequantize_kernel(
    codes,
    scales,
    zeros,
    out,
    num_rows,
    tokens,
    width,
    groups,
    group: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
    per_channel: tl.constexpr,
    half_precision: tl.constexpr,
    packed: tl.constexpr,
):
    """One program: a block of elements."""
    rows = (tl.program_id(0).to(tl.int64) * row_block + tl.arange(0, row_block))[:, None]
    columns = (tl.program_id(1) * column_block + tl.arange(0, column_block))[None, :]
    inside = (rows < num_rows) & (columns < width)
    where = _group_offsets(rows, columns, tokens, width, groups, group, per_channel)
    scale = _scale_at(scales, where, inside)
    if packed:
        stored = (width + 1) // 2
        upper = columns >= stored
        byte = tl.load(codes + rows * stored + tl.where(upper, columns - stored, columns), mask=inside, other=0)
        code = (byte.to(tl.int32) >> tl.where(upper, 4, 0)) & 15
        steps = code.to(tl.float32) + tl.load(zeros + where, mask=inside, other=0).to(tl.float32)
    else:
        steps = tl.load(codes + rows * width + columns, mask=inside, other=0).to(tl.float32)
    restored = steps * scale
    target = out + rows * width + columns
    if out.dtype.element_ty == tl.int16:
        bits = restored.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(target, rounded.to(tl.int16), mask=inside)
    elif half_precision:
        tl.store(target, tl.minimum(tl.maximum(restored, -65504.0), 65504.0).to(tl.float16), mask=inside)
    else:
        tl.store(target, restored, mask=inside)
