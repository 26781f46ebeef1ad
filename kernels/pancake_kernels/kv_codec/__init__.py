"""KV cache in fewer bytes: exactly, in 8 bits or in 4, as one self-describing frame.

    codec = codec_for("cpu")
    frame = codec.encode(keys, values, "int8")  # [layers, tokens, kv_heads * head_size] each
    keys, values = codec.decode(frame)

`encoded_size` says beforehand how long the frame will be.  `frame` describes the bytes, `reference` the arithmetic and
its error bound.
"""

from pancake_kernels.kv_codec.codec import Buffer, KVCodec, read_header
from pancake_kernels.kv_codec.frame import Header, KVShape, Mode, encoded_size, settled_tokens
from pancake_kernels.kv_codec.layouts import ChunkLayout, Order
from pancake_kernels.kv_codec.registry import codec_for

__all__ = [
    "Buffer",
    "ChunkLayout",
    "Header",
    "KVCodec",
    "KVShape",
    "Mode",
    "Order",
    "codec_for",
    "encoded_size",
    "read_header",
    "settled_tokens",
]
