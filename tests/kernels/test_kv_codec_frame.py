"""Frames: what is in them, how they are refused, and deltas."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pancake_kernels.errors import FrameDamaged, FrameError, FrameUnknown, KernelError, TensorRefused, WrongBase
from pancake_kernels.kv_codec import KVShape, Mode, codec_for, encoded_size, read_header, settled_tokens
from tests.kernels.kv_bed import DTYPES, LOSSY, sample

CODEC = codec_for("cpu")

#: Frames of version 1, as they were written first: they stay readable.
STORED = {
    "exact": "504b5643010000000100000002000000030000000000000000000000180000000000000022a407d6"
    "803f00c0003f803e804000c14040c0c0c03f403f4041c0c1",
    "int8": "504b564301010000010000000200000003000000200040000000000016000000000000004dd2ec9b"
    "023c023d823d423d423e7ec108207e823f8120043f81",
    "int4": "504b564301020000010000000200000003000000200020000000000017000000000000008964b3c8"
    "4d3dcd3e123f1a3f1a4005fbf2f6f6ff00000fcf000a0f",
}


def stored_pair() -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.tensor([[[1.0, -2.0, 0.5], [0.25, 4.0, -8.0]]], dtype=torch.bfloat16)
    return keys, keys * 3


def reseal(frame: torch.Tensor) -> torch.Tensor:
    """Make the header's checksum right again."""
    head = bytes(frame[:36].tolist())
    frame[36:40] = torch.tensor(list(struct.pack("<I", zlib.crc32(head))), dtype=torch.uint8)
    return frame


@pytest.mark.parametrize("mode", Mode)
def test_frames_of_the_first_version_are_written_and_read(mode: Mode) -> None:
    frame = CODEC.encode(*stored_pair(), mode)
    assert bytes(frame.tolist()).hex() == STORED[mode]
    keys, values = CODEC.decode(bytes.fromhex(STORED[mode]))
    assert torch.allclose(keys.float(), stored_pair()[0].float(), atol=0.3)
    assert torch.allclose(values.float(), stored_pair()[1].float(), atol=1.2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_mode_keeps_every_bit(dtype: torch.dtype) -> None:
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    info = torch.iinfo(bits)
    noise = torch.Generator().manual_seed(3)
    keys = torch.randint(info.min, info.max, (3, 7, 5), generator=noise, dtype=bits).view(dtype)
    values = torch.randint(info.min, info.max, (3, 7, 5), generator=noise, dtype=bits).view(dtype)
    keys[0, 0, 0], values[0, 0, 0], values[0, 0, 1] = float("nan"), float("inf"), -0.0
    back = CODEC.decode(CODEC.encode(keys, values, "exact"))
    assert torch.equal(back[0].view(bits), keys.view(bits))
    assert torch.equal(back[1].view(bits), values.view(bits))


def test_a_frame_says_what_is_in_it() -> None:
    header = read_header(CODEC.encode(*sample((2, 70, 67), torch.float16), Mode.INT4))
    assert (header.mode, header.dtype, header.shape) == (Mode.INT4, torch.float16, KVShape(2, 70, 67))
    assert (header.key_group, header.value_group, header.base_tokens) == (32, 32, None)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("mode", Mode)
def test_any_run_of_bytes_is_read(kind: type, mode: Mode) -> None:
    frame = CODEC.encode(*sample((2, 40, 33)), mode)
    raw = bytes(frame.tolist())
    assert all(map(torch.equal, CODEC.decode(kind(raw)), CODEC.decode(frame)))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_frame_may_lie_anywhere(mode: Mode, shift: int) -> None:
    keys, values = sample((2, 40, 33), torch.float32)
    room = torch.full((encoded_size((2, 40, 33), torch.float32, mode) + 8,), 7, dtype=torch.uint8)
    size = CODEC.encode_into(keys, values, mode, room[shift:])
    frame = CODEC.encode(keys, values, mode)
    assert size == frame.numel()
    assert torch.equal(room[shift : shift + size], frame)
    assert set(room[:shift].tolist() + room[shift + size :].tolist()) == {7}
    assert all(map(torch.equal, CODEC.decode(room[shift : shift + size]), CODEC.decode(frame)))


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
def test_short_and_long_buffers_are_refused(mode: Mode) -> None:
    frame = CODEC.encode(*sample((1, 33, 20)), mode)
    for length in (0, 1, 39, 40, 41, frame.numel() - 1):
        with pytest.raises(FrameDamaged, match="drop it"):
            CODEC.decode(frame[:length])
    with pytest.raises(FrameDamaged, match="its header says"):
        CODEC.decode(torch.cat((frame, frame[:1])))


def test_every_changed_bit_of_the_header_is_refused() -> None:
    frame = CODEC.encode(*sample((1, 33, 20)), "int8")
    for bit in range(40 * 8):
        changed = frame.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FrameError):
            CODEC.decode(changed)


