"""What the tests of the KV codec share: samples, and a yardstick of its own for the error bound."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from pancake_kernels.kv_codec import KVCodec, Mode, read_header
from pancake_kernels.kv_codec.frame import views

LOSSY = (Mode.INT8, Mode.INT4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Half a step, and what float32's own rounding may add to it.
BOUND = 0.5 + 2.0**-14


def sample(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, *, seed: int = 1, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with loud channels and an offset, values without."""
    noise = torch.Generator().manual_seed(seed)
    loud = torch.randn((shape[0], 1, shape[2]), generator=noise).exp()
    keys = (torch.randn(shape, generator=noise) + 1) * loud * scale
    values = torch.randn(shape, generator=noise) * scale
    return keys.to(dtype), values.to(dtype)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 100), st.integers(1, 140))
cases = st.fixed_dictionaries(
    {
        "shape": shapes,
        "dtype": st.sampled_from(DTYPES),
        "seed": st.integers(0, 2**31),
        "scale": st.sampled_from((1.0, 1e-3, 30.0)),
    }
)


def make(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(case["shape"], case["dtype"], seed=case["seed"], scale=case["scale"])


def worst_error_in_steps(codec: KVCodec, keys: torch.Tensor, values: torch.Tensor, mode: Mode) -> float:
    """Return the largest error over all elements, in scales of their own groups, without the rounding to the dtype."""
    frame = codec.encode(keys, values, mode)
    header = read_header(frame)
    parts = views(header, frame)
    worst = 0.0
    for name, axis, group, was, got in (
        ("key", 1, header.key_group, keys, codec.decode(frame)[0]),
        ("value", 2, header.value_group, values, codec.decode(frame)[1]),
    ):
        scales = parts[f"{name}_scales"].double()
        index = (torch.arange(was.shape[axis]) // group).clamp(max=scales.shape[axis] - 1)
        step = scales.index_select(axis, index)
        rounding = got.double().abs() * torch.finfo(was.dtype).eps / 2 + torch.finfo(was.dtype).smallest_normal
        if was.dtype is torch.float32:
            rounding = torch.zeros(())  # the product of code and scale is exact there
        off = (got.double() - was.double()).abs() - rounding
        worst = max(worst, float((off / step).max()))
    return worst
