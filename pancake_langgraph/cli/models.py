"""`pancake models`: prepare and verify model files."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pancake_langgraph.cli._progress import show_progress
from pancake_langgraph.weights._folder import file_sha256
from pancake_langgraph.weights.smollm import prepare_smollm


@click.group()
def models() -> None:
    """Prepare and verify model files."""


@models.command()
@click.option("--full", is_flag=True, help="Read every byte of files that are there already.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Use this cache folder.")
def prepare(full: bool, cache_dir: Path | None) -> None:
    """Convert SmolLM2-135M-Instruct to safetensors, or verify that it is there."""
    started_s = time.monotonic()
    folder = prepare_smollm(cache_dir, show_progress, verify="full" if full else "fast")
    click.echo(f"{folder}")
    click.echo(f"sha256 {file_sha256(folder / 'model.safetensors')}  ({time.monotonic() - started_s:.1f} s)", err=True)
