"""Measure the codec: `python -m pancake_kernels.kv_codec.bench [--json FILE] [--model FOLDER --text FILE]`.

Speed in GB/s of KV read (encode) or restored (decode), next to a plain copy and to LMCache's fp8 where it is installed;
error of what comes back, relative to what went in.  With `--model`, the KV is that of a real model over a real text.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pancake_kernels.kv_codec.codec import KVCodec
from pancake_kernels.kv_codec.frame import Mode, encoded_size
from pancake_kernels.kv_codec.reference import ReferenceBackend
from pancake_kernels.kv_codec.registry import codec_for
from pancake_kernels.kv_codec.samples import CHUNK_TOKENS, Sample, model_sample, synthetic_sample
from pancake_kernels.machine import machine_line

_PACKAGES = ("torch", "triton", "lmcache", "transformers")
#: Encode and decode of one chunk, by its number.
Action = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to keep KV.  Ratios are to bfloat16; errors are relative, None where nothing is encoded."""

    name: str
    size_ratio: float
    encode_gb_s: float
    decode_gb_s: float
    key_rms: float | None
    key_max: float | None
    value_rms: float | None
    value_max: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What one run measured."""

    date: str
    machine: str
    threads: int
    device: str
    sample: str
    chunk_shape: tuple[int, ...]
    repeats: int
    #: Processes that wanted a core in the minute before, on average; None where the system does not say.
    load: float | None
    rows: tuple[Row, ...]


def measure(sample: Sample, *, device: str, repeats: int) -> Report:
    """Measure every mode on the chunks of `sample`; speeds are medians over `repeats` rounds through all chunks."""
    chunks = [(keys.to(device), values.to(device)) for keys, values in sample.chunks()]
    codec = codec_for(device)
    load = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
    rows = [_copy_row(chunks, repeats)]
    if (eight := _fp8_row(chunks, repeats)) is not None:
        rows.append(eight)
    rows += [_codec_row(codec, mode, chunks, repeats) for mode in Mode]
    rows += [_codec_row(KVCodec(ReferenceBackend()), mode, chunks, repeats) for mode in (Mode.INT8, Mode.INT4)]
    return Report(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine_line(_PACKAGES),
        threads=torch.get_num_threads(),
        device=device if device == "cpu" else torch.cuda.get_device_name(),
        sample=sample.origin,
        chunk_shape=tuple(chunks[0][0].shape),
        repeats=repeats,
        load=load,
        rows=tuple(rows),
    )


def _codec_row(codec: KVCodec, mode: Mode, chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], repeats: int) -> Row:
    keys = chunks[0][0]
    size = encoded_size(tuple(keys.shape), keys.dtype, mode)
    frames = [torch.empty(size, dtype=torch.uint8, device=keys.device) for _ in chunks]
    out = [(torch.empty_like(keys), torch.empty_like(values)) for keys, values in chunks]
    encode = _speed(lambda index: codec.encode_into(*chunks[index], mode, frames[index]), chunks, repeats)
    decode = _speed(lambda index: codec.decode_into(frames[index], *out[index]), chunks, repeats)
    ratio = size / (2 * keys.numel() * 2)
    return Row(f"{mode}, {codec.backend.name}", ratio, encode, decode, *_errors(chunks, out))


def _copy_row(chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], repeats: int) -> Row:
    out = [(torch.empty_like(keys), torch.empty_like(values)) for keys, values in chunks]

    def copy(index: int) -> None:
        for source, target in zip(chunks[index], out[index], strict=True):
            target.copy_(source)

    speed = _speed(copy, chunks, repeats)
    return Row("copy", 1.0, speed, speed, None, None, None, None)


def _fp8_row(chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], repeats: int) -> Row | None:
    """Measure LMCache's own fp8 serializer on the same bytes; None where LMCache is not installed."""
    try:
        from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
    except ImportError:
        return None
    key: Any = None  # neither of them looks at it
    to_bytes, back = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    joined = [SimpleNamespace(tensor=torch.stack(pair)) for pair in chunks]
    stored = [SimpleNamespace(tensor=torch.empty(kv.tensor.numel(), dtype=torch.uint8)) for kv in joined]
    restored = [SimpleNamespace(tensor=torch.empty_like(kv.tensor)) for kv in joined]
    for place in stored:
        place.tensor = place.tensor.to(chunks[0][0].device)
    encode = _speed(lambda index: to_bytes.serialize(joined[index], stored[index], key), chunks, repeats)
    decode = _speed(lambda index: back.deserialize(stored[index], restored[index], key), chunks, repeats)
    errors = _errors(chunks, [(kv.tensor[0], kv.tensor[1]) for kv in restored])
    return Row("LMCache fp8 (e4m3)", 0.5, encode, decode, *errors)


