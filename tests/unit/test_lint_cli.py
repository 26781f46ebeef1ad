"""`pancake lint`: what it reads, prints and refuses."""

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pancake_langgraph.cli.main import pancake
from pancake_langgraph.engines.fake import FakeEngine, FakeEngineSettings
from pancake_langgraph.prompts.lint_kinds import BreakKind
from pancake_langgraph.testing.fake_server import FakeEngineServer

RULES = "You keep the accounts of a small bakery, and you answer in one short sentence. "


def body(system: str, *texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    talk = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "fake", "messages": [{"role": "system", "content": system}, *talk], **fields}


CLOCKED = [body(f"{RULES}It is 10:{15 + n}.", *[f"text {i} of many words" for i in range(4 * n + 5)]) for n in range(3)]


@pytest.fixture
def record(tmp_path: Path) -> Any:
    def write(*lines: Any) -> Path:
        path = tmp_path / "requests.jsonl"
        path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines), encoding="utf-8")
        return path

    return write


def lint(path: Path, *options: str) -> Result:
    return CliRunner().invoke(pancake, ["lint", str(path), *options])


def found(path: Path, *options: str) -> dict[str, Any]:
    result = lint(path, "--format", "json", *options)
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_a_table_and_how_to_mend_it(record: Any) -> None:
    result = lint(record(*CLOCKED))
    assert result.exit_code == 0
    assert "clock" in result.output
    assert "line 3, after line 2: message 0 (system), content, character 89" in result.output
    assert BreakKind.CLOCK.mend in result.output
    assert "2 of 3 requests did not extend the one before; about" in result.output
    assert "10:1" not in result.output, "no text unless it is asked for"


def test_a_few_words_of_both_sides_where_they_are_asked_for(record: Any) -> None:
    result = lint(record(*CLOCKED), "--show-text")
    assert "It is 10:16." in result.output
    assert "It is 10:17." in result.output
    assert "You keep the accounts" not in result.output


def test_terminal_codes_in_a_prompt_are_shown_not_obeyed(record: Any) -> None:
    result = lint(record(body(f"{RULES}\x1b[31mred"), body(f"{RULES}\x1b[32mgreen")), "--show-text")
    assert result.exit_code == 0
    assert "\x1b[3" not in result.output


def test_json_has_every_break_with_its_lines(record: Any) -> None:
    value = found(record(*CLOCKED))
    assert (value["format"], value["version"], value["calls"], value["breaks"]) == ("pancake-prefix-lint", 1, 3, 2)
    assert [(case["line"], case["after_line"], case["kind"]) for case in value["found"]] == [
        (2, 1, "clock"),
        (3, 2, "clock"),
    ]
    assert value["found_left_out"] == 0
    assert "before" not in value["found"][0]
    assert "10:15" in found(record(*CLOCKED), "--show-text")["found"][0]["before"]


REPLACED = [
    {**body(rules, *[f"text {i}" for i in range(n)]), "agent": "cook", "thread": "t"}
    for n, rules in enumerate(("Plan the week.", "You find mistakes, all of them.", "Answer no question!"), 1)
]


def test_a_replaced_prompt_is_shown_as_suspected_where_the_file_ends_before_it_is_certain(record: Any) -> None:
    value = found(record(*REPLACED))
    assert (value["breaks"], value["suspected"], value["agents"][0]["kinds"][0]["suspected"]) == (2, 2, 2)
    assert [(case["line"], case["after_line"], case["is_suspected"]) for case in value["found"]] == [
        (2, 1, True),
        (3, 2, True),
    ]
    output = lint(record(*REPLACED), "--show-text").output
    assert "line 3, after line 2: message 0 (system)" in output
    assert "Answer no question!" in output
    assert "suspected only: no later request" in output
    assert "2 of 3 requests did not extend the one before (2 suspected only); about" in output


def test_a_break_that_a_later_request_makes_certain_is_shown_with_its_own_lines(record: Any) -> None:
    rules = REPLACED[1]["messages"][0]["content"]
    more = {**body(rules, *[f"text {i}" for i in range(4)]), "agent": "cook", "thread": "t"}
    value = found(record(*REPLACED[:2], more), "--show-text")
    [case] = value["found"]
    assert (case["line"], case["after_line"], case["kind"], case["is_suspected"]) == (2, 1, "system", False)
    assert (case["before"], case["now"]) == ("Plan the week.", rules)
    output = lint(record(*REPLACED[:2], more)).output
    assert "line 2, after line 1" in output
    assert "suspected" not in output


def test_agents_and_threads_may_be_named(record: Any) -> None:
    lines = [
        {**body(RULES, "text 0"), "agent": "planner", "thread": "t1"},
        {**body(RULES, "text 0"), "agent": "critic", "thread": "t1"},
        {**body(RULES, "memory", "noted", "text 0"), "agent": "planner", "thread": "t1"},
    ]
    value = found(record(*lines))
    assert {agent["agent"]: agent["breaks"] for agent in value["agents"]} == {"planner": 1, "critic": 0}
    assert value["found"][0]["kind"] == "inserted"


