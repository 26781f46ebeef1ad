"""`pancake up`: the model server and the KV cache server, until Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path
from typing import Any, get_args

import click

from pancake_langgraph._errors import ConfigError, EngineError, LaunchError, TierError
from pancake_langgraph.cli._progress import show_progress
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.launch.plans import DiskAdapter, Dtype, StackPlan, TierPlan
from pancake_langgraph.launch.ports import require_free
from pancake_langgraph.launch.proving import prove_started_tier
from pancake_langgraph.launch.stack import Stack
from pancake_langgraph.tiers.canary import CanaryReport, Place
from pancake_langgraph.tiers.naming import KVCodec
from pancake_langgraph.weights import TOOLS_TEMPLATE, prepare_smollm

_POLL_S = 1.0


def state_path() -> Path:
    """Return the file that says what the last `pancake up` started."""
    return cache_dir() / "up.json"


@click.command()
@click.option("--model", "model_dir", type=click.Path(path_type=Path), help="Model folder (default: SmolLM2-135M).")
@click.option("--name", default="small", show_default=True, help="Model name that clients send.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), default="bfloat16", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the model server (default: a free one).")
@click.option("--lora", "adapters", multiple=True, metavar="NAME=FOLDER", help="A LoRA adapter.  Repeat it.")
@click.option("--no-tier", is_flag=True, help="Start no KV cache server.")
@click.option("--l2-dir", type=click.Path(path_type=Path), help="Keep the disk tier in this folder.")
@click.option("--l2-bytes", type=int, default=10_000_000_000, show_default=True, help="Most bytes in that folder.")
@click.option("--l2-key-file", type=click.Path(path_type=Path), help="Encrypt the disk tier with the key in this file.")
@click.option(
    "--l2-adapter",
    type=click.Choice(get_args(DiskAdapter)),
    default="verified",
    show_default=True,
    help="plain: LMCache's own, without checks and cap.",
)
@click.option(
    "--l2-codec",
    type=click.Choice(get_args(KVCodec)),
    default="exact",
    show_default=True,
    help="Bits per number of KV that leaves host memory; int8 and int4 change it a little.",
)
@click.option(
    "--l3-url",
    envvar="PANCAKE_L3_URL",
    show_envvar=True,
    help="Share KV through this Redis or Valkey, redis://HOST:PORT.  With a password use the variable: every user of"
    " the machine can read arguments.",
)
@click.option("--l1-bytes", type=int, default=400_000_000, show_default=True, help="Host memory for KV, in bytes.")
@click.option(
    "--kv-pool-bytes", type=int, default=200_000_000, show_default=True, help="The engine's KV pool, in bytes."
)
@click.option("--max-model-len", type=int, default=4096, show_default=True, help="Prompt plus answer, in tokens.")
@click.option("--threads", type=int, default=1, show_default=True, help="OpenMP threads of a CPU engine.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for logs (default: in the cache folder).")
def up(model_dir: Path | None, dtype: Dtype, no_tier: bool, l2_dir: Path | None, l1_bytes: int, **options: Any) -> None:
    """Start the model server and the KV cache server on loopback; stop both on Ctrl-C.

    Prints the variables that point a client at them, ready for `eval`.
    """
    if options["port"] is not None:
        require_free(options["port"], "model server")  # before the model is prepared and the cache server started
    # Folders too are tried first: a wrong one is told at once, whatever else is missing.
    for place in (options["log_dir"], state_path().parent):
        if place is not None:
            place.mkdir(parents=True, exist_ok=True)
    default_model = model_dir is None
    folder = (model_dir or prepare_smollm(on_progress=show_progress)).resolve()
    plan = StackPlan(
        model_dir=folder,
        served_model_name=options["name"],
        dtype=dtype,
        kv_pool_bytes=options["kv_pool_bytes"],
        max_model_len_tokens=options["max_model_len"],
        num_threads=options["threads"],
        adapters=tuple(_adapter(text) for text in options["adapters"]),
        # The test model's own template has no tools section; other models keep theirs.
        chat_template=TOOLS_TEMPLATE if default_model else None,
        tier=None if no_tier else _tier_plan(l1_bytes, l2_dir, options),
        engine_port=options["port"],
        run_dir=options["log_dir"],
    )
    with Stack(plan, on_progress=show_progress) as stack:
        try:
            _prove_tier(stack)
            _announce(stack)
            _watch(stack)
        except KeyboardInterrupt:
            click.echo("stopping", err=True)
        finally:
            state_path().unlink(missing_ok=True)


def _tier_plan(l1_bytes: int, l2_dir: Path | None, options: dict[str, Any]) -> TierPlan:
    return TierPlan(
        l1_bytes=l1_bytes,
        l2_dir=l2_dir,
        l2_adapter=options["l2_adapter"],
        l2_bytes=options["l2_bytes"],
        l2_key_file=options["l2_key_file"],
        l2_codec=options["l2_codec"],
        l3_url=options["l3_url"],
    )


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals or not folder:
        raise ConfigError(f"--lora: got {text!r}, allowed is NAME=FOLDER")
    return name, Path(folder).resolve()


def _prove_tier(stack: Stack) -> None:
    """Ask for the known answer from every place; an engine that gets a wrong one leaves its tier alone from then on."""
    if stack.tier_url is None:
        return
    try:
        report = prove_started_tier(
            stack.base_url, model=stack.served_model_name, tier_url=stack.tier_url, model_key=stack.model_key
        )
    except (EngineError, TierError) as exc:
        click.echo(f"the tier could not be proven: {exc}", err=True)
        return
    if report is None:
        click.echo("the tier is used unproven: it cannot be asked for a known answer", err=True)
    elif Place.HOST in report.slow_places:
        click.echo(f"the tier is switched off: it loses time here, {_times(report)}; use --no-tier", err=True)
    elif report.is_right:
        click.echo(f"tier: {report.reason}, {_times(report)}", err=True)
        if report.slow_places:
            click.echo("the disk loses time here: put --l2-dir on a faster one", err=True)
    else:
        click.echo(f"the tier is switched off: {report.reason}", err=True)


def _times(report: CanaryReport) -> str:
    pairs = zip(report.places, report.seconds, strict=False)
    return "in " + ", ".join(f"{took_s:.2f} s ({place})" for place, took_s in pairs)


def _announce(stack: Stack) -> None:
    for name, value in stack.client_env().items():
        click.echo(f"export {name}={shlex.quote(value)}")
    click.echo(f"ready; logs in {stack.log_dir}; Ctrl-C stops both", err=True)
    state = {
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "log_dir": str(stack.log_dir),
        "engine_pid": stack.engine.pid,
        "tier_pid": stack.tier.pid if stack.tier is not None else None,
        "env": stack.client_env(),
    }
    path = state_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    fresh.write_text(json.dumps(state, indent=1))
    fresh.replace(path)


def _watch(stack: Stack) -> None:
    """Wait; say once when the cache server ends, and end when the engine does."""
    tier_lost = False
    while True:
        time.sleep(_POLL_S)
        if not stack.engine.alive:
            raise LaunchError(f"the model server ended: {stack.engine.log_problem()}")
        if stack.tier is not None and not stack.tier.alive and not tier_lost:
            tier_lost = True
            click.echo(f"the cache server ended, the engine goes on without: {stack.tier.log_problem()}", err=True)
