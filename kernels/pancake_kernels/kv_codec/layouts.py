"""Where keys and values lie in a cache server's chunk, and how to take them apart and put them together again.

The codec scales keys per channel and values per token, so it has to know which is which.  A chunk of the shape
`[layers, tokens, heads * 2 * head_size]` does not say so: vLLM's attention on CPUs keeps, per block and head, first all
keys of the block and then all values, each in an order made for the processor, and the cache server copies those rows
as if they were tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from pancake_kernels.errors import TensorRefused

#: Tokens and channels that AMX keeps together.
_TILE = 16


class Order(StrEnum):
    """How a chunk is ordered."""

    #: `[2, layers, tokens, heads * head_size]`: keys, then values.
    PLANES = "planes"
    #: `[layers, tokens, heads * 2 * head_size]`: per token and head, its key, then its value.
    HALVES = "halves"
    #: The same shape; per block and head all keys as `[head_size, block]`, then all values as `[block, head_size]`:
    #: vLLM on CPUs, instruction sets `vec` and `vec16`.
    CPU_VEC = "cpu_vec"
    #: The same shape; per block and head keys, then values, in tiles of 16 with pairs interleaved: vLLM on CPUs, `amx`.
    CPU_AMX = "cpu_amx"


#: Orders in which a token's keys and values lie in the token's own row.
_PLAIN = (Order.PLANES, Order.HALVES)


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """What has to be known about the chunks of one engine.

    `block_tokens` is the engine's block size; only the CPU orders read it.
    """

    order: Order
    heads: int
    head_size: int
    block_tokens: int = 1

    def split(self, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, `[layers, tokens, heads * head_size]` each; they may share memory with `chunk`.

        Raises:
            TensorRefused: if the chunk does not have this layout's shape.
        """
        layers, tokens = self._size_of(chunk)
        shape = (layers, tokens, self.heads * self.head_size)
        keys, values = self._places(chunk if self.order in _PLAIN else self._blocks(chunk).contiguous())
        return keys.reshape(shape), values.reshape(shape)

    def join(self, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> None:
        """Fill the chunk `out`, contiguous, from keys and values: the inverse of `split`.

        Raises:
            TensorRefused: if `out` does not have this layout's shape, or keys and values do not fit it.
        """
        layers, tokens = self._size_of(out)
        shape = (layers, tokens, self.heads * self.head_size)
        for source in (keys, values):
            if tuple(source.shape) != shape or source.dtype is not out.dtype:
                raise TensorRefused(
                    f"keys or values of {tuple(source.shape)}, {source.dtype}: the chunk holds {shape}, {out.dtype}; "
                    "to mend: give what split returns for such a chunk"
                )
        plain = self.order in _PLAIN
        target = out if plain else torch.empty_like(self._blocks(out), memory_format=torch.contiguous_format)
        for place, source in zip(self._places(target), (keys, values), strict=True):
            place.copy_(source.reshape(place.shape))
        if not plain:
            self._blocks(out).copy_(target)

    def _size_of(self, chunk: torch.Tensor) -> tuple[int, int]:
        """Return layers and tokens of a chunk that has this layout."""
        shape = tuple(chunk.shape)
        width = self.heads * self.head_size
        if self.order is Order.PLANES:
            wanted, fits = f"[2, layers, tokens, {width}]", len(shape) == 4 and (shape[0], shape[3]) == (2, width)
        else:
            step, sizes = self.block_tokens, (self.block_tokens, self.head_size)
            tiled = self.order is not Order.CPU_AMX or not any(size % _TILE for size in sizes)
            whole = self.order in _PLAIN or (step % 2 == 0 and tiled)
            wanted = f"[layers, tokens, {2 * width}], tokens in blocks of {step} (amx: in multiples of {_TILE})"
            in_blocks = self.order in _PLAIN or not (len(shape) == 3 and shape[1] % step)
            fits = len(shape) == 3 and shape[2] == 2 * width and whole and in_blocks
        if not fits or not chunk.is_contiguous():
            raise TensorRefused(
                f"chunk of {shape}: layout {self.order} of {self.heads} heads of {self.head_size} has contiguous "
                f"{wanted}; to mend: name the engine's own layout"
            )
        return shape[-3], shape[-2]

    def _blocks(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a view `[layers, blocks, heads, block, 2 * head_size]`: the engine's own blocks."""
        layers, tokens, _ = chunk.shape
        step = self.block_tokens
        return chunk.view(layers, tokens // step, step, self.heads, 2 * self.head_size).permute(0, 1, 3, 2, 4)

    def _places(self, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of keys and values whose axes follow one another as layers, tokens, heads, channels."""
        step, size = self.block_tokens, self.head_size
        if self.order is Order.PLANES:
            return held[0], held[1]
        if self.order is Order.HALVES:
            parts = held.unflatten(2, (self.heads, 2, size))
            return parts[:, :, :, 0], parts[:, :, :, 1]
        runs = held.flatten(3, 4).unflatten(3, (2, step * size))
        keys, values = runs[:, :, :, 0], runs[:, :, :, 1]
        if self.order is Order.CPU_VEC:
            return (
                keys.unflatten(3, (size, step)).permute(0, 1, 4, 2, 3),
                values.unflatten(3, (step, size)).permute(0, 1, 3, 2, 4),
            )
        return (
            keys.unflatten(3, (step // _TILE, size // 2, _TILE, 2)).permute(0, 1, 3, 5, 2, 4, 6),
            values.unflatten(3, (size // _TILE, step // 2, _TILE, 2)).permute(0, 1, 4, 6, 2, 3, 5),
        )