def _speed(action: Action, chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], repeats: int) -> float:
    """Return GB/s of KV through `action`: the median of rounds through all chunks, after one that warms up."""
    on_gpu = chunks[0][0].is_cuda
    num_bytes = sum(2 * int(keys.nbytes) for keys, _ in chunks)
    rounds: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for index in range(len(chunks)):
            action(index)
        if on_gpu:
            torch.cuda.synchronize()
        rounds.append(time.perf_counter() - started)
    return num_bytes / statistics.median(rounds[1:]) / 1e9


def _errors(
    before: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[float, float, float, float]:
    """Return RMS error over RMS, and largest error over largest magnitude, of keys and then of values."""
    found: list[float] = []
    for side in (0, 1):
        was = torch.cat([pair[side].float().flatten() for pair in before])
        off = torch.cat([pair[side].float().flatten() for pair in after]) - was
        found.append(float(off.square().mean().sqrt() / was.square().mean().sqrt()))
        found.append(float(off.abs().max() / was.abs().max()))
    return found[0], found[1], found[2], found[3]


def table(report: Report) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| kept as | bytes to bfloat16 | encode GB/s | decode GB/s | keys: RMS, max error | values: RMS, max error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report.rows:
        keys, values = _percent(row.key_rms, row.key_max), _percent(row.value_rms, row.value_max)
        speeds = f"{row.encode_gb_s:.2f} | {row.decode_gb_s:.2f}"
        lines.append(f"| {row.name} | {row.size_ratio:.4f} | {speeds} | {keys} | {values} |")
    return "\n".join(lines)


def _percent(rms: float | None, largest: float | None) -> str:
    return "" if rms is None or largest is None else f"{rms:.3%}, {largest:.3%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench from a command line; return the exit code."""
    prog = "python -m pancake_kernels.kv_codec.bench"
    parser = argparse.ArgumentParser(prog=prog, description="Measure the KV codec.")
    parser.add_argument("--json", type=Path, help="write the report there, for `card`")
    parser.add_argument("--model", type=Path, help="folder of a model that transformers can load; needs --text")
    parser.add_argument("--text", type=Path, help="text file whose KV is taken")
    parser.add_argument("--tokens", type=int, default=4 * CHUNK_TOKENS, help="tokens of KV (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="rounds per figure (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    asked = parser.parse_args(argv)
    if (asked.model is None) != (asked.text is None):
        parser.error("--model and --text go together")
    if asked.tokens < CHUNK_TOKENS or min(asked.repeats, asked.threads) < 1:
        parser.error(f"--tokens is at least {CHUNK_TOKENS}, --repeats and --threads at least 1")
    torch.set_num_threads(asked.threads)
    if asked.model is None:
        sample = synthetic_sample(asked.tokens)
    else:
        sample = model_sample(asked.model, asked.text.read_text(encoding="utf-8"), asked.tokens)
    report = measure(sample, device=asked.device, repeats=asked.repeats)
    sys.stdout.write(f"{report.machine}\n{report.sample}\n\n{table(report)}\n")
    if asked.json is not None:
        asked.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
