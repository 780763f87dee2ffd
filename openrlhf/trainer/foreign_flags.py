"""Flags of OpenRLHF's train_ppo_ray that train_ppo does not have, flat and dotted, by the reason; see docs/rl.md.

Those that say where models are placed are known to our train_ppo_ray.
"""

from __future__ import annotations

# Reason -> beginnings of names. Names that train_ppo has never come here.
FOREIGN_FLAGS: dict[str, tuple[str, ...]] = {
    "every process holds all models, and deepspeed, torchrun, srun or train_ppo_ray start the processes": (
        *(f"{model}{mark}num_" for model in ("ref", "reward", "critic", "actor") for mark in "_."),
        "colocate_",
        "train.colocate_",
        "deepspeed_enable_sleep",
        "ds.enable_sleep",
        "ref_reward_offload",
        "ref.offload",
        "actor_init_on_gpu",
        "use_ds_universal_ckpt",
        "ckpt.use_ds_universal",
        "ds_tensor_parallel_size",
        "ds.tensor_parallel_size",
        "deepcompile",
        "ds.deepcompile",
    ),
    "responses are sampled by the policy itself, without vLLM, and their log-probabilities are computed anew": (
        "vllm_",
        "vllm.",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_vllm_",
        "algo.advantage.is_correction_",
        "rollout.vllm_",
    ),
    "rollouts and updates take turns, whether an agent is async or not": (
        "async_",
        "train.async_",
        "train.agent_async_enable",
        "partial_rollout",
        "train.partial_rollout",
    ),
    "a forward pass takes --micro_train_batch_size or --micro_rollout_batch_size padded responses": (
        "packing_samples",
        "ds.packing_samples",
        "use_dynamic_batch",
        "train.dynamic_batch_enable",
        "train_max_tokens_per_gpu",
        "train.max_tokens_per_gpu",
        "rollout_max_tokens_per_gpu",
        "rollout.max_tokens_per_gpu",
        "ring_",
        "ds.ring_",
    ),
    "the policy reads text only, no images": (
        "image_key",
        "data.image_key",
        "max_images_per_prompt",
        "data.max_images_per_prompt",
        "freeze_visual_encoder",
        "actor.freeze_visual_encoder",
        "vlm_enable",
    ),
    "an agent's turns are counted in its file, and an episode ends at --max_len tokens": ("max_steps",),
    "held-out prompts get one response each": ("eval_n_samples_per_prompt", "eval.n_samples_per_prompt"),
    "there is no such thing here": (
        "enable_ema",
        "ema_beta",
        "save_value_network",
        "critic.save_value_network",
        "use_liger_kernel",
        "ds.use_liger_kernel",
        "aux_loss_coef",
        "actor.aux_loss_coef",
        "value_head_prefix",
        "ds.value_head_prefix",
        "use_ms",
        "best_metric_key",
        "ckpt.best_metric_key",
    ),
}
