"""Flags: spellings, files, nearest names; and mistakes that must stop a run before anything is loaded."""

import dataclasses
import json

import pytest

from openrlhf.cli import train_rm
from openrlhf.cli.parser import build_parser, parse_config
from openrlhf.trainer.config import TrainRMConfig, TrainSFTConfig, validate
from tests.tiny import save_tiny_causal_lm

NEEDED = ["--pretrain", "m", "--dataset", "d", "--save_path", "s"]

# flat name, dotted name, a value
DOTTED = [
    ("save_path", "ckpt.output_dir", "x"),
    ("ckpt_path", "ckpt.path", "x"),
    ("save_steps", "ckpt.save_steps", "7"),
    ("max_ckpt_num", "ckpt.max_num", "7"),
    ("max_ckpt_mem", "ckpt.max_mem", "7"),
    ("logging_steps", "logger.logging_steps", "7"),
    ("eval_steps", "eval.steps", "7"),
    ("eval_dataset", "eval.dataset", "x"),
    ("eval_split", "eval.split", "x"),
    ("use_wandb", "logger.wandb.key", "x"),
    ("wandb_project", "logger.wandb.project", "x"),
    ("use_tensorboard", "logger.tensorboard_dir", "x"),
    ("seed", "train.seed", "7"),
    ("max_epochs", "train.max_epochs", "7"),
    ("train_batch_size", "train.batch_size", "7"),
    ("micro_train_batch_size", "train.micro_batch_size", "7"),
    ("zero_stage", "ds.zero_stage", "3"),
    ("zpg", "ds.zpg", "2"),
    ("grad_accum_dtype", "ds.grad_accum_dtype", "fp32"),
    ("param_dtype", "ds.param_dtype", "bf16"),
    ("attn_implementation", "ds.attn_implementation", "sdpa"),
    ("lora_rank", "ds.lora.rank", "7"),
    ("lora_alpha", "ds.lora.alpha", "7"),
    ("lora_dropout", "ds.lora.dropout", "0.1"),
    ("pretrain", "model.model_name_or_path", "x"),
    ("learning_rate", "adam.lr", "0.1"),
    ("l2", "adam.weight_decay", "0.1"),
    ("loss", "model.loss_type", "logexp"),
    ("aux_loss_coef", "model.aux_loss_coef", "0.1"),
    ("dataset", "data.dataset", "x"),
    ("dataset_probs", "data.dataset_probs", "x"),
    ("prompt_key", "data.prompt_key", "x"),
    ("chosen_key", "data.chosen_key", "x"),
    ("rejected_key", "data.rejected_key", "x"),
    ("input_template", "data.input_template", "x"),
    ("max_len", "data.max_len", "7"),
    ("max_samples", "data.max_samples", "7"),
]
DOTTED_SWITCHES = [
    ("load_checkpoint", "ckpt.load_enable"),
    ("save_hf_ckpt", "ckpt.save_hf"),
    ("disable_ds_ckpt", "ckpt.disable_ds"),
    ("full_determinism", "train.full_determinism_enable"),
    ("adam_offload", "ds.adam_offload"),
    ("overlap_comm", "ds.overlap_comm"),
    ("gradient_checkpointing", "model.gradient_checkpointing_enable"),
    ("load_in_4bit", "ds.load_in_4bit"),
    ("margin_loss", "model.margin_loss_enable"),
    ("compute_fp32_loss", "model.compute_fp32_loss_enable"),
    ("apply_chat_template", "data.apply_chat_template"),
]


@pytest.mark.parametrize("flat,dotted,value", DOTTED)
def test_dotted_names_mean_the_flat_ones(flat, dotted, value):
    start = NEEDED[2:] if flat == "pretrain" else NEEDED
    one = parse_config(TrainRMConfig, [*start, f"--{flat}", value])
    two = parse_config(TrainRMConfig, [*start, f"--{dotted}", value])
    assert one == two
    assert getattr(one, flat) != getattr(TrainRMConfig(), flat)


