"""Chunks of a cache server, taken apart and put together; the CPU orders against the engine's own operation."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pancake_kernels.errors import TensorRefused
from pancake_kernels.kv_codec import ChunkLayout, Order, codec_for

LAYERS, TOKENS, HEADS, SIZE, BLOCK = 2, 192, 3, 32, 64

#: Lets the engine's operation write known keys and values into its cache, cuts a chunk as the cache server does, and
#: takes that apart.
ENGINE = """
import sys
import torch
from vllm import _custom_ops as ops
from pancake_kernels.kv_codec import ChunkLayout, Order

for isa, order in (("vec", Order.CPU_VEC), ("vec16", Order.CPU_VEC), ("amx", Order.CPU_AMX)):
    for blocks, heads, block, size in ((2, 3, 64, 64), (3, 2, 32, 128), (2, 1, 128, 32)):
        cache = torch.zeros(blocks, heads, block, 2 * size, dtype=torch.bfloat16)
        halves = cache.view(blocks, heads, 2 * block, size).chunk(2, dim=2)
        keys = torch.randn(blocks * block, heads, size).bfloat16()
        values = torch.randn(blocks * block, heads, size).bfloat16()
        slots = torch.arange(blocks * block)
        ops.cpu_attn_reshape_and_cache(
            keys, values, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
        chunk = cache.transpose(1, 2).reshape(1, blocks * block, heads * 2 * size)
        got = ChunkLayout(order, heads, size, block).split(chunk)
        print(isa, torch.equal(got[0][0], keys.flatten(1)), torch.equal(got[1][0], values.flatten(1)))
"""


def chunk_shape(order: Order) -> tuple[int, ...]:
    width = HEADS * SIZE
    return (2, LAYERS, TOKENS, width) if order is Order.PLANES else (LAYERS, TOKENS, 2 * width)


def layout_of(order: Order) -> ChunkLayout:
    return ChunkLayout(order, HEADS, SIZE, BLOCK)


@pytest.mark.parametrize("order", Order)
def test_what_is_taken_apart_is_put_together_again(order: Order) -> None:
    chunk = torch.arange(2 * LAYERS * TOKENS * HEADS * SIZE, dtype=torch.float32).reshape(chunk_shape(order))
    keys, values = layout_of(order).split(chunk)
    assert keys.shape == values.shape == (LAYERS, TOKENS, HEADS * SIZE)
    assert sorted(torch.cat((keys, values)).flatten().tolist()) == chunk.flatten().tolist()
    again = torch.zeros_like(chunk)
    layout_of(order).join(keys, values, again)
    assert torch.equal(again, chunk)


@pytest.mark.parametrize("order", Order)
def test_a_token_of_a_layer_stays_in_its_block(order: Order) -> None:
    chunk = torch.zeros(chunk_shape(order))
    keys, values = torch.zeros(2, LAYERS, TOKENS, HEADS * SIZE)
    keys[1, 70], values[1, 70] = 1, 2
    layout_of(order).join(keys, values, chunk)
    touched = chunk.nonzero()[:, -2]
    assert int(touched.min()) // BLOCK == int(touched.max()) // BLOCK == 1
    assert sorted(chunk.unique().tolist()) == [0, 1, 2]


def test_plain_orders_are_what_they_say() -> None:
    rows = torch.randn(LAYERS, TOKENS, HEADS, 2, SIZE)
    keys, values = layout_of(Order.HALVES).split(rows.flatten(2))
    assert torch.equal(keys, rows[:, :, :, 0].flatten(2))
    assert torch.equal(values, rows[:, :, :, 1].flatten(2))


def test_the_cpu_orders_are_those_of_the_engine() -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run([sys.executable, "-c", ENGINE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert said == [f"{isa} True True" for isa in ("vec", "vec16", "amx") for _ in range(3)]


@pytest.mark.parametrize("order", Order)
def test_another_layout_is_refused(order: Order) -> None:
    layout = layout_of(order)
    for shape in ((LAYERS, TOKENS, HEADS * SIZE), (3, LAYERS, TOKENS, HEADS * SIZE), (TOKENS, 2 * HEADS * SIZE)):
        with pytest.raises(TensorRefused, match="layout"):
            layout.split(torch.zeros(shape))
    chunk = torch.zeros(chunk_shape(order))
    with pytest.raises(TensorRefused, match="layout"):
        layout.split(chunk.transpose(-3, -2).contiguous().transpose(-3, -2))
    plane = torch.zeros(LAYERS, TOKENS, HEADS * SIZE)
    with pytest.raises(TensorRefused, match="give what split returns"):
        layout.join(plane, plane[:, 1:], chunk)
    with pytest.raises(TensorRefused, match="give what split returns"):
        layout.join(plane.half(), plane.half(), chunk)


def test_blocks_that_do_not_fit_the_order_are_refused() -> None:
    odd = torch.zeros(1, 40, 2 * 32)
    for layout in (ChunkLayout(Order.CPU_VEC, 1, 32, 16), ChunkLayout(Order.CPU_AMX, 1, 32, 8)):
        with pytest.raises(TensorRefused, match="in blocks of"):
            layout.split(odd)


def test_naming_the_layout_makes_the_error_small() -> None:
    noise = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, LAYERS, TOKENS, HEADS * SIZE, generator=noise)
    keys *= torch.randn(LAYERS, 1, HEADS * SIZE, generator=noise).mul(2).exp()
    chunk = torch.zeros(chunk_shape(Order.CPU_VEC))
    layout_of(Order.CPU_VEC).join(keys, values, chunk)
    off = {}
    for order in (Order.CPU_VEC, Order.HALVES):
        codec, again = codec_for("cpu"), torch.zeros_like(chunk)
        back = codec.decode(codec.encode(*layout_of(order).split(chunk), "int4"))
        layout_of(order).join(*back, again)
        wrong = layout_of(Order.CPU_VEC).split(again)[0] - keys
        # Attention sees a quiet channel's error as much as a loud one's: each counts by its own size.
        off[order] = float((wrong.square().mean(1) / keys.square().mean(1)).mean())
    assert off[Order.CPU_VEC] < 0.01
    assert off[Order.HALVES] > 10 * off[Order.CPU_VEC]
