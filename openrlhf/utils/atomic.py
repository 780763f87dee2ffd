"""Crash-safe files and folders, and checks of a place before anything is written to it.

Everything is written under a temporary sibling name and then renamed, so a reader never meets a half-written one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

COMPLETE_NAME = "complete.json"
GIB = 2**30  # bytes

_TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>.+)-(?P<pid>\d+)-\d+")
_HOST = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname()) or "host"
_FOREIGN_AGE = 24 * 3600  # seconds after which a temporary folder of another host counts as stale
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100
_serial = itertools.count()
_active: set[str] = set()  # temporary names that this process is still writing


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Replace the file at `path` by `data`: after a crash it holds the old or the new content, never a part."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target, "tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
        _active.discard(temporary.name)
    _fsync_path(target.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text; line ends are kept as given."""
    atomic_write_bytes(path, text.encode("utf-8"))


@contextlib.contextmanager
def atomic_dir(
    path: str | Path, *, complete: Mapping[str, Any] | None = None, carry: Iterable[str] = ()
) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path` and put it in place of `path` when the block ends without an error.

    An error inside the block, also an interrupt, removes the temporary folder and leaves `path` as it was.
    `complete` and `carry` are those of `publish_folder`.
    """
    temporary = start_folder(path)
    try:
        yield temporary
        publish_folder(temporary, path, complete=complete, carry=carry)
    except BaseException:
        discard_folder(temporary)
        raise


def start_folder(path: str | Path) -> Path:
    """Make the empty temporary folder that `publish_folder` later puts in place of `path`.

    Several ranks may fill it: one starts it and sends its name, all write, and after a barrier one publishes it.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise ValueError(f"expected a folder or nothing at {target}, found a file; choose another path or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target, "tmp")
    temporary.mkdir()
    return temporary


def publish_folder(
    temporary: Path, path: str | Path, *, complete: Mapping[str, Any] | None = None, carry: Iterable[str] = ()
) -> None:
    """Flush the files of `temporary` to the disk and swap the folder in place of `path`; then remove the old one.

    Args:
        temporary: folder from `start_folder` of the same `path`, filled and with all files closed.
        path: final name; an existing folder is replaced as a whole.
        complete: when given, `complete.json` is written last with these entries and the size in bytes of all new files.
        carry: names of files or folders of the old folder to keep, unless the new one has them (hard-linked).

    On Linux the swap is one atomic exchange. Where the file system has none, the old folder is first renamed; a crash
    between the two renames leaves `path` missing until `clean_stale` restores it.
    """
    target = Path(os.path.realpath(path))
    sizes = {str(file.relative_to(temporary)): file.stat().st_size for file in _files(temporary)}
    for name in carry:  # not among the sizes: a log may grow on
        _carry(target / name, temporary / name)
    _share(temporary)
    _fsync_tree(temporary)
    if complete is not None:
        record = json.dumps({**complete, "files": sizes}, indent=1, sort_keys=True)
        atomic_write_text(temporary / COMPLETE_NAME, record + "\n")
    _fsync_path(temporary)
    if not target.exists():
        os.rename(temporary, target)
    elif _exchange(temporary, target):
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        old = temporary_sibling(target, "old")
        os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old, ignore_errors=True)
        _active.discard(old.name)
    _active.discard(temporary.name)
    _fsync_path(target.parent)


def discard_folder(temporary: Path) -> None:
    """Remove a folder from `start_folder` that will not be published."""
    shutil.rmtree(temporary, ignore_errors=True)
    _active.discard(temporary.name)


def clean_stale(parent: str | Path) -> list[Path]:
    """Remove what dead processes left half-written directly inside `parent`; return the removed paths.

    A process on another host cannot be asked: its leftovers go when they are older than a day. A folder that was moved
    aside by an interrupted swap is put back when its place is empty.
    """
    parent = Path(parent)
    removed = []
    if not parent.is_dir():
        return removed
    for item in sorted(parent.iterdir()):
        match = _TEMPORARY_NAME.fullmatch(item.name)
        if match is None or not _is_stale(item, match["host"], int(match["pid"])):
            continue
        if match["kind"] == "old" and not (parent / match["name"]).exists():
            os.rename(item, parent / match["name"])
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)
        removed.append(item)
    return removed


def ensure_writable(path: str | Path, *, inside: bool = False) -> None:
    """Check before training that results can be written to `path`; creates its parents, and nothing else stays.

    Args:
        inside: False for a folder that `atomic_dir` puts in place as a whole (so its parent must be writable), True
            for a folder that is only written into, such as the root of the checkpoints.
    Raises:
        ValueError: not a folder, not writable, or a mount point that cannot be renamed.
    """
    if str(path).startswith("s3:"):
        raise ValueError(f"cannot save to {path}: expected a local folder; upload it afterwards (--s3_save_path)")
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise ValueError(f"cannot save to {target}: expected a folder or nothing there, found a file")
        if target.is_dir() and not inside and os.path.ismount(target):
            raise ValueError(
                f"cannot save to {target}: it is a mount point and cannot be replaced as a whole; "
                f"choose a folder inside it, such as {target / 'model'}"
            )
        for folder in {target if target.is_dir() else target.parent, target if inside else target.parent}:
            if folder.is_dir():
                _probe(folder)
    except OSError as error:
        raise ValueError(f"cannot save to {target}: {error}; choose a writable path") from error


@contextlib.contextmanager
def hold_lock(path: str | Path, active: bool = True) -> Iterator[None]:
    """Keep other processes of this project from writing to `path` while the block runs; ends with the process.

    Args:
        active: False does nothing (processes other than the main one).
    Raises:
        ValueError: a living process holds it.
    """
    if not active:
        yield
        return
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f".{target.name}.lock"
    with open(lock, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            raise ValueError(
                f"another run ({handle.read().strip() or 'unknown'}) writes to {path}; wait, or choose another folder"
            ) from error
        except OSError as error:  # some network file systems have no locks: go on without
            logger.warning("%s cannot be locked (%s); make sure that no other run writes to %s", lock, error, path)
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {_HOST}\n")
        handle.flush()
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def require_free_space(path: str | Path, required: int) -> None:
    """Raise ValueError unless the file system of `path` (or its nearest existing parent) has `required` bytes free."""
    folder = Path(os.path.realpath(path))
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < required:
        raise ValueError(
            f"not enough room to save to {path}: {required / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free under "
            f"{folder}; free some space or choose another path"
        )


def folder_size(folder: str | Path) -> int:
    """Bytes in all files under `folder`."""
    return sum(file.stat().st_size for file in _files(Path(folder)))


def temporary_sibling(target: Path, kind: str) -> Path:
    """Free name beside `target` that tells its host and process; kind is "tmp", or "old" for what was moved aside."""
    name = f".{target.name}.{kind}-{_HOST}-{os.getpid()}-{next(_serial)}"
    _active.add(name)
    sibling = target.with_name(name)
    if sibling.is_dir():  # left by a dead process that had our pid
        shutil.rmtree(sibling)
    return sibling


def _is_stale(item: Path, host: str, pid: int) -> bool:
    if item.name in _active:
        return False
    if host != _HOST:
        with contextlib.suppress(OSError):
            return time.time() - item.stat().st_mtime > _FOREIGN_AGE
        return False
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # alive, of another user
        return False
    return False


def _exchange(first: Path, second: Path) -> bool:
    """Swap two paths in one step with renameat2; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    done = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    if done == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _carry(source: Path, target: Path) -> None:
    if target.exists() or not source.exists():
        return
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links here
        shutil.copy2(source, target)


def _files(folder: Path) -> list[Path]:
    """Regular files under `folder`, links left out."""
    paths = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    return [path for path in paths if not path.is_symlink()]


def _share(folder: Path) -> None:
    """Add to every file the rights that a plainly opened one gets here: safetensors writes for the owner alone."""
    probe = folder / ".rights"
    probe.touch()
    rights = probe.stat().st_mode & 0o666
    probe.unlink()
    for file in _files(folder):
        file.chmod(file.stat().st_mode | rights)


def _fsync_tree(folder: Path) -> None:
    for file in _files(folder):
        _fsync_path(file)
    for root, _, _ in os.walk(folder):
        _fsync_path(Path(root))


def _fsync_path(path: Path) -> None:
    """Flush a file or a folder entry; some network file systems refuse it for folders, which is no error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def _probe(folder: Path) -> None:
    probe = temporary_sibling(folder / "write-probe", "tmp")
    try:
        with open(probe, "wb") as handle:
            handle.write(b"0" * 4096)
            handle.flush()
            os.fsync(handle.fileno())
    finally:
        probe.unlink(missing_ok=True)
        _active.discard(probe.name)
