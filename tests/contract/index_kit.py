"""What the tests of the index on disk share: small indexes, child processes, damaged files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import index_children

CHILDREN = Path(index_children.__file__)
WAIT_S = 120


def start(program: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen[str]:
    """Start a program of `index_children`."""
    return subprocess.Popen(
        [sys.executable, str(CHILDREN), program, *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str], given: str | None = None) -> str:
    """Wait for the end of a program and return what it printed; a failed one fails the test."""
    output, errors = process.communicate(given, timeout=WAIT_S)
    assert process.returncode == 0, errors
    return output


def flip(path: Path, at: int) -> None:
    """Change one byte of a file, as a failing disk would; negative places count from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)
