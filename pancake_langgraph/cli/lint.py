"""`pancake lint FILE`: where recorded requests broke the prefix that an engine had cached."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from pancake_langgraph._errors import ConfigError
from pancake_langgraph._types import Prompt
from pancake_langgraph.cli._recorded import Recorded, read_recorded
from pancake_langgraph.cli._threads_text import safe_text
from pancake_langgraph.config.address import require_http_address
from pancake_langgraph.prompts.lint_book import LateBreak, PrefixLint
from pancake_langgraph.prompts.lint_history import text_fields
from pancake_langgraph.prompts.lint_kinds import BreakKind, BreakPlace, PrefixBreak
from pancake_langgraph.prompts.lint_report import PrefixReport
from pancake_langgraph.prompts.prefix import common_prefix_tokens

#: So many single breaks are listed in JSON; the totals count all.
MAX_LISTED: Final = 1000
_MAX_AGENTS: Final = 4096
_BEFORE_CHARS, _BEHIND_CHARS = 24, 40

Tokenizer = Callable[[Recorded], list[int] | None]


@dataclass(slots=True)
class _Case:
    """One break and the two calls it lies between."""

    line: int
    after_line: int
    agent: str
    found: PrefixBreak
    texts: tuple[str, str] | None
    is_suspected: bool = False

    def to_json(self) -> dict[str, Any]:
        known = {"line": self.line, "after_line": self.after_line, "agent": self.agent, **self.found.to_json()}
        known["is_suspected"] = self.is_suspected
        if self.texts is not None:
            known["before"], known["now"] = self.texts
        return known


@dataclass(slots=True)
class _Cases:
    """The first breaks as a list, and the worst one of each agent and kind."""

    listed: list[_Case] = field(default_factory=list)
    left_out: int = 0
    worst: dict[tuple[str, BreakKind], _Case] = field(default_factory=dict)

    def add(self, case: _Case) -> None:
        if len(self.listed) < MAX_LISTED:
            self.listed.append(case)
        else:
            self.left_out += 1
        key = (case.agent, case.found.kind)
        if key not in self.worst or case.found.lost_tokens > self.worst[key].found.lost_tokens:
            self.worst[key] = case


@click.command("lint")
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--format", "output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--show-text", is_flag=True, help="Also show a few words of both prompts at each break.")
@click.option("--base-url", help="Count with the tokenizer and template of this engine (…/v1), not by estimate.")
@click.option("--model", help="Model name at that engine (default: the one each request names).")
def lint(file: Path, output: str, show_text: bool, base_url: str | None, model: str | None) -> None:
    """Say where requests recorded in FILE stopped extending the one before, why, what it cost, how to mend it.

    FILE has one request body (OpenAI wire) a line; "agent", "thread" and "timestamp" may stand beside "messages".
    Without them the system prompt tells the agent, and the longest common history the thread.
    """
    tokens = None if base_url is None else _tokenizer(base_url, model)
    book, cases = PrefixLint(max_agents=_MAX_AGENTS), _Cases()
    lines: dict[str, int] = {}
    for request in read_recorded(file):
        seen = book.observe(
            request.prompt,
            agent=request.agent,
            thread=request.thread,
            token_ids=None if tokens is None else tokens(request),
            tag=request.line,
        )
        lines.setdefault(seen.agent, request.line)
        if seen.found is not None and seen.previous is not None:
            known = LateBreak(seen.agent, seen.found, seen.previous, seen.tag, request.prompt, request.line)
            cases.add(_case(known, show_text=show_text))
        for late in seen.late:
            cases.add(_case(late, show_text=show_text))
    for late in book.suspected():  # the end of the file leaves it open
        cases.add(_case(late, show_text=show_text, is_suspected=True))
    report = book.report()
    if output == "json":
        found = {"found": [case.to_json() for case in cases.listed], "found_left_out": cases.left_out}
        click.echo(json.dumps({"format": "pancake-prefix-lint", "version": 1, **report.to_json(), **found}, indent=1))
    else:
        _print(report, cases, lines)


def _case(known: LateBreak, *, show_text: bool, is_suspected: bool = False) -> _Case:
    texts = excerpts(known.previous, known.current, known.found.place) if show_text else None
    return _Case(known.call_tag, known.tag, known.agent, known.found, texts, is_suspected)


def _tokenizer(base_url: str, model: str | None) -> Tokenizer:
    from pancake_langgraph.chat.facts import ServerFacts, tokenize_body
    from pancake_langgraph.chat.link import Link, LinkConfig
    from pancake_langgraph.config.env import settings_from_env

    require_http_address("--base-url", base_url)
    key = settings_from_env().api_key or "EMPTY"
    facts = ServerFacts(Link(LinkConfig(base_url=base_url, api_key=key)))

    def tokens(request: Recorded) -> list[int]:
        body = tokenize_body({**request.body, "model": model or request.body.get("model")})
        ids = facts.tokenize(body)
        if ids is None:
            raise ConfigError(
                f"--base-url: the server at {base_url} has no /tokenize route; allowed is a vLLM server, "
                "or leave it out for estimates"
            )
        return ids

    return tokens


# -- words --------------------------------------------------------------------------------------------------------


def excerpts(previous: Prompt, current: Prompt, place: BreakPlace) -> tuple[str, str] | None:
    """Return a few words of both prompts at a break; `None` where only tokens are known.  For the user's own eyes."""
    old, new = _text_at(previous, place), _text_at(current, place)
    if place.where == "token":
        return None
    char = common_prefix_tokens(old, new)
    return _window(old, char), _window(new, char)


