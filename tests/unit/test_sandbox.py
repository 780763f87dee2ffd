"""Hostile programs in the sandbox, under both kinds of isolation where the machine has them."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from openrlhf.rewards import sandbox
from openrlhf.rewards.sandbox import SandboxLimits, best_isolation, run_python

QUICK = SandboxLimits(time_s=1.0, cpu_s=5)


@pytest.fixture(scope="module", params=["namespaces", "process"])
def run(request):
    """run_python under one kind of isolation.

    Without namespaces, root's programs run as another user, who may not be able to read the interpreter of the tests:
    then with that of the system.
    """
    with pytest.MonkeyPatch.context() as patch:
        for python in (sys.executable, "/usr/bin/python3"):
            patch.setattr(sandbox, "PYTHON", python)
            try:
                trial = run_python("print(1)", isolation=request.param)
                problem = "" if trial.ok else trial.stderr.strip()[-200:]
            except (RuntimeError, FileNotFoundError) as error:
                problem = str(error)
            if not problem:
                break
        else:
            pytest.skip(f"isolation by {request.param} does not work here: {problem}")

        def run_isolated(code, limits=QUICK, **arguments):
            return run_python(code, limits=limits, isolation=request.param, **arguments)

        run_isolated.kind = request.param
        yield run_isolated


def programs_left() -> list[str]:
    """Sandbox children of this process, and those that have lost their parent."""
    left = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes().decode(errors="replace")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if "sandbox_child.py" in line and parent in (1, os.getpid()):
                left.append(f"{folder.name} {line}")
    return left


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After every test: no process of a program, and no folder."""
    folders = set(Path("/tmp").glob("sandbox-*"))
    yield
    deadline = time.monotonic() + 2
    while programs_left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert programs_left() == []
    assert set(Path("/tmp").glob("sandbox-*")) <= folders


def test_an_honest_program(run):
    code = "import sys\nfrom helper import double\nprint(double(int(input())))\nprint('note', file=sys.stderr)"
    result = run(code, stdin="21\n", files={"helper.py": "def double(x):\n    return 2 * x\n"})
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "note\n", 0)
    assert result.ok and result.reason == "finished" and not result.timed_out and not result.cut
    assert result.isolation == run.kind and 0 < result.seconds < 20


def test_an_exception_is_told_without_the_frames_of_the_sandbox(run):
    result = run("def f(x):\n    return 1 / x\nf(0)")
    assert (result.exit_code, result.reason, result.ok) == (1, "failed", False)
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "program.py", line 3')
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run("x = (").stderr.strip().endswith("SyntaxError: '(' was never closed")


def test_exit_codes_and_signals(run):
    assert (run("import sys; sys.exit(3)").exit_code, run("import os; os._exit(4)").exit_code) == (3, 4)
    crashed = run("import faulthandler; faulthandler._sigsegv()")
    assert (crashed.exit_code, crashed.reason) == (-11, "signal SIGSEGV")


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import atexit, time; atexit.register(time.sleep, 60); print('done')",
        "import signal\nfor n in {*range(1, 32)} - {9, 19}:\n    signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "input(); import threading; threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    ],
)
def test_programs_that_do_not_end_are_ended(run, code):
    result = run(code, stdin="x\n")
    assert result.timed_out and result.reason == "time" and result.exit_code is None and not result.ok
    assert 1.0 <= result.seconds < 8


def test_processor_time_is_bounded(run):
    result = run("while True: pass", SandboxLimits(time_s=20, cpu_s=1))
    assert (result.reason, result.timed_out) == ("cpu", False) and result.seconds < 15


@pytest.mark.parametrize("code", ["bytearray(10**10)", "x = []\nwhile True: x.append(bytearray(10**7))"])
def test_memory_is_bounded(run, code):
    result = run(code, SandboxLimits(time_s=20, memory_bytes=256 << 20))
    assert (result.reason, result.exit_code) == ("memory", 1)


def test_a_fork_bomb_stays_small_and_ends(run):
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = run(code)
    assert result.timed_out or "PermissionError" in result.stderr  # without namespaces no process is forked at all


def test_processes_left_behind_are_ended(run, tmp_path):
    """A child in a session of its own, which closes its output and sleeps, must not outlive the program."""
    code = (
        "import os, time\nif os.fork() == 0:\n    os.setsid(); os.close(1); os.close(2); time.sleep(60)\nprint('done')"
    )
    began = time.monotonic()
    result = run(code)
    assert result.stdout == "done\n" or "PermissionError" in result.stderr
    assert time.monotonic() - began < 5  # and nothing_is_left


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_cut_and_floods_are_ended(run, stream):
    limits = SandboxLimits(time_s=20, output_bytes=1000)
    result = run(f"import sys; sys.{stream}.write('ab' * 5000)", limits)
    assert (getattr(result, stream), result.cut, result.ok) == ("ab" * 500, True, True)
    exact = run(f"import sys; sys.{stream}.write('ab' * 500)", limits)
    assert (getattr(exact, stream), exact.cut) == ("ab" * 500, False)
    flood = run(f"import sys\nwhile True: sys.{stream}.write('x' * 10000)", limits)
    assert (flood.reason, flood.ok, flood.cut) == ("output", False, True) and flood.seconds < 15