@pytest.mark.parametrize("flat,dotted", DOTTED_SWITCHES)
def test_dotted_switches_mean_the_flat_ones(flat, dotted):
    assert getattr(parse_config(TrainRMConfig, [*NEEDED, f"--{flat}"]), flat) is True
    assert getattr(parse_config(TrainRMConfig, [*NEEDED, f"--{dotted}"]), flat) is True


@pytest.mark.parametrize(
    "words,told",
    [
        (["--learnin_rate", "1"], "did you mean --learning_rate"),
        (["--reward.learning_rate", "1"], "did you mean --learning_rate"),
        (["--train_batch", "64"], "did you mean --train_batch_size"),  # an abbreviation is not accepted
        (["--reward_model_strategy", "contrast"], "invalid choice"),
        (["--seed", "x"], "invalid int"),
        (["--bf16", "--max_epochs", "1", " "], "backslash"),
    ],
)
def test_mistakes_in_flags_are_named(words, told, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainRMConfig, [*NEEDED, *words])
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_yaml_file_sets_defaults_and_flags_override_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("pretrain: m\ntrain:\n  batch_size: 16\n  max_epochs: 3\nbf16: true\nadam_betas: [0.8, 0.9]\n")
    config = parse_config(TrainRMConfig, ["--config", str(file), "--train_batch_size", "32", "--dataset", "d"])
    assert (config.train_batch_size, config.max_epochs, config.bf16, config.pretrain) == (32, 3, True, "m")
    assert config.adam_betas == [0.8, 0.9]


def test_the_printed_configuration_is_a_valid_yaml_file(tmp_path):
    """Nulls and switches that are off mean the default."""
    config = parse_config(TrainRMConfig, [*NEEDED, "--bf16", "--seed", "3"])
    file = tmp_path / "printed.yaml"
    file.write_text(json.dumps(dataclasses.asdict(config)))
    assert parse_config(TrainRMConfig, ["--config", str(file)]) == config
    file.write_text("use_tensorboard: false\nbf16: false\n")
    read = parse_config(TrainRMConfig, [*NEEDED, "--config", str(file)])
    assert read.use_tensorboard is None and read.bf16 is False


@pytest.mark.parametrize("text", ["train_batch: 3\n", "- a\n", "seed: x\n", "seed: ["])
def test_mistakes_in_a_yaml_file_end_with_code_2(text, tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainRMConfig, [*NEEDED, "--config", str(file)])
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_every_flag_has_a_description():
    for config_class in (TrainRMConfig, TrainSFTConfig):
        assert all(
            len(field.metadata["help"]) > 5 or field.name.startswith("wandb")
            for field in dataclasses.fields(config_class)
        )
        assert "--train_batch_size" in build_parser(config_class).format_help()


