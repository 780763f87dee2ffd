"""Steering an attribute with goal states, on pocket: towards short working and away from it.

    python decoding/attribute_steering.py --save_dir runs/attribute

The attribute is checked by a rule: the equations of a solution, less those that its problem takes. The policy leaves
one out in about a ninth of its solutions. A reward model learns to prefer the shorter of two solutions of a problem;
the mean last states of its short and of its full solutions are two goal states. Decoding with the weights +1 and -1
steers towards short working, with -1 and +1 away from it; random numbers in their place are the control, which draws
and drops as many candidates.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from openrlhf.cli.common import POCKET, run_command
from openrlhf.cli.parser import parse_config
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import atomic_write_text, ensure_writable

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from decoding.records import Answered
    from openrlhf.datasets.completions import Completion
    from openrlhf.datasets.pocket import PocketProblem

logger = logging.getLogger(__name__)

GOALS = ("short", "full")  # columns of the rated responses, and folders of their goal states
DIRECTIONS = {"control": None, "towards short": (1.0, -1.0), "away from short": (-1.0, 1.0)}  # weights of GOALS


@dataclass(frozen=True)
class SteeringConfig:
    """Steer the length of the working of pocket solutions, both ways, and count equations."""

    save_dir: str = flag("runs/attribute", "Folder of the rated data, the reward model, its goal states and the table")
    policy: str = flag(POCKET, "Language model to steer")
    questions: int = flag(300, "Test questions")
    train_questions: int = flag(1500, "Questions whose solutions the reward model learns from")
    seeds: list[int] = flag([0, 1, 2], "Seeds of the decoding")
    beam_size: int = flag(2, "Beams kept at every step")
    n_samples: int = flag(4, "Continuations of every beam")
    conf_ratio: float = flag(0.9, "Weight of the goal similarity against the language model's log-probability")
    max_epochs: int = flag(4, "Epochs of the reward model's training")
    bootstrap: int = flag(1000, "Draws for the 95% intervals")

    def validate(self) -> None:
        """Refuse what cannot work, before anything is computed.

        Raises:
            ValueError: names the flag.
        """
        for name in ("questions", "train_questions", "beam_size", "n_samples", "max_epochs", "bootstrap"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.conf_ratio <= 1:
            raise ValueError(f"--conf_ratio: expected a share from 0 to 1, got {self.conf_ratio}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"--seeds: expected different numbers, got {self.seeds}")


def extra_equations(solution: str, steps: int) -> int:
    """Equations of a solution, one a line, less those that the problem takes: below 0 where the working is short."""
    return sum("=" in line for line in solution.splitlines()) - steps


def rate_solutions(completions: Sequence[Completion], steps: dict[str, int]) -> list[dict[str, Any]]:
    """Rows prompt, response and, 1 or 0, `short` (fewer equations than the problem takes) and `full`."""
    rows = []
    for one in completions:
        short = int(extra_equations(one.generated_solution, steps[one.question]) < 0)
        rows.append({"prompt": one.question, "response": one.generated_solution, "short": short, "full": 1 - short})
    return rows


def pair_by_length(rated: Sequence[dict[str, Any]], most: int = 3) -> list[dict[str, str]]:
    """Preference pairs of one question, short working chosen; at most `most` a question, no solution in two of them."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rated:
        found.setdefault(row["prompt"], ({}, {}))[row["short"]].setdefault(row["response"])
    return [
        {"prompt": prompt, "chosen": short, "rejected": full}
        for prompt, (fulls, shorts) in found.items()
        for short, full in list(zip(shorts, fulls, strict=False))[:most]
    ]


def run(config: SteeringConfig) -> dict[str, Any]:
    """Train where it is not done yet, decode, print and save the table; returns its figures."""
    config.validate()
    from openrlhf.cli.common import cache_folder, resolve_pocket_model
    from openrlhf.cli.get_representation import RepresentationConfig
    from openrlhf.cli.get_representation import run as extract
    from openrlhf.cli.train_rm import run as train
    from openrlhf.datasets.jsonl import write_jsonl
    from openrlhf.datasets.pocket import generate_problems
    from openrlhf.evaluation.sampling import pocket_completions
    from openrlhf.trainer.config import TrainRMConfig

    ensure_writable(config.save_dir, inside=True)
    folder, policy = Path(config.save_dir), resolve_pocket_model(config.policy)
    rated_path, pairs_path, model_path = folder / "rated.jsonl", folder / "pairs.jsonl", folder / "reward_model"
    if not (model_path / "config.json").is_file():
        problems = generate_problems("train", config.train_questions)
        steps = {problem.question: problem.steps for problem in problems}
        completions = pocket_completions(cache_folder(), policy, "train", config.train_questions, 8)
        rated = rate_solutions(completions, steps)
        pairs = pair_by_length(rated)
        write_jsonl(rated_path, rated)
        write_jsonl(pairs_path, pairs)
        print(f"{len(rated)} solutions, {sum(row['short'] for row in rated)} of them short; {len(pairs)} pairs")
        train(
            TrainRMConfig(
                pretrain=policy, dataset=str(pairs_path), save_path=str(model_path), input_template=POCKET,
                reward_model_strategy="contrastive", train_batch_size=64, micro_train_batch_size=64,
                learning_rate=4e-4, max_epochs=config.max_epochs, seed=0,
            )
        )  # fmt: skip
    extract(
        RepresentationConfig(
            dataset=str(rated_path), reward_model=str(model_path), save_dir=str(folder / "goals"),
            attribute=list(GOALS), min_value=1,
        )
    )  # fmt: skip
    problems = generate_problems("test", config.questions)
    answers = decode(config, policy, model_path, folder / "goals", problems)
    figures = summarise(answers, problems, config.bootstrap)
    figures["settings"] = {name: value for name, value in vars(config).items() if name != "save_dir"}
    atomic_write_text(folder / "steering.json", json.dumps(figures, indent=2) + "\n")
    table = format_table(figures)
    atomic_write_text(folder / "steering.md", table + "\n")
    print(table)
    return figures


