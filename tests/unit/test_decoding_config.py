"""Flags of generate.py: what they mean together, and which combinations are refused before anything is read."""

from __future__ import annotations

import pytest

from decoding import beam, config, guided_settings
from decoding.config import METHODS, DecodingConfig, parse_pocket
from openrlhf.cli.parser import parse_config

REWARD = ["--reward_model_path", "rm"]
GOAL = [*REWARD, "--goal_state_path", "goal"]


def parsed(*words):
    return parse_config(DecodingConfig, list(words))


def test_the_flags_of_the_original_are_accepted():
    settings = parsed(
        *"--dt_name gsm8k --model_name lm --input_file q.jsonl --output_dir out --start 3 --end 9 --temperature 0.5 "
        "--max_tokens 99 --top_p 0.9 --n_samples 3 --mini_n_samples 7 --beam_size 5 --bs_temperature 0.2 "
        "--bs_temperature_decay 0.5 --bs_min_score 0.1 --conf_ratio 0.25 --reject_sample --beam_search_max_step 6 "
        "--resume --seed 4".split(),
        *GOAL,
    )
    settings.validate()
    guided = settings.guided_settings()
    assert (guided.n_samples, guided.rows, guided.temperature, guided.top_p, guided.max_tokens) == (3, 7, 0.5, 0.9, 99)
    assert guided.beam == beam.BeamSettings(5, 0.25, "mean", 0.2, 0.5, True, 0.1, False, 6)
    assert guided.guidance == guided_settings.Guidance(goal=1.0, goal_weights=(1.0,))


def test_parts_of_the_guidance():
    def guidance(*words):
        made = parsed(*words)
        made.validate()
        return made.guided_settings()

    both = guidance(*GOAL, "other", "--goal_weights", "1", "-0.5", "--reward_weight", "2", "--self_eval_weight", "0.5")
    assert both.guidance == guided_settings.Guidance(1.0, 2.0, 0.5, 0.0, (1.0, -0.5))
    assert guidance(*GOAL, "other").guidance.goal_weights == (1.0, 1.0)
    assert guidance(*REWARD, "--guidance", "reward").guidance == guided_settings.Guidance(0.0, 1.0)
    assert guidance("--guidance", "random").guidance == guided_settings.Guidance(0.0, random=1.0)
    assert guidance("--not_use_conf").guidance == guided_settings.Guidance(0.0)
    assert guidance(*GOAL, "--not_use_logprob", "--conf_ratio", "0.1").beam.conf_ratio == 1.0


def test_the_votes_are_over_as_many_samples_as_the_first_step_draws():
    assert parsed("--beam_size", "3", "--n_samples", "5").pool_size == 15
    assert parsed("--pool_samples", "2").pool_size == 2


def test_stops_may_be_written_with_an_escaped_line_end():
    assert parsed("--stop", r"\n\n", "END").stops == ("\n\n", "END")


def test_names_are_those_of_the_tables():
    from decoding.voting import FILTERED, POOL_FIGURES

    fields = DecodingConfig.__dataclass_fields__
    assert config.POOL_METHODS == tuple(POOL_FIGURES) and set(POOL_FIGURES) < set(METHODS) and FILTERED in METHODS
    assert all(f"'{name}'" in fields["accumulate"].type.replace('"', "'") for name in beam.ACCUMULATE)
    assert all(f"'{name}'" in fields["step_score"].type.replace('"', "'") for name in beam.REDUCTIONS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--dt_name", "gsm8k", "--input_file", "q.jsonl"], "pass --model_name"),
        (["--dt_name", "chat", "--model_name", "lm"], "--dt_name chat needs --input_file"),
        (["--question_key", "q"], "--question_key"),
        (["--start", "5", "--end", "5"], "--start 5 --end 5: expected 0 <= start < end"),
        (["--pocket_level", "9"], "--pocket_level: expected one of"),
        (["--input_template", "plain", "--apply_chat_template"], "exclude each other"),
        (["--input_template", "no place"], "unknown template"),
        (["--methods", "beams"], "--methods: expected any of greedy, .* got beams"),
        (["--methods", "greedy", "greedy"], "each at most once"),
        (["--seeds", "1", "1"], "--seeds: expected different numbers"),
        (["--methods", "majority", "--dt_name", "chat", "--input_file", "f", "--model_name", "m"], "final answers"),
        (["--methods", "beam"], "--methods beam needs a goal state: .* .or pass another --guidance"),
        (["--methods", "beam", "--guidance", "reward"], "--methods beam needs a reward model"),
        (["--methods", "weighted"], "--methods weighted needs a reward model"),
        (["--methods", "best_of_n"], "--methods best_of_n needs a reward model"),
        ([*REWARD, "--methods", "best_of_n_goal"], "--methods best_of_n_goal needs a goal state"),
        (["--methods", "greedy", "--goal_state_path", "g"], "--goal_state_path needs --reward_model_path"),
        ([*GOAL, "--goal_weights", "1", "2"], r"--goal_weights: .* each of 1 goal states, got \[1.0, 2.0\]"),
        ([*GOAL, "--goal_weights", "0"], "--goal_weights: expected finite numbers, not all 0"),
        ([*GOAL, "--goal_weights", "nan"], "--goal_weights: expected finite numbers"),
        ([*GOAL, "other", "--methods", "filtered_vote", "--threshold", "0"], "takes one goal state, got 2"),
        ([*GOAL, "--max_tokens", "0"], "--max_tokens: expected 1 or more, got 0"),
        ([*GOAL, "--beam_size", "0"], "--beam_size: expected 1 or more"),
        ([*GOAL, "--temperature", "-1"], "--temperature: expected 0 or more"),
        ([*GOAL, "--top_p", "0"], "--top_p"),
        (["--methods", "sample", "--temperature", "0"], "--temperature 0 gives 16 equal samples"),
        ([*GOAL, "--temperature", "0"], "temperature 0 draws equal steps"),
        ([*GOAL, "--step_boundary", "word"], "step boundary"),
        ([*GOAL, "--conf_ratio", "2"], "conf_ratio"),
        ([*GOAL, "--not_use_logprob", "--not_use_conf"], "nothing to score by"),
        (["--not_use_conf", "--self_eval_weight", "1"], "--self_eval_weight is part of the guidance"),
        ([*GOAL, "--reward_weight", "inf"], "finite"),
        ([*REWARD, "--guidance", "reward", "--reward_weight", "1"], "the reward is the guidance already"),
        (["--guidance", "none", "--unbiased"], "--unbiased goes by the guidance"),
        ([*GOAL, "--methods", "filtered_vote"], "either --threshold or --validation_file"),
        ([*GOAL, "--methods", "filtered_vote", "--threshold", "2"], "threshold"),
        ([*GOAL, "--threshold", "0"], "--threshold goes with filtered_vote"),
        (["--methods", "greedy", "--report", "r.html"], "--report shows the steps"),
    ],
)
def test_what_cannot_work_is_refused(words, told):
    with pytest.raises(ValueError, match=told):
        parsed(*words).validate()


def test_pocket_questions_are_named_by_split_and_number():
    assert parse_pocket(None) == ("test", 200) and parse_pocket("ood:5") == ("ood", 5)
    for name in ("test", "test:", "test:0", "test:-1", "test:x"):
        with pytest.raises(ValueError, match="SPLIT:N"):
            parse_pocket(name)
