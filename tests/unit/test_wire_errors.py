"""Typed errors from what servers really said."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pancake_langgraph._errors import (
    ContextOverflow,
    EngineFault,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    ModelNotFound,
    Unsupported,
)
from pancake_langgraph.wire.errors import (
    CallFacts,
    cut_stream,
    error_from_response,
    overflow_before_sending,
    safe_detail,
    timed_out,
    unreachable,
)

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "vllm_answers.json").read_text(encoding="utf-8"))
FACTS = CallFacts("http://127.0.0.1:1/v1", model="m", max_tokens=10, served_models=("small", "large"))


def test_an_unknown_model_names_the_served_ones() -> None:
    answer = RECORDED["unknown_model"]
    error = error_from_response(answer["status"], answer["body"], FACTS)
    assert isinstance(error, ModelNotFound)
    assert "'m'" in str(error)
    assert "'small', 'large'" in str(error)


def test_a_wrong_path_is_no_unknown_model() -> None:
    answer = RECORDED["wrong_path"]
    error = error_from_response(answer["status"], answer["body"], FACTS)
    assert type(error) is EngineRejected
    assert "/v1" in str(error)


def test_a_recorded_overflow_gives_the_numbers() -> None:
    answer = RECORDED["overflow_prompt"]
    error = error_from_response(answer["status"], answer["body"], FACTS)
    assert isinstance(error, ContextOverflow)
    assert "2049 tokens" in str(error)
    assert "2048 tokens" in str(error)


def test_a_recorded_output_limit_above_the_window_is_an_overflow() -> None:
    answer = RECORDED["overflow"]
    error = error_from_response(answer["status"], answer["body"], FACTS)
    assert isinstance(error, ContextOverflow)
    assert "2048 tokens" in str(error)


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        (
            (
                '{"error":{"code":400,"message":"the request exceeds the available context size",'
                '"type":"exceed_context_size_error","n_prompt_tokens":5000,"n_ctx":4096}}'
            ),
            ("5000", "4096"),
        ),
        ('{"message":"The input (9000 tokens) is longer than the model\'s context length (8192 tokens)."}', ("9000",)),
        (
            (
                '{"error":{"message":"This model\'s maximum context length is 4096 tokens. However, you requested 5000 '
                'tokens (4000 in the messages, 1000 in the completion)."}}'
            ),
            ("4096", "1000"),
        ),
    ],
)
def test_other_servers_overflows_are_known(body: str, numbers: tuple[str, ...]) -> None:
    error = error_from_response(400, body, FACTS)
    assert isinstance(error, ContextOverflow)
    assert all(number in str(error) for number in numbers)


def test_a_missing_tool_parser_names_the_flags() -> None:
    words = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    body = json.dumps({"error": {"message": words}})
    error = error_from_response(400, body, FACTS)
    assert isinstance(error, Unsupported)
    assert "--enable-auto-tool-choice --tool-call-parser" in str(error)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, EngineRejected),
        (401, EngineRejected),
        (422, EngineRejected),
        (429, EngineRejected),
        (404, EngineRejected),
        (408, EngineTimeout),
        (500, EngineFault),
        (502, EngineFault),
        (503, EngineFault),
        (504, EngineTimeout),
    ],
)
def test_every_status_has_a_type_and_a_remedy(status: int, kind: type[Exception]) -> None:
    error = error_from_response(status, "<html>no</html>", FACTS)
    assert type(error) is kind
    assert str(status) in str(error)
    assert "html" not in str(error)


def test_strict_roles_are_recognized() -> None:
    assert "strict_roles=True" in str(
        error_from_response(400, '{"message": "Conversation roles must alternate"}', FACTS)
    )


def test_transport_failures_name_the_address() -> None:
    assert isinstance(unreachable(FACTS, "ConnectError"), EngineUnavailable)
    assert "pancake up" in str(unreachable(FACTS, "ConnectError"))
    assert isinstance(cut_stream(FACTS, "ReadError"), EngineUnavailable)
    assert isinstance(timed_out(FACTS, "ReadTimeout"), EngineTimeout)
    assert all(FACTS.url in str(f(FACTS, "x")) for f in (unreachable, cut_stream, timed_out))


def test_a_counted_overflow_gives_all_numbers() -> None:
    error = overflow_before_sending(FACTS, prompt_tokens=4000, window_tokens=4096)
    assert all(number in str(error) for number in ("4000", "10", "4096"))


def test_a_validation_error_that_repeats_the_prompt_is_not_quoted() -> None:
    secret = "the launch code is 0000-1111-2222"
    facts = CallFacts("http://x/v1", prompt_texts=(secret,))
    body = json.dumps({"error": {"message": f"1 validation error: {{'input': '{secret}'}}"}})
    error = error_from_response(400, body, facts)
    assert "0000-1111" not in str(error)
    assert "left out" in str(error)


def test_harmless_words_of_the_server_are_quoted() -> None:
    answer = RECORDED["bad_temperature"]
    error = error_from_response(
        answer["status"], answer["body"], CallFacts("http://x/v1", prompt_texts=("hello there",))
    )
    assert "temperature must be non-negative" in str(error)


@given(st.text(min_size=20, max_size=80, alphabet="abcdefghij klmnop"), st.integers(0, 3), st.integers(0, 3))
def test_no_long_piece_of_the_prompt_gets_through(prompt: str, drop_front: int, drop_back: int) -> None:
    echoed = prompt[drop_front : len(prompt) - drop_back]
    flat = " ".join(echoed.split())
    if len(flat) >= 16:
        assert flat not in safe_detail(f"bad input '{echoed}' here", (prompt,))
