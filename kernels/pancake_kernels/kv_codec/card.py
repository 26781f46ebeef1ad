"""Write the card from what a bench measured: `python -m pancake_kernels.kv_codec.card REPORT [--out FILE]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pancake_kernels.kv_codec.bench import Report, Row, table

_CARD = """\
# KV codec: card

Written by `python -m pancake_kernels.kv_codec.card` from one run of `python -m pancake_kernels.kv_codec.bench`.

- Date: {date}
- Machine: {machine}
- Device: {device}, {threads} thread(s) of torch; load of the machine before: {load}
- KV: {sample}; chunks of {layers} layers, {tokens} tokens, {width} channels for keys and for values each
- Speeds: GB/s of KV in its own dtype, medians of {repeats} rounds through all chunks, into memory made beforehand
- Errors: RMS of the error to RMS of the data, largest error to largest magnitude

{table}

"Copy" is torch's copy of the same tensors, and so the ceiling. "LMCache fp8" is LMCache's own serializer class, called
on the same tensors; it casts without scales. Sizes include header, scales and zeros.

## Bounds that are tested

- Every element is within half a step of its group (half of the stored scale), before it is rounded to its dtype.
- All implementations give the reference's bytes. Triton's kernels were run in Triton's interpreter, not on a GPU.
- From 32 tokens and 64 channels on, 8 bits take at most 0.5235 of bfloat16 and 4 bits at most 0.2969, and 40 bytes.
- NaN, infinities and magnitudes beyond about 1e31 are refused in both lossy modes; the exact mode keeps every bit.
"""


def card(report: Report) -> str:
    """Return the card's text."""
    layers, tokens, width = report.chunk_shape
    return _CARD.format(
        date=report.date,
        machine=report.machine,
        device=report.device,
        threads=report.threads,
        load="unknown" if report.load is None else f"{report.load:g}",
        sample=report.sample,
        layers=layers,
        tokens=tokens,
        width=width,
        repeats=report.repeats,
        table=table(report),
    )


def read_report(path: Path) -> Report:
    """Read what the bench wrote with `--json`.

    Raises:
        ValueError: if it is no such file.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        rows = tuple(Row(**row) for row in found.pop("rows"))
        return Report(**{**found, "chunk_shape": tuple(found["chunk_shape"]), "rows": rows})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: not a report of this bench ({error}); to mend: run the bench again") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Write the card from a command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pancake_kernels.kv_codec.card", description="Write the card.")
    parser.add_argument("report", type=Path, help="what the bench wrote with --json")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("CARD.md"), help="where to (default: here)"
    )
    asked = parser.parse_args(argv)
    asked.out.write_text(card(read_report(asked.report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
