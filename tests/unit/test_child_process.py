"""A child never outlives the wish for it, nor do its children, whatever they ignore."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pancake_langgraph._errors import ConfigError, LaunchError
from pancake_langgraph.launch.ports import free_ports, port_is_free, require_free
from pancake_langgraph.launch.process import ChildProcess, Command, Leftovers, TerminationSignals

#: Says which processes there are, then waits; `{setup}` runs in every one of them.
FAMILY = """
import os, pathlib, signal, subprocess, sys, time
{setup}
depth = int(sys.argv[2])
pathlib.Path(sys.argv[1], str(os.getpid())).touch()
if depth:
    subprocess.Popen([sys.executable, "-S", __file__, sys.argv[1], str(depth - 1)], start_new_session={detached})
while True:
    time.sleep(60)
"""
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError("the condition did not come true in time")
        time.sleep(0.01)


def family_script(folder: Path, *, setup: str = "", detached: bool = False) -> Path:
    script = folder / "family.py"
    script.write_text(FAMILY.format(setup=setup, detached=detached))
    return script


def members(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def born(tmp_path: Path) -> Path:
    folder = tmp_path / "born"
    folder.mkdir()
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ChildProcess]]:
    made: list[ChildProcess] = []

    def _start(*argv: str, grace_s: float = 0.3, leftovers: Leftovers | None = None) -> ChildProcess:
        child = ChildProcess(
            "test child",
            Command((sys.executable, "-S", *argv)),
            log_path=tmp_path / "child.log",
            grace_s=grace_s,
            leftovers=leftovers,
        )
        made.append(child)
        child.start()
        return child

    yield _start
    for child in made:
        child.thaw()
        child.terminate()


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("setup", ["", STUBBORN])
def test_terminate_ends_children_of_children(
    start: Callable[..., ChildProcess], tmp_path: Path, born: Path, setup: str, detached: bool
) -> None:
    child = start(str(family_script(tmp_path, setup=setup, detached=detached)), str(born), "2")
    wait_until(lambda: len(members(born)) == 3)
    assert child.alive
    assert child.pid in members(born)
    child.terminate()
    assert not living(members(born))
    assert not child.alive
    child.terminate()


def test_orphans_of_a_crashed_child_are_ended(start: Callable[..., ChildProcess], tmp_path: Path, born: Path) -> None:
    child = start(str(family_script(tmp_path, setup=STUBBORN, detached=True)), str(born), "2")
    wait_until(lambda: len(members(born)) == 3)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: not living(members(born)))
    assert not child.alive


def test_a_frozen_child_is_ended_too(start: Callable[..., ChildProcess], tmp_path: Path, born: Path) -> None:
    child = start(str(family_script(tmp_path)), str(born), "1")
    wait_until(lambda: len(members(born)) == 2)
    child.freeze()
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    assert child.alive
    child.terminate()
    assert not living(members(born))


def test_freeze_thaw_kill_and_restart(start: Callable[..., ChildProcess], tmp_path: Path, born: Path) -> None:
    child = start(str(family_script(tmp_path)), str(born), "1")
    wait_until(lambda: len(members(born)) == 2)
    first_pid = child.pid
    child.freeze()
    child.thaw()
    wait_until(lambda: psutil.Process(first_pid).status() != psutil.STATUS_STOPPED)
    child.kill()
    assert not child.alive
    assert not living(members(born))
    child.restart()
    assert child.alive
    assert child.pid != first_pid
    assert child.rss_bytes() > 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_an_owner_that_was_ended(tmp_path: Path, born: Path, signal_number: signal.Signals) -> None:
    script = family_script(tmp_path, setup=STUBBORN, detached=True)
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    owner_script = tmp_path / "owner.py"
    owner_script.write_text(
        textwrap.dedent(
            f"""
            import signal, sys, time
            from pathlib import Path
            from pancake_langgraph.launch.process import ChildProcess, Command, Leftovers
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            child = ChildProcess(
                "c", Command((sys.executable, "-S", {str(script)!r}, {str(born)!r}, "2")),
                log_path=Path({str(tmp_path / "log")!r}), grace_s=0.2,
                leftovers=Leftovers((), (Path({str(sockets)!r}),)),
            )
            child.start()
            time.sleep(60)
            """
        )
    )
    package_root = str(Path(sys.modules["pancake_langgraph"].__path__[0]).parent)
    env = {**os.environ, "PYTHONPATH": package_root}
    owner = subprocess.Popen([sys.executable, str(owner_script)], env=env, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(members(born)) == 3)
    owner.send_signal(signal_number)
    owner.wait(10)
    wait_until(lambda: not living(members(born)))
    wait_until(lambda: not sockets.exists())


def test_named_shared_memory_is_removed_after_a_crash(start: Callable[..., ChildProcess]) -> None:
    if not Path("/dev/shm").is_dir():  # other systems keep shared memory out of the file system
        return
    name = f"pancake_test_{os.getpid()}"
    code = f"import time; open('/dev/shm/{name}', 'w').close(); time.sleep(60)"
    child = start("-c", code, leftovers=Leftovers((name,), ()))
    wait_until(Path("/dev/shm", name).exists)
    child.kill()
    wait_until(lambda: not Path("/dev/shm", name).exists())


@pytest.mark.parametrize("crash", [False, True])
def test_semaphores_of_a_crashed_family_are_removed(
    start: Callable[..., ChildProcess], tmp_path: Path, *, crash: bool
) -> None:
    if not Path("/dev/shm").is_dir():  # as above
        return
    names = tmp_path / "names"
    code = (
        "import multiprocessing, pathlib, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        f"pathlib.Path({str(names)!r}).write_text(lock._semlock.name)\n"
        "time.sleep(60)\n"
    )
    child = start("-c", code)
    wait_until(lambda: names.exists() and bool(names.read_text()))
    semaphore = Path("/dev/shm", f"sem.{names.read_text().lstrip('/')}")
    assert semaphore.exists()
    (child.kill if crash else child.terminate)()
    wait_until(lambda: not semaphore.exists())


def test_a_child_that_dies_early_is_explained_from_its_log(start: Callable[..., ChildProcess]) -> None:
    child = start("-c", "print('prompt text'); raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.raises(LaunchError) as caught:
        child.wait_ready(lambda: False, timeout_s=20.0)
    message = str(caught.value)
    assert "exit code 1" in message
    assert "RuntimeError: operator torchvision::nms does not exist" in message
    assert "to mend: pip uninstall torchvision" in message
    assert "prompt text" not in message
    assert str(child.log_path) in message


def test_a_command_that_cannot_run_is_named(tmp_path: Path) -> None:
    child = ChildProcess("ghost", Command(("/no/such/program",)), log_path=tmp_path / "log")
    with pytest.raises(LaunchError, match=r"/no/such/program.*No such file"):
        child.start()
    assert not child.alive


def test_a_child_that_is_never_ready_is_ended(start: Callable[..., ChildProcess]) -> None:
    child = start("-c", "import time; time.sleep(60)")
    with pytest.raises(LaunchError, match="not ready after"):
        child.wait_ready(lambda: False, timeout_s=0.05)
    assert not child.alive


def test_ready_is_told_apart_from_started(start: Callable[..., ChildProcess]) -> None:
    child = start("-c", "import time; time.sleep(60)")
    answers = iter([False, True])
    assert child.wait_ready(lambda: next(answers), timeout_s=20.0) >= 0
    with pytest.raises(LaunchError, match="already runs"):
        child.start()


def test_wait_returns_the_exit_code(start: Callable[..., ChildProcess]) -> None:
    assert start("-c", "raise SystemExit(7)").wait(timeout_s=20.0, step="x") == 7
    with pytest.raises(LaunchError, match="took longer"):
        start("-c", "import time; time.sleep(60)").wait(timeout_s=0.05, step="x")


def test_a_pid_before_start_is_refused(tmp_path: Path) -> None:
    child = ChildProcess("later", Command((sys.executable,)), log_path=tmp_path / "log")
    with pytest.raises(LaunchError, match="start"):
        _ = child.pid
    child.terminate()
    child.freeze()
    assert child.rss_bytes() == 0


def test_a_taken_port_names_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        with pytest.raises(LaunchError, match=rf"port {port} .* taken by process {os.getpid()} "):
            require_free(port, "x")
    with pytest.raises(ConfigError, match="65535"):
        require_free(0, "x")


def test_free_ports_differ() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5


def test_sigterm_unwinds_with_blocks_while_signals_are_open() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), TerminationSignals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
