"""Cost of scoring responses while they grow, and speed of drawing them step by step.

    python benchmarks/bench_decode.py                  # a random Llama of 6 million parameters; the pocket policy
    python benchmarks/bench_decode.py --model MODEL --policy MODEL --rows 8 --prompts 8
    python benchmarks/bench_decode.py --quick          # under a minute: a smaller model, one thread, processor time

Scoring: responses of 64, 128, 256 and 512 tokens are scored after every 8 tokens in two ways, in turn, several times:
    cached      what guided decoding does: each token is run through the reward model once (decoding/scoring.py)
    re-encoded  prompt and response are run through it from the start every time
Both give values and goal similarities of all tokens, which are compared. Tokens are those run through the reward model,
prompt included. `ms/token` is the time of a whole response by its tokens: a cost that grows linearly with the length
keeps it, a quadratic one does not. `doubled` is the time by that of half the length: 2 is linear, 4 quadratic.

Drawing: one batch until all rows are over, greedily and at temperature 1, against generate() of transformers with the
same weights, prompts and precision. `steps` stops at every line end, where guided decoding scores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import now

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

VOCABULARY = 512  # of the random model: more than the pocket tokenizer has


def random_reward_model(hidden: int, layers: int):
    """A Llama in memory with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from openrlhf.models.reward_model import RewardModel, initialise_head

    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=3 * hidden, max_position_embeddings=2048, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config)
    initialise_head(network.score, hidden, 0)
    return RewardModel(network).eval()


def score_cached(model, tokenizer, goal, prompts, responses, every: int) -> tuple[int, Any, Any]:
    """Reward-model tokens, and values and similarities (rows, tokens) of responses scored after every few tokens."""
    import numpy as np

    from decoding.scoring import PrefixScorer, RowText

    scorer = PrefixScorer(model, tokenizer, [goal], prompts, same_tokens=True)
    for end in range(every, len(responses[0]) + 1, every):
        scorer.extend([RowText(ids[:end], "", False) for ids in responses])
    scores = [scorer.scores(row) for row in range(len(prompts))]
    tokens = scorer.reward_tokens + scorer.prompt_tokens
    return tokens, np.stack([one.values for one in scores]), np.stack([one.similarities[:, 0] for one in scores])


def score_again(model, tokenizer, goal, prompts, responses, every: int) -> tuple[int, Any, Any]:
    """The same by a pass over prompts and responses every time; prompts of equal length need no padding."""
    import torch

    from openrlhf.evaluation.goal_state import goal_similarity

    ids = torch.tensor([[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)])
    ids, vector, tokens = ids.to(model.device), torch.from_numpy(goal).to(model.device), 0
    for end in range(len(prompts[0]) + every, ids.shape[1] + 1, every):
        with torch.inference_mode():
            out = model(ids[:, :end], torch.ones_like(ids[:, :end]))
            similarities = goal_similarity(out.hidden_states[:, len(prompts[0]) :], vector)
        tokens += ids[:, :end].numel()
    return tokens, out.values[:, len(prompts[0]) :].cpu().numpy(), similarities.cpu().numpy()


def measure(ways: dict[str, Callable[[], Any]], repeats: int, clock: str) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each way and what it gave last; the ways run in turn, once before the first one counts."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    given = {}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            start = now()
            given[name] = run()
            wall, cpu = (after - before for before, after in zip(start, now(), strict=True))
            if turn:
                seconds[name].append(wall if clock == "wall" else cpu)
    return {name: statistics.median(times) for name, times in seconds.items()}, given


