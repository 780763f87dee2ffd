"""Sampled and graded completions of a policy, and the preference pairs of the embedded pocket task made from them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from openrlhf.datasets.completions import Completion, completion_to_row, read_completions, write_jsonl
from openrlhf.datasets.pairing import build_pairs
from openrlhf.datasets.pocket import DEFAULT_LEVEL, LEVELS, check_solution, generate_problems
from openrlhf.datasets.templates import render_prompt
from openrlhf.models.policy import Policy
from openrlhf.models.pretrained import checkpoint_fingerprint
from openrlhf.rewards.grading import extract_answer, extract_boxed_answer, grade_answer

logger = logging.getLogger(__name__)

POCKET_QUESTIONS = 3000  # training questions whose completions are paired


def pocket_question_count(max_pairs: int | None) -> int:
    """Training questions to sample for at most ``max_pairs`` pairs: most questions give one to four."""
    return POCKET_QUESTIONS if max_pairs is None else min(POCKET_QUESTIONS, max_pairs + 20)


Grade = Callable[[str, str], tuple[str | None, bool]]


class Problem(Protocol):
    """What sampling needs to know of a problem; PocketProblem is one."""

    question: str
    answer: str


def grade_text(text: str, answer: str) -> tuple[str | None, bool]:
    """Predicted answer of a solution (box, else last number) and whether it equals the expected one."""
    predicted = extract_answer(text)
    return predicted, predicted is not None and grade_answer(predicted, answer)


def grade_pocket(text: str, answer: str) -> tuple[str | None, bool]:
    """Predicted answer of a pocket solution (box only) and whether it is exactly the expected integer."""
    return extract_boxed_answer(text), check_solution(text, answer)


def sample_completions(
    policy: Policy,
    problems: Sequence[Problem],
    template: str,
    n: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_new_tokens: int = 256,
    seed: int = 0,
    batch_tokens: int = 65_536,
    grade: Grade = grade_text,
    progress: bool = True,
    description: str = "sampling",
) -> list[Completion]:
    """Sample `n` solutions of each problem and grade them.

    Args:
        template: name of a prompt template or a text with a place for the question.
        grade: from (solution text, expected answer) to (predicted answer or None, correct or not).
    Returns:
        N * n completions in the order of the problems, `sample` counting from 0 within each.
    """
    prompts = [render_prompt(template, problem.question) for problem in problems]
    with tqdm(total=len(prompts) * n, desc=description, unit="completion", disable=not progress) as bar:
        texts = policy.generate(
            prompts, n, temperature, top_p, max_new_tokens, seed=seed, batch_tokens=batch_tokens, on_batch=bar.update
        )
    completions = []
    for problem, group in zip(problems, texts, strict=True):
        for sample, text in enumerate(group):
            predicted, correct = grade(text, problem.answer)
            completions.append(Completion(problem.question, text, problem.answer, predicted, correct, sample))
    return completions


def pocket_completions(
    cache_dir: str | Path,
    policy_path: str | Path,
    split: str,
    n_questions: int,
    n_samples: int,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    level: int = DEFAULT_LEVEL,
    device: str = "cpu",
    progress: bool = True,
) -> list[Completion]:
    """Graded completions of pocket problems, sampled once and then read from the cache.

    The same arguments and policy weights give the same completions; the cached file is named by their fingerprint and
    appears only when it is whole.

    Args:
        cache_dir: folder for the cached files; created when absent.
        policy_path: Hugging Face folder of a policy trained on pocket, such as examples/pocket.
        split: "sft", "train", "validation", "test" or "ood".
        n_questions: different questions of the split.
        n_samples: completions per question.
        seed: of the questions and of the sampling.
    """
    problems = generate_problems(split, n_questions, seed, level)
    max_new_tokens = pocket_response_limit(split, level)
    settings = {
        "policy": checkpoint_fingerprint(policy_path),
        "tokenizer": _file_hash(Path(policy_path) / "tokenizer.json"),
        "problems": hashlib.sha256(json.dumps([asdict(problem) for problem in problems]).encode()).hexdigest(),
        "n_samples": n_samples,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
    }
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    path = Path(cache_dir) / f"pocket-{split}-{fingerprint}.jsonl"
    if path.is_file():
        logger.info("pocket completions (%s) read from %s", split, path)
        return read_completions(path)
    completions = sample_completions(
        Policy.from_pretrained(policy_path, device),
        problems,
        "pocket",
        n_samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        grade=grade_pocket,
        progress=progress,
        description=f"pocket completions ({split})",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, [completion_to_row(completion) for completion in completions])
    return completions


def pocket_solutions(
    cache_dir: str | Path,
    policy_path: str | Path,
    n_questions: int = POCKET_QUESTIONS,
    n_samples: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    split: str = "train",
    level: int = DEFAULT_LEVEL,
    device: str = "cpu",
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Rows of labelled solutions of pocket problems: those of `pocket_completions`, with its arguments."""
    completions = pocket_completions(
        cache_dir, policy_path, split, n_questions, n_samples, temperature, seed,
        level=level, device=device, progress=progress,
    )  # fmt: skip
    return [completion_to_row(completion) for completion in completions]


def pocket_preferences(
    cache_dir: str | Path,
    policy_path: str | Path,
    n_questions: int = POCKET_QUESTIONS,
    n_samples: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    *,
    split: str = "train",
    pairs_per_question: int = 4,
    level: int = DEFAULT_LEVEL,
    device: str = "cpu",
    progress: bool = True,
) -> list[dict[str, str]]:
    """Preference rows question/correct/incorrect: the policy's own correct and wrong solutions of pocket problems.

    Questions that the policy solves always or never give no pair. Arguments as in `pocket_completions`.
    """
    rows = pocket_solutions(
        cache_dir, policy_path, n_questions, n_samples, temperature, seed,
        split=split, level=level, device=device, progress=progress,
    )  # fmt: skip
    pairs, counts = build_pairs(rows, pairs_per_question, seed)
    logger.info("pocket pairs from %d completions: %s", len(rows), counts)
    return pairs


def pocket_response_limit(split: str, level: int) -> int:
    """New tokens that hold any right solution: one digit is one token, and an equation has three numbers."""
    settings = LEVELS[level]
    steps = (settings.ood_steps if split in ("ood", "sft") else settings.steps)[1]
    digits = len(str(settings.max_count))
    return steps * (3 * digits + 3) + digits + 3


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
