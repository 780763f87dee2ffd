"""The child of the sandbox: closes itself in, then runs the program. Run by path; standard library only.

Three processes with namespaces: this one, which stays outside; the init of the new namespaces, whose end ends every
process in them; and the program. Without namespaces two: this one, which adopts and ends what the program leaves
behind, and the program. Reads one JSON request from standard input and writes JSON lines to the file descriptor named
in argv: {"ready": true} or {"problem": ...} before the program starts; {"status": ..., "timed_out": ...} after it.
"""

import contextlib
import ctypes
import json
import os
import resource
import runpy
import signal
import struct
import sys
import time
import traceback

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    2,
    4,
    8,
    1,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # the number is the same on every architecture
ATTR_RDONLY, ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
OLD_ROOT = "/.old"
PROGRAM = "program.py"

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [word.encode() for word in (source, target, kind)]
    check(libc.mount(*arguments, ctypes.c_ulong(flags), options.encode()), f"mount {kind or source} on {target}")


def make_read_only(path: str) -> None:
    """The mount at a path and all below it."""
    attributes = struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    call = [ctypes.c_long(MOUNT_SETATTR), AT_FDCWD, path.encode(), AT_RECURSIVE, attributes]
    check(libc.syscall(*call, ctypes.c_size_t(len(attributes))), f"make {path} read-only")


def enter_namespaces() -> None:
    """New mount, process, network and IPC namespaces; for users other than root in a new user namespace."""
    uid, gid = os.getuid(), os.getgid()
    flags = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
    check(libc.unshare(flags if uid == 0 else flags | NEWUSER), "unshare")
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def build_root(visible: list, disk_bytes: int, owner: int) -> None:
    """A root of its own: the visible folders read-only, a bounded file system for home and /tmp, few devices."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir("/tmp" + OLD_ROOT)
    check(libc.pivot_root(b"/tmp", b"/tmp" + OLD_ROOT.encode()), "pivot_root")
    os.chdir("/")
    os.makedirs("/sandbox")
    mount("tmpfs", "/sandbox", "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes=4096,mode=755")
    for name in ("home", "tmp"):
        os.mkdir(f"/sandbox/{name}")
        os.chown(f"/sandbox/{name}", owner, owner if os.getuid() == 0 else -1)
    os.symlink("/sandbox/tmp", "/tmp")
    for path in visible:  # behind /tmp: an interpreter may lie in it
        show(path)
    os.makedirs("/dev", exist_ok=True)
    os.symlink("/sandbox/tmp", "/dev/shm")
    for name in ("null", "zero", "full", "random", "urandom"):
        show(f"/dev/{name}", read_only=False)
    os.mkdir("/proc")
    with contextlib.suppress(OSError):  # forbidden in some containers; Python runs without it
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    check(libc.umount2(OLD_ROOT.encode(), MNT_DETACH), "umount the old root")
    os.rmdir(OLD_ROOT)
    mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def show(path: str, read_only: bool = True) -> None:
    """Bind a file or folder of the old root at the same place in the new one; a link stays a link."""
    source = OLD_ROOT + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, path, "", MS_BIND | MS_REC)
    if read_only:
        make_read_only(path)


def drop_privileges(uid: int) -> None:
    """Another user where this is root; no capabilities, and none to be won by running a program."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header, nothing = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)
    check(libc.capset(header, nothing), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_limits(limits: dict) -> None:
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = value + 1 if name == "CPU" else value  # SIGXCPU first, then SIGKILL
        resource.setrlimit(kind, (value, hard))


def guard(visible: list, home: str) -> None:
    """Refuse in Python what namespaces would make impossible: network, new programs, files outside, other processes.

    A hurdle and no wall: whoever gets past the interpreter gets past this.
    """
    home = os.path.realpath(home)
    readable = (home, *(os.path.realpath(path) for path in visible), "/proc/self", f"/proc/{os.getpid()}")
    devices = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
    refused = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill",
               "os.setxattr", "pty.", "ctypes.", "signal.pthread_kill")  # fmt: skip
    writers = {"os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.mkdir": 1, "os.link": 2, "os.symlink": 2,
               "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1}  # paths of each event  # fmt: skip
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: object, roots: tuple) -> bool:
        if isinstance(path, int):
            return True
        name = os.path.realpath(os.fsdecode(path))
        return any(name == root or name.startswith(root.rstrip("/") + "/") for root in roots)

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            roots = (home,) if isinstance(flags, int) and flags & writing else readable
            if path is None or inside(path, roots + devices):
                return
            raise PermissionError(f"the sandbox does not let {path!r} be opened")
        if event in writers and not all(inside(path, (home,)) for path in arguments[: writers[event]]):
            raise PermissionError(f"the sandbox does not let {event} touch {arguments[0]!r}")
        if event in ("os.listdir", "os.scandir") and not (arguments[0] is None or inside(arguments[0], readable)):
            raise PermissionError(f"the sandbox does not let {arguments[0]!r} be listed")
        if event.startswith(refused):
            raise PermissionError(f"the sandbox does not allow {event}")

    sys.addaudithook(hook)


