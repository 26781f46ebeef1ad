"""Progress lines for steps that take longer than two seconds."""

from __future__ import annotations

import click


def show_progress(step: str, elapsed_s: float) -> None:
    """Write one line to standard error."""
    click.echo(f"  {step} … {elapsed_s:.0f} s", err=True)