def bench_scoring(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A record a length; prints the table."""
    import numpy as np

    from openrlhf.cli.common import POCKET, resolve_pocket_model
    from openrlhf.models.pretrained import load_reward_model, load_tokenizer

    tokenizer = load_tokenizer(arguments.model or resolve_pocket_model(POCKET))
    if arguments.model:
        model = load_reward_model(arguments.model, allow_missing_head=True, pad_token_id=tokenizer.pad_token_id).eval()
    else:
        model = random_reward_model(arguments.hidden_size, arguments.layers)
    rng = np.random.default_rng(0)
    goal = rng.normal(size=(1, model.hidden_size)).astype(np.float32)
    ordinary = sorted(set(range(min(len(tokenizer), VOCABULARY))) - set(tokenizer.all_special_ids))
    prompts, responses = (
        rng.choice(ordinary, (arguments.rows, length)).tolist()
        for length in (arguments.prompt_tokens, max(arguments.lengths))
    )
    print(f"\nscoring {arguments.rows} rows every {arguments.every} tokens behind prompts of {arguments.prompt_tokens}")
    heads = ("seconds", "ms/token", "doubled", "tokens")
    print(f"{'':8}{'cached':>33}{'re-encoded':>36}")
    print(f"{'length':8}" + 2 * ("".join(f"{head:>9}" for head in heads)) + f"{'ratio':>8}{'difference':>12}")
    records: list[dict[str, Any]] = []
    for length in arguments.lengths:
        given = (model, tokenizer, goal, prompts, [ids[:length] for ids in responses], arguments.every)
        ways = {"cached": lambda g=given: score_cached(*g), "re-encoded": lambda g=given: score_again(*g)}
        seconds, found = measure(ways, arguments.repeats, arguments.clock)
        record: dict[str, Any] = {"length": length}
        cells = ""
        for way, time in seconds.items():
            before = records[-1] if records and 2 * records[-1]["length"] == length else None
            record[way] = {
                "seconds": time,
                "ms_per_token": 1000 * time / length / arguments.rows,
                "doubled": time / before[way]["seconds"] if before else None,
                "reward_tokens": found[way][0],
            }
            doubled = f"{record[way]['doubled']:9.2f}" if before else f"{'':9}"
            cells += f"{time:9.3f}{record[way]['ms_per_token']:9.3f}{doubled}{found[way][0]:9}"
        record["ratio"] = seconds["re-encoded"] / seconds["cached"]
        pairs = zip(found["cached"][1:], found["re-encoded"][1:], strict=True)
        record["difference"] = max(float(np.abs(a - b).max()) for a, b in pairs)
        records.append(record)
        print(f"{length:<8}{cells}{record['ratio']:8.1f}{record['difference']:12.1e}", flush=True)
    return records


def bench_drawing(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and tokens of each way of drawing; prints the table."""
    import torch

    from decoding.boundary import StepBoundary
    from decoding.sampling import PolicySession
    from decoding.streams import Stream
    from openrlhf.cli.common import POCKET, resolve_pocket_model
    from openrlhf.datasets.pocket import generate_problems
    from openrlhf.datasets.templates import render_question
    from openrlhf.datasets.tokenize import encode_prompts
    from openrlhf.models.policy import Policy

    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = Policy.from_pretrained(arguments.policy or resolve_pocket_model(POCKET), device)
    chat = bool(policy.tokenizer.chat_template)
    prompts = encode_prompts(
        policy.tokenizer,
        [
            render_question(problem.question, policy.tokenizer, template="plain", apply_chat_template=chat)
            for problem in generate_problems("test", arguments.prompts)
        ],
    )
    streams = [Stream(0, row) for row in range(len(prompts))]

    def draw(temperature: float, boundary: StepBoundary | None) -> tuple[int, list]:
        session = PolicySession(policy, prompts, temperature=temperature, max_tokens=arguments.max_tokens)
        while not all(session.ended):
            session.draw(streams, boundary, arguments.max_tokens)
        return session.policy_tokens, session.ids

    def generate(temperature: float) -> tuple[int, list]:
        found = policy.generate_ids(prompts, temperature=temperature, max_new_tokens=arguments.max_tokens)
        return sum(len(ids) for (ids,) in found), [ids for (ids,) in found]

    newline = StepBoundary("newline")
    ways = {
        f"{name}, {kind}": run
        for kind, temperature in (("greedy", 0.0), ("temperature 1", 1.0))
        for name, run in (
            ("ours", lambda t=temperature: draw(t, None)),
            ("ours in steps", lambda t=temperature: draw(t, newline)),
            ("generate", lambda t=temperature: generate(t)),
        )
    }
    seconds, found = measure(ways, arguments.repeats, arguments.clock)
    if not found["ours, greedy"][1] == found["ours in steps, greedy"][1] == found["generate, greedy"][1]:
        raise SystemExit("greedy responses differ from those of generate()")
    print(f"\ndrawing {len(prompts)} responses of at most {arguments.max_tokens} tokens; greedy ones are equal")
    print(f"{'':30}{'seconds':>9}{'tokens':>9}{'tokens/s':>10}")
    records = {}
    for name, time in seconds.items():
        tokens = found[name][0]
        records[name] = {"seconds": time, "tokens": tokens, "tokens_per_s": tokens / time}
        print(f"{name:30}{time:9.3f}{tokens:9}{tokens / time:10.0f}")
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="reward checkpoint or language model; default: a random Llama made in memory")
    parser.add_argument("--hidden_size", type=int, default=256, help="of the random model")
    parser.add_argument("--layers", type=int, default=8, help="of the random model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512], help="response tokens")
    parser.add_argument("--every", type=int, default=8, help="tokens from score to score")
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1, help="responses scored together")
    parser.add_argument("--policy", help="language model; default: the pocket policy")
    parser.add_argument("--prompts", type=int, default=64, help="responses drawn together")
    parser.add_argument("--max_tokens", type=int, default=64, help="of a response that is drawn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu where other work runs")
    parser.add_argument("--json", help="file for all figures")
    parser.add_argument("--quick", action="store_true", help="a smaller model, one thread, processor time")
    arguments = parser.parse_args()
    if any(length % arguments.every for length in arguments.lengths):
        parser.error(f"--lengths: expected multiples of --every {arguments.every}, got {arguments.lengths}")
    if arguments.quick:
        arguments.hidden_size, arguments.layers = 128, 4
        arguments.threads, arguments.clock = 1, "cpu"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.set_num_threads(arguments.threads)
    scoring, drawing = bench_scoring(arguments), bench_drawing(arguments)
    if arguments.json:
        results = {"scoring": scoring, "drawing": drawing}
        Path(arguments.json).write_text(json.dumps({"settings": vars(arguments), "results": results}, indent=2) + "\n")
    for kind in ("greedy", "temperature 1"):
        ours, theirs = (drawing[f"{name}, {kind}"]["tokens_per_s"] for name in ("ours", "generate"))
        print(f"ratio {ours / theirs:.2f} drawing speed, {kind}, ours against generate()")
    last = scoring[-1]
    print(
        f"ratio {last['ratio']:.2f} scoring {last['length']} tokens every {arguments.every}, cached against re-encoded"
    )


if __name__ == "__main__":
    main()
