"""What an earlier run of get_representation left: finished goal states, or sums to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from openrlhf.evaluation.goal_accumulator import SUMS_FILE, GoalSums, load_sums
from openrlhf.evaluation.goal_state import FILE_NAME, QuestionGoals, load_goal
from openrlhf.utils.atomic import clean_stale

Identity = dict[str, Any]  # the fields of a goal state that decide its value, and "per_question"


def find_earlier(
    save_dir: str | Path, folders: Sequence[Path], identities: Sequence[Identity], overwrite: bool
) -> tuple[list[int], GoalSums | None]:
    """The goal states still to compute, and the sums of a stopped run over just these.

    Args:
        save_dir: where unfinished sums lie.
        folders, identities: of the goal states asked for.
        overwrite: take nothing over; unfinished sums are removed.
    Returns:
        Positions among those asked for, and sums or None.
    Raises:
        ValueError: a goal state or sums of other inputs are there.
    """
    clean_stale(save_dir)
    path = Path(save_dir) / SUMS_FILE
    everything = list(range(len(folders)))
    if overwrite:
        path.unlink(missing_ok=True)
        return everything, None
    found, sums = load_sums(path) or (None, None)
    if found == {"goals": list(identities)}:  # also where the stop came while the goal states were written
        return everything, sums
    wanted = [i for i in everything if not _is_finished(folders[i], identities[i])]
    asked = [identities[i] for i in wanted]
    if wanted and found is not None and found != {"goals": asked}:
        _refuse(f"{path} holds unfinished sums", found["goals"], asked)
    return wanted, sums if wanted else None


def _is_finished(folder: Path, identity: Identity) -> bool:
    """Whether the folder holds the goal state asked for; one of other inputs raises."""
    if not (folder / FILE_NAME).is_file():
        return False
    goal = load_goal(folder)
    found = {"per_question": isinstance(goal, QuestionGoals)}
    found |= {name: getattr(goal, name, None) for name in identity if name not in found}
    if found != identity:
        _refuse(f"{folder / FILE_NAME} is there already", [found], [identity])
    return True


def _refuse(what: str, found: Sequence[Identity], asked: Sequence[Identity]) -> NoReturn:
    """Raise an error that names what differs."""
    differing = [f"{len(found)} goals against {len(asked)}"] if len(found) != len(asked) else []
    for there, here in zip(found, asked, strict=False):
        differing += [f"{key} {there.get(key)!r} against {here[key]!r}" for key in here if there.get(key) != here[key]]
    raise ValueError(
        f"{what}, of other inputs ({'; '.join(dict.fromkeys(differing))}); "
        "choose another --save_dir, or pass --overwrite to start anew"
    )
