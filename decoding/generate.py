"""Answer questions with a policy and a reward model: ``python decoding/generate.py --model_name MODEL ...``."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from decoding.config import METHODS, POOL_METHODS, DecodingConfig
from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.utils.atomic import ensure_writable, hold_lock
from openrlhf.utils.manifest import finish_manifest, hide_secrets, write_manifest

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from decoding.preparation import Preparation

SHOWN_PROMPTS = 2  # of a dry run


def run(config: DecodingConfig) -> str | None:
    """Answer all questions by all methods and seeds; returns the table that is printed (None: a dry run).

    Raises:
        ValueError: a setting, a file, a row or a model that cannot be used, or answers of other settings in the folder.
    """
    config.validate()
    ensure_writable(config.output_dir, inside=True)
    if config.report is not None:
        ensure_writable(Path(config.report).parent, inside=True)
    from decoding.preparation import prepare

    prepared = prepare(config)
    if config.dry_run:
        _print_plan(config, prepared)
        return None
    with hold_lock(config.output_dir):
        write_manifest(config.output_dir, "generate", config, prepared.described())
        try:
            table = _answer_all(config, prepared)
        except BaseException as error:
            finish_manifest(config.output_dir, f"failed: {type(error).__name__}")
            raise
        finish_manifest(config.output_dir, "finished")
    return table


def _print_plan(config: DecodingConfig, prepared: Preparation) -> None:
    settings = hide_secrets(dataclasses.asdict(config)) | {"resolved": prepared.described()}
    print(json.dumps(settings, indent=2, ensure_ascii=False))
    for question in prepared.questions[:SHOWN_PROMPTS]:
        print(f"\n--- question {question.index}: prompt of the policy\n{question.policy_prompt}")
        if question.reward_prompt is not None:
            print(f"--- prompt of the reward model\n{question.reward_prompt}")
        if question.expected_answer is not None:
            print(f"--- expected answer\n{question.expected_answer}")


def _answer_all(config: DecodingConfig, prepared: Preparation) -> str:
    from decoding.drawing import Drawer
    from decoding.output import OutputFolder
    from decoding.preparation import method_settings
    from decoding.prompts import grade_for
    from openrlhf.evaluation.scoring import ScoringBar

    grade = grade_for(config.dt_name)
    output = OutputFolder(config.output_dir, grade)
    jobs = []  # every file is opened, and so its settings are compared, before a model is loaded
    for methods, seed in _groups(config):
        done = {
            method: output.open(
                method, seed, method_settings(config, prepared, method), prepared.questions, config.resume
            )
            for method in methods
        }
        open_questions = [
            one for one in prepared.questions if any(one.index not in answered for answered in done.values())
        ]
        jobs.append((methods, seed, done, open_questions))
    drawer = Drawer(config, prepared, grade)
    for methods, seed, done, questions in jobs:
        if not questions:
            continue
        total = len(prepared.questions)
        described = f"{methods[0] if len(methods) == 1 else 'samples'}, seed {seed}"
        drawn = drawer.draw(methods, seed, questions)
        with ScoringBar(total, total - len(questions), desc=described, unit="question") as bar:
            for answers in drawn:
                for answered in answers:
                    if answered.question.index not in done[answered.method]:
                        output.write(answered)
                bar.add(1, answers[0].policy_tokens)
    output.finish()
    asked = {method for methods, *_ in jobs for method in methods}
    table = output.table([method for method in METHODS if method in asked])
    print(f"{table}\n\nresponses and answers: {config.output_dir}")
    if config.report is not None:
        from decoding.trace_report import write_trace_report

        print(f"search trees: {write_trace_report(config.report, output.traces())}")
    return table


def _groups(config: DecodingConfig) -> list[tuple[tuple[str, ...], int]]:
    """Methods that are answered together, with each seed: those of one pool of samples, and the others one by one."""
    pool = tuple(method for method in POOL_METHODS if method in config.methods)
    if pool and pool[0] != "sample":
        pool = ("sample", *pool)  # the votes are over samples that can be looked at
    single = [(method,) for method in config.methods if method not in POOL_METHODS]
    groups = [*single, pool] if pool else single
    return [
        (methods, seed)
        for place, seed in enumerate(config.all_seeds)
        for methods in groups
        if methods != ("greedy",) or place == 0  # nothing of it is drawn: one seed stands for all
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(DecodingConfig, argv)) and None)


if __name__ == "__main__":
    main()
