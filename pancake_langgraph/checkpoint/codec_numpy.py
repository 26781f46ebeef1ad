"""NumPy arrays and scalars, as raw bytes beside a description of their type; never pickled, never objects.

NumPy is imported by nobody here unless a value of it is stored or read.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from pancake_langgraph.checkpoint.codec_wire import Code, Ext, Read, Reader, Write, Writer, pack

_KINDS = frozenset("biufcmMSUV")
_ADVICE = "Store numbers, texts, dates or records of these; convert with `.tolist()` otherwise"


def write_for(kind: type) -> Write | None:
    """Return how to write objects of a NumPy type; `None` if it is not one."""
    # A type of NumPy exists only after the app imported it.
    numpy = sys.modules.get("numpy")
    if numpy is None or kind.__module__ != "numpy":
        return None
    if kind is numpy.ndarray:
        return _write_array
    return _write_scalar if issubclass(kind, numpy.generic) else None


def _format() -> Any:
    from numpy.lib import format as npy

    return npy


def _description(writer: Writer, kind: type, dtype: Any) -> tuple[Any, Any]:
    """Return what describes a dtype, and the dtype that comes of it."""
    npy = _format()
    if dtype.hasobject or dtype.kind not in _KINDS or dtype.metadata or not dtype.itemsize:
        raise writer.refusal(kind, f"its dtype is {str(dtype)[:80]}. {_ADVICE}")
    described = npy.dtype_to_descr(dtype)
    again = npy.descr_to_dtype(described)
    if again != dtype:
        raise writer.refusal(kind, f"its dtype {str(dtype)[:80]} does not survive being described. {_ADVICE}")
    return described, again


def _write_array(writer: Writer, value: Any, depth: int) -> Ext:
    described, _ = _description(writer, type(value), value.dtype)
    is_fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    order = "F" if is_fortran else "C"
    raw = _without_padding(value).tobytes(order)
    return Ext(
        Code.ARRAY, pack([writer.wrap(described, depth), list(value.shape), order, bool(value.flags.writeable), raw])
    )


def _write_scalar(writer: Writer, value: Any, depth: int) -> Ext:
    import numpy as np

    kind = type(value)
    # The texts are kept as texts: an array would cut zeros off their ends.
    if kind is np.str_:
        return Ext(Code.SCALAR, pack(["str", str.__str__(value)]))
    if kind is np.bytes_:
        return Ext(Code.SCALAR, pack(["bytes", value.tobytes()]))
    described, dtype = _description(writer, kind, value.dtype)
    raw = _without_padding(value).tobytes()
    if type(_zero_dimensional(dtype, raw)) is not kind:
        raise writer.refusal(kind, f"it reads back as another type of scalar. {_ADVICE}")
    return Ext(Code.SCALAR, pack([writer.wrap(described, depth), raw]))


def _without_padding(value: Any) -> Any:
    """Return a record or array whose bytes between fields are zero: they hold whatever was in memory before."""
    if value.dtype.names is None:
        return value
    import numpy as np

    clean = np.zeros(value.shape, value.dtype)
    clean[...] = value
    return clean


def _zero_dimensional(dtype: Any, raw: bytes) -> Any:
    import numpy as np

    return np.ndarray((), dtype, buffer=raw).copy()[()]


def _dtype(described: Any) -> Any:
    dtype = _format().descr_to_dtype(described)
    if dtype.hasobject or dtype.kind not in _KINDS or not dtype.itemsize:
        raise ValueError("not a dtype that is ever stored")
    return dtype


def _read_array(reader: Reader, data: bytes) -> object:
    import numpy as np

    described, shape, order, is_writeable, raw = reader.sequence(data)
    dtype = _dtype(described)
    # Before anything is allocated for it.
    if type(raw) is not bytes or any(type(side) is not int or side < 0 for side in shape):
        raise ValueError("not an array")
    if math.prod(shape) * dtype.itemsize != len(raw) or order not in ("C", "F"):
        raise ValueError("size and shape of an array do not agree")
    array: Any = np.ndarray(tuple(shape), dtype, buffer=raw, order=order).copy(order="K")
    array.flags.writeable = is_writeable is True
    return array


def _read_scalar(reader: Reader, data: bytes) -> object:
    import numpy as np

    described, raw = reader.sequence(data)
    if described == "str" and type(raw) is str:
        return np.str_(raw)
    if described == "bytes" and type(raw) is bytes:
        return np.bytes_(raw)
    dtype = _dtype(described)
    if type(raw) is not bytes or dtype.itemsize != len(raw):
        raise ValueError("not a scalar")
    return _zero_dimensional(dtype, raw)


#: How to read a payload, by its code.
READS: dict[int, Read] = {Code.ARRAY: _read_array, Code.SCALAR: _read_scalar}
