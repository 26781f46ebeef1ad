"""What the lossy modes promise: error, size, and the same bytes from every implementation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pancake_kernels.errors import ValuesRefused
from pancake_kernels.kv_codec import KVCodec, Mode, codec_for, encoded_size
from pancake_kernels.kv_codec import reference as reference_module
from pancake_kernels.kv_codec.backend import Plane
from pancake_kernels.kv_codec.cpu import CpuBackend
from pancake_kernels.kv_codec.reference import ReferenceBackend
from tests.kernels.kv_bed import BOUND, DTYPES, LOSSY, cases, make, sample, worst_error_in_steps

REFERENCE = KVCodec(ReferenceBackend())
CPU = KVCodec(CpuBackend())


@settings(max_examples=60)
@given(case=cases, mode=st.sampled_from(LOSSY))
def test_every_element_is_within_half_a_step(case: dict[str, Any], mode: Mode) -> None:
    assert worst_error_in_steps(REFERENCE, *make(case), mode) <= BOUND


@settings(max_examples=60)
@given(case=cases, mode=st.sampled_from(tuple(Mode)))
def test_the_cpu_path_gives_the_reference_bytes(case: dict[str, Any], mode: Mode) -> None:
    keys, values = make(case)
    frame = REFERENCE.encode(keys, values, mode)
    assert torch.equal(CPU.encode(keys, values, mode), frame)
    assert frame.numel() == encoded_size(tuple(keys.shape), keys.dtype, mode)
    for ours, theirs in zip(CPU.decode(frame), REFERENCE.decode(frame), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype is keys.dtype


@pytest.mark.parametrize("mode", LOSSY)
def test_blocks_of_layers_give_the_reference_bytes(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = sample((5, 64, 48))
    monkeypatch.setattr("pancake_kernels.kv_codec.cpu._BUFFER_BYTES", 2 * 64 * 48 * 4)
    frame = CPU.encode(keys, values, mode)
    assert torch.equal(frame, REFERENCE.encode(keys, values, mode))
    assert all(map(torch.equal, CPU.decode(frame), REFERENCE.decode(frame)))


def test_threads_share_one_codec() -> None:
    pairs = [sample((2, 64, 64), seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        frames = list(pool.map(lambda pair: codec_for("cpu").encode(*pair, "int4"), pairs))
    assert all(torch.equal(frame, REFERENCE.encode(*pair, "int4")) for frame, pair in zip(frames, pairs, strict=True))


# -- a broken implementation is found -------------------------------------------------------------------------------


class OffByOne(ReferenceBackend):
    """A reference whose codes are one step too high."""

    def quantize(self, source: torch.Tensor, plane: Plane) -> None:
        super().quantize(source, plane)
        plane.codes.add_(1)


class WrongNeighbor(ReferenceBackend):
    """A reference that takes the scales of the group beside."""

    def dequantize(self, plane: Plane, out: torch.Tensor) -> None:
        plane.scales.copy_(plane.scales.roll(1, plane.grouping.axis))
        super().dequantize(plane, out)


def down(raw: torch.Tensor) -> torch.Tensor:
    """A scale that is too small for its group."""
    return (raw * 0.98).to(torch.bfloat16)


def test_broken_arithmetic_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = sample((1, 64, 64), torch.float32)
    for broken in (OffByOne(), WrongNeighbor()):
        assert worst_error_in_steps(KVCodec(broken), keys, values, Mode.INT8) > BOUND, broken
    monkeypatch.setattr(reference_module, "round_up", down)
    for mode in LOSSY:
        assert worst_error_in_steps(REFERENCE, keys, values, mode) > BOUND


def test_truncation_instead_of_rounding_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values = sample((1, 64, 64), torch.float32)
    monkeypatch.setattr(torch.Tensor, "round", torch.Tensor.trunc)
    for mode in LOSSY:
        assert worst_error_in_steps(REFERENCE, keys, values, mode) > BOUND


# -- sizes ----------------------------------------------------------------------------------------------------------


@given(layers=st.integers(1, 80), tokens=st.integers(32, 5000), width=st.integers(64, 8192))
def test_bytes_per_token_stay_below_the_promise(layers: int, tokens: int, width: int) -> None:
    plain = 2 * layers * tokens * width * 2
    for mode, ratio in ((Mode.INT8, 0.5235), (Mode.INT4, 0.2969)):
        even = width + width % 2  # an odd channel takes a whole byte
        assert encoded_size((layers, tokens, width), torch.bfloat16, mode) <= ratio * plain * even / width + 40


@pytest.mark.parametrize(("tokens", "width"), [(32, 192), (33, 192), (63, 192), (64, 64), (65, 128), (256, 192)])
def test_whole_frames_of_usual_models_stay_below_the_promise(tokens: int, width: int) -> None:
    plain = 2 * 30 * tokens * width * 2
    assert encoded_size((30, tokens, width), torch.bfloat16, "int8") <= 0.53 * plain
    assert encoded_size((30, tokens, width), torch.bfloat16, "int4") <= 0.30 * plain


def test_the_size_is_the_stated_formula() -> None:
    layers, tokens, width = 3, 70, 67
    keys, values = sample((layers, tokens, width))
    plane = layers * tokens * width
    assert REFERENCE.encode(keys, values, "exact").numel() == 40 + 2 * plane * 2
    scales = layers * (2 * width + tokens * 1)
    assert REFERENCE.encode(keys, values, "int8").numel() == 40 + 2 * plane + 2 * scales
    groups = layers * (2 * width + tokens * 2)
    assert REFERENCE.encode(keys, values, "int4").numel() == 40 + 2 * layers * tokens * 34 + 3 * groups


# -- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("mode", LOSSY)
class TestEdges:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zeros_come_back_as_zeros(self, codec: KVCodec, mode: Mode, dtype: torch.dtype) -> None:
        nothing = torch.zeros((2, 40, 32), dtype=dtype)
        assert all(torch.equal(back, nothing) for back in codec.decode(codec.encode(nothing, nothing, mode)))

    @pytest.mark.parametrize("constant", [1.0, -3.7, 1e-30, -1e30, 1e-40, 65504.0])
    def test_constants_are_within_half_a_step(self, codec: KVCodec, mode: Mode, constant: float) -> None:
        same = torch.full((1, 33, 40), constant)
        assert worst_error_in_steps(codec, same, same, mode) <= BOUND
        [back, _] = codec.decode(codec.encode(same, same, mode))
        assert float((back - same).abs().max()) <= max(abs(constant) / 200, 2.0**-127)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_token_is_held(self, codec: KVCodec, mode: Mode, dtype: torch.dtype) -> None:
        assert worst_error_in_steps(codec, *sample((4, 1, 128), dtype), mode) <= BOUND

    @pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0), (0, 0, 0)])
    def test_nothing_is_held_too(self, codec: KVCodec, mode: Mode, shape: tuple[int, int, int]) -> None:
        empty = torch.empty(shape, dtype=torch.bfloat16)
        frame = codec.encode(empty, empty, mode)
        assert frame.numel() == encoded_size(shape, torch.bfloat16, mode)
        assert [tuple(back.shape) for back in codec.decode(frame)] == [shape, shape]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
    @pytest.mark.parametrize("side", [0, 1])
    @pytest.mark.parametrize("place", [(0, 0, 0), (1, 69, 66), (1, 31, 5)])
    def test_what_cannot_be_held_is_refused(
        self, codec: KVCodec, mode: Mode, bad: float, side: int, place: tuple[int, int, int]
    ) -> None:
        pair = sample((2, 70, 67))
        pair[side][place] = bad
        with pytest.raises(ValuesRefused, match="use mode exact"):
            codec.encode(*pair, mode)

    def test_the_largest_half_precision_numbers_stay_finite(self, codec: KVCodec, mode: Mode) -> None:
        keys, values = sample((1, 40, 64), torch.float16)
        keys[0, 3], values[0, 5], values[0, 7, 8] = 65504.0, -65504.0, 65504.0
        assert worst_error_in_steps(codec, keys, values, mode) <= BOUND
        assert all(bool(back.isfinite().all()) for back in codec.decode(codec.encode(keys, values, mode)))

    def test_large_offsets_with_little_spread_are_within_half_a_step(self, codec: KVCodec, mode: Mode) -> None:
        keys, values = sample((1, 64, 64), torch.float32, scale=1e-3)
        assert worst_error_in_steps(codec, keys + 100, values - 100, mode) <= BOUND

    def test_strides_do_not_matter(self, codec: KVCodec, mode: Mode) -> None:
        keys, values = sample((2, 70, 67))
        fused = torch.stack((keys, values), dim=-1)
        frame = codec.encode(fused[..., 0], fused[..., 1], mode)
        assert torch.equal(frame, codec.encode(keys, values, mode))
        target = torch.zeros_like(fused)
        codec.decode_into(frame, target[..., 0], target[..., 1])
        assert all(map(torch.equal, target.unbind(-1), codec.decode(frame)))
