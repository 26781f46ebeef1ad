"""The CPU path: the reference's arithmetic, a few layers at a time in one float32 buffer.

Same bytes as the reference: the same float32 operations on the same numbers, with whole runs of groups in one call,
in place, and two 4-bit codes put together as `low + 16 * high` while they are still numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pancake_kernels.kv_codec.backend import CODE_LIMIT, NIBBLE_LIMIT, ZERO_LIMIT, Plane
from pancake_kernels.kv_codec.frame import num_groups
from pancake_kernels.kv_codec.reference import round_up

#: Size of the float32 buffer: smaller ones cost more calls than they save cache misses (measured).
_BUFFER_BYTES = 2 * 1024 * 1024


class CpuBackend:
    """Vectorized torch for tensors in main memory."""

    name = "cpu"

    def quantize(self, source: torch.Tensor, plane: Plane) -> None:
        """Fill the plane's tensors from `source`; see `Backend`."""
        runs = tuple(_runs(source.shape[plane.grouping.axis], plane))
        for layers, buffer in _blocks(source):
            buffer.copy_(source[layers])
            for run in runs:
                _quantize_run(run, run.of(buffer), layers, plane)
            if plane.zeros is not None:
                half = plane.codes.shape[-1]
                high = buffer[..., half:]
                buffer[..., : high.shape[-1]].add_(high, alpha=16)
                plane.codes[layers].copy_(buffer[..., :half])
            else:
                plane.codes[layers].copy_(buffer)

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        """Fill `out` from the plane's tensors; see `Backend`."""
        runs = tuple(_runs(out.shape[plane.grouping.axis], plane))
        largest = torch.finfo(out.dtype).max
        may_pass = float(plane.scales.amax()) * (CODE_LIMIT + 1) > largest
        for layers, buffer in _blocks(out):
            codes = plane.codes[layers]
            if plane.zeros is not None:
                half = codes.shape[-1]
                buffer[..., :half].copy_(codes & 15)
                buffer[..., half:].copy_(codes[..., : out.shape[-1] - half] >> 4)
            else:
                buffer.copy_(codes)
            for run in runs:
                part = run.of(buffer)
                if plane.zeros is not None:
                    part.add_(run.members(plane.zeros[layers]))
                part.mul_(run.members(plane.scales[layers]).to(torch.float32))
            if may_pass:
                buffer.clamp_(-largest, largest)
            out[layers].copy_(buffer)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighboring groups of equal length along one axis."""

    axis: int
    start: int
    length: int
    first: int
    count: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the run's elements with its axis cut into groups and members."""
        part = buffer.narrow(self.axis, self.start, self.length * self.count)
        return part.unflatten(self.axis, (self.count, self.length))

    def members(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return the run's part of scales or zeros, fit to be combined with `of`."""
        return per_group.narrow(self.axis, self.first, self.count).unsqueeze(self.axis + 1)


def _runs(size: int, plane: Plane) -> Iterator[_Run]:
    """Yield the groups of full length, then the last one where it is longer or shorter."""
    axis, group = plane.grouping.axis, plane.group
    groups = num_groups(size, group)
    regular = groups if groups * group == size else groups - 1
    if regular:
        yield _Run(axis, 0, group, 0, regular)
    if regular < groups:
        yield _Run(axis, regular * group, size - regular * group, regular, 1)


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of layers and a buffer of their shape, the same memory each time."""
    num_layers, tokens, width = tensor.shape
    step = min(num_layers, max(1, _BUFFER_BYTES // (4 * tokens * width)))
    buffer = torch.empty((step, tokens, width), dtype=torch.float32)
    for start in range(0, num_layers, step):
        stop = min(num_layers, start + step)
        yield slice(start, stop), buffer[: stop - start]


def _quantize_run(run: _Run, part: torch.Tensor, layers: slice, plane: Plane) -> None:
    """Turn the elements of `part` into codes in place, and store scales and zeros."""
    low = part.amin(run.axis + 1, keepdim=True)
    high = part.amax(run.axis + 1, keepdim=True)
    if plane.zeros is None:
        raw = torch.maximum(high, -low).mul_(1 / CODE_LIMIT)
    else:
        raw = torch.maximum((high - low).mul_(1 / NIBBLE_LIMIT), low.abs().mul_(1 / ZERO_LIMIT))
    scale = round_up(raw)
    inverse = scale.to(torch.float32).reciprocal_()
    part.mul_(inverse).round_()
    run.members(plane.scales[layers]).copy_(scale)
    if plane.zeros is not None:
        zero = low.mul_(inverse).round_()
        run.members(plane.zeros[layers]).copy_(zero)
        part.sub_(zero).clamp_(0, NIBBLE_LIMIT)
