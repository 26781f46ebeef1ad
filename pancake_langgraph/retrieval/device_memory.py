"""How much memory of a GPU is free, as its driver says: Faiss does not tell."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

_DRIVER: Final = "libcuda.so.1"


def free_device_bytes(*, load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """Return the free memory of the first CUDA device that this process may use; `None` where that cannot be told.

    `load` opens the driver's library by name, and raises `OSError` where there is none.
    """
    try:
        driver = load(_DRIVER)
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    # The context that everybody in the process shares, so that no second one takes memory.
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        return _free_bytes(driver, context)
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _free_bytes(driver: Any, context: ctypes.c_void_p) -> int | None:
    free, total, popped = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    if driver.cuCtxPushCurrent_v2(context):
        return None
    try:
        failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
    return None if failed else int(free.value)
