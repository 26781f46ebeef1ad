"""The command line: quick help, one line per error, honest exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner

from pancake_langgraph._errors import ConfigError, LaunchError, TierError
from pancake_langgraph.cli import main as main_module
from pancake_langgraph.cli import models as models_module
from pancake_langgraph.cli import up as up_module
from pancake_langgraph.cli.main import main, pancake
from pancake_langgraph.tiers.canary import CanaryReport, Place


def run_main(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    return int(caught.value.code or 0)


def test_help_lists_every_command_without_importing_any() -> None:
    code = (
        "import sys\n"
        "from pancake_langgraph.cli.main import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'vllm', 'lmcache', 'transformers', 'httpx', 'langgraph', 'langchain_core', 'psutil', 'zmq')]\n"
        "print('HEAVY', heavy)\n"
    )
    root = str(Path(sys.modules["pancake_langgraph"].__path__[0]).parent)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert "HEAVY []" in done.stdout
    for name in ("bench", "demo", "doctor", "explain", "lint", "models", "up"):
        assert f"  {name} " in done.stdout


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("fly") == 2
    assert "No such command" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(LaunchError("port taken"), 1), (KeyboardInterrupt(), 130)])
def test_errors_become_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    @click.command()
    def boom() -> None:
        raise error

    monkeypatch.setattr(sys.modules[__name__], "boom", boom, raising=False)
    monkeypatch.setitem(sys.modules, "boom_module", sys.modules[__name__])
    monkeypatch.setitem(main_module._COMMANDS, "boom", ("boom_module", "boom", "Fail."))
    assert run_main("boom") == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if code == 1:
        assert said.strip() == "pancake: port taken"


def test_an_entry_that_is_no_command_is_a_bug_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(main_module._COMMANDS, "bad", ("json", "dumps", "Not a command."))
    outcome = CliRunner().invoke(pancake, ["bad"])
    assert isinstance(outcome.exception, TypeError)


def test_models_prepare_prints_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    seen: dict[str, Any] = {}

    def fake(cache_dir: Path | None, on_progress: Any, *, verify: str) -> Path:
        seen.update(cache_dir=cache_dir, verify=verify)
        on_progress("converting", 2.0)
        return tmp_path

    monkeypatch.setattr(models_module, "prepare_smollm", fake)
    outcome = CliRunner().invoke(pancake, ["models", "prepare", "--full"])
    assert outcome.exit_code == 0
    assert outcome.stdout.strip() == str(tmp_path)
    assert "converting … 2 s" in outcome.stderr
    assert seen == {"cache_dir": None, "verify": "full"}


class FakeStack:
    """Stands for a started stack whose engine lives for `polls` looks."""

    polls = 1
    plans: ClassVar[list[Any]] = []

    def __init__(self, plan: Any, *, on_progress: Any) -> None:
        FakeStack.plans.append(plan)
        self.log_dir = Path("logs")
        self.tier = None
        self.tier_url = self.base_url = self.served_model_name = self.model_key = None
        self.stopped = False

    @property
    def engine(self) -> Any:
        self.polls -= 1
        return SimpleNamespace(pid=7, alive=self.polls >= 0, log_problem=lambda: "it broke")

    def client_env(self) -> dict[str, str]:
        return {"PANCAKE_BASE_URL": "http://127.0.0.1:1/v1"}

    def __enter__(self) -> "FakeStack":
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_up_prints_the_client_variables_and_ends_with_the_engine(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    monkeypatch.setenv("PANCAKE_CACHE_DIR", str(model_dir / "cache"))
    monkeypatch.setattr(up_module, "Stack", FakeStack)
    states: list[dict[str, Any]] = []

    def look(seconds: float) -> None:
        states.append(json.loads(up_module.state_path().read_text()))

    monkeypatch.setattr(up_module.time, "sleep", look)
    outcome = CliRunner().invoke(pancake, ["up", "--model", str(model_dir), "--no-tier", "--port", "8011"])
    assert isinstance(outcome.exception, LaunchError)
    assert "export PANCAKE_BASE_URL=http://127.0.0.1:1/v1" in outcome.stdout
    assert states[0]["env"]["PANCAKE_BASE_URL"] == "http://127.0.0.1:1/v1"
    assert not up_module.state_path().exists()
    assert (FakeStack.plans[-1].engine_port, FakeStack.plans[-1].tier) == (8011, None)


def test_up_stops_quietly_on_ctrl_c(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("PANCAKE_CACHE_DIR", str(model_dir / "cache"))
    monkeypatch.setattr(up_module, "Stack", FakeStack)
    monkeypatch.setattr(up_module.time, "sleep", interrupt)
    disk = ["--l2-dir", str(model_dir / "kv"), "--l2-bytes", "20000000", "--l2-codec", "int4"]
    shared = ["--l3-url", "redis://127.0.0.1:6379"]
    outcome = CliRunner().invoke(pancake, ["up", "--model", str(model_dir), *disk, *shared])
    assert outcome.exit_code == 0
    assert "stopping" in outcome.stderr
    tier = FakeStack.plans[-1].tier
    assert (tier.l2_dir, tier.l2_bytes, tier.l2_adapter) == (model_dir / "kv", 20_000_000, "verified")
    assert (tier.l2_codec, tier.l3_url) == ("int4", "redis://127.0.0.1:6379")
    CliRunner().invoke(pancake, ["up", "--model", str(model_dir), "--l2-adapter", "plain"])
    tier = FakeStack.plans[-1].tier
    assert (tier.l2_adapter, tier.l2_codec, tier.l3_url) == ("plain", "exact", None)


def test_up_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(pancake, ["up", "--model", str(tmp_path / "nothing")])
    assert isinstance(outcome.exception, ConfigError)
    assert "config.json" in str(outcome.exception)


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (CanaryReport(is_right=True, reason="equal answers", places=(), elapsed_s=0.1), "tier: equal answers"),
        (CanaryReport(is_right=False, reason="L2 differs", places=(), elapsed_s=0.1), "switched off: L2 differs"),
        (
            CanaryReport(True, "equal", (Place.COLD, Place.HOST), 1.0, (0.2, 0.4)),
            "loses time here, in 0.20 s (cold), 0.40 s (L1)",
        ),
        (
            CanaryReport(True, "equal", (Place.COLD, Place.HOST, Place.DISK), 1.0, (0.2, 0.1, 0.3)),
            "the disk loses time",
        ),
        (None, "unproven"),
        (TierError("gone"), "could not be proven: gone"),
    ],
)
def test_up_says_whether_the_tier_was_proven(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path, report: CanaryReport | TierError | None, said: str
) -> None:
    def prove(base_url: str, *, model: str, tier_url: str, model_key: str) -> CanaryReport | None:
        if isinstance(report, TierError):
            raise report
        return report

    class WithTier(FakeStack):
        """A started stack with a cache server."""

        def __init__(self, plan: Any, *, on_progress: Any) -> None:
            super().__init__(plan, on_progress=on_progress)
            self.tier_url = "http://127.0.0.1:1"

    monkeypatch.setenv("PANCAKE_CACHE_DIR", str(model_dir / "cache"))
    monkeypatch.setattr(up_module, "Stack", WithTier)
    monkeypatch.setattr(up_module, "prove_started_tier", prove)
    monkeypatch.setattr(up_module.time, "sleep", lambda _: None)
    outcome = CliRunner().invoke(pancake, ["up", "--model", str(model_dir)])
    assert said in outcome.stderr
    assert "export PANCAKE_BASE_URL" in outcome.stdout