@pytest.mark.parametrize(("place", "content"), [(4, 2), (4, 0), (5, 3), (6, 3), (7, 2)])
def test_what_a_later_version_wrote_is_refused(place: int, content: int) -> None:
    frame = CODEC.encode(*sample((1, 33, 20)), "int8")
    frame[place] = content
    with pytest.raises(FrameUnknown, match="update the reader"):
        CODEC.decode(reseal(frame))


@given(body=st.binary(min_size=0, max_size=80), head=st.binary(min_size=32, max_size=32))
def test_foreign_bytes_are_refused(body: bytes, head: bytes) -> None:
    for raw in (body, b"PKVC" + body, b"PKVC" + head + struct.pack("<I", zlib.crc32(b"PKVC" + head)) + body):
        with pytest.raises(FrameError):
            CODEC.decode(raw)


def test_group_sizes_of_zero_are_refused() -> None:
    frame = CODEC.encode(*sample((1, 33, 20)), "int8")
    frame[20:24] = 0
    with pytest.raises(FrameDamaged, match="without group sizes"):
        CODEC.decode(reseal(frame))


def test_unfit_tensors_are_refused() -> None:
    keys, values = sample((2, 40, 33))
    with pytest.raises(TensorRefused, match="same for both"):
        CODEC.encode(keys, values[:, :39], "int8")
    with pytest.raises(TensorRefused, match="same for both"):
        CODEC.encode(keys, values.float(), "int8")
    with pytest.raises(TensorRefused, match="allowed is"):
        CODEC.encode(keys[0], values[0], "exact")
    with pytest.raises(TensorRefused, match="allowed are"):
        CODEC.encode(keys.double(), values.double(), "exact")
    with pytest.raises(FrameUnknown, match="int8"):
        CODEC.encode(keys, values, "int3")
    with pytest.raises(TensorRefused, match="room for 100 bytes"):
        CODEC.encode_into(keys, values, "int8", torch.empty(100, dtype=torch.uint8))
    with pytest.raises(TensorRefused, match="the frame holds"):
        CODEC.decode_into(CODEC.encode(keys, values, "int8"), keys.float(), values)
    with pytest.raises(FrameDamaged, match="uint8, one axis"):
        CODEC.decode(keys)
    assert issubclass(KernelError, ValueError)


# -- deltas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("tokens", [64, 96, 128, 191])
def test_a_delta_completes_its_base_bit_for_bit(mode: Mode, tokens: int) -> None:
    keys, values = sample((2, tokens, 40))
    base = CODEC.encode(keys[:, :45], values[:, :45], mode)
    delta = CODEC.encode_delta(keys, values, mode, base=base, base_tokens=32)
    later = CODEC.encode(keys[:, 32:], values[:, 32:], mode)
    assert delta.numel() == later.numel() + 16
    assert torch.equal(delta[56:], later[40:])
    whole = CODEC.encode(keys, values, mode)
    before = CODEC.decode(CODEC.encode(keys[:, :64], values[:, :64], mode))
    for grown, full, first in zip(CODEC.decode_delta(base, delta), CODEC.decode(whole), before, strict=True):
        assert torch.equal(grown[:, 32:], full[:, 32:])
        if mode is Mode.EXACT:
            assert torch.equal(grown, full)
        assert first.shape[1] == 64


