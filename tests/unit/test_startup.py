"""Start-up: flags are read without heavy packages, and weights are not drawn only to be overwritten."""

import argparse
import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import HfArgumentParser

from openrlhf.cli.parser import build_parser, parse_config
from openrlhf.models import goal_contrastive, goal_sampling, losses, reward_model
from openrlhf.models.pretrained import load_reward_model, save_reward_model
from openrlhf.trainer import config as trainer_config
from openrlhf.trainer.config import flag
from tests.tiny import save_tiny_causal_lm, tiny_reward_model, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
# Module of every command.
COMMANDS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("openrlhf/cli", "decoding")
    for path in (ROOT / folder).glob("*.py")
    if "def main(" in path.read_text()
)
HEAVY = ("torch", "transformers", "datasets", "pandas", "deepspeed", "accelerate", "matplotlib", "scipy", "sklearn")
# Runs programs in turn, as `python FILE` or `python -m MODULE` would; tells which of the packages named came in.
RUN = """
import contextlib, io, json, runpy, sys
lines, heavy = map(json.loads, sys.argv[1:])
told = []
for program, *words in lines:
    sys.argv[:] = [program, *words]
    run = runpy.run_path if program.endswith(".py") else runpy.run_module
    output, errors = io.StringIO(), io.StringIO()
    code = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            run(program, run_name="__main__", **({} if program.endswith(".py") else {"alter_sys": True}))
        except SystemExit as stop:
            code = stop.code
    told.append([code, output.getvalue() + errors.getvalue()])
print(json.dumps({"told": told, "heavy": [name for name in heavy if name in sys.modules]}))
"""


def run_programs(*lines: list[str]) -> dict:
    """Exit codes and texts of programs run in one fresh process, and the heavy packages it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(lines), json.dumps(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def config_class(command: str) -> type:
    """The configuration dataclass of a command: the one that its main parses."""
    module = importlib.import_module(command)
    source = Path(module.__file__).read_text()
    return getattr(module, source.split("parse_config(")[1].split(",")[0])


def test_all_commands_are_found():
    named = {"train_rm", "eval_rm", "quickstart", "build_pocket"}
    assert len(COMMANDS) >= 12 and {f"openrlhf.cli.{name}" for name in named} | {"decoding.generate"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_and_bad_flags_import_no_heavy_package(command):
    folder, name = command.rsplit(".", 1)
    file = ROOT / ("examples" if folder == "openrlhf.cli" else folder) / f"{name}.py"
    lines = [[command, "--help"], [command, "--no_such_flag"]] + ([[str(file), "--help"]] if file.exists() else [])
    result = run_programs(*lines)
    assert result["heavy"] == []
    assert [code for code, _ in result["told"]] == [0, 2, 0][: len(lines)]
    assert "--help" in result["told"][0][1] and "unknown flag" in result["told"][1][1]


def test_bad_values_are_refused_without_a_heavy_package():
    train = ["--pretrain", "m", "--dataset", "d"]
    result = run_programs(
        ["openrlhf.cli.train_rm", *train, "--loss", "hinge"],
        ["openrlhf.cli.train_sft", *train, "--lora_rank", "4"],
        ["openrlhf.cli.train_ppo", *train, "--advantage_estimator", "rlo"],
        ["openrlhf.cli.eval_rm", "--reward_model_path", "m"],
        ["openrlhf.cli.get_representation", "--dataset", "d"],
        ["openrlhf.cli.inspect_response", "--prompt", "p"],
        ["openrlhf.cli.probe_states", "--reward_model_path", "m"],
        ["openrlhf.cli.lora_combiner", "--lora_path", "nowhere"],
        ["openrlhf.cli.metrics", "--scored_path", "nowhere"],
        ["openrlhf.cli.grade", "--input", "nowhere.jsonl"],
        ["openrlhf.cli.quickstart", "--seeds", "one"],
        ["openrlhf.cli.data_setup", "--output", "x.jsonl"],
        ["openrlhf.cli.serve_rm", "--port", "5000"],
        ["openrlhf.cli.rl_report", "one", "other"],
        ["decoding.generate", "--methods", "beam"],
    )
    assert [code for code, _ in result["told"]] == [1] * 15
    assert all("error: " in text for _, text in result["told"])
    assert result["heavy"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_are_those_of_hf_argument_parser(command):
    """transformers' own parser of dataclasses is the reference for names, aliases, defaults and kinds."""

    def described(parser: argparse.ArgumentParser) -> dict:
        names = ("dest", "nargs", "const", "required", "choices", "default", "help")
        return {  # of --no_NAME, default and help are ours: the flag itself tells both
            tuple(action.option_strings): {
                name: getattr(action, name) for name in names[: 5 if action.const is False else None]
            }
            for action in parser._actions
            if action.dest not in ("help", "config")
        }

    assert described(build_parser(config_class(command))) == described(HfArgumentParser(config_class(command)))