def decode(
    config: SteeringConfig, policy_path: str, model_path: Path, goals_path: Path, problems: Sequence[PocketProblem]
) -> dict[str, list[Answered]]:
    """Answers of the problems in every direction, seed by seed."""
    from tqdm import tqdm

    from decoding.beam import BeamSettings
    from decoding.guided import decode_guided
    from decoding.guided_settings import Guidance, GuidedSettings
    from decoding.records import Question
    from openrlhf.cli.reward_checkpoint import find_checkpoint
    from openrlhf.datasets.pocket import DEFAULT_LEVEL
    from openrlhf.datasets.templates import render_prompt
    from openrlhf.evaluation.sampling import pocket_response_limit
    from openrlhf.models.policy import Policy

    checkpoint = find_checkpoint(str(model_path))
    goals = [checkpoint.load_goal(goals_path / name).vector for name in GOALS]
    model, tokenizer = checkpoint.load()
    policy = Policy.from_pretrained(policy_path, model.device)
    questions = []
    for index, problem in enumerate(problems):
        prompt = render_prompt(POCKET, problem.question)
        questions.append(Question(index, problem.question, prompt, prompt, problem.answer))
    answers: dict[str, list[Answered]] = {}
    total = len(DIRECTIONS) * len(config.seeds) * len(questions)
    with tqdm(total=total, desc="decoding", unit="question") as bar:
        for direction, weights in DIRECTIONS.items():
            guidance = Guidance(goal=0.0, random=1.0) if weights is None else Guidance(goal_weights=weights)
            settings = GuidedSettings(
                beam=BeamSettings(beam_size=config.beam_size, conf_ratio=config.conf_ratio),
                guidance=guidance,
                n_samples=config.n_samples,
                max_tokens=pocket_response_limit("test", DEFAULT_LEVEL),
                rows=256,
            )
            answers[direction] = []
            for seed in config.seeds:
                found = decode_guided(
                    policy, questions, settings, seed=seed, model=model, tokenizer=tokenizer, goals=goals
                )
                for answer in found:
                    answers[direction].append(answer)
                    bar.update()
    return answers


def summarise(
    answers: dict[str, list[Answered]], problems: Sequence[PocketProblem], bootstrap: int = 1000
) -> dict[str, Any]:
    """Mean extra equations and accuracy of the best responses, with 95% intervals over questions.

    Returns:
        by direction: `extra_equations`, `short` (share), `accuracy`, `tokens` a question, and `difference` from the
        control, paired by question and seed; each interval as value, low, high.
    """
    import numpy as np

    from openrlhf.evaluation.bootstrap import draw_questions, ratio_intervals
    from openrlhf.evaluation.sampling import grade_pocket

    steps = {problem.question: problem.steps for problem in problems}
    control = answers["control"]
    draws = draw_questions([one.question.text for one in control], bootstrap, 0)
    columns = draws.columns([one.question.text for one in control])

    def extra(found: Sequence[Answered]) -> np.ndarray:
        return np.array([extra_equations(one.responses[0].text, steps[one.question.text]) for one in found], float)

    figures: dict[str, Any] = {}
    for direction, found in answers.items():
        pairs = zip(found, control, strict=True)
        if any((one.question.text, one.seed) != (other.question.text, other.seed) for one, other in pairs):
            raise ValueError(f"{direction}: expected the questions and seeds of the control in its order")
        equations = extra(found)
        right = [grade_pocket(one.responses[0].text, one.question.expected_answer)[1] for one in found]
        values = np.column_stack([equations, equations < 0, np.array(right, float), equations - extra(control)])
        names = ("extra_equations", "short", "accuracy", "difference")
        told = {name: list(one) for name, one in zip(names, ratio_intervals(draws, columns, values), strict=True)}
        told["tokens"] = float(np.mean([one.policy_tokens for one in found]))
        figures[direction] = told
    return {"directions": figures, "questions": len(steps), "seeds": sorted({one.seed for one in control})}


def format_table(figures: dict[str, Any]) -> str:
    """The figures as a Markdown table."""

    def told(interval: Sequence[float], form: str = "+.3f") -> str:
        value, low, high = interval
        return f"{value:{form}} [{low:{form}}, {high:{form}}]"

    lines = [
        "| direction | extra equations | minus control | short solutions | accuracy | tokens a question |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for direction, one in figures["directions"].items():
        difference = "" if direction == "control" else told(one["difference"])
        lines.append(
            f"| {direction} | {told(one['extra_equations'])} | {difference} | {told(one['short'], '.1%')} | "
            f"{told(one['accuracy'], '.1%')} | {one['tokens']:.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(SteeringConfig, argv)) and None)


if __name__ == "__main__":
    main()
