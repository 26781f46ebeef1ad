"""The errors of the kernels.  Every message says what was got, what is allowed and how to mend it.

KernelError (ValueError)
├── TensorRefused      shape, dtype or device does not fit the operation
├── ValuesRefused      NaN, infinite, or too large for a lossy mode
└── FrameError         stored bytes cannot be read
    ├── FrameDamaged   not a frame, cut short, too long, or its header was changed
    ├── FrameUnknown   a later version, or a codec or dtype this version does not know
    └── WrongBase      a delta was made against another frame
"""

from __future__ import annotations


class KernelError(ValueError):
    """Root of all errors raised on purpose by this package."""


class TensorRefused(KernelError):
    """A tensor's shape, dtype or device does not fit; nothing was written."""


class ValuesRefused(KernelError):
    """Values that a lossy mode cannot hold within its error bound; the exact mode takes them."""


class FrameError(KernelError):
    """A buffer cannot be read as a frame; treat it as a miss."""


class FrameDamaged(FrameError):
    """The buffer is not a frame, has the wrong length, or its header does not match its checksum."""


class FrameUnknown(FrameError):
    """The frame was written by a later version, or names a codec or dtype that is unknown here."""


class WrongBase(FrameError):
    """A delta does not belong to the frame it was to be put on."""