def test_files_outside_cannot_be_written(run, tmp_path):
    tmp_path.chmod(0o777)
    targets = [
        tmp_path / "new",
        Path("/tmp/openrlhf_sandbox_test"),
        Path("/dev/shm/openrlhf_sandbox_test"),
        Path("/etc/x"),
    ]
    kept = tmp_path / "kept"
    kept.write_text("mine")
    kept.chmod(0o666)
    attempts = "\n".join(f"attempt(lambda: open({str(path)!r}, 'w').write('x'))" for path in [*targets, kept])
    run(
        "import os, shutil\ndef attempt(action):\n    try: action()\n    except OSError: pass\n" + attempts +
        f"\nattempt(lambda: os.remove({str(kept)!r}))\nattempt(lambda: shutil.rmtree({str(tmp_path)!r}))"
    )  # fmt: skip
    assert kept.read_text() == "mine" and not any(path.exists() for path in targets)


def test_files_inside_are_bounded(run):
    assert run("open('a', 'w').write('x' * 10**6); print(len(open('a').read()))").stdout == "1000000\n"
    big = run("with open('a', 'wb') as f:\n    while True: f.write(b'x' * 10**6)", SandboxLimits(file_bytes=3 << 20))
    assert "OSError" in big.stderr and "File too large" in big.stderr
    if run.kind == "namespaces":
        code = "for n in range(100):\n    with open(str(n), 'wb') as f: f.write(b'x' * 10**6)"
        assert "No space left" in run(code, SandboxLimits(disk_bytes=10 << 20)).stderr


def test_secrets_of_the_host_are_not_seen(run, monkeypatch, tmp_path):
    """Neither in the environment, nor in those of other processes, nor in files beside the interpreter's."""
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy-token")
    (tmp_path / "key").write_text("xyzzy-file")
    (tmp_path / "key").chmod(0o644)
    paths = [str(tmp_path / "key"), "/etc/shadow", "/etc/hosts", "/proc/1/environ", f"/proc/{os.getpid()}/environ"]
    result = run(
        f"import os\nprint(dict(os.environ))\nfor path in {paths}:\n"
        "    try: print(open(path).read())\n    except OSError as error: print(type(error).__name__)"
    )
    assert "xyzzy" not in result.stdout and result.exit_code == 0
    assert len(result.stdout.splitlines()) == 6  # the environment and five refusals
    home = "/sandbox/home" if run.kind == "namespaces" else "/tmp/sandbox-"
    assert f"'HOME': '{home}" in result.stdout


def test_there_is_no_network(run):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('connected')"
        result = run(code)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.exit_code == 1 and "connected" not in result.stdout


def test_other_processes_cannot_be_ended(run):
    code = (
        "import os, signal\n"
        f"for target in ({os.getpid()}, os.getppid(), -1):\n"
        "    try: os.kill(target, signal.SIGKILL)\n"
        "    except OSError: print('refused')\n"
    )
    result = run(code)
    assert result.exit_code == 0 and result.stdout.count("refused") >= 2  # init ignores signals from inside
    own_group = run("import os; os.kill(0, 9)")
    assert own_group.reason == "signal SIGKILL" or "PermissionError" in own_group.stderr  # and it is told, not lost


def test_the_program_has_no_privileges(run):
    """Another user than root, no capability in any set, and no way to one by running a set-user-id program."""
    status = dict(
        line.split(":\t") for line in run("print(open('/proc/self/status').read())").stdout.splitlines() if line
    )
    assert "0" not in status["Uid"].split()
    assert {int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff")} == {0} and status["NoNewPrivs"] == "1"


def test_a_program_that_gets_around_the_hook_leaves_nothing(run):
    """The audit hook is a hurdle: subprocess without its audit call starts a program. That one ends all the same."""
    seconds = f"60.{os.getpid():07d}"  # in no other command line
    code = (
        "import subprocess, sys, types\n"
        "subprocess.sys = types.SimpleNamespace(**{**vars(sys), 'audit': lambda *_: None})\n"
        "quiet = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.DEVNULL)\n"
        f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True, **quiet)\nprint('started')"
    )
    assert run(code).stdout == "started\n"
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(seconds.encode() in line for line in lines)


def test_many_threads_at_once():
    """From 12 threads; each gets the answer to its own program."""
    results = {}

    def work(n):
        results[n] = run_python(f"print({n} ** 2)", limits=SandboxLimits(time_s=10)).stdout

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: f"{n * n}\n" for n in range(12)}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../x"])
def test_file_names_that_lead_outside(name):
    with pytest.raises(ValueError, match="relative to its folder"):
        run_python("", files={name: ""})


def test_limits_are_checked():
    with pytest.raises(ValueError, match="'time_s': 0"):
        SandboxLimits(time_s=0)


def test_weaker_isolation_is_told_and_none_is_refused(monkeypatch, caplog):
    def fail_in(*kinds):
        real = sandbox._run

        def fake(code, stdin, files, limits, isolation):
            if isolation in kinds:
                raise RuntimeError("unshare: Operation not permitted")
            return sandbox.SandboxResult("42\n", "", 0, False, "finished", False, 0.1, isolation)

        monkeypatch.setattr(sandbox, "_run", fake)
        best_isolation.cache_clear()
        return real

    try:
        fail_in("namespaces")
        assert best_isolation() == "process"
        assert "unshare: Operation not permitted" in caplog.text and "a determined program gets around" in caplog.text
        fail_in("namespaces", "process")
        with pytest.raises(RuntimeError, match="cannot be run safely here; namespaces: unshare.*process: unshare"):
            best_isolation()
    finally:
        best_isolation.cache_clear()