def _text_at(prompt: Prompt, place: BreakPlace) -> str:
    if place.where == "tool":
        return json.dumps(prompt.tools[place.index], ensure_ascii=False) if place.index < len(prompt.tools) else ""
    if place.where != "message" or place.index >= len(prompt.messages):
        return ""
    message = prompt.messages[place.index]
    texts = dict(text_fields(message))
    return texts.get(place.field, "") if place.field else f"{message.get('role')}: {' '.join(texts.values())}"


def _window(text: str, char: int) -> str:
    start, end = max(0, char - _BEFORE_CHARS), char + _BEHIND_CHARS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _print(report: PrefixReport, cases: _Cases, lines: dict[str, int]) -> None:
    table = Table(title="prefix breaks", title_justify="left")
    table.add_column("agent", overflow="fold")
    table.add_column("kind")
    for column in ("calls", "breaks", "tokens lost"):
        table.add_column(column, justify="right")
    for agent in report.agents:
        name = safe_text(f"{agent.agent} (line {lines[agent.agent]})")
        if not agent.kinds:
            table.add_row(name, "none", str(agent.calls), "0", "0")
        for kind in agent.kinds:
            lost = f"{'about ' if kind.is_estimate else ''}{kind.lost_tokens}"
            table.add_row(name, kind.kind.value, str(agent.calls), str(kind.count), lost)
    Console().print(table)
    for case in sorted(cases.worst.values(), key=lambda case: -case.found.lost_tokens):
        found = case.found
        click.echo(f"\n{safe_text(case.agent)}: {found.kind.value} ({found.detail})")
        click.echo(f"  line {case.line}, after line {case.after_line}: {safe_text(found.place)}")
        if case.texts is not None:
            click.echo(f"  before:  {safe_text(case.texts[0])}\n  now:     {safe_text(case.texts[1])}")
        if case.is_suspected:
            click.echo("  suspected only: no later request tells whether the prompt before comes back")
        click.echo(f"  to mend: {found.mend}")
    about = "about " if any(kind.is_estimate for agent in report.agents for kind in agent.kinds) else ""
    suspected = f" ({report.suspected} suspected only)" if report.suspected else ""
    click.echo(
        f"\n{report.breaks} of {report.calls} requests did not extend the one before{suspected}; "
        f"{about}{report.lost_tokens} tokens had to be read again."
    )