@pytest.mark.parametrize(
    "changes,told",
    [
        ({"pretrain": None}, "--pretrain"),
        ({"dataset": None}, "--dataset"),
        ({"contrastive_strategy": "cosin"}, "cosine_avg"),
        ({"contrastive_reduction": "mean"}, "original"),
        ({"loss": "hinge"}, "logexp"),
        ({"value_head_strategy": "big"}, "mlp"),
        ({"contrastive_loss": True, "reward_model_strategy": "vanilla"}, "disagree"),
        ({"goal_state_percentile": 1.5}, "0 to 1"),
        ({"contrastive_temperature": 0.0}, "above 0"),
        ({"contrastive_start": "first"}, "goals_diverge"),
        ({"goal_sampling": "far"}, "geometric"),
        ({"goal_discount": 1.0}, "between 0 and 1"),
        ({"contrastive_loss_beta_end": -0.1}, "at least 0"),
        ({"contrastive_loss_beta_end": float("nan")}, "at least 0, got nan"),
        ({"contrastive_loss_beta": float("inf")}, "at least 0, got inf"),
        ({"contrastive_temperature": float("nan")}, "above 0, got nan"),
        ({"contrastive_strategy": "value", "goal_stop_gradient": True}, "compares no goals"),
        ({"contrastive_strategy": "infonce", "contrastive_reduction": "original"}, "belongs to"),
        ({"contrastive_loss": True, "contrastive_strategy": "goal_margin", "batch_tokens": 9}, "goal_margin depends"),
        ({"contrastive_loss": True, "contrastive_strategy": "infonce_batch", "responses_per_prompt": 4}, "knows no"),
        ({"sim_samples": 0}, "at least 1"),
        ({"max_epochs": 0}, "at least 1"),
        ({"learning_rate": 0.0}, "above 0"),
        ({"eval_fraction": 1.0}, "share"),
        ({"zero_stage": 4}, "0, 1, 2 or 3"),
        ({"load_in_4bit": True}, "--lora_rank"),
        ({"flash_attn": True, "attn_implementation": "eager"}, "disagree"),
        ({"max_len": 2}, "at least 3"),
        ({"save_best": True, "eval_fraction": 0.0}, "evaluation data"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"seed": -5}, "seed"),
        ({"learning_rate": float("nan")}, "above 0"),
        ({"lr_scheduler": "reduce_lr_on_plateau"}, "cosine"),
        ({"adam_betas": [0.9, 1.5]}, r"\[0, 1\)"),
        ({"bf16": True, "param_dtype": "fp32"}, "disagree"),
        ({"save_path": ""}, "save_path"),
        ({"disable_ds_ckpt": True, "load_checkpoint": True}, "drop one"),
    ],
)
def test_impossible_settings_are_refused(changes, told):
    settings = TrainRMConfig(**{"pretrain": "m", "dataset": "d", **changes})
    with pytest.raises(ValueError, match=told):
        validate(settings)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("lm")))


def write_pairs(path, count=12):
    lines = [
        f'{{"question": "what is {i}", "correct": "the answer {i}", "incorrect": "bad {i}"}}\n' for i in range(count)
    ]
    path.write_text("".join(lines))
    return str(path)


def run_main(*words) -> int:
    with pytest.raises(SystemExit) as stop:
        train_rm.main(list(words))
    return stop.value.code


@pytest.mark.parametrize(
    "rows,words,told",
    [
        ('{"accepted": "a", "rejected": "b"}\n', ["--chosen_key", "chosen"], ["chosen", "accepted"]),
        ("", [], ["no rows|empty|holds no"]),
        (
            '{"question": "q", "correct": "a", "incorrect": "b"}\n',
            ["--train_batch_size", "8"],
            ["fewer than one batch"],
        ),
        ('{"question": "q", "correct": "a", "incorrect": "b"}\n{"question"\n', [], ["data.jsonl", "2"]),
        ('{"question": "q q q q", "correct": "a", "incorrect": "b"}\n' * 9, ["--max_len", "4"], ["prompt_too_long"]),
        ('{"question": "q", "correct": "a", "incorrect": "b"}\n', ["--margin_loss"], ["margin"]),
    ],
)
def test_bad_data_gives_one_error_and_no_output(rows, words, told, start, tmp_path, capsys):
    import re

    data = tmp_path / "data.jsonl"
    data.write_text(rows)
    words = [
        "--pretrain",
        start,
        "--dataset",
        str(data),
        "--save_path",
        str(tmp_path / "out"),
        "--eval_fraction",
        "0",
        *words,
    ]
    assert run_main(*words) == 1
    error = next(line for line in capsys.readouterr().err.split("\n") if line.startswith("error:"))
    for part in told:
        assert re.search(part, error), error
    assert not (tmp_path / "out").exists()


def test_batch_sizes_that_do_not_divide(start, tmp_path, capsys):
    data = write_pairs(tmp_path / "d.jsonl", 40)
    words = ["--pretrain", start, "--dataset", data, "--save_path", str(tmp_path / "out")]
    assert run_main(*words, "--train_batch_size", "10", "--micro_train_batch_size", "3") == 1
    assert "multiple of --micro_train_batch_size 3" in capsys.readouterr().err


