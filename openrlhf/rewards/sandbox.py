"""Run Python code that a model has written: bounded in time, memory, processes, files and output, without network.

Where the kernel lets it, the program runs in namespaces of its own: it sees no network, no other process and no file
but the interpreter, system libraries and an empty home in memory. Elsewhere (`isolation` "process") limits hold and an
audit hook refuses network, other programs and other files from inside the interpreter, which a determined program gets
around. docs/agents.md says what neither protects against. `sandbox_child.py` is the other side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import random
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

logger = logging.getLogger(__name__)

Isolation = Literal["namespaces", "process"]

PYTHON = sys.executable  # runs the programs
START_LIMIT_S = 20.0  # beyond the program's own time: starting an interpreter on a loaded machine
MAX_OUTPUT_FACTOR = 64  # a program that writes this many times what is kept is ended
_CHILD = Path(__file__).with_name("sandbox_child.py")
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_UIDS = range(61_184, 65_520)  # for programs started by root; no user of the system has one of these
_slots = threading.BoundedSemaphore(os.cpu_count() or 1)  # more at once would run into their limits of time


@dataclass(frozen=True)
class SandboxLimits:
    """What one program may use."""

    time_s: float = 5.0  # seconds on the clock
    cpu_s: int = 5  # seconds of processor time, of each process
    memory_bytes: int = 512 << 20  # address space of each process
    file_bytes: int = 8 << 20  # of one file
    disk_bytes: int = 32 << 20  # of all files; with namespaces only
    processes: int = 16  # processes and threads at the same time, about
    open_files: int = 64
    output_bytes: int = 64 << 10  # kept of standard output, and of standard error

    def __post_init__(self) -> None:
        wrong = [name for name, value in vars(self).items() if not value > 0]
        if wrong:
            raise ValueError(
                f"limits of the sandbox must be above 0; got { ({name: vars(self)[name] for name in wrong}) }"
            )


@dataclass(frozen=True)
class SandboxResult:
    """How a program ended."""

    stdout: str  # at most output_bytes of it
    stderr: str
    exit_code: int | None  # as a shell sees it: minus the signal where one ended it; None: killed from outside
    timed_out: bool
    reason: str  # "finished", "failed" (exit code), "time", "cpu", "memory", "output" or "signal ..."
    cut: bool  # there was more output than is kept
    seconds: float
    isolation: Isolation

    @property
    def ok(self) -> bool:
        """The program came to its end with exit code 0; a program that exits early does so too."""
        return self.reason == "finished"


def run_python(
    code: str,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: SandboxLimits | None = None,
    isolation: Isolation | None = None,
) -> SandboxResult:
    """Run a program in a new, empty folder, which is gone afterwards; callable from any thread.

    Args:
        code: Python source, run as `__main__` by this interpreter, with its packages.
        stdin: what the program reads from standard input.
        files: texts by name, put beside the program.
        limits: None: SandboxLimits().
        isolation: None: the strongest that this machine allows (`best_isolation`).
    Returns:
        What it wrote and how it ended; whatever the program does is no error.
    Raises:
        ValueError: a file name that leads out of the folder.
        RuntimeError: the sandbox cannot be set up, for example where namespaces are asked for and forbidden.
    """
    files = dict(files or {})
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
            raise ValueError(f"files of a program are named relative to its folder, got {name!r}")
    isolation = isolation or best_isolation()
    with _slots:
        return _run(code, stdin, files, limits or SandboxLimits(), isolation)


@functools.lru_cache(maxsize=1)
def best_isolation() -> Isolation:
    """The strongest isolation that works here, found by trying; a weaker one than namespaces is told in the log.

    Raises:
        RuntimeError: none works, for example outside of Linux.
    """
    problems = []
    for isolation in ("namespaces", "process"):
        try:
            result = _run("print(6 * 7)", "", {}, SandboxLimits(), isolation)
        except RuntimeError as error:
            problems.append(f"{isolation}: {error}")
            continue
        if result.ok and result.stdout == "42\n":
            if problems:
                logger.warning(
                    "programs run without namespaces of their own (%s): limits hold, but network and files are refused "
                    "only from inside the interpreter, which a determined program gets around",
                    problems[0],
                )
            return isolation
        problems.append(f"{isolation}: a trial ended with {result.reason}: {result.stderr.strip()[-300:]}")
    raise RuntimeError(f"generated code cannot be run safely here; {'; '.join(problems)}")


def _run(code: str, stdin: str, files: dict, limits: SandboxLimits, isolation: Isolation) -> SandboxResult:
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"the sandbox needs Linux, this is {sys.platform}")
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        home = folder if isolation == "process" else "/sandbox/home"
        processes = limits.processes + 3  # the child's own ones
        if isolation == "process" and os.getuid() != 0:
            processes += _tasks_of_user(os.getuid())  # the limit counts every process of the user
        request = {
            "code": code,
            "stdin": stdin,
            "files": files,
            "isolation": isolation,
            "home": folder,
            "visible": _visible_paths(),
            "uid": random.SystemRandom().choice(_UIDS),
            "time_limit_s": limits.time_s,
            "disk_bytes": limits.disk_bytes,
            "limits": {
                "CPU": limits.cpu_s,
                "AS": limits.memory_bytes,
                "FSIZE": limits.file_bytes,
                "NPROC": processes,
                "NOFILE": limits.open_files,
                "CORE": 0,
            },
        }
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home if isolation == "process" else "/tmp",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        return _watch(request, environment, limits, isolation)


def _watch(request: dict, environment: dict, limits: SandboxLimits, isolation: Isolation) -> SandboxResult:
    """Start the child, collect what comes from it, and end it with everything below it."""
    began = time.monotonic()
    report, report_end = os.pipe()
    process = subprocess.Popen(
        [PYTHON, "-I", "-B", str(_CHILD), str(report_end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(report_end,),
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    os.close(report_end)
    texts = {process.stdout.fileno(): b"", process.stderr.fileno(): b"", report: b""}
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and told why
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
        flooded = _collect(texts, report, limits.output_bytes, began + limits.time_s + START_LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the child; what is below it ends with it
        process.wait()
        stdout, stderr = (texts[stream.fileno()] for stream in (process.stdout, process.stderr))
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()
        os.close(report)
    told: dict = {}
    for line in texts[report].splitlines():
        told.update(json.loads(line))
    if "problem" in told or "ready" not in told:
        said = stderr.decode(errors="replace").strip()[-300:]
        raise RuntimeError(f"the sandbox did not start ({isolation}): {told.get('problem') or said or 'no answer'}")
    exit_code, reason = _ending(told, flooded, stderr)
    return SandboxResult(
        stdout=stdout[: limits.output_bytes].decode(errors="replace"),
        stderr=stderr[: limits.output_bytes].decode(errors="replace"),
        exit_code=exit_code,
        timed_out=reason == "time",
        reason=reason,
        cut=max(len(stdout), len(stderr)) > limits.output_bytes,
        seconds=time.monotonic() - began,
        isolation=isolation,
    )


def _collect(texts: dict[int, bytes], report: int, keep: int, deadline: float) -> bool:
    """Read until all writers are gone, or the deadline; True where a stream was flooded.

    Args:
        texts: by file descriptor; filled in place, with at most keep + 1 bytes of a program's stream.
    """
    counts = dict.fromkeys(texts, 0)
    with selectors.DefaultSelector() as selector:
        for number in texts:
            selector.register(number, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                return False
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                if not part:
                    selector.unregister(key.fd)
                    if key.fd == report:  # the child has ended: take what is in the pipes, wait for no one else
                        deadline = min(deadline, time.monotonic() + 0.5)
                    continue
                counts[key.fd] += len(part)
                room = len(part) if key.fd == report else keep + 1 - len(texts[key.fd])
                texts[key.fd] += part[: max(room, 0)]
                if key.fd != report and counts[key.fd] > MAX_OUTPUT_FACTOR * keep:
                    return True
    return False


def _ending(told: dict, flooded: bool, stderr: bytes) -> tuple[int | None, str]:
    """Exit code and reason of a program, from what the child told of it."""
    if flooded:
        return None, "output"
    if "status" not in told or told["timed_out"]:
        return None, "time"
    exit_code = os.waitstatus_to_exitcode(told["status"])
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return exit_code, "cpu" if name == "SIGXCPU" else f"signal {name}"
    if exit_code == 0:
        return 0, "finished"
    last = stderr.strip().rpartition(b"\n")[2]
    return exit_code, "memory" if last.startswith(b"MemoryError") else "failed"


@functools.lru_cache(maxsize=1)
def _visible_paths() -> list[str]:
    """What a program needs of this machine's files: the interpreter, its packages, system libraries."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    own |= {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted({os.path.abspath(path) for path in (*own, *_SYSTEM)} - {"/"})


def _tasks_of_user(uid: int) -> int:
    """Processes and threads of a user."""
    count = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                count += len(os.listdir(folder / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count
