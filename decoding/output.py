"""The output folder: responses as completions, answers and traces, written question by question and taken up again.

    OUTPUT_DIR/METHOD/output-seed{SEED}.jsonl            responses, as eval_rm and metrics read them
    OUTPUT_DIR/METHOD/output-seed{SEED}.settings.json    what they depend on
    OUTPUT_DIR/answers.jsonl                             one line a method, seed and question, as compare.py reads it
    OUTPUT_DIR/traces.jsonl                              the same with every step, where traces are kept

The line in answers.jsonl is written last: a question without it is not done, and what else was written of it is removed
when the folder is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decoding.records import Answered, Decoded, Question
from openrlhf.datasets.completions import completion_to_row, row_to_completion
from openrlhf.datasets.jsonl import append_jsonl, cut_partial_line, read_jsonl, write_jsonl
from openrlhf.evaluation.resuming import open_scores
from openrlhf.evaluation.tables import aligned

ANSWERS_FILE = "answers.jsonl"
TRACES_FILE = "traces.jsonl"

Grade = Callable[[Question, str], tuple[str | None, bool | None]]
Run = tuple[str, int]  # method and seed
Row = dict[str, Any]


class OutputFolder:
    """What earlier calls and this one have answered; one process at a time.

    Args:
        grade: predicted answer of a response, and whether it is right.
    Raises:
        ValueError: a line of answers.jsonl that cannot be read.
    """

    def __init__(self, folder: str | Path, grade: Grade) -> None:
        self.folder, self._grade = Path(folder), grade
        self._lines: dict[Run, dict[int, Row]] = {}  # of answers.jsonl, by question
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (ANSWERS_FILE, TRACES_FILE):
            if (self.folder / name).is_file():
                cut_partial_line(self.folder / name)
        if (self.folder / ANSWERS_FILE).is_file():
            for number, row in read_jsonl(self.folder / ANSWERS_FILE):
                if not {"method", "seed", "index", "question"} <= set(row):
                    raise ValueError(f"{self.folder / ANSWERS_FILE}:{number}: no answer, its keys are {list(row)}")
                self._lines.setdefault((row["method"], row["seed"]), {})[row["index"]] = row

    def responses_file(self, method: str, seed: int) -> Path:
        """File of the responses of one method and seed."""
        return self.folder / method / f"output-seed{seed}.jsonl"

    def open(
        self, method: str, seed: int, settings: Mapping[str, Any], questions: Sequence[Question], resume: bool
    ) -> set[int]:
        """Make a method and seed ready to be written; returns the numbers of the questions that are done.

        Args:
            settings: plain JSON values by the flag that gives them: what the responses depend on.
            questions: of this call.
            resume: False refuses answers of an earlier call.
        Raises:
            ValueError: answers of an earlier call that are not resumed, of other settings or of other questions.
        """
        file, run = self.responses_file(method, seed), (method, seed)
        found = self._lines.get(run, {})
        if not resume and (found or (file.is_file() and file.stat().st_size)):
            raise ValueError(
                f"{file} holds answers of an earlier call: go on with --resume, or choose another --output_dir"
            )
        open_scores(file, dict(settings), made="written", folder_flag="--output_dir")
        rows = [row for _, row in read_jsonl(file)]
        done = set(found) & {row["index"] for row in rows}
        if len(done) < len(found):
            self._lines[run] = {index: line for index, line in found.items() if index in done}
            self._write_answers()
        if any(row["index"] not in done for row in rows):
            write_jsonl(file, [row for row in rows if row["index"] in done])
        for question in questions:
            line = self._lines.get(run, {}).get(question.index)
            if line is not None and (line["question"], line.get("expected_answer")) != (
                question.text,
                question.expected_answer,
            ):
                raise ValueError(
                    f"{file}: question {question.index} is another one than in the input ({line['question']!r:.60} "
                    f"against {question.text!r:.60}); choose another --output_dir"
                )
        return done

    def write(self, answered: Answered) -> None:
        """Add what a method did for a question that is not done yet.

        Raises:
            ValueError: a number that is not finite.
        """
        file = self.responses_file(answered.method, answered.seed)
        append_jsonl(file, [response_row(answered, one, self._grade) for one in answered.responses])
        if answered.trace is not None:
            append_jsonl(self.folder / TRACES_FILE, [trace_row(answered)])
        line = answer_row(answered)
        append_jsonl(self.folder / ANSWERS_FILE, [line])
        self._lines.setdefault((answered.method, answered.seed), {})[answered.question.index] = line

    def finish(self) -> None:
        """Put the files into the order of the questions: questions end in another one, and after a resume more so."""
        for method, seed in self._lines:
            file = self.responses_file(method, seed)
            rows = [row for _, row in read_jsonl(file)] if file.is_file() else []
            ordered = sorted(rows, key=lambda row: (row["index"], row["sample"]))
            if ordered != rows:
                write_jsonl(file, ordered)
        self._write_answers()

    def traces(self) -> Iterator[Row]:
        """Traces of the answers, by method, seed and question; of a question that was answered again the last one."""
        file = self.folder / TRACES_FILE
        rows = [row for _, row in read_jsonl(file)] if file.is_file() else []
        last = {(row["method"], row["seed"], row["index"]): row for row in rows}
        for method, seed in sorted(self._lines):
            for index in sorted(self._lines[method, seed]):
                if (method, seed, index) in last:
                    yield last[method, seed, index]

    def table(self, methods: Iterable[str]) -> str:
        """Accuracy and cost of the methods over all seeds and questions in the folder."""
        rows = [["method", "seeds", "questions", "accuracy", "policy tokens", "reward tokens", "seconds"]]
        for method in methods:
            runs = [run for run in self._lines if run[0] == method and self._lines[run]]
            lines = [line for run in runs for line in self._lines[run].values()]
            if not lines:
                continue
            right, size = [line["is_correct"] for line in lines], 1
            if method == "sample":  # its lines tell of whole pools
                samples = [row for run in runs for _, row in read_jsonl(self.responses_file(*run))]
                right, size = [row["is_correct"] for row in samples], len(samples) / len(lines)
            judged = [one for one in right if one is not None]
            costs = [
                float(np.mean([line[name] for line in lines])) / size
                for name in ("policy_tokens", "reward_tokens", "seconds")
            ]
            accuracy = f"{100 * sum(judged) / len(judged):.1f}%" if judged else "-"
            counts = [str(len(runs)), str(len({line["index"] for line in lines}))]
            rows.append([method, *counts, accuracy, f"{costs[0]:.1f}", f"{costs[1]:.1f}", f"{costs[2]:.3f}"])
        return aligned(rows) + "\ntokens and seconds: mean a question, of sample a sample; prompts are not counted"

    def _write_answers(self) -> None:
        lines = (self._lines[run][index] for run in sorted(self._lines) for index in sorted(self._lines[run]))
        write_jsonl(self.folder / ANSWERS_FILE, lines)


def answer_row(answered: Answered) -> Row:
    """The line of answers.jsonl."""
    question = answered.question
    return {
        "index": question.index,
        "question": question.text,
        "method": answered.method,
        "seed": answered.seed,
        "answer": answered.answer,
        "expected_answer": question.expected_answer,
        "is_correct": answered.is_correct,
        "policy_tokens": answered.policy_tokens,
        "reward_tokens": answered.reward_tokens,
        "seconds": round(answered.seconds, 6),
        **answered.details,
    }


def trace_row(answered: Answered) -> Row:
    """The line of traces.jsonl: the answer, the best response of a beam search, and the steps that led to it."""
    best = answered.responses[0] if answered.method == "beam" else None
    told = {} if best is None else {"response": best.text, "finished": best.finished}
    return {**answer_row(answered), **told, "trace": answered.trace}


def response_row(answered: Answered, response: Decoded, grade: Grade) -> Row:
    """The row of a response, a completion with its scores as eval_rm writes them.

    Of several goal states the similarities stand under `goal_similarities`, a list a token: no metric reads those.
    """
    question = answered.question
    predicted, right = grade(question, response.text)
    partial, cosines = response.partial_rewards, response.cosine_sim
    row = {
        **question.row,
        "question": question.text,
        "generated_solution": response.text,
        "expected_answer": question.expected_answer,
        "predicted_answer": predicted,
        "is_correct": right,
        "sample": response.sample,
        "index": question.index,
        "seed": answered.seed,
        "method": answered.method,
        "policy_tokens": len(response.ids),
        "num_actions": len(response.ids) if partial is None else len(partial),
        "finished": response.finished,
        "score": response.score,
    }
    if partial is not None:  # null for a response that was stopped on the way
        row |= {"reward": response.reward, "partial_rewards": partial}
    if cosines is not None:
        row["goal_similarities" if cosines and isinstance(cosines[0], Sequence) else "cosine_sim"] = cosines
    return completion_to_row(row_to_completion(row))
