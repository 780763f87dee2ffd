"""The flags of generate.py: one frozen dataclass, from which flags and help are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from decoding.beam import BeamSettings
from decoding.boundary import StepBoundary
from decoding.guided_settings import Guidance, GuidedSettings
from openrlhf.cli.common import POCKET
from openrlhf.datasets.pocket import LEVELS
from openrlhf.datasets.templates import render_prompt
from openrlhf.evaluation.filtering import check_filter
from openrlhf.trainer.config import flag

# What each method needs: "reward" a reward model, "goal" a goal state of it too, "answers" responses with an answer.
METHODS: dict[str, frozenset[str]] = {
    "greedy": frozenset(),
    "sample": frozenset(),
    "majority": frozenset({"answers"}),
    "weighted": frozenset({"answers", "reward"}),
    "weighted_goal": frozenset({"answers", "reward", "goal"}),
    "best_of_n": frozenset({"reward"}),
    "best_of_n_goal": frozenset({"reward", "goal"}),
    "beam": frozenset(),
    "filtered_vote": frozenset({"answers", "reward", "goal"}),
}
POOL_METHODS = ("sample", "majority", "weighted", "weighted_goal", "best_of_n", "best_of_n_goal")  # of one pool
SAMPLED_METHODS = (*POOL_METHODS, "filtered_vote")
WITHOUT_ANSWERS = ("helpsteer", "chat")  # data whose responses hold no final answer to vote on


@dataclass(frozen=True)
class DecodingConfig:
    """Answer questions greedily, by votes over samples, by best-of-n, by guided beam search and by live filtering."""

    # data
    dt_name: Literal["pocket", "gsm8k", "helpsteer", "chat", "custom"] = flag(
        POCKET, "Kind of data: pocket, gsm8k (question, answer), helpsteer (prompt), chat (messages), custom (question)"
    )
    input_file: str | None = flag(
        None, "json, jsonl(.gz), parquet or csv file, folder or hub id; of pocket SPLIT:N (default: test:200)"
    )
    split: str = flag("test", "Split of --input_file, where it has splits")
    question_key: str | None = flag(None, "Column of the question; default: that of --dt_name")
    start: int = flag(0, "First question, counted from 0")
    end: int | None = flag(None, "Question behind the last one; default: all")
    pocket_level: int = flag(2, "Difficulty of pocket's problems, 1 to 3")
    output_dir: str = flag("./decoding_results", "Folder of METHOD/output-seed*.jsonl, answers.jsonl and manifest.json")
    resume: bool = flag(False, "Go on where an earlier call with the same settings stopped")

    # models
    model_name: str | None = flag(None, "Policy: folder, hub id or 'pocket' (the default with pocket data)")
    reward_model_path: str | None = flag(None, "Reward model checkpoint: folder, s3:// address or hub id")
    goal_state_path: list[str] | None = flag(None, "Goal states of this reward model: folders or .npy files")
    goal_weights: list[float] | None = flag(
        None, "Weight of each goal state in the guidance, negative to steer away (default: 1 each)"
    )
    input_template: str | None = flag(
        None, "Prompt template of the policy; default: its chat template where it has one, else that of --dt_name"
    )
    apply_chat_template: bool = flag(False, "Render the policy's prompts with its chat template, pocket's too")
    bf16: bool = flag(False, "Compute in bfloat16")
    attn_implementation: str | None = flag(None, "Attention of transformers: sdpa, eager, flash_attention_2, ...")

    # sampling
    methods: list[str] = flag(["beam"], f"Any of: {', '.join(METHODS)}")
    seed: int = flag(0, "Seed of all random numbers")
    seeds: list[int] | None = flag(None, "Several seeds, one after another, in place of --seed")
    temperature: float = flag(1.0, "Sampling temperature; greedy never samples")
    top_p: float = flag(1.0, "Share of the probability mass to sample from")
    max_tokens: int = flag(256, "Tokens of a response at most")
    stop: list[str] | None = flag(None, r"Texts before which a response ends; \n is a line end")
    pool_samples: int | None = flag(
        None, "Samples of a question for the votes and best-of-n (default: beam_size * n_samples)"
    )
    batch_rows: int = flag(64, "Responses in one forward pass at most; changes no result", "mini_n_samples")

    # beam search
    beam_size: int = flag(4, "Beams kept after a step")
    n_samples: int = flag(4, "Continuations drawn from each beam at a step")
    step_boundary: str = flag("newline", "Where a step ends: newline, sentence, tokens:N or text:...")
    max_step_tokens: int = flag(64, "Tokens after which a step ends in any case")
    beam_search_max_step: int = flag(32, "Steps at most")
    guidance: Literal["goal", "reward", "random", "none"] = flag(
        "goal", "What scores a step: goal similarity, sigmoid of the reward, random numbers (a control), or nothing"
    )
    reward_weight: float = flag(0.0, "Weight of the reward beside the guidance, whose own weight is 1")
    self_eval_weight: float = flag(0.0, "Weight of the policy's own opinion of the response beside the guidance")
    step_score: Literal["last", "mean", "min"] = flag("last", "Goal similarity of a step, over its tokens")
    conf_ratio: float = flag(0.5, "Weight of the guidance in a step's score; the rest is the log-probability's")
    not_use_logprob: bool = flag(False, "Score by the guidance alone (as --conf_ratio 1)")
    not_use_conf: bool = flag(False, "Score by the log-probability alone (as --guidance none)")
    accumulate: Literal["mean", "last"] = flag("mean", "A beam's score: mean over its steps, or its last step's")
    bs_temperature: float = flag(0.0, "Temperature at which beams are drawn by their scores; 0 keeps the best")
    bs_temperature_decay: float = flag(1.0, "Factor on --bs_temperature at every step")
    bs_min_score: float = flag(0.0, "Guidance below which --reject_sample drops a candidate")
    reject_sample: bool = flag(False, "Drop candidates whose guidance is below --bs_min_score, unless all are")
    unbiased: bool = flag(False, "Score by the guidance alone: likely candidates are drawn more often already")

    # live filtered voting
    threshold: float | None = flag(None, "Goal similarity below which filtered_vote stops a sample")
    validation_file: str | None = flag(
        None, "Other questions (as --input_file) on which the threshold of filtered_vote is chosen"
    )
    warmup_tokens: int = flag(0, "Response tokens that the filter never judges")
    check_every: int = flag(16, "Tokens between two looks of the filter")
    stop_when_decided: bool = flag(False, "filtered_vote stops samples that can no longer change the vote")

    # what is shown
    trace: bool = flag(False, "Keep every step of beam and filtered_vote in OUTPUT_DIR/traces.jsonl")
    report: str | None = flag(None, "HTML file with the search trees of beam; implies --trace")
    dry_run: bool = flag(False, "Print the settings and the first prompts, and stop")

    @property
    def all_seeds(self) -> list[int]:
        """The seeds, in order."""
        return [self.seed] if self.seeds is None else self.seeds

    @property
    def policy_name(self) -> str | None:
        """The policy asked for; None where one has to be named."""
        return self.model_name or (POCKET if self.dt_name == POCKET else None)

    @property
    def pool_size(self) -> int:
        """Samples of a question for the votes: as many as the first step of the beam search draws."""
        return self.beam_size * self.n_samples if self.pool_samples is None else self.pool_samples

    @property
    def weights_of_goals(self) -> list[float]:
        """One a goal state."""
        return [1.0] * len(self.goal_state_path or []) if self.goal_weights is None else self.goal_weights

    @property
    def guidance_weights(self) -> dict[str, float]:
        """Weight of every part of the guidance, by its name."""
        chosen = None if self.not_use_conf else self.guidance
        weights = {name: float(chosen == name) for name in ("goal", "reward", "random")}
        if not self.not_use_conf:
            weights["reward"] += self.reward_weight
        return weights | {"self_evaluation": 0.0 if self.not_use_conf else self.self_eval_weight}

    @property
    def keeps_trace(self) -> bool:
        """Whether traces are written."""
        return self.trace or self.report is not None

    @property
    def stops(self) -> tuple[str, ...]:
        r"""The stop texts with \n as line ends."""
        return tuple(text.replace("\\n", "\n") for text in self.stop or ())

    def guided_settings(self) -> GuidedSettings:
        """What the beam search is asked.

        Raises:
            ValueError: a value outside its range, with the name of its field.
        """
        beam = BeamSettings(
            beam_size=self.beam_size,
            conf_ratio=1.0 if self.not_use_logprob else self.conf_ratio,
            accumulate=self.accumulate,
            temperature=self.bs_temperature,
            temperature_decay=self.bs_temperature_decay,
            reject_sample=self.reject_sample,
            min_score=self.bs_min_score,
            unbiased=self.unbiased,
            max_steps=self.beam_search_max_step,
        )
        guidance = Guidance(
            **self.guidance_weights,
            goal_weights=tuple(self.weights_of_goals) or (1.0,),
            reduction=self.step_score,
        )
        return GuidedSettings(
            beam=beam,
            guidance=guidance,
            boundary=StepBoundary.parse(self.step_boundary),
            n_samples=self.n_samples,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            max_step_tokens=self.max_step_tokens,
            stops=self.stops,
            rows=self.batch_rows,
        )

    def validate(self) -> None:
        """Refuse settings that cannot work, before anything is read.

        Raises:
            ValueError: names the flag.
        """
        self._check_data()
        self._check_methods()
        self._check_models()
        self._check_sampling()
        self._check_filter()
        if "beam" in self.methods:
            self._check_beam()
        if self.report is not None and not {"beam", "filtered_vote"} & set(self.methods):
            raise ValueError("--report shows the steps of beam and filtered_vote: add one of them to --methods")
        if self.report is not None and Path(self.report).is_dir():
            raise ValueError(f"--report: expected the name of a file, {self.report} is a folder")

    def _check_data(self) -> None:
        if self.policy_name is None:
            raise ValueError("pass --model_name with the policy: a folder, a hub id or 'pocket'")
        if self.dt_name != POCKET and self.input_file is None:
            raise ValueError(f"--dt_name {self.dt_name} needs --input_file")
        if self.dt_name == POCKET and self.question_key is not None:
            raise ValueError("--question_key: pocket's questions are generated; drop it, or pass --dt_name custom")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ValueError(f"--start {self.start} --end {self.end}: expected 0 <= start < end")
        if self.pocket_level not in LEVELS:
            raise ValueError(f"--pocket_level: expected one of {list(LEVELS)}, got {self.pocket_level}")
        if self.input_template is not None and self.apply_chat_template:
            raise ValueError("--input_template and --apply_chat_template exclude each other: leave one out")
        if self.input_template is not None and self.dt_name == "chat":
            raise ValueError(
                "--input_template: a conversation is rendered by the policy's chat template alone; drop it"
            )
        if self.input_template is not None:
            render_prompt(self.input_template, "")

    def _check_methods(self) -> None:
        unknown = [name for name in self.methods if name not in METHODS]
        if unknown or not self.methods:
            raise ValueError(f"--methods: expected any of {', '.join(METHODS)}, got {' '.join(unknown) or 'none'}")
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"--methods: expected each at most once, got {' '.join(self.methods)}")
        if len(set(self.all_seeds)) < len(self.all_seeds) or not self.all_seeds:
            raise ValueError(f"--seeds: expected different numbers, got {self.all_seeds}")
        voting = self._methods_with("answers")
        if voting and self.dt_name in WITHOUT_ANSWERS:
            raise ValueError(
                f"--methods {voting[0]} votes on final answers, which responses to {self.dt_name} data have not; "
                "best_of_n needs none"
            )

    def _check_models(self) -> None:
        needed = {name: self._methods_with(name) for name in ("reward", "goal")}
        if "beam" in self.methods:
            needed["reward"] += ["beam"] * bool(self.guidance_weights["reward"])
            needed["goal"] += ["beam"] * bool(self.guidance_weights["goal"])
        hint = " (or pass another --guidance)" if needed["goal"][-1:] == ["beam"] else ""
        if needed["goal"] and not self.goal_state_path:
            raise ValueError(f"--methods {needed['goal'][-1]} needs a goal state: pass --goal_state_path{hint}")
        if (needed["reward"] or needed["goal"]) and self.reward_model_path is None:
            name = (needed["reward"] or needed["goal"])[-1]
            raise ValueError(f"--methods {name} needs a reward model: pass --reward_model_path{hint}")
        if self.goal_state_path and self.reward_model_path is None:
            raise ValueError("--goal_state_path needs --reward_model_path, the model it was made with")
        goals = len(self.goal_state_path or [])
        if self.goal_weights is not None and len(self.goal_weights) != goals:
            raise ValueError(f"--goal_weights: expected one for each of {goals} goal states, got {self.goal_weights}")
        if self.goal_weights is not None and not (
            all(map(math.isfinite, self.goal_weights)) and any(self.goal_weights)
        ):
            raise ValueError(f"--goal_weights: expected finite numbers, not all 0, got {self.goal_weights}")
        single = [name for name in self._methods_with("goal") if goals > 1]
        if single:
            raise ValueError(f"--methods {single[0]} takes one goal state, got {goals}; several are for beam")

    def _check_sampling(self) -> None:
        for name in (
            "max_tokens pool_samples batch_rows beam_size n_samples max_step_tokens check_every beam_search_max_step"
        ).split():
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name}: expected 1 or more, got {getattr(self, name)}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature: expected 0 or more, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p: expected a share in (0, 1], got {self.top_p}")
        sampled = [name for name in self.methods if name in SAMPLED_METHODS]
        if self.temperature == 0 and sampled and self.pool_size > 1:
            raise ValueError(
                f"--temperature 0 gives {self.pool_size} equal samples: pass one above 0, or drop {', '.join(sampled)}"
            )

    def _check_beam(self) -> None:
        self.guided_settings()
        if self.not_use_logprob and self.not_use_conf:
            raise ValueError("--not_use_logprob and --not_use_conf leave nothing to score by: drop one")
        for name in ("reward_weight", "self_eval_weight"):
            if getattr(self, name) and self.not_use_conf:
                raise ValueError(f"--{name} is part of the guidance, which --not_use_conf leaves out: drop one")
        if self.reward_weight and self.guidance == "reward":
            raise ValueError("--reward_weight: the reward is the guidance already, with weight 1; drop it")
        for name in ("not_use_logprob", "unbiased", "reject_sample"):
            if getattr(self, name) and not any(self.guidance_weights.values()):
                raise ValueError(f"--{name} goes by the guidance, and there is none: choose a --guidance")

    def _check_filter(self) -> None:
        if "filtered_vote" not in self.methods:
            for name in ("threshold", "validation_file"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name} goes with filtered_vote: add it to --methods, or drop the flag")
            return
        if (self.threshold is None) == (self.validation_file is None):
            raise ValueError("--methods filtered_vote needs either --threshold or --validation_file to choose it on")
        check_filter(self.threshold, self.warmup_tokens)

    def _methods_with(self, need: str) -> list[str]:
        """The methods asked for that have this need."""
        return [name for name in self.methods if need in METHODS[name]]


def parse_pocket(name: str | None) -> tuple[str, int]:
    """Split and number of pocket's problems from SPLIT:N.

    Raises:
        ValueError: not of this form.
    """
    split, _, number = (name or "test:200").partition(":")
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--input_file: expected SPLIT:N of pocket, such as test:300 or ood:100, got {name!r}")
    return split, int(number)