@pytest.mark.parametrize("mode", LOSSY)
def test_on_group_boundaries_a_grown_thread_equals_a_full_frame(mode: Mode) -> None:
    keys, values = sample((2, 160, 40))
    base = CODEC.encode(keys[:, :64], values[:, :64], mode)
    delta = CODEC.encode_delta(keys, values, mode, base=base, base_tokens=64)
    assert all(map(torch.equal, CODEC.decode_delta(base, delta), CODEC.decode(CODEC.encode(keys, values, mode))))


def test_deltas_continue_deltas() -> None:
    keys, values = sample((2, 150, 40))
    frames = [CODEC.encode(keys[:, :64], values[:, :64], "int8")]
    for before, now in ((64, 100), (100, 150)):
        grown = keys[:, :now], values[:, :now]
        frames.append(CODEC.encode_delta(*grown, "int8", base=frames[-1], base_tokens=settled_tokens(before)))
    got = CODEC.decode_delta(*frames)
    assert all(map(torch.equal, got, CODEC.decode(CODEC.encode(keys, values, "int8"))))
    assert all(map(torch.equal, CODEC.decode_delta(frames[0]), CODEC.decode(frames[0])))


@pytest.mark.parametrize(("tokens", "settled"), [(0, 0), (1, 0), (32, 32), (45, 0), (64, 64), (65, 32), (100, 64)])
def test_settled_tokens_end_where_the_last_group_may_still_change(tokens: int, settled: int) -> None:
    assert settled_tokens(tokens) == settled


def test_a_thread_that_did_not_grow_needs_an_empty_delta() -> None:
    keys, values = sample((2, 64, 40))
    base = CODEC.encode(keys, values, "int4")
    delta = CODEC.encode_delta(keys, values, "int4", base=base, base_tokens=64)
    assert delta.numel() == 56
    assert all(map(torch.equal, CODEC.decode_delta(base, delta), CODEC.decode(base)))


def test_a_delta_may_be_kept_in_another_mode() -> None:
    keys, values = sample((2, 96, 40))
    base = CODEC.encode(keys[:, :64], values[:, :64], "int4")
    delta = CODEC.encode_delta(keys, values, "exact", base=base, base_tokens=50)
    for got, old, was in zip(CODEC.decode_delta(base, delta), CODEC.decode(base), (keys, values), strict=True):
        assert torch.equal(got[:, :50], old[:, :50])
        assert torch.equal(got[:, 50:], was[:, 50:])


def test_a_delta_on_another_base_is_refused() -> None:
    keys, values = sample((2, 96, 40))
    base = CODEC.encode(keys[:, :64], values[:, :64], "int8")
    delta = CODEC.encode_delta(keys, values, "int8", base=base, base_tokens=64)
    other = base.clone()
    other[-1] ^= 1
    with pytest.raises(WrongBase, match="another frame"):
        CODEC.decode_delta(other, delta)
    with pytest.raises(WrongBase, match="another frame"):
        CODEC.decode_delta(base, delta, delta)
    with pytest.raises(WrongBase, match="another frame"):
        CODEC.decode_delta(base, base)
    with pytest.raises(WrongBase, match="needs its base"):
        CODEC.decode(delta)
    with pytest.raises(WrongBase, match="needs its base"):
        CODEC.decode_into(delta, keys, values)


def test_an_unfit_delta_is_refused() -> None:
    keys, values = sample((2, 96, 40))
    base = CODEC.encode(keys[:, :64], values[:, :64], "int8")
    for start in (-32, 33, 96):
        with pytest.raises(TensorRefused, match="multiples of 32"):
            CODEC.encode_delta(keys, values, "int8", base=base, base_tokens=start)
    with pytest.raises(TensorRefused, match="encode a full frame"):
        CODEC.encode_delta(keys.float(), values.float(), "int8", base=base, base_tokens=64)
    with pytest.raises(TensorRefused, match="encode a full frame"):
        CODEC.encode_delta(keys[1:], values[1:], "int8", base=base, base_tokens=64)
