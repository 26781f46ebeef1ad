"""What an implementation of the codec provides."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

#: Largest scale that is stored.  A group that needs a larger one, or holds NaN or an infinity, gets NaN for its scale.
MAX_SCALE = 2.0**100
#: Smallest scale that is stored: the smallest normal float32.
MIN_SCALE = 2.0**-126
#: Largest magnitude of an 8-bit code.
CODE_LIMIT = 127
#: Largest magnitude of a 4-bit group's zero, and its largest code: their sum still fits 8 bits.
ZERO_LIMIT = 112
NIBBLE_LIMIT = 15


class Grouping(Enum):
    """Which elements of `[layers, tokens, width]` share a scale."""

    #: Keys: one scale per layer and channel for a group of tokens.
    PER_CHANNEL = 1
    #: Values: one scale per layer and token for a group of channels.
    PER_TOKEN = 2

    @property
    def axis(self) -> int:
        """Return the axis that is cut into groups."""
        return self.value


@dataclass(frozen=True, slots=True)
class Plane:
    """The tensors that hold keys or values in a frame; `zeros` is None for 8 bits, and `codes` packed for 4."""

    grouping: Grouping
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None


class Backend(Protocol):
    """One implementation.  All of them give the same bytes; `reference` is the definition.

    Calls may come from any thread, for different tensors at the same time.
    """

    @property
    def name(self) -> str:
        """Return the name for benches and logs."""
        ...

    def quantize(self, source: torch.Tensor, plane: Plane) -> None:
        """Fill the plane's tensors from `source`: `[layers, tokens, width]`, not empty, any strides.

        A group that cannot be held within the bound gets NaN for its scale; its codes mean nothing then.
        """
        ...

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        """Fill `out`, `[layers, tokens, width]` in the dtype to restore, not empty, any strides."""
        ...
