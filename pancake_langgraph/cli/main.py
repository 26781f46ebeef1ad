"""The command group.  Sub-commands are imported only when they are used, so that `pancake --help` is quick."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, Final

import click

from pancake_langgraph._errors import PancakeError
from pancake_langgraph.retrieval.extra import lacking

logger = logging.getLogger(__name__)

#: Sub-command -> (module, attribute, one line for the overview).
_COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "bench": ("pancake_langgraph.cli.bench", "bench", "Measure a workload next to what people use today."),
    "demo": ("pancake_langgraph.cli.demo", "demo", "Start everything, run the example app, show what it gained."),
    "doctor": ("pancake_langgraph.cli.doctor", "doctor", "Check this machine and, with --base-url, a running engine."),
    "explain": ("pancake_langgraph.cli.explain", "explain", "Show a graph's topology and forecast."),
    "index": ("pancake_langgraph.cli.index", "index", "Make indexes of text, verify, compact and import them."),
    "lint": ("pancake_langgraph.cli.lint", "lint", "Say where recorded requests broke the cached prefix, and why."),
    "models": ("pancake_langgraph.cli.models", "models", "Prepare and verify model files."),
    "threads": ("pancake_langgraph.cli.threads", "threads", "Look after the threads that a PancakeSaver keeps."),
    "tiers": ("pancake_lmcache.cli", "tiers", "List and clean what the KV tiers keep."),
    "up": ("pancake_langgraph.cli.up", "up", "Start the model server and the KV cache server."),
}


class _LazyGroup(click.Group):
    """A group that knows its commands' names and one-line helps without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, sorted."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return one command; `None` when there is none of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module_name, attribute, _ = _COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module_name}.{attribute} is a {type(command).__name__}, not a command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the overview from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in sorted(_COMMANDS.items())])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pancake-langgraph", prog_name="pancake")
@click.option("-v", "--verbose", count=True, help="Log more (-v: state changes, -vv: everything).")
def pancake(verbose: int) -> None:
    """Keep KV cache, weights and indexes where the next LangGraph agent needs them."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def main(args: list[str] | None = None) -> None:
    """Run the command line; exit code 1 on an error of ours (one line, no traceback), 130 on Ctrl-C."""
    keywords: dict[str, Any] = {"standalone_mode": False, "prog_name": "pancake"}
    try:
        code = pancake.main(args, **keywords)
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except PancakeError as exc:
        click.echo(f"pancake: {exc}", err=True)
        sys.exit(1)
    except ImportError as exc:
        if (error := lacking(exc)) is None:
            raise
        click.echo(f"pancake: {error}", err=True)
        sys.exit(1)
    except OSError as exc:
        logger.debug("stopped by the operating system", exc_info=True)
        click.echo(f"pancake: {_file_problem(exc)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _file_problem(exc: OSError) -> str:
    """Say which file or folder could not be used, and what may be done."""
    reason = exc.strerror or str(exc) or type(exc).__name__
    if exc.filename is None:
        return f"the operating system refused: {reason}; mend that, or run with -vv to see what led to it"
    return (
        f"cannot use {exc.filename}: {reason}; make room or allow access there, or name another place "
        "(own files go to PANCAKE_CACHE_DIR)"
    )
