"""Every documented command is accepted by the parser of its program."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from decoding.config import DecodingConfig
from openrlhf.cli import train_rm
from openrlhf.cli.eval_rm import EvalRMConfig
from openrlhf.cli.get_representation import RepresentationConfig
from openrlhf.cli.grade import GradeConfig
from openrlhf.cli.inspect_response import InspectConfig
from openrlhf.cli.metrics import MetricsConfig
from openrlhf.cli.parser import parse_config
from openrlhf.cli.probe_states import ProbeConfig
from openrlhf.cli.serve_rm import ServeConfig
from openrlhf.trainer.config import TrainRMConfig, validate
from openrlhf.trainer.ppo_config import PPOConfig, validate_ppo

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "train_rm": TrainRMConfig,
    "get_representation": RepresentationConfig,
    "eval_rm": EvalRMConfig,
    "metrics": MetricsConfig,
    "grade": GradeConfig,
    "inspect_response": InspectConfig,
    "probe_states": ProbeConfig,
    "serve_rm": ServeConfig,
    "train_ppo": PPOConfig,
    "generate": DecodingConfig,
}
LAUNCH_SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("run_scripts", "decoding")
    for path in (ROOT / folder).glob("*.sh")
    if "launch.sh" in path.read_text() and path.name != "launch.sh"
)


def readme_commands() -> list[str]:
    """Joined lines of the README's shell blocks that start one of our programs."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").split("\n")]
    return [line for line in lines if program_of(line)]


def program_of(line: str) -> str | None:
    found = re.search(r"(?:examples/|decoding/|openrlhf\.cli\.)(\w+)", line)
    return found.group(1) if found and found.group(1) in CONFIGS else None


def words_after_program(line: str) -> list[str]:
    line = re.sub(r"<[^<>]*>", "pocket", line.split("#")[0])
    words = shlex.split(line)
    return words[next(i for i, word in enumerate(words) if program_of(word)) + 1 :]


def test_the_readme_holds_the_commands_of_every_job():
    programs = [program_of(line) for line in readme_commands()]
    assert programs.count("train_rm") >= 5 and programs.count("eval_rm") >= 4 and set(CONFIGS) <= set(programs)


@pytest.mark.parametrize("line", readme_commands())
def test_readme_commands_parse(line):
    config = parse_config(CONFIGS[program_of(line)], words_after_program(line))
    assert isinstance(config, CONFIGS[program_of(line)])
    if isinstance(config, TrainRMConfig):
        validate(config)
    elif isinstance(config, PPOConfig):
        validate_ppo(config)
    elif isinstance(config, EvalRMConfig | DecodingConfig):
        config.validate()


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in readme_commands() if program_of(line) == "train_rm"])
def test_readme_training_commands_pass_a_dry_run_on_pocket(line, tmp_path_factory, capsys, monkeypatch):
    """Models and data sets become pocket, everything else stays as printed; few pairs, sampled once for all."""
    monkeypatch.setenv("OPENRLHF_CACHE", str(tmp_path_factory.getbasetemp() / "pocket"))
    words = words_after_program(line)
    for flag in ("--pretrain", "--model.model_name_or_path", "--dataset", "--data.dataset"):
        if flag in words:
            words[words.index(flag) + 1] = "pocket"
    train_rm.main([*words, "--max_samples", "140", "--dry_run"])
    printed = capsys.readouterr().out
    assert "140 training examples" in printed and "How many" in printed


@pytest.mark.parametrize("name", LAUNCH_SCRIPTS)
@pytest.mark.parametrize("first", [[], ["slurm"]])
def test_run_scripts_print_a_command_that_parses(name, first):
    environment = {**os.environ, "LAUNCH": "printf %s\\n"}
    script = ["bash", str(ROOT / name), *first, "--seed", "7"]
    printed = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, cwd="/").stdout
    program, *words = printed.split("\n")[:-1]
    config = parse_config(CONFIGS[Path(program).stem], words)
    assert config.seed == 7
    if isinstance(config, TrainRMConfig):
        validate(config)
    elif isinstance(config, DecodingConfig):
        config.validate()


def test_no_line_ends_in_a_backslash_and_a_blank():
    texts = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("decoding/*.md"),
        *ROOT.glob("decoding/*.sh"),
        *ROOT.glob("run_scripts/*.sh"),
        *ROOT.glob("build_scripts/*.sh"),
    ]
    assert len(texts) > 10
    for path in texts:
        assert not re.search(r"\\[ \t]+$", path.read_text(), flags=re.MULTILINE), path


def test_the_file_tree_of_the_readme_names_every_file():
    tree = re.search(r"```text\n(openrlhf/\n.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL).group(1)
    named = {line.split()[0] for line in tree.split("\n") if line.strip()}
    folders = ("openrlhf", "decoding", "examples", "run_scripts", "build_scripts", "benchmarks", "docs", "tests")
    files = [path for folder in folders for end in ("py", "sh", "md") for path in (ROOT / folder).rglob(f"*.{end}")]
    missing = [str(path.relative_to(ROOT)) for path in files if path.name not in named and path.name != "__init__.py"]
    assert not missing
