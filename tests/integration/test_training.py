"""Whole training runs of tiny models on the CPU."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.cli import lora_combiner, train_sft
from openrlhf.models.pretrained import load_reward_model, load_tokenizer
from openrlhf.models.reward_model import read_settings
from openrlhf.trainer.reward_trainer import RewardTrainer
from openrlhf.utils.storage import download_dir
from tests.runs import ROOT, arguments, curve, largest_difference, train, weights, write_pairs
from tests.tiny import save_tiny_causal_lm, tiny_reward_model, tiny_tokenizer


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.jsonl")


@pytest.fixture(scope="module")
def trained(start, pairs, tmp_path_factory):
    """One finished contrastive run."""
    out = tmp_path_factory.mktemp("run") / "model"
    figures = train(start, pairs, out, max_epochs=4, wandb_project="x")
    return out, figures


def test_a_separable_set_is_learned(trained):
    out, figures = trained
    assert figures["accuracy"] == 1.0 and figures["pairs"] == 8
    steps = curve(out)
    assert sorted(steps) == list(range(1, 21))  # 40 training pairs x 4 epochs / 8
    assert steps[20]["preference_loss"] < 0.5 * steps[1]["preference_loss"]
    assert steps[20]["contrastive_loss"] < steps[1]["contrastive_loss"]
    assert steps[20]["learning_rate"] == pytest.approx(1e-3, rel=0.1)  # one step before the floor, a tenth of the peak
    assert sorted(curve(out, "eval")) == [5, 10, 15, 20]  # end of each epoch


def test_loss_is_the_sum_of_its_logged_terms(trained):
    for line in curve(trained[0]).values():
        assert line["loss"] == pytest.approx(line["preference_loss"] + 0.5 * line["contrastive_loss"], abs=1e-5)


def test_checkpoint_records_the_run(trained):
    out, figures = trained
    settings = read_settings(load_reward_model(out).config)
    assert settings["template"] == "plain" and settings["strategy"] == "contrastive"
    assert settings["reward_mean"] == pytest.approx(figures["reward_mean"])
    assert settings["reward_std"] == pytest.approx(figures["reward_std"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "finished" and manifest["config"]["train_batch_size"] == 8
    assert manifest["data"]["counts"]["kept"] == 40
    card = (out / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card and "accuracy" in card


def test_transformers_gives_our_rewards_in_any_batch(trained):
    out, _ = trained
    ours, theirs = load_reward_model(out).eval(), AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = [
        "what is 4 plus 5\nthe answer is good</s>",
        "what is 1\nbad</s>",
        "what is 1\nthe answer is the answer is bad</s>",
    ]
    for side in ("right", "left"):
        batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            alone = torch.stack([ours(**_single(tokenizer, text)).reward[0] for text in texts])
            assert (theirs(**batch).logits[:, 0] - alone).abs().max() < 1e-5
            assert (ours(batch.input_ids, batch.attention_mask).reward - alone).abs().max() < 1e-5
    assert alone.std() > 0.1


def _single(tokenizer, text):
    encoded = tokenizer(text, return_tensors="pt")
    return {"input_ids": encoded.input_ids, "attention_mask": encoded.attention_mask}


def test_accumulation_does_not_change_the_result(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "whole", micro_train_batch_size=8)
    train(start, pairs, tmp_path / "split", micro_train_batch_size=2)
    # Adam divides near-zero gradients by their own size, so that rounding of the sum shows in the weights.
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "split")) < 1e-4
    for step, line in curve(tmp_path / "whole").items():
        assert line["loss"] == pytest.approx(curve(tmp_path / "split")[step]["loss"], abs=1e-5)


def test_gradient_checkpointing_does_not_change_the_result(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "plain", max_epochs=1)
    train(start, pairs, tmp_path / "saved", max_epochs=1, gradient_checkpointing=True)
    assert largest_difference(weights(tmp_path / "plain"), weights(tmp_path / "saved")) < 1e-5


class Stop(Exception):
    """Stands for a killed process."""


def stop_at(stop: int, monkeypatch) -> None:
    """Make the training step of update ``stop`` (from 0) end the run."""
    real_step = RewardTrainer.train_step

    def step_or_stop(self, step):
        if step == stop:
            raise Stop
        return real_step(self, step)

    monkeypatch.setattr(RewardTrainer, "train_step", step_or_stop)


def test_resume_equals_the_unbroken_run(start, pairs, tmp_path, monkeypatch):
    train(start, pairs, tmp_path / "whole")
    stop_at(6, monkeypatch)
    with pytest.raises(Stop):
        train(start, pairs, tmp_path / "broken", save_steps=2, max_ckpt_num=2)
    monkeypatch.undo()
    checkpoints = tmp_path / "broken-checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == ["step-00000004", "step-00000006"]
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    train(start, pairs, tmp_path / "broken", save_steps=2, max_ckpt_num=2, load_checkpoint=True)
    assert largest_difference(weights(tmp_path / "whole"), weights(tmp_path / "broken")) == 0.0
    whole, resumed = curve(tmp_path / "whole"), curve(tmp_path / "broken")
    assert sorted(whole) == sorted(resumed)
    assert all(whole[step]["loss"] == resumed[step]["loss"] for step in whole)


def test_vanilla_run_logs_no_goal_term_and_mlp_head_survives(start, pairs, tmp_path):
    figures = train(
        start, pairs, tmp_path / "v", reward_model_strategy="vanilla", value_head_strategy="mlp", loss="logexp"
    )
    assert "contrastive_loss" not in figures
    assert read_settings(load_reward_model(tmp_path / "v").config)["value_head"] == "mlp"


@pytest.mark.parametrize(
    "changes",
    [
        {"contrastive_strategy": "cosine_avg"},
        {"contrastive_strategy": "infonce", "contrastive_start": "diverge", "goal_stop_gradient": True},
        {"contrastive_strategy": "infonce_batch", "contrastive_start": "goals_diverge"},
        {"contrastive_strategy": "goal_margin", "goal_sampling": "last"},
        {"contrastive_strategy": "value", "goal_sampling": "geometric", "contrastive_loss_beta_end": 0.0},
        {"contrastive_reduction": "original", "source_state_percentile": 0.2, "goal_state_percentile": 0.9},
        {"bf16": True},
        {"center_rewards_coefficient": 0.01},
        {"eval_fraction": 0},
    ],
)
def test_variants_run_and_stay_finite(changes, start, pairs, tmp_path):
    train(start, pairs, tmp_path / "v", max_epochs=1, **changes)
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in curve(tmp_path / "v").values())
    load_reward_model(tmp_path / "v", dtype=None)


def test_margin_is_used_only_when_asked_for(start, tmp_path):
    rows = [
        json.loads(line) | {"margin": 2.0} for line in write_pairs(tmp_path / "m.jsonl").read_text().split("\n") if line
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(start, tmp_path / "m.jsonl", tmp_path / "without", max_epochs=1)
    train(start, tmp_path / "m.jsonl", tmp_path / "with", max_epochs=1, margin_loss=True)
    # first step: rewards are near 0, so -log sigmoid(-2) = 2.1269 instead of ln 2 = 0.6931
    assert curve(tmp_path / "without")[1]["preference_loss"] == pytest.approx(0.6931, abs=0.05)
    assert curve(tmp_path / "with")[1]["preference_loss"] == pytest.approx(2.1269, abs=0.1)


def test_best_model_is_kept(start, pairs, tmp_path, monkeypatch):
    losses = iter([0.5, 0.2, 0.9, 0.8])
    real = RewardTrainer.evaluate
    monkeypatch.setattr(RewardTrainer, "evaluate", lambda self: {**real(self), "loss": next(losses)})
    train(start, pairs, tmp_path / "best", max_epochs=4, save_best=True)
    monkeypatch.undo()
    train(start, pairs, tmp_path / "all", max_epochs=4, save_steps=10, save_hf_ckpt=True)
    after_two_epochs = weights(tmp_path / "all-checkpoints" / "step-00000010" / "model")
    assert largest_difference(weights(tmp_path / "best"), after_two_epochs) == 0.0


def test_lora_saves_its_head_and_merges_to_equal_scores(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "lora", lora_rank=4, max_epochs=1)
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    adapter = load_reward_model(tmp_path / "lora").eval()
    words = ["--lora_path", str(tmp_path / "lora"), "--output_path", str(tmp_path / "merged")]
    lora_combiner.main(words)
    merged = load_reward_model(tmp_path / "merged").eval()
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    ids = torch.tensor([[5, 6, 7, 2]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        reward = adapter(ids, mask).reward
        assert (merged(ids, mask).reward - reward).abs().max() < 1e-6
        assert (theirs(input_ids=ids, attention_mask=mask).logits[:, 0] - reward).abs().max() < 1e-6
        untrained = load_reward_model(start, allow_missing_head=True, seed=1).eval()
        assert (untrained(ids, mask).reward - reward).abs().max() > 1e-4
    assert read_settings(merged.config)["strategy"] == "contrastive"


def test_offline_wandb_run(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "w", max_epochs=1, use_wandb="offline")
    assert list((tmp_path / "w" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert (tmp_path / "w" / "model.safetensors").is_file()


def save_tiny_mixture(folder):
    """A language model with four experts of which two are used."""
    config = AutoConfig.for_model(
        "mixtral", vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_experts_balance_loss_is_added_and_logged(start, pairs, tmp_path):
    mixture = save_tiny_mixture(tmp_path / "moe")
    train(mixture, pairs, tmp_path / "out", max_epochs=1, aux_loss_coef=0.1)
    for line in curve(tmp_path / "out").values():
        # 4 experts, 2 used: sum over experts of 4 * share * probability is 2 when balanced, more when not
        assert 1.9 < line["aux_loss"] < 8
        expected = line["preference_loss"] + 0.5 * line["contrastive_loss"] + 0.1 * line["aux_loss"]
        assert line["loss"] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="mixture-of-experts"):
        train(start, pairs, tmp_path / "dense", max_epochs=1, aux_loss_coef=0.1)


@pytest.fixture(scope="module")
def bucket():
    """A bucket of a local S3 server; the usual AWS environment variables point to it."""
    boto3 = pytest.importorskip("boto3")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="finished-models")
        yield "finished-models"
    server.stop()


def test_final_model_is_uploaded_and_loads_from_the_download(start, pairs, tmp_path, bucket):
    train(start, pairs, tmp_path / "out", max_epochs=1, s3_save_path=f"s3://{bucket}/runs/one")
    download_dir(f"s3://{bucket}/runs/one", tmp_path / "back")
    assert largest_difference(weights(tmp_path / "out"), weights(tmp_path / "back")) == 0.0
    load_reward_model(tmp_path / "back")
    with pytest.raises(ValueError, match="nowhere"):
        train(start, pairs, tmp_path / "none", s3_save_path="s3://nowhere/x")
    assert not (tmp_path / "none").exists()  # refused before training


def test_a_new_pad_token_trains_and_scores(start, pairs, tmp_path):
    for out, lora in ((tmp_path / "full", None), (tmp_path / "lora", 4)):
        train(start, pairs, out, max_epochs=1, pad_token="<new>", lora_rank=lora)
        model, tokenizer = load_reward_model(out).eval(), load_tokenizer(out)
        assert model.config.pad_token_id == tokenizer.pad_token_id == 320
        batch = tokenizer(["good", "what is the answer"], padding=True, return_tensors="pt")
        with torch.no_grad():
            alone = model(torch.tensor([tokenizer("good").input_ids]), torch.ones(1, 1)).reward
            assert (model(batch.input_ids, batch.attention_mask).reward[0] - alone).abs() < 1e-5


def test_bf16_checkpoint_says_so(start, pairs, tmp_path):
    train(start, pairs, tmp_path / "out", max_epochs=1, bf16=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert weights(tmp_path / "out")["score.weight"].dtype == torch.bfloat16
    assert next(load_reward_model(tmp_path / "out", dtype=None).parameters()).dtype == torch.bfloat16


def test_rewards_are_not_rounded_under_bf16():
    model = tiny_reward_model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rewards = model(torch.randint(3, 300, (64, 4)), torch.ones(64, 4)).reward
    assert rewards.dtype == torch.float32
    assert not torch.equal(rewards, rewards.bfloat16().float())  # finer than bfloat16


def test_resume_between_logged_steps_keeps_the_mean(start, pairs, tmp_path, monkeypatch):
    train(start, pairs, tmp_path / "whole", logging_steps=5)
    stop_at(7, monkeypatch)
    with pytest.raises(Stop):
        train(start, pairs, tmp_path / "broken", logging_steps=5, save_steps=1)
    monkeypatch.undo()
    train(start, pairs, tmp_path / "broken", logging_steps=5, save_steps=1, load_checkpoint=True)
    assert curve(tmp_path / "broken")[10]["loss"] == curve(tmp_path / "whole")[10]["loss"]


def test_sft_learns_answers_only_and_resumes(start, tmp_path):
    lines = [{"question": f"what is {i} plus {i}", "answer": "the answer is good"} for i in range(32)]
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--pretrain", str(start), "--dataset", str(tmp_path / "sft.jsonl"), "--save_path", str(tmp_path / "out")]
    words += [
        "--train_batch_size",
        "8",
        "--micro_train_batch_size",
        "4",
        "--learning_rate",
        "1e-2",
        "--max_epochs",
        "16",
    ]
    train_sft.main([*words, "--eval_fraction", "0.25"])
    steps = curve(tmp_path / "out")
    assert steps[max(steps)]["loss"] < 0.1 * steps[1]["loss"]
    assert steps[1]["tokens"] == 8 * 5  # the, answer, is, good and EOS
    assert curve(tmp_path / "out", "eval")[max(steps)]["loss"] < 0.5


def test_module_is_importable_from_examples(start, pairs, tmp_path):
    from tests.runs import ROOT, command

    words = arguments(start, pairs, tmp_path / "o", dry_run=True)
    process = command(str(ROOT / "examples" / "train_rm.py"), *words, stdout=-1, stderr=-1)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "10 optimizer steps of 8" in out


def test_one_process_runs_do_not_import_deepspeed(tmp_path):
    """accelerate would import it when a model is saved; it takes seconds and prints a warning on a CPU."""
    start, data = save_tiny_causal_lm(tmp_path / "start"), write_pairs(tmp_path / "d.jsonl", 16)
    program = (
        "import json, sys\n"
        "from openrlhf.cli import train_rm, train_sft\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    {'rm': train_rm, 'sft': train_sft}[words[0]].main(words[1:])\n"
        "assert 'torch' in sys.modules and 'deepspeed' not in sys.modules\n"
    )
    short = {"max_epochs": 1, "eval_fraction": 0.25}
    runs = [
        ["rm", *arguments(start, data, tmp_path / "full", save_steps=1, **short)],
        ["rm", *arguments(start, data, tmp_path / "lora", lora_rank=2, **short)],
        ["sft", *arguments(start, data, tmp_path / "sft", reward_model_strategy=None, output_key="correct", **short)],
    ]
    command = [sys.executable, "-c", program, json.dumps([[str(word) for word in words] for words in runs])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name / "manifest.json").is_file() for name in ("full", "lora", "sft"))
