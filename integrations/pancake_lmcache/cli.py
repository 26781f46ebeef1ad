"""`pancake tiers`: list what the KV tiers keep, and remove what nobody asks for any more."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from pancake_lmcache.inventory import FolderStore, RedisStore, Store, StoredGroup, chosen, grouped

_SCHEMES: Final = ("redis://", "rediss://", "unix://", "valkey://")
_DAY_S: Final = 86_400.0


@click.group()
def tiers() -> None:
    """List and clean what the KV tiers keep on disk and in Redis or Valkey."""


@tiers.command("ls")
@click.argument("where", metavar="WHERE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tiers(where: str, as_json: bool) -> None:
    """Show what WHERE keeps, by model and identity of its weights.

    WHERE is the folder of a disk tier, or the URL of a Redis or Valkey server.
    """
    groups = grouped(_opened(where).objects())
    if as_json:
        click.echo(json.dumps([asdict(group) for group in groups], indent=1))
        return
    if not groups:
        click.echo("nothing is kept there")
    for group in groups:
        click.echo(_line(group, time.time()))


@tiers.command()
@click.argument("where", metavar="WHERE")
@click.option("--keep", multiple=True, metavar="IDENTITY", help="An identity that stays whatever else.  Repeat it.")
@click.option("--unused-days", type=click.FloatRange(0.0), help="Remove what was not used for so many days instead.")
@click.option("--yes", is_flag=True, help="Remove.  Without it nothing is removed, only shown.")
def gc(where: str, keep: Sequence[str], unused_days: float | None, yes: bool) -> None:
    """Remove from WHERE what was computed with weights that have been replaced since.

    Of each model that is what bears another identity than what was used last.  An engine that runs two sets of weights
    under one name in turn needs `--keep`.
    """
    store, since_s = _opened(where), None
    if unused_days is not None:
        since_s = time.time() - unused_days * _DAY_S if unused_days else math.inf
    found = chosen(store.objects(), keep=set(keep), unused_since_s=since_s)
    size = _size(sum(one.num_bytes for one in found))
    if not yes:
        click.echo(f"{len(found)} objects with {size} would go; say --yes to remove them")
        return
    removed = store.remove(one.name for one in found)
    click.echo(f"{removed} objects with {size} removed")


def _opened(where: str) -> Store:
    if not where.startswith(_SCHEMES):
        try:
            return FolderStore(Path(where))
        except NotADirectoryError as exc:
            raise click.BadParameter(str(exc), param_hint="WHERE") from exc
    try:
        import redis
    except ImportError as exc:
        raise click.ClickException("redis is not installed; install pancake-langgraph[redis]") from exc
    url = re.sub(r"^valkey://", "redis://", where)
    client = redis.Redis.from_url(url, socket_connect_timeout=5.0, socket_timeout=30.0)
    try:
        client.ping()
    except redis.RedisError as exc:
        raise click.ClickException(f"the server does not answer ({exc}); is it running, and is the URL right?") from exc
    return RedisStore(client, now_s=time.time)


def _line(group: StoredGroup, now_s: float) -> str:
    identity = group.kv_identity or "no identity"
    note = "  superseded" if group.superseded else ""
    hours = max(now_s - group.used_at_s, 0.0) / 3600.0
    size = f"{group.num_objects} objects  {_size(group.num_bytes)}"
    return f"{group.model}  {identity}  {size}  used {hours:.1f} h ago{note}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
