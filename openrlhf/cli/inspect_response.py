"""A look at one response, token by token: ``python -m openrlhf.cli.inspect_response --reward_model_path MODEL ...``."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from openrlhf.cli.common import run_command
from openrlhf.cli.parser import parse_config
from openrlhf.datasets.completions import Completion, completion_to_row, read_jsonl, row_to_completion
from openrlhf.evaluation.filtering import check_filter
from openrlhf.evaluation.heat import (
    ASCII_BARS,
    BARS,
    color_tokens,
    cut_token,
    is_correct,
    plain_text,
    sparkline,
    token_scale,
    token_texts,
)
from openrlhf.evaluation.report import write_completion_page
from openrlhf.evaluation.scored_rows import checked_row
from openrlhf.trainer.config import flag
from openrlhf.utils.atomic import ensure_writable

if TYPE_CHECKING:  # torch and transformers take seconds to import: flags are read without them
    from openrlhf.cli.reward_checkpoint import RewardCheckpoint


@dataclass(frozen=True)
class InspectConfig:
    """Show one response with every token coloured by its goal similarity, with reward and lowest point."""

    reward_model_path: str | None = flag(
        None, "Reward model: folder, hub id or s3:// address; not needed for a --file of scored rows"
    )
    goal_state_path: str | None = flag(None, "Goal state of this model; without it only rewards are shown")
    prompt: str | None = flag(None, "Question, as in the data; the model's prompt template is put around it")
    response: str | None = flag(None, "Response to look at")
    file: str | None = flag(None, "Instead of prompt and response: JSON lines of completions or scored rows")
    row: int = flag(1, "Line of --file, from 1")
    filter_threshold: float | None = flag(None, "Goal similarity below which the filter stops the response")
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    input_template: str | None = flag(None, "Prompt template; default: the one the model was trained with")
    apply_chat_template: bool = flag(False, "Render prompts by the tokenizer's chat template")
    max_len: int | None = flag(None, "Tokens of prompt and response; default: as the model was trained")
    bf16: bool = flag(False, "Compute in bfloat16")
    html: str | None = flag(None, "HTML file for the same view as in the report")
    color: Literal["auto", "always", "never"] = flag("auto", "Colours; auto: in a terminal unless NO_COLOR is set")

    def validate(self) -> None:
        """Refuse settings that cannot work, before a model is loaded.

        Raises:
            ValueError: names the flag.
        """
        typed = (self.prompt is not None, self.response is not None)
        if self.file is None and typed != (True, True):
            raise ValueError("pass --prompt and --response, or --file with completions or scored rows and --row")
        if self.file is not None and typed != (False, False):
            raise ValueError("pass either --prompt and --response or --file, not both")
        if self.file is not None and not Path(self.file).is_file():
            raise ValueError(f"--file: expected JSON lines at {self.file}, found no file")
        if self.file is None and self.reward_model_path is None:
            raise ValueError("pass --reward_model_path to score the response")
        if self.goal_state_path is not None and self.reward_model_path is None:
            raise ValueError(
                "--goal_state_path needs --reward_model_path; scored rows of --file hold their similarities"
            )
        if self.row < 1:
            raise ValueError(f"--row: lines count from 1, got {self.row}")
        check_filter(self.filter_threshold, self.warmup_tokens)
        if self.html is not None:
            if Path(self.html).is_dir():
                raise ValueError(f"--html: expected the name of a file, {self.html} is a folder")
            ensure_writable(Path(self.html).parent, inside=True)


def run(config: InspectConfig) -> dict[str, Any]:
    """Score the response where needed, print it, and write the page; returns the scored row.

    Raises:
        ValueError: a setting, a file or a row that cannot be used.
    """
    config.validate()
    if config.file is None:
        row = completion_to_row(Completion(question=config.prompt, generated_solution=config.response))
    else:
        row = read_row(config.file, config.row)
    label = f"{Path(config.file).name}, line {config.row}" if config.file else ""
    if config.reward_model_path is not None:
        from openrlhf.cli.reward_checkpoint import find_checkpoint

        checkpoint = find_checkpoint(
            config.reward_model_path,
            input_template=config.input_template,
            apply_chat_template=config.apply_chat_template,
            max_len=config.max_len,
        )
        label = checkpoint.name
        row = score(checkpoint, row_to_completion(row), config)
    elif "reward" not in row:
        raise ValueError(f"{config.file}: line {config.row} is not scored yet; pass --reward_model_path")
    options = {"threshold": config.filter_threshold, "warmup_tokens": config.warmup_tokens}
    color = config.color == "always" or (
        config.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    true_color = os.environ.get("COLORTERM") in ("truecolor", "24bit")
    encoding = sys.stdout.encoding or "utf-8"
    bars = BARS if _can_write(BARS, encoding) else ASCII_BARS
    source = f"model {label}" if config.reward_model_path is not None else label
    text = describe(row, source, color=color, true_color=true_color, bars=bars, **options)
    print(text.encode(encoding, "replace").decode(encoding))
    if config.html is not None:
        write_completion_page(config.html, row, label, **options)
        print(f"\nhtml: {config.html}")
    return row


def read_row(path: str, number: int) -> dict[str, Any]:
    """Row on a line of a JSONL file, with the newest field names.

    Raises:
        ValueError: no such line, an unreadable one, or a row that is no completion.
    """
    for line, row in itertools.islice(read_jsonl(path), number):
        if line >= number:
            try:
                return checked_row(row) if "reward" in row else completion_to_row(row_to_completion(row))
            except ValueError as error:
                raise ValueError(f"{path}:{line}: {error}") from error
    raise ValueError(f"--row: {path} has no row on line {number} or behind it")


def score(checkpoint: RewardCheckpoint, completion: Completion, config: InspectConfig) -> dict[str, Any]:
    """Scored row of one completion."""
    from openrlhf.evaluation.scored_files import score_completions

    goal = None if config.goal_state_path is None else checkpoint.load_goal(config.goal_state_path)
    model, tokenizer = checkpoint.load(config.bf16)
    (row,) = score_completions(
        model,
        tokenizer,
        [completion],
        template=checkpoint.template,
        apply_chat_template=checkpoint.apply_chat_template,
        max_len=checkpoint.max_len,
        goal=goal,
        progress=False,
    )
    if row["reward"] is None:
        raise ValueError(
            f"the prompt leaves no room for the response in {checkpoint.max_len} tokens; pass a larger --max_len"
        )
    return row


def describe(
    row: Mapping[str, Any],
    source: str,
    *,
    threshold: float | None = None,
    warmup_tokens: int = 0,
    color: bool = False,
    true_color: bool = True,
    bars: str = BARS,
) -> str:
    """A scored completion as text for a terminal.

    Args:
        row: scored row.
        source: the model, or the file and line that hold the row.
        threshold, warmup_tokens: the goal filter.
        color: tokens on coloured ground; False: one line a token with its numbers.
        true_color: 24-bit colours instead of 256.
        bars: letters of the curves, from low to high.
    """
    curves = {"goal similarity": row.get("cosine_sim"), "reward": row.get("partial_rewards")}
    curves = {name: curve for name, curve in curves.items() if curve is not None and len(curve)}
    head = [plain_text(source), "not scored" if row.get("reward") is None else f"reward {row['reward']:.3f}"]
    if "goal similarity" in curves:
        head.append(f"goal similarity {curves['goal similarity'][-1]:.3f} at the end")
    lines = [" · ".join(head), f"question: {plain_text(row['question'])}", *_answer(row), ""]
    if not curves:
        return "\n".join([*lines, plain_text(row["generated_solution"])])
    cut = cut_token(row.get("cosine_sim"), threshold, warmup_tokens)
    texts, (name, scores) = token_texts(row), next(iter(curves.items()))
    if texts is None:
        lines += [plain_text(row["generated_solution"]), "(no colours: the row has no token_ends; score it again)"]
    elif color:
        scale = token_scale([scores])
        lines.append(color_tokens(texts, scores, scale, cut, true_color))
        lines.append(f"({name}: orange {scale.low:.2f}, pale {scale.middle:.2f}, blue {scale.high:.2f})")
    else:
        lines += _token_lines(texts, curves, cut)
    if row.get("truncated"):
        lines.append("(the end of the response was cut to fit the model and was not read)")
    lines.append("")
    for name, curve in curves.items():
        lines.append(f"{name:15}  {sparkline(curve, bars=bars)}  {min(curve):.3f} to {max(curve):.3f}")
    place = int(np.argmin(scores))
    name = next(iter(curves))
    where = "" if texts is None else f": {_token_word(texts, place)}"
    lines.append(f"lowest {name} {scores[place]:.3f} at token {place + 1} of {len(scores)}{where}")
    if threshold is not None and "goal similarity" not in curves:
        lines.append("filter: not applied, the row has no goal similarity; pass --goal_state_path")
    elif threshold is not None:
        told = "kept" if cut is None else f"stopped at token {cut + 1}, {1 - (cut + 1) / len(scores):.0%} of it saved"
        lines.append(f"filter at {threshold:g}: {told}")
    return "\n".join(lines)


def _answer(row: Mapping[str, Any]) -> list[str]:
    label = {True: "correct", False: "wrong", None: ""}[is_correct(row)]
    answers = [
        f"{word} {plain_text(str(row[key]))}"
        for word, key in (("predicted", "predicted_answer"), ("expected", "expected_answer"))
        if row.get(key) is not None
    ]
    told = ", ".join(([label] if label else []) + answers)
    return [f"answer: {told}"] if told else []


def _token_lines(texts: Sequence[str], curves: Mapping[str, Sequence[float]], cut: int | None) -> list[str]:
    lines = ["token  " + "  ".join(f"{name:>15}" for name in curves) + "  text"]
    for place in range(len(texts)):
        numbers = "  ".join(f"{curve[place]:15.3f}" for curve in curves.values())
        mark = "  <- stopped here" if place == cut else ""
        lines.append(f"{place + 1:5}  {numbers}  {_token_word(texts, place)}{mark}")
    return lines


def _token_word(texts: Sequence[str], place: int) -> str:
    """A token in quotes; the empty one at the end of a response is its end-of-sequence token."""
    return "(end)" if place == len(texts) - 1 and texts[place] == "" else repr(texts[place])


def _can_write(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    run_command(lambda: run(parse_config(InspectConfig, argv)) and None)


if __name__ == "__main__":
    main()
