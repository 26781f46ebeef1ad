"""`pancake doctor`: what is wrong here, and how to mend it."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from pancake_langgraph.cli._checks import CheckResult, engine_checks, machine_checks

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL", "absent": "none"}


@click.command()
@click.option("--base-url", envvar="PANCAKE_BASE_URL", help="Also check this running engine (…/v1).")
@click.option("--model", envvar="PANCAKE_MODEL", help="Model name at that engine (default: the one it serves).")
@click.option("--tier-url", envvar="PANCAKE_TIER_URL", help="Also check this KV cache server.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def doctor(base_url: str | None, model: str | None, tier_url: str | None, as_json: bool) -> None:
    """Check this machine and, with --base-url, what a running engine can do.

    Exit code 1 if a check failed; warnings do not count, nor does an extra of which nothing is installed.
    """
    results = machine_checks(needs_parts=base_url is None)
    if base_url is not None:
        results += engine_checks(base_url, model=model, tier_url=tier_url)
    failed = [result for result in results if result.status == "fail"]
    if as_json:
        click.echo(json.dumps({"ok": not failed, "checks": [asdict(result) for result in results]}, indent=1))
    else:
        _print(results)
    if failed:
        raise click.exceptions.Exit(1)


def _print(results: list[CheckResult]) -> None:
    width = max(len(result.name) for result in results)
    for result in results:
        click.echo(f"{_MARKS[result.status]}  {result.name:<{width}}  {result.found}")
        if result.status != "ok" and result.fix:
            word = "to have it" if result.status == "absent" else "to mend"
            click.echo(f"      {'':<{width}}  {word}: {result.fix}")