@dataclasses.dataclass(frozen=True)
class Switches:
    """A switch that is on by default."""

    shuffle: bool = flag(True, "Mix the rows")
    sizes: list[int] | None = flag(None, "Sizes")
    name: str = dataclasses.field(metadata={"help": "Needed"}, kw_only=True)


def test_a_switch_that_is_on_can_be_put_off(capsys):
    assert parse_config(Switches, ["--name", "x"]).shuffle is True
    assert parse_config(Switches, ["--name", "x", "--no_shuffle"]).shuffle is False
    assert parse_config(Switches, ["--name", "x", "--shuffle", "no"]).shuffle is False
    assert parse_config(Switches, ["--name", "x", "--sizes", "1", "2"]).sizes == [1, 2]
    for words, told in (([], "required: --name"), (["--name", "x", "--shuffle", "maybe"], "expected true or false")):
        with pytest.raises(SystemExit):
            parse_config(Switches, words)
        assert told in capsys.readouterr().err


def test_a_field_that_no_word_can_fill_is_refused():
    for kind in (dict[str, int], int | str):
        with pytest.raises(TypeError, match="flag x"):
            build_parser(dataclasses.make_dataclass("Odd", [("x", kind, flag(None, "odd"))]))


def test_names_that_flags_accept_are_those_of_the_tables():
    assert set(trainer_config.PAIR_LOSSES) == set(losses.PAIR_LOSSES)
    assert set(trainer_config.CONTRASTIVE_STRATEGIES) == set(goal_contrastive.CONTRASTIVE_STRATEGIES)
    assert trainer_config.STARTS == goal_contrastive.STARTS
    assert trainer_config.GOAL_SAMPLINGS == goal_sampling.GOAL_SAMPLINGS
    assert set(trainer_config.REDUCTIONS) == set(goal_contrastive.REDUCTIONS)
    assert set(trainer_config.VALUE_HEADS) == set(reward_model.VALUE_HEADS)


class CountRandomNumbers(TorchDispatchMode):
    """Numbers drawn into real memory; those on the meta device cost nothing."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("normal_", "uniform_", "trunc_normal_") and not args[0].is_meta:
            self.count += args[0].numel()
        return function(*args, **(kwargs or {}))


def test_weights_of_a_checkpoint_are_not_drawn_first(tmp_path):
    """A reward checkpoint draws nothing; a language model only its new head, which transformers draws before us."""
    tokenizer = tiny_tokenizer()
    (tmp_path / "reward").mkdir()
    save_reward_model(tmp_path / "reward", tiny_reward_model(), tokenizer)
    with CountRandomNumbers() as drawn:
        model = load_reward_model(tmp_path / "reward")
    assert drawn.count == 0
    start = save_tiny_causal_lm(tmp_path / "start")
    with CountRandomNumbers() as drawn:
        model = load_reward_model(start, allow_missing_head=True)
    assert drawn.count <= 2 * model.hidden_size
    with CountRandomNumbers() as drawn:
        torch.nn.Linear(8, 8)
    assert drawn.count == 8 * 8 + 8  # the count sees an ordinary layer
