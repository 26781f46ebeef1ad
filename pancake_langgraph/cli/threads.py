"""`pancake threads`: look after what a `PancakeSaver` keeps."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from pancake_langgraph._errors import ConfigError, PancakeError
from pancake_langgraph.checkpoint.foreign_sources import POSTGRES_SCHEMES
from pancake_langgraph.checkpoint.overview import ThreadInfo
from pancake_langgraph.checkpoint.registry import REDIS_SCHEMES
from pancake_langgraph.checkpoint.seal import KEY_BYTES
from pancake_langgraph.cli import _threads_text as text
from pancake_langgraph.cli._progress import show_progress
from pancake_langgraph.saver import PancakeSaver

_Command = TypeVar("_Command", bound=Callable[..., Any])
_PROGRESS_S = 2.0


@click.group()
def threads() -> None:
    """List, measure, show, prune, delete, export and import the threads that a PancakeSaver keeps."""


def _store_options(command: _Command) -> _Command:
    """Add what every command needs to open a store."""
    for option in (
        click.option(
            "--key-file",
            "key_files",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="File with a key: 32 bytes, or those in hex or base64.  Repeat it, newest key first.",
        ),
        click.option("--allow", multiple=True, metavar="MODULE:CLASS", help="A class of the app that state holds."),
        click.option(
            "--store",
            "where",
            envvar="PANCAKE_SAVER",
            required=True,
            metavar="WHERE",
            help="The saver's SQLite file or Redis URL (or PANCAKE_SAVER).",
        ),
    ):
        command = option(command)
    return command


@threads.command("list")
@_store_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_threads(where: str, allow: Sequence[str], key_files: Sequence[Path], as_json: bool) -> None:
    """Show all threads, the largest last."""
    with _opened(where, allow, key_files) as saver:
        tick = _ticker("read")
        infos = []
        for thread_id in saver.threads():
            if (info := saver.info(thread_id)) is not None:  # else deleted meanwhile
                infos.append(info)
            tick(thread_id)
    if as_json:
        click.echo(json.dumps([asdict(info) for info in infos], indent=1))
        return
    Console().print(text.threads_table(sorted(infos, key=lambda info: info.num_bytes)))
    for info in infos:
        if info.problem is not None:
            click.echo(f"{text.safe_text(info.thread_id)}: {text.safe_text(info.problem)}", err=True)


@threads.command()
@_store_options
@click.argument("thread_id", metavar="THREAD")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sizes(where: str, allow: Sequence[str], key_files: Sequence[Path], thread_id: str, as_json: bool) -> None:
    """Show how many bytes each channel of THREAD takes."""
    with _opened(where, allow, key_files) as saver:
        _require(saver, [thread_id])
        found = saver.sizes(thread_id)
    if as_json:
        click.echo(json.dumps(dict(found), indent=1))
    else:
        Console().print(text.sizes_table(thread_id, found))


@threads.command()
@_store_options
@click.argument("thread_id", metavar="THREAD")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Checkpoints at most.")
@click.option("--values", "with_values", is_flag=True, help="Also show values, cut short.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(
    where: str,
    allow: Sequence[str],
    key_files: Sequence[Path],
    thread_id: str,
    limit: int,
    with_values: bool,
    as_json: bool,
) -> None:
    """Show the history of THREAD, newest first; values only when asked for."""
    with _opened(where, allow, key_files) as saver:
        _require(saver, [thread_id])
        items = list(itertools.islice(saver.history(thread_id), limit))
        for item in items:
            place = {"thread_id": thread_id, "checkpoint_ns": item.checkpoint_ns, "checkpoint_id": item.checkpoint_id}
            found = saver.get_tuple({"configurable": place}) if with_values else None
            if as_json:
                click.echo(json.dumps(text.history_json(item, found)))
            else:
                for line in text.history_lines(item, found):
                    click.echo(line.plain)


@threads.command()
@_store_options
@click.argument("thread_ids", metavar="[THREAD]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="All threads.")
@click.option("--keep-latest", is_flag=True, help="Keep the latest checkpoint of each namespace (the default).")
def prune(
    where: str,
    allow: Sequence[str],
    key_files: Sequence[Path],
    thread_ids: Sequence[str],
    is_all: bool,
    keep_latest: bool,
) -> None:
    """Remove old checkpoints; the latest of each namespace stays, with all it needs."""
    del keep_latest  # there is no other way yet; the option says what happens
    _require_choice(thread_ids, is_all)
    with _opened(where, allow, key_files) as saver:
        tick = _ticker("pruned")
        num_checkpoints = num_bytes = 0
        chosen = _require(saver, list(saver.threads()) if is_all else thread_ids)
        for before in chosen:
            saver.prune([before.thread_id])
            after = saver.info(before.thread_id)
            num_checkpoints += before.num_checkpoints - (after.num_checkpoints if after else 0)
            num_bytes += before.num_bytes - (after.num_bytes if after else 0)
            tick(before.thread_id)
    click.echo(
        f"{text.in_threads(len(chosen))} pruned: {num_checkpoints} checkpoints, {text.in_bytes(num_bytes)} removed"
    )


@threads.command()
@_store_options
@click.argument("thread_ids", metavar="THREAD...", nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(where: str, allow: Sequence[str], key_files: Sequence[Path], thread_ids: Sequence[str], yes: bool) -> None:
    """Remove threads with all they hold."""
    with _opened(where, allow, key_files) as saver:
        chosen = _require(saver, thread_ids)
        num_checkpoints = sum(info.num_checkpoints for info in chosen)
        if not yes:
            names = ", ".join(str(text.safe_text(info.thread_id)) for info in chosen)
            click.confirm(f"Delete {names} ({num_checkpoints} checkpoints)? This cannot be undone.", abort=True)
        tick = _ticker("deleted")
        for info in chosen:
            saver.delete_thread(info.thread_id)
            tick(info.thread_id)
    num_bytes = sum(info.num_bytes for info in chosen)
    click.echo(f"{text.in_threads(len(chosen))} deleted: {num_checkpoints} checkpoints, {text.in_bytes(num_bytes)}")


@threads.command("export")
@_store_options
@click.argument("thread_ids", metavar="[THREAD]...", nargs=-1)
@click.option("--all", "is_all", is_flag=True, help="All threads.")
@click.option("--to", "path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def export_threads(
    where: str,
    allow: Sequence[str],
    key_files: Sequence[Path],
    thread_ids: Sequence[str],
    is_all: bool,
    path: Path,
    force: bool,
) -> None:
    """Write threads to one file, in plain, also from an encrypted store."""
    _require_choice(thread_ids, is_all)
    with _opened(where, allow, key_files) as saver:
        names = None if is_all else thread_ids
        done = saver.export_threads(path, names, overwrite=force, on_thread=_ticker("exported"))
    click.echo(f"{text.in_threads(len(done))} exported to {path}")
    click.echo("the file is not encrypted: whoever can read it can read the conversations", err=True)


@threads.command("import")
@_store_options
@click.argument("thread_ids", metavar="[THREAD]...", nargs=-1)
@click.option("--from", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="An export.")
@click.option(
    "--from-sqlite", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A file of SqliteSaver."
)
@click.option("--from-postgres", metavar="URL", help="A database of PostgresSaver (password: PGPASSWORD).")
@click.option("--from-redis", metavar="URL", help="A server of langgraph-checkpoint-redis.")
def import_threads(
    where: str, allow: Sequence[str], key_files: Sequence[Path], thread_ids: Sequence[str], **origins: Any
) -> None:
    """Take threads in (all, or those that are named), from an export or another saver.

    Threads that exist already are refused.  Nothing is removed where they come from.
    """
    given = {name: origin for name, origin in origins.items() if origin is not None}
    if len(given) != 1:
        raise click.UsageError("give one of --from, --from-sqlite, --from-postgres, --from-redis")
    [(name, origin)] = given.items()
    for option, schemes in (("from_postgres", POSTGRES_SCHEMES), ("from_redis", REDIS_SCHEMES)):
        if name == option and not origin.startswith(schemes):
            raise click.UsageError(f"--{option.replace('_', '-')}: give a URL that begins with {' or '.join(schemes)}")
    with _opened(where, allow, key_files, is_made=True) as saver:
        take: Callable[..., Sequence[str]] = saver.import_threads if name == "path" else saver.import_from
        done = take(origin, thread_ids or None, on_thread=_ticker("imported"))
    click.echo(f"{text.in_threads(len(done))} imported")


# -- what the commands share ----------------------------------------------------------------------------------------


@contextmanager
def _opened(
    where: str, allow: Sequence[str], key_files: Sequence[Path], *, is_made: bool = False
) -> Iterator[PancakeSaver]:
    """Open the store; errors of ours end the command with one line."""
    try:
        if not is_made and not where.startswith(REDIS_SCHEMES) and not Path(where).is_file():
            raise ConfigError(f"--store: there is no file {where}; name the one that the app gives to PancakeSaver")
        keys = [_read_key(path) for path in key_files]
        with _importable(Path.cwd()), PancakeSaver(where, allow=map(_type_name, allow), keys=keys) as saver:
            yield saver
    except PancakeError as exc:
        raise click.ClickException(str(exc)) from exc


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let `--allow` find the app's modules below the working directory, as `python -m` does."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _type_name(spec: str) -> tuple[str, str]:
    module, _, name = spec.partition(":")
    if not module or not name:
        raise ConfigError(f"--allow: got {spec!r}, allowed is module:Class, for example my_app.state:Order")
    return module, name


def _read_key(path: Path) -> bytes:
    """Return the key that a file holds."""
    data = path.read_bytes()
    if len(data) == KEY_BYTES:
        return data
    words = data.strip()
    for decode in (bytes.fromhex, lambda found: base64.b64decode(found, altchars="-_", validate=True)):
        try:
            key = decode(words.decode("ascii").replace("+", "-").replace("/", "_"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return key
    raise ConfigError(
        f"--key-file: {path} holds no key: {len(data)} bytes, allowed are {KEY_BYTES} raw bytes, {2 * KEY_BYTES} hex "
        "digits, or the base64 of them"
    )


def _require_choice(thread_ids: Sequence[str], is_all: bool) -> None:
    if bool(thread_ids) == is_all:
        raise click.UsageError("name threads, or give --all")


def _require(saver: PancakeSaver, thread_ids: Sequence[str]) -> Sequence[ThreadInfo]:
    """Return what threads hold; refuse if one of them holds nothing."""
    infos: Mapping[str, ThreadInfo | None] = {thread_id: saver.info(thread_id) for thread_id in thread_ids}
    for thread_id, info in infos.items():
        if info is None:
            raise ConfigError(f"there is no thread {thread_id!r}; `pancake threads list` shows those there are")
    return [info for info in infos.values() if info is not None]


def _ticker(verb: str) -> Callable[[str], None]:
    """Return what is told of each thread that is done; it writes a line every two seconds."""
    started_s = last_s = time.monotonic()
    count = 0

    def tick(thread_id: str) -> None:
        nonlocal count, last_s
        count += 1
        now_s = time.monotonic()
        if now_s - last_s >= _PROGRESS_S:
            last_s = now_s
            show_progress(f"{text.in_threads(count)} {verb}", now_s - started_s)

    return tick