def test_timestamps_put_the_calls_in_order(record: Any) -> None:
    late, first, middle = CLOCKED[2], CLOCKED[0], CLOCKED[1]
    stamped = [
        {**late, "timestamp": "2026-07-29T10:17:00Z"},
        {**first, "timestamp": "2026-07-29T10:15:00+00:00"},
        {**middle, "timestamp": 1785320160},
    ]
    assert [(case["line"], case["after_line"]) for case in found(record(*stamped))["found"]] == [(3, 2), (1, 3)]
    stamped[1].pop("timestamp")
    assert [case["line"] for case in found(record(*stamped))["found"]] == [2, 3], "else the lines are the order"


def test_bodies_of_batch_files_are_read(record: Any) -> None:
    lines = [{"custom_id": str(n), "method": "POST", "body": request} for n, request in enumerate(CLOCKED)]
    assert found(record(*lines))["breaks"] == 2


def test_an_engine_counts_with_its_own_template(record: Any) -> None:
    with FakeEngineServer(FakeEngine(FakeEngineSettings())) as server:
        value = found(record(*CLOCKED), "--base-url", server.base_url)
    assert [case["is_estimate"] for case in value["found"]] == [False, False]
    assert all(case["lost_tokens"] > 0 for case in value["found"])


def test_an_engine_that_is_away_is_one_line(record: Any) -> None:
    result = lint(record(*CLOCKED), "--base-url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 1
    assert "127.0.0.1:1" in str(result.exception)


BAD = {
    "no JSON": ('{"messages": [', "no JSON (at character"),
    "no object": ("[1]", "a JSON list"),
    "no messages": ('{"model": "m"}', "messages of type NoneType"),
    "empty messages": ('{"messages": []}', "messages of type list"),
    "a message without role": ('{"messages": [{"content": "x"}]}', "messages[0] without a role"),
    "a message that is text": ('{"messages": ["x"]}', "messages[0] without a role"),
    "content that is a number": ('{"messages": [{"role": "user", "content": 4}]}', "content of type int"),
    "calls that are text": ('{"messages": [{"role": "user", "tool_calls": ["x"]}]}', "no list of calls"),
    "tools that are text": ('{"messages": [{"role": "user"}], "tools": ["x"]}', "no list of objects"),
    "an agent that is a number": ('{"messages": [{"role": "user"}], "agent": 4}', "agent of type int"),
    "a time that is none": ('{"messages": [{"role": "user"}], "timestamp": "noon"}', "that is no time"),
    "a time beyond all numbers": (
        f'{{"messages": [{{"role": "user"}}], "timestamp": 1{"0" * 400}}}',
        "that is no time",
    ),
    "an answer to an object": (
        '{"messages": [{"role": "tool", "content": "", "tool_call_id": {"a": 1}}]}',
        "messages[0] with a tool_call_id of type dict",
    ),
    "a time that is a truth": ('{"messages": [{"role": "user"}], "timestamp": true}', "timestamp of type bool"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_with_what_is_allowed(record: Any, name: str) -> None:
    line, got = BAD[name]
    result = lint(record(CLOCKED[0], "", line, CLOCKED[1]))
    assert result.exit_code == 1
    text = str(result.exception)
    assert text.startswith("line 3: got ")
    assert got in text
    assert "allowed is one request body a line" in text
    assert "; " in text
    assert not result.stdout, "nothing is told of a file that is bad"


def test_bytes_that_are_no_text_and_empty_files_are_refused(record: Any, tmp_path: Path) -> None:
    packed = tmp_path / "requests.gz"
    packed.write_bytes(gzip.compress(json.dumps(CLOCKED[0]).encode()))
    assert "line 1: got bytes that are no UTF-8" in str(lint(packed).exception)
    assert "got no line with a request" in str(lint(record("", "")).exception)
    assert lint(tmp_path / "missing").exit_code == 2


@pytest.mark.parametrize("in_memory", [1, 10**9], ids=["much", "little"])
def test_a_pipe_is_read_as_a_file_is(record: Any, tmp_path: Path, monkeypatch: Any, in_memory: int) -> None:
    monkeypatch.setattr("pancake_langgraph.cli._recorded._MEMORY_BYTES", in_memory)
    written = record(*CLOCKED)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(written.read_bytes()), daemon=True)
    writer.start()
    value = found(pipe)
    writer.join()
    assert value == found(written)
    assert value["breaks"] == 2


def test_traces_of_real_agents_can_be_read_where_there_are_some(tmp_path: Path) -> None:
    """The traces hold ids of blocks instead of text: each block stands for one message here."""
    folder = os.environ.get("PANCAKE_TRACES")
    files = sorted(Path(folder).glob("*.json.gz"))[:3] if folder else []
    sessions = [json.loads(gzip.decompress(file.read_bytes()))["requests"] for file in files] or [
        [{"hash_ids": list(range(1, 40 + 5 * n)), "t": float(n)} for n in range(6)]
        + [{"hash_ids": [*range(1, 30), *range(100, 110)], "t": 6.0}]
    ]
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "messages": [{"role": "user", "content": f"block {i}"} for i in request["hash_ids"]],
            "thread": str(n),
            "timestamp": request["t"],
        }
        for n, session in enumerate(sessions)
        for request in session
        if request.get("hash_ids")
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    value = found(path)
    assert value["calls"] == len(lines)
