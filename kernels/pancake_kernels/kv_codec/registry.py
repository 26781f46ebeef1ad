"""Which implementation runs on which device: decided by a trial, in this one place."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from pancake_kernels.kv_codec.backend import Backend
from pancake_kernels.kv_codec.codec import KVCodec
from pancake_kernels.kv_codec.frame import Mode
from pancake_kernels.kv_codec.reference import ReferenceBackend

_log = logging.getLogger(__name__)


def _triton() -> Backend:
    from pancake_kernels.kv_codec.triton_kernel import TritonBackend

    return TritonBackend()


def _cpu() -> Backend:
    from pancake_kernels.kv_codec.cpu import CpuBackend

    return CpuBackend()


#: Device type -> what is tried there; every other device, and one whose trial fails, gets the reference.
_TRIED: dict[str, Callable[[], Backend]] = {"cuda": _triton, "cpu": _cpu}


def codec_for(device: torch.device | str) -> KVCodec:
    """Return the codec for tensors on `device`.

    The first call for a kind of device tries the implementation made for it on a small sample; where it cannot run, or
    gives other bytes than the reference, the reference is used, and a warning says so.  `codec.backend.name` tells.
    """
    return _probed(torch.device(device).type)


@cache
def _probed(kind: str) -> KVCodec:
    reference = KVCodec(ReferenceBackend())
    if (make := _TRIED.get(kind)) is None:
        return reference
    try:
        codec = KVCodec(make())
        fits = all(_same(codec, reference, kind, mode) for mode in (Mode.INT8, Mode.INT4))
    except Exception as error:  # noqa: BLE001 -- compilers and drivers fail in their own ways; the reference always runs
        _log.warning("KV codec for %s does not run here (%s): using the reference", kind, type(error).__name__)
        return reference
    if not fits:
        _log.warning("KV codec for %s differs from the reference: using the reference", kind)
        return reference
    return codec


def _same(codec: KVCodec, reference: KVCodec, kind: str, mode: Mode) -> bool:
    """Compare both on a sample with a leftover group and an odd width."""
    ramp = torch.arange(2 * 70 * 67, dtype=torch.float32, device=kind).reshape(2, 70, 67)
    keys = torch.sin(ramp).to(torch.bfloat16)
    values = (torch.cos(ramp) * 3 + 1).to(torch.bfloat16)
    frame = reference.encode(keys, values, mode)
    if not torch.equal(codec.encode(keys, values, mode), frame):
        return False
    pairs = zip(codec.decode(frame), reference.decode(frame), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)
