"""Triton's kernels in Triton's interpreter, against the reference: the same bits.

The interpreter is chosen before Triton is imported, so all cases run in one child process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "bfloat16 with an odd width and a long last group": ("bfloat16", (2, 70, 67)),
    "float16 with two column blocks": ("float16", (1, 33, 130)),
    "float32 with two lane blocks": ("float32", (1, 65, 70)),
    "one token": ("bfloat16", (3, 1, 64)),
    "one element": ("float32", (1, 1, 1)),
    "fewer tokens than a group": ("float16", (2, 5, 3)),
}
TIES = "halves between two codes"
REFUSED = "NaN, infinities and large numbers"

CHILD = """
import json, sys
import torch
from pancake_kernels.errors import ValuesRefused
from pancake_kernels.kv_codec import KVCodec
from pancake_kernels.kv_codec.reference import ReferenceBackend
from pancake_kernels.kv_codec.triton_kernel import TritonBackend
from kv_bed import LOSSY, sample

reference, triton = KVCodec(ReferenceBackend()), KVCodec(TritonBackend())

def same(keys, values):
    found = {}
    for mode in LOSSY:
        frame = reference.encode(keys, values, mode)
        pairs = zip(triton.decode(frame), reference.decode(frame))
        found[f"{mode} codes"] = torch.equal(triton.encode(keys, values, mode), frame)
        found[f"{mode} restored"] = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return found

def refused(keys, values, mode):
    try:
        triton.encode(keys, values, mode)
    except ValuesRefused:
        return True
    return False

results = {}
for name, (dtype, shape) in json.loads(sys.argv[1]).items():
    results[name] = same(*sample(tuple(shape), getattr(torch, dtype)))
halves = (torch.arange(-127, 127, dtype=torch.float32) + 0.5).reshape(1, 2, 127)
halves[0, :, 0] = 127  # scale 1 for both rows of values
results[sys.argv[2]] = same(halves, halves)
results[sys.argv[3]] = {}
for bad in (float("nan"), float("inf"), -float("inf"), 1e38):
    for side in (0, 1):
        pair = sample((1, 35, 33))
        pair[side][0, 34, 32] = bad
        results[sys.argv[3]][f"{bad} {side}"] = all(refused(*pair, mode) for mode in LOSSY)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, bool]]:
    paths = [str(Path(__file__).parent), *sys.path]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    argv = [sys.executable, "-c", CHILD, json.dumps(CASES), TIES, REFUSED]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, bool]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("case", [*CASES, TIES])
def test_the_kernels_give_the_reference_bits(results: dict[str, dict[str, bool]], case: str) -> None:
    assert len(results[case]) == 4
    assert all(results[case].values()), results[case]


def test_the_kernels_refuse_what_the_reference_refuses(results: dict[str, dict[str, bool]]) -> None:
    assert len(results[REFUSED]) == 8
    assert all(results[REFUSED].values()), results[REFUSED]