def run_program(request: dict, home: str) -> None:
    """Write the files, then run the program as __main__; returns as a script does, or raises SystemExit."""
    os.chdir(home)
    for name, text in {**request["files"], PROGRAM: request["code"]}.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w", encoding="utf-8") as file:
            file.write(text)
    given = os.memfd_create("stdin")
    with open(given, "w", encoding="utf-8", closefd=False) as file:
        file.write(request["stdin"])
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.close(given)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  (stays open for the program)
    sys.argv[:] = [PROGRAM]
    sys.path.insert(0, home)
    set_limits(request["limits"])
    if request["isolation"] == "process":
        guard(request["visible"], home)
    try:
        runpy.run_path(PROGRAM, run_name="__main__")
    except Exception as error:
        trace = error.__traceback__
        while trace.tb_next is not None and trace.tb_frame.f_code.co_filename != PROGRAM:
            trace = trace.tb_next  # the frames above belong to this file and to runpy
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)


def start(request: dict, home: str, report: int) -> int:
    """Fork the program; its process id. Returns only in the parent; the program goes on in run_program."""
    child = os.fork()
    if child:
        return child
    os.setsid()  # signals to its group stay inside
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        drop_privileges(request["uid"])
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears it
        tell(report, {"ready": True})
    except BaseException as error:
        tell(report, {"problem": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os.close(report)
    run_program(request, home)
    sys.exit(0)


def watch(child: int, time_limit_s: float, report: int) -> None:
    """Wait for the program, at most until its time is over, and report how it ended."""
    timed_out = False

    def over(number: int, frame: object) -> None:
        nonlocal timed_out
        timed_out = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, time_limit_s)
    while True:
        finished, status = os.waitpid(-1, 0)  # orphans come here too
        if finished == child:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    tell(report, {"status": status, "timed_out": timed_out})


def descendants() -> set:
    """Process ids of everything below this process."""
    children = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
        children.setdefault(parent, []).append(int(name))
    found, queue = set(), [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def end_descendants() -> None:
    """Stop every process below this one until no new one appears, then kill and collect them all."""
    stopped = set()
    while True:
        below = descendants()
        number = signal.SIGKILL if below <= stopped else signal.SIGSTOP
        stopped |= below
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def tell(report: int, message: dict) -> None:
    os.write(report, json.dumps(message).encode() + b"\n")


def main() -> None:
    report = int(sys.argv[1])
    request = json.load(sys.stdin.buffer)
    try:
        if request["isolation"] == "process":
            if os.getuid() == 0:
                os.chown(request["home"], request["uid"], request["uid"])
            check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "adopt orphans")
            watch(start(request, request["home"], report), request["time_limit_s"], report)
            end_descendants()
            os._exit(0)
        enter_namespaces()
        init = os.fork()
        if init:
            os.close(report)
            os.waitpid(init, 0)
            os._exit(0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        build_root(request["visible"], request["disk_bytes"], request["uid"] if os.getuid() == 0 else os.getuid())
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        watch(start(request, "/sandbox/home", report), request["time_limit_s"], report)
        os._exit(0)
    except (OSError, AttributeError) as error:  # AttributeError: a C library without the call
        tell(report, {"problem": str(error)})
        os._exit(1)


if __name__ == "__main__":
    main()