def test_missing_dataset_model_and_unwritable_path(start, tmp_path, capsys):
    data = write_pairs(tmp_path / "d.jsonl")
    assert (
        run_main("--pretrain", start, "--dataset", str(tmp_path / "none.jsonl"), "--save_path", str(tmp_path / "o"))
        == 1
    )
    assert "none.jsonl" in capsys.readouterr().err
    assert run_main("--pretrain", str(tmp_path / "nothing"), "--dataset", data, "--save_path", str(tmp_path / "o")) == 1
    assert "nothing" in capsys.readouterr().err
    file = tmp_path / "file"
    file.write_text("x")
    assert run_main("--pretrain", start, "--dataset", data, "--save_path", str(file / "o")) == 1
    assert str(file) in capsys.readouterr().err


def test_nothing_of_the_user_is_replaced(start, tmp_path, capsys):
    data = write_pairs(tmp_path / "d.jsonl")
    words = ["--pretrain", start, "--dataset", data]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").write_text("keep me")
    assert run_main(*words, "--save_path", str(tmp_path / "mine")) == 1
    assert (
        "notes.md and no manifest.json" in capsys.readouterr().err
        and (tmp_path / "mine" / "notes.md").read_text() == "keep me"
    )
    assert run_main(*words, "--save_path", start) == 1
    assert "which this run reads" in capsys.readouterr().err
    assert run_main(*words, "--save_path", str(tmp_path)) == 1  # the data lies in it
    assert "which this run reads" in capsys.readouterr().err
    inside = ["--save_path", str(tmp_path / "o"), "--ckpt_path", str(tmp_path / "o" / "checkpoints")]
    assert run_main(*words, *inside) == 1
    assert "lies inside --save_path" in capsys.readouterr().err


def test_pad_token_equal_to_eos(start, tmp_path, capsys):
    data = write_pairs(tmp_path / "d.jsonl")
    words = ["--pretrain", start, "--dataset", data, "--save_path", str(tmp_path / "o"), "--pad_token", "</s>"]
    assert run_main(*words) == 1
    assert "must differ from EOS" in capsys.readouterr().err


def test_four_bit_without_bitsandbytes_names_the_package(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    data = write_pairs(tmp_path / "d.jsonl")
    words = ["--pretrain", start, "--dataset", data, "--save_path", str(tmp_path / "o"), "--train_batch_size", "8"]
    assert run_main(*words, "--load_in_4bit", "--lora_rank", "4") == 1
    assert "pip install bitsandbytes" in capsys.readouterr().err


def test_flash_attn_without_the_package_says_so_and_trains(start, tmp_path, caplog):
    from openrlhf.cli.common import resolve_attention

    assert resolve_attention(True, None) in ("sdpa", "flash_attention_2")
    if resolve_attention(True, None) == "sdpa":
        assert "flash-attn is not installed" in caplog.text
    assert resolve_attention(False, None) is None


def test_dry_run_prints_settings_and_first_example_and_writes_nothing(start, tmp_path, capsys):
    data = write_pairs(tmp_path / "d.jsonl", 40)
    out = tmp_path / "o"
    words = ["--pretrain", start, "--dataset", data, "--save_path", str(out), "--train_batch_size", "8", "--dry_run"]
    train_rm.main(words)
    printed = capsys.readouterr().out
    assert '"train_batch_size": 8' in printed and "[prompt" in printed and "5 optimizer steps" in printed
    assert not out.exists()


def test_reward_checkpoint_without_head_is_refused(start, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    from openrlhf.models.pretrained import save_reward_model
    from tests.tiny import tiny_reward_model, tiny_tokenizer

    folder = tmp_path / "rm"
    folder.mkdir()
    save_reward_model(folder, tiny_reward_model(), tiny_tokenizer())
    state = load_file(folder / "model.safetensors")
    del state["score.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    data = write_pairs(tmp_path / "d.jsonl", 40)
    words = [
        "--pretrain",
        str(folder),
        "--dataset",
        data,
        "--save_path",
        str(tmp_path / "o"),
        "--train_batch_size",
        "8",
    ]
    assert run_main(*words) == 1
    assert "score.weight" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
