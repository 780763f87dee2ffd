"""One measured run of TRL's GRPOTrainer; started by bench_rl.py in the environment of the peer.

Reads settings as JSON from the command line and prints figures as JSON. Imports nothing of this project but
measuring.py and rl_reward.py beside it: the peer has an environment of its own.
"""

from __future__ import annotations

import json
import sys
import time

from measuring import forget_peak
from rl_reward import reward_func


def train(settings: dict, prompts: str) -> dict:
    """One pass over the prompts, from the start of the model's weights.

    Args:
        settings: model (folder of a language model), micro (responses of a pass), update (responses of an optimizer
            step), rollout (responses sampled together), samples (of a prompt), max_tokens, gradient_checkpointing,
            learning_rate, scratch (folder).
        prompts: json lines with prompt and answer.
    Returns:
        seconds (wall clock) and cpu_seconds from the start of the training to the end of its last update; samples,
        tokens that were sampled, prompt_tokens (of every response) and updates by then; memory in MiB, mean reward, and
        wall seconds by part.
    """
    import datasets
    import torch
    from peer_clock import PeerClock
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    counted = {"samples": 0, "tokens": 0, "reward": 0.0}
    parts = {"sampling": 0.0, "reward": 0.0}

    def counting(prompts, completions, completion_ids, answer, **kwargs):
        start = time.perf_counter()
        rewards = reward_func(prompts, completions, answer)
        parts["reward"] += time.perf_counter() - start
        counted["samples"] += len(completions)
        counted["tokens"] += sum(map(len, completion_ids))
        counted["reward"] += sum(rewards)
        return rewards

    arguments = GRPOConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["micro"],
        gradient_accumulation_steps=settings["update"] // settings["micro"],
        generation_batch_size=settings["rollout"],
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        gradient_checkpointing=settings["gradient_checkpointing"],
        num_train_epochs=1,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        use_vllm=False,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    clock = PeerClock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=counting,
        args=arguments,
        train_dataset=datasets.load_dataset("json", data_files=prompts, split="train", cache_dir=settings["scratch"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[clock],
    )
    generate = trainer._generate_single_turn

    def timed(*words):
        start = time.perf_counter()
        drawn = generate(*words)
        parts["sampling"] += time.perf_counter() - start
        return drawn

    trainer._generate_single_turn = timed
    trainer.train()
    measured = clock.figures()
    return {
        **measured,
        "samples": counted["samples"],
        "tokens": counted["tokens"],
        "prompt_tokens": int(trainer.state.num_input_tokens_seen) - counted["tokens"],
        "updates": int(trainer.state.global_step),
        "reward": counted["reward"] / counted["samples"],
        "parts": {**parts, "training": measured["seconds"] - sum(parts.values())},
    }


def main(settings: dict) -> None:
    """Warm up by a run of its own, then measure one."""
    import torch

    torch.set_num_threads(settings["threads"])
    train(settings, settings["warmup"])
    forget_peak()
    print(json.dumps(train(settings, settings["prompts"])))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
