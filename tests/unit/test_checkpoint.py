"""Atomic files and folders, and which checkpoints are found, kept and removed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf.utils import atomic
from openrlhf.utils.checkpoint import (
    atomic_dir,
    atomic_write_text,
    clean_stale,
    discard_folder,
    ensure_writable,
    folder_step,
    latest_checkpoint,
    list_checkpoints,
    prune,
    publish_folder,
    read_complete,
    require_free_space,
    start_folder,
    step_folder,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def save(root, step, size=10):
    with atomic_dir(step_folder(root, step), complete={"step": step}) as folder:
        (folder / "weights.bin").write_bytes(b"w" * size)
    return step_folder(root, step)


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_text_file_is_replaced_as_a_whole_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "deep" / "note.txt"
    atomic_write_text(target, "first\r\n")
    atomic_write_text(target, "zweite Fassung: ü\u2028")
    assert target.read_bytes().decode() == "zweite Fassung: ü\u2028"
    assert names(target.parent) == ["note.txt"]


def test_a_link_keeps_pointing_at_the_file_that_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real" / "file.txt")
    atomic_write_text(tmp_path / "link.txt", "text")
    assert (tmp_path / "real" / "file.txt").read_text() == "text"
    assert (tmp_path / "link.txt").is_symlink()


@pytest.mark.parametrize("exchange", [True, False])
def test_folder_is_replaced_as_a_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    target = tmp_path / "model"
    for content in ("old", "new"):
        with atomic_dir(target) as folder:
            (folder / f"{content}.txt").write_text(content)
    assert names(target) == ["new.txt"]
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_an_error_while_saving_leaves_the_old_folder(tmp_path, error):
    target = tmp_path / "model"
    with atomic_dir(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(type(error)), atomic_dir(target) as folder:
        (folder / "a").write_text("ne")
        raise error
    assert (target / "a").read_text() == "old"
    assert names(tmp_path) == ["model"]


def test_carried_files_stay_and_keep_their_open_writers(tmp_path):
    target = tmp_path / "model"
    (target / "wandb" / "run-1").mkdir(parents=True)
    (target / "wandb" / "run-1" / "log").write_text("e")
    (target / "wandb" / "latest-run").symlink_to("run-1")
    (target / "wandb" / "dangling").symlink_to("absent")
    (target / "stale.bin").write_text("x")
    (target / "config.json").write_text("old")
    with open(target / "metrics.jsonl", "a") as log:
        log.write("1\n")
        log.flush()
        with atomic_dir(target, complete={}, carry=["metrics.jsonl", "wandb", "config.json", "absent"]) as folder:
            (folder / "config.json").write_text("new")
        log.write("2\n")
    assert (target / "metrics.jsonl").read_text() == "1\n2\n"
    assert (target / "wandb" / "run-1" / "log").read_text() == "e"
    assert os.readlink(target / "wandb" / "latest-run") == "run-1"
    assert (target / "config.json").read_text() == "new"
    assert names(target) == ["complete.json", "config.json", "metrics.jsonl", "wandb"]
    assert read_complete(target) == {}, "a log that grows does not break the folder"


def test_files_written_for_the_owner_alone_get_the_usual_rights(tmp_path):
    before = os.umask(0o027)
    try:
        with atomic_dir(tmp_path / "model") as folder:
            (folder / "weights").touch(mode=0o600)
            (folder / "program").touch(mode=0o700)
    finally:
        os.umask(before)
    # 0666 less the mask 0027 is 0640
    assert (tmp_path / "model" / "weights").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "model" / "program").stat().st_mode & 0o777 == 0o740


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "model").write_text("file")
    with pytest.raises(ValueError, match="found a file"):
        start_folder(tmp_path / "model")


# Kills the saving process just before its n-th call that touches the disk: no handler and no clean-up runs.
KILLED_SAVE = """
import os, shutil, sys
from openrlhf.utils import atomic
target, limit, exchange = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
calls = 0
def dying(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == limit:
            os._exit(9)
        return function(*args, **kwargs)
    return call
for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
atomic._exchange = dying(atomic._exchange) if exchange else (lambda first, second: False)
with atomic.atomic_dir(target, complete={"version": "new"}) as folder:
    for name in ("a", "b"):
        with open(folder / name, "w") as handle:
            handle.write("new")
"""


def run_killed_save(target, limit, exchange):
    command = [sys.executable, "-c", KILLED_SAVE, str(target), str(limit), str(exchange)]
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}).returncode


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_any_point_the_folder_is_the_old_or_the_new_one(tmp_path, exchange):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    if exchange and not atomic._exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("this file system cannot exchange two folders in one step")
    for name in ("first", "second"):
        (tmp_path / name).rmdir()
    target = tmp_path / "model"
    seen = []
    for limit in range(1, 40):
        with atomic_dir(target, complete={"version": "old"}) as folder:
            for name in ("a", "b"):
                (folder / name).write_text("old")
        code = run_killed_save(target, limit, exchange)
        if exchange:  # a reader needs no repair
            assert read_complete(target) is not None
        clean_stale(tmp_path)
        version = read_complete(target)["version"]
        assert {(target / name).read_text() for name in ("a", "b")} == {version}
        assert names(tmp_path) == ["model"]
        seen.append(version)
        if code == 0:
            break
    assert code == 0, "the saving never ran to its end"
    assert len(seen) > 8
    assert seen == sorted(seen, reverse=True), "new, once in place, stays"  # "old" sorts after "new"
    assert set(seen) == {"old", "new"}


def test_clean_stale_takes_only_leftovers_of_dead_processes(tmp_path):
    host = atomic._HOST
    dead, alive = dead_pid(), os.getppid()
    (tmp_path / f".model.tmp-{host}-{dead}-0").mkdir()
    (tmp_path / f".model.tmp-{host}-{dead}-0" / "part").write_text("x")
    (tmp_path / f".note.txt.tmp-{host}-{dead}-1").write_text("x")
    (tmp_path / f".model.tmp-{host}-{alive}-0").mkdir()
    (tmp_path / f".model.tmp-elsewhere-{dead}-0").mkdir()
    (tmp_path / ".hidden").mkdir()
    mine = start_folder(tmp_path / "model")
    assert [item.name for item in clean_stale(tmp_path)] == [
        f".model.tmp-{host}-{dead}-0",
        f".note.txt.tmp-{host}-{dead}-1",
    ]
    assert mine.is_dir()
    assert (tmp_path / f".model.tmp-{host}-{alive}-0").is_dir()
    assert (tmp_path / f".model.tmp-elsewhere-{dead}-0").is_dir()  # its host cannot be asked and it is young
    os.utime(tmp_path / f".model.tmp-elsewhere-{dead}-0", (0, 0))
    assert [item.name for item in clean_stale(tmp_path)] == [f".model.tmp-elsewhere-{dead}-0"]
    discard_folder(mine)


def test_several_ranks_can_fill_a_folder_before_it_is_published(tmp_path):
    temporary = start_folder(tmp_path / "step-00000001")
    assert list_checkpoints(tmp_path) == []
    for rank in range(2):
        (temporary / f"rank{rank}").write_text("x")
    publish_folder(temporary, tmp_path / "step-00000001", complete={"step": 1})
    assert read_complete(tmp_path / "step-00000001") == {"step": 1}


def test_only_complete_checkpoints_are_found_in_step_order(tmp_path):
    for step in (10, 9, 100_000_000, 2):  # the last but one outgrows the eight digits: order is by number, not by text
        save(tmp_path, step)
    (tmp_path / "step-00000500").mkdir()
    (tmp_path / "step-00000500" / "weights.bin").write_bytes(b"w")
    (tmp_path / "stepfoo").mkdir()
    assert [folder_step(folder) for folder in list_checkpoints(tmp_path)] == [2, 9, 10, 100_000_000]
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 100_000_000)
    assert latest_checkpoint(tmp_path / "absent") is None
    assert step_folder(tmp_path, 12).name == "step-00000012"


@pytest.mark.parametrize("damage", ["shorter", "missing", "no record", "broken record", "other record"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, caplog):
    first = save(tmp_path, 1)
    second = save(tmp_path, 2)
    record = second / "complete.json"
    if damage == "shorter":
        (second / "weights.bin").write_bytes(b"w" * 9)
    elif damage == "missing":
        (second / "weights.bin").unlink()
    elif damage == "no record":
        record.unlink()
    elif damage == "broken record":
        record.write_text(record.read_text()[:-5])
    else:
        record.write_text(json.dumps([1]))
    assert latest_checkpoint(tmp_path) == first
    assert "step-00000002" in caplog.text


def test_prune_keeps_the_newest_by_number(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    removed = prune(tmp_path, max_num=2, keep=["step-00000002"])
    assert [folder_step(folder) for folder in removed] == [1, 3, 4]
    assert [folder_step(folder) for folder in list_checkpoints(tmp_path)] == [2, 5]
    assert names(tmp_path) == ["step-00000002", "step-00000005"]


def test_prune_by_size_never_removes_the_newest(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step, size=2**20)
    # Four folders of 1 MiB and a small record each; 2.5 MiB leave room for two.
    removed = prune(tmp_path, max_mem_gb=2.5 / 1024)
    assert [folder_step(folder) for folder in removed] == [1, 2]
    assert [folder_step(folder) for folder in prune(tmp_path, max_mem_gb=0)] == [3]
    assert prune(tmp_path, max_mem_gb=0) == []
    assert prune(tmp_path) == []
    with pytest.raises(ValueError, match="max_num=0"):
        prune(tmp_path, max_num=0)


def test_ensure_writable_leaves_only_parents(tmp_path):
    ensure_writable(tmp_path / "a" / "b" / "model")
    assert names(tmp_path / "a" / "b") == []
    (tmp_path / "out").mkdir()
    ensure_writable(tmp_path / "out", inside=True)
    assert names(tmp_path / "out") == []


def test_ensure_writable_refuses_files_and_mount_points(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(ValueError, match="cannot save to"):
            ensure_writable(path)
    with pytest.raises(ValueError, match="mount point"):
        ensure_writable("/")


def test_ensure_writable_refuses_a_read_only_place(tmp_path, monkeypatch):
    # As root every mode is writable, so the system's answer is given by hand.
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match="Permission denied.*choose a writable path"):
        ensure_writable(tmp_path / "model")


def test_require_free_space_names_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    require_free_space(tmp_path / "not" / "yet", 2**30)
    with pytest.raises(ValueError, match=r"2\.00 GiB needed, 1\.00 GiB free"):
        require_free_space(tmp_path / "not" / "yet", 2 * 2**30)
