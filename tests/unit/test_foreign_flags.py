"""Commands of OpenRLHF's scripts for train_ppo_ray: what train_ppo takes of them, and what it tells of the rest."""

from __future__ import annotations

import pytest

from openrlhf.cli.parser import build_parser, parse_config
from openrlhf.trainer.config import TrainRMConfig
from openrlhf.trainer.foreign_flags import FOREIGN_FLAGS
from openrlhf.trainer.ppo_config import PPOConfig, validate_ppo
from tests.runs import command

# The flags of published scripts; first those that are refused as unknown, then those of DeepSpeed, then the
# others, all of which are taken.
SCRIPTS = {
    "ppo with a reward model, one engine": (
        "--ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 "
        "--critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 "
        "--vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.5 "
        "--packing_samples --vllm_sync_backend nccl --enforce_eager --vllm_enable_sleep --deepspeed_enable_sleep "
        "--use_dynamic_batch --train_max_tokens_per_gpu 16384 --enable_vllm_is_correction",
        "--zero_stage 3",
        "--pretrain m --reward_pretrain r --save_path final --ckpt_path ckpt --save_hf_ckpt --train_batch_size 128 "
        "--rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 --max_samples 100000 "
        "--generate_max_len 1024 --param_dtype bf16 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 "
        "--init_kl_coef 0.01 --prompt_data d --input_key context_messages --apply_chat_template --normalize_reward "
        "--gradient_checkpointing",
    ),
    "dapo with a function": (
        "--ref_num_nodes 1 --actor_num_gpus_per_node 8 --vllm_num_engines 8 --colocate_all_models --packing_samples "
        "--vllm_is_truncated_threshold 0.5 5.0 --vllm_is_correction_type icepop --eval_n_samples_per_prompt 4 "
        "--async_train",
        "--zero_stage 3 --adam_offload",
        "--init_kl_coef 1e-3 --gamma 1.0 --use_kl_loss --kl_estimator k3 --advantage_estimator group_norm "
        "--dynamic_filtering --dynamic_filtering_reward_range 0 1 --eps_clip_low_high 0.2 0.3 --pretrain m "
        "--remote_rm_url reward_func.py --save_path final --ckpt_path ckpt --save_steps 20 --save_hf_ckpt "
        "--micro_train_batch_size 8 --train_batch_size 128 --micro_rollout_batch_size 16 --rollout_batch_size 128 "
        "--n_samples_per_prompt 8 --max_epochs 1 --num_episodes 100 --prompt_max_len 1024 --max_samples 20000 "
        "--generate_max_len 1024 --bf16 --actor_learning_rate 5e-7 --prompt_data d --input_key prompt "
        "--label_key label --apply_chat_template --gradient_checkpointing --eval_dataset e --eval_steps 5 "
        "--eval_temperature 1.0 --stop_properly_penalty_coef 0.0 --overlong_buffer_len 512 "
        "--overlong_penalty_factor 1.0 --use_wandb k",
    ),
    "an async agent": (
        "--vllm_num_engines 2 --async_train --packing_samples --ring_attn_size 2 --ring_head_stride 2 "
        "--rollout_max_tokens_per_gpu 32768 --max_steps 3",
        "--zero_stage 3",
        "--pretrain m --agent_func_path agent_func.py --save_path final --ckpt_path final/ckpt --load_checkpoint "
        "--max_ckpt_num 3 --save_steps 10 --prompt_data d --input_key prompt --label_key label --prompt_max_len 10240 "
        "--generate_max_len 64000 --max_len 74240 --apply_chat_template --rollout_batch_size 128 "
        "--n_samples_per_prompt 8 --train_batch_size 1024 --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0 "
        "--micro_train_batch_size 1 --advantage_estimator reinforce_baseline --actor_learning_rate 5e-7 "
        "--entropy_loss_coef 0.0 --init_kl_coef 1e-5 --use_kl_loss --kl_estimator k2 --use_tensorboard runs "
        "--logging_steps 1 --eval_steps -1",
    ),
    "dotted": (
        "--ref.num_nodes 1 --reward.num_gpus_per_node 4 --critic.num_nodes 1 --actor.num_gpus_per_node 4 "
        "--vllm.num_engines 4 --vllm.enforce_eager --vllm.enable_sleep --train.colocate_all --train.async_enable "
        "--train.agent_async_enable --ds.enable_sleep --ds.packing_samples --ds.ring_attn_size 2 "
        "--ds.ring_attn_head_stride 2 --data.image_key images --data.max_images_per_prompt 4 "
        "--actor.freeze_visual_encoder --vlm_enable",
        "--ds.zero_stage 3 --ds.adam_offload --ds.overlap_comm",
        "--actor.model_name_or_path m --reward.model_name_or_path r --ckpt.output_dir final --ckpt.path ckpt "
        "--ckpt.save_hf --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 "
        "--rollout.batch_size 1024 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 1024 "
        "--data.max_samples 100000 --train.max_epochs 1 --data.max_len 2048 --ds.param_dtype bf16 "
        "--actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --data.prompt_dataset d "
        "--data.input_key context_messages --data.apply_chat_template --reward.normalize_enable "
        "--algo.advantage.estimator group_norm --actor.gradient_checkpointing_enable --ds.attn_implementation sdpa "
        "--logger.logging_steps 1 --eval.steps -1 --logger.wandb.key k --algo.dynamic_filtering_enable "
        "--algo.dynamic_filtering_range 0 1",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_told_all_its_foreign_flags_at_once(name, capsys):
    foreign, deepspeed, taken = (part.split() for part in SCRIPTS[name])
    with pytest.raises(SystemExit) as stop:
        parse_config(PPOConfig, [*foreign, *deepspeed, *taken])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.count("\n") == 1  # one line, without a usage of a hundred flags
    flags = [word for word in foreign if word.startswith("--")]
    groups = [group.split(": ")[0].split(", ") for group in told.split("does not have. ")[1].split("; ")]
    assert sorted(flag for group in groups for flag in group) == sorted(flags)
    # What is left is known; ZeRO 3 alone is refused.
    with pytest.raises(ValueError, match="--zero_stage 3 splits the weights"):
        validate_ppo(parse_config(PPOConfig, [*deepspeed, *taken]))
    stage_2 = ["2" if word == "3" else word for word in deepspeed]
    validate_ppo(parse_config(PPOConfig, [*stage_2, *taken]))
    validate_ppo(parse_config(PPOConfig, taken))


def test_the_name_that_scripts_start_is_there():
    process = command("-m", "openrlhf.cli.train_ppo_ray", "--vllm_num_engines", "4", stdout=-3, stderr=-1)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 2
    assert told.startswith("train_ppo_ray.py: error: drop flags that this command does not have. --vllm_num_engines: ")


def test_the_reason_is_told():
    message = parse_message(["--vllm_num_engines=2", "--packing-samples", "--colocate_all_models"])
    assert "--vllm_num_engines: responses are sampled by the policy itself, without vLLM" in message
    assert "--packing-samples: a forward pass takes --micro_train_batch_size" in message  # dashes as typed
    assert "--colocate_all_models: every process holds all models" in message
    assert parse_message(["--n_samples_per", "2"]).endswith("did you mean --n_samples_per_prompt?")


def parse_message(words: list[str]) -> str:
    return build_parser(PPOConfig).unknown_flag_message(words)


def test_no_flag_of_train_ppo_is_in_the_table():
    """Such an entry would never be read."""
    prefixes = tuple(prefix for group in FOREIGN_FLAGS.values() for prefix in group)
    known = [flag[2:].replace("-", "_") for flag in build_parser(PPOConfig).known_flags()]
    assert [flag for flag in known if flag.startswith(prefixes)] == []


def test_other_commands_have_no_table(capsys):
    with pytest.raises(SystemExit):
        parse_config(TrainRMConfig, ["--pretrain", "m", "--dataset", "d", "--vllm_num_engines", "2"])
    assert "unknown flag --vllm_num_engines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--load_in_4bit --lora_rank 8 --lora_alpha 32", "drop --lora_rank, --load_in_4bit, --lora_alpha"),
        ("--s3_save_path s3://b/x --save_best", "drop --s3_save_path, --save_best"),
        ("--remote_rm_tries 0", "--remote_rm_tries must be at least 1"),
        ("--remote_rm_timeout 0", "--remote_rm_timeout above 0"),
        ("--agent_func_path a.py --prompt_max_len 2048", "leaves an agent no room in an episode of --max_len 2048"),
        (
            "--n_samples_per_prompt 1 --advantage_estimator rloo",
            "raise samples_per_prompt (--n_samples_per_prompt) to 2 or more, or choose reinforce or gae",
        ),
    ],
)
def test_what_is_known_and_not_done_is_refused(words, told):
    config = parse_config(PPOConfig, ["--pretrain", "m", "--prompt_data", "d", *words.split()])
    with pytest.raises(ValueError) as error:
        validate_ppo(config)
    assert told in str(error.value)
