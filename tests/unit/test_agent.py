"""Episodes of agents: tokens, masks, rewards, concurrency, and what a faulty agent gets."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
import time

import numpy as np
import pytest
import torch

from openrlhf.models.generation import Generation, PolicyEngine
from openrlhf.models.policy import Policy
from openrlhf.models.sampling import SamplingParams
from openrlhf.rewards.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, run_episodes
from openrlhf.rewards.agent_calls import AgentError, read_number, read_observation, read_step
from openrlhf.rewards.episode import Episode
from tests.tiny import save_tiny_causal_lm, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Policy:
    return Policy.from_pretrained(save_tiny_causal_lm(tmp_path_factory.mktemp("policy")))


class Script:
    """An engine that says given texts in turn, whatever the prompt; keeps the requests."""

    def __init__(self, *texts, finish_reason="stop"):
        self.texts, self.finish_reason, self.requests = list(texts), finish_reason, []

    async def generate(self, prompt_token_ids, sampling_params):
        self.requests.append((list(prompt_token_ids), copy.copy(sampling_params)))
        text = self.texts[min(len(self.requests), len(self.texts)) - 1]
        ids = TOKENIZER(text).input_ids[: sampling_params.max_tokens]
        return Generation(ids, [-0.5] * len(ids), text, self.finish_reason)


def play(executor, engine, prompts=("how many",), labels=None, params=None, max_length=100, tokenizer=TOKENIZER):
    """Episodes of one executor, or of an agent class."""
    if isinstance(executor, type):
        executor = MultiTurnAgentExecutor(executor)
    labels = labels if labels is not None else [None] * len(prompts)
    return run_episodes(executor, list(prompts), labels, params or SamplingParams(), max_length, tokenizer, engine)


def answers(*steps):
    """An agent class whose n-th step returns (or raises) the n-th of these; the last one for ever."""

    class Agent(AgentInstanceBase):
        def __init__(self):
            self.count = 0

        async def step(self, states):
            self.count += 1
            answer = steps[min(self.count, len(steps)) - 1]
            if isinstance(answer, Exception):
                raise answer
            return answer

    return Agent


def step(reward=0.0, feedback="", done=True, **more):
    return {"rewards": reward, "environment_feedback": feedback, "done": done, **more}


# Tokens and rewards


def test_tokens_of_an_episode_are_those_generated_and_fed_back_in_turn():
    """Tokenised together, "app" + "les" would be the one token "apples"-like merge: here they stay apart."""
    engine = Script("app", "she buys")
    agent = answers(step(1.0, "les plus", done=False), step(0.25, " yes", scores=0.5, extra_logs={"a": 1}))
    [episode] = play(agent, engine)
    parts = [TOKENIZER(text).input_ids for text in ("how many", "app", "les plus", "she buys", " yes")]
    assert list(episode.token_ids) == sum(parts, [])
    assert list(episode.token_ids) != TOKENIZER("how manyapples plusshe buys yes").input_ids
    prompt, first, feedback, second, last = map(len, parts)
    starts = (prompt, prompt + first + feedback)
    assert episode.action_ranges == ((starts[0], starts[0] + first), (starts[1], starts[1] + second))
    assert episode.prompt_ids == tuple(parts[0]) and episode.turns == 2
    mask = [False] * prompt + [True] * first + [False] * feedback + [True] * second + [False] * last
    assert episode.action_mask.tolist() == mask
    assert episode.logprobs == tuple(-0.5 if own else 0.0 for own in mask)
    dense = [0.0] * len(mask)
    dense[starts[0] + first - 1], dense[starts[1] + second - 1] = 1.0, 0.25
    assert episode.dense_rewards.tolist() == dense
    assert episode.reward == 1.25 and episode.step_rewards == (1.0, 0.25)
    assert episode.scores == 0.5 and episode.extra_logs == {"a": 1}
    assert not episode.truncated and episode.ended == "done"
    assert [ids for ids, _ in engine.requests] == [parts[0], sum(parts[:3], [])]


def test_special_tokens_in_feedback_keep_their_ids():
    [episode] = play(answers(step(feedback="</s>yes<s>", done=True)), Script("no"))
    end = episode.action_ranges[0][1]
    assert list(episode.token_ids[end:]) == [2, *TOKENIZER("yes").input_ids, 1]


def test_bos_is_put_before_the_prompt_once_and_never_before_feedback():
    tokenizer = tiny_tokenizer(add_bos=True)
    for prompt in ("how", "<s>how"):
        [episode] = play(answers(step(feedback="yes")), Script("no"), [prompt], tokenizer=tokenizer)
        assert list(episode.token_ids).count(1) == 1 and episode.token_ids[0] == 1


def test_the_first_observation_may_differ_from_the_prompt():
    class Agent(answers(step())):
        def reset(self, states):
            return {"observation": "what is " + states["observation"]}

    [episode] = play(Agent, Script("no"), ["yes"])
    assert list(episode.prompt_ids) == TOKENIZER("what is yes").input_ids and episode.prompt == "yes"


def test_states_that_an_agent_gets():
    seen = []

    class Agent(AgentInstanceBase):
        async def reset(self, states):
            seen.append(states)
            return states

        async def step(self, states):
            seen.append(states)
            return step(0.0, " plus", done=len(seen) == 3)

    play(Agent, Script("good", "bad"), ["yes"], ["gold"], SamplingParams(temperature=0.5, max_tokens=7))
    assert [state["label"] for state in seen] == ["gold"] * 3
    assert seen[0]["observation"] == seen[0]["prompt"] == "yes"
    assert [(state["observation_text"], state["action_text"]) for state in seen[1:]] == [
        ("yes", "good"), ("yesgood plus", "bad")
    ]  # fmt: skip
    assert all(state["sampling_params"].temperature == 0.5 for state in seen)
    assert all(state["sampling_params"].max_tokens == 7 for state in seen)
    seen.clear()
    play(Agent, Script("good", "bad"), ["yes"])
    assert all(state["sampling_params"].max_tokens is None for state in seen)  # not what the context left


def test_an_agent_changes_the_settings_of_its_next_turn():
    class Agent(answers(step(done=False, sampling_params=SamplingParams(temperature=0.1)), step(done=False), step())):
        def reset(self, states):
            states["sampling_params"].stop = ["="]
            return {"observation": states["observation"], "sampling_params": states["sampling_params"]}

    engine = Script("no")
    play(Agent, engine, params=SamplingParams(temperature=0.9, seed=5))
    used = [params for _, params in engine.requests]
    assert [params.temperature for params in used] == [0.9, 0.1, 0.1]
    assert [params.stop for params in used] == [["="], None, None]
    assert len({params.seed for params in used}) == 1 and used[0].seed is not None  # kept where none is named


def test_log_probabilities_equal_those_of_a_plain_forward_pass(policy: Policy):
    """Over whole episodes of three turns, padding and batching in the rollout, none in the reference."""
    prompts = ["how many apples", "yes", "what is the answer of the question 12 plus 7", "no"]
    steps = (step(0, " plus yes", done=False), step(0, "\n", done=False), step(1))
    params = SamplingParams(max_tokens=9, seed=2, temperature=0.8)
    episodes = play(answers(*steps), PolicyEngine(policy), prompts, params=params, tokenizer=policy.tokenizer)
    for episode in episodes:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([episode.token_ids])).logits[0, :-1] / 0.8
        expected = logits.log_softmax(-1).gather(1, torch.tensor(episode.token_ids[1:]).unsqueeze(1)).squeeze(1)
        mask = episode.action_mask[1:]
        got = torch.tensor(episode.logprobs[1:])
        assert episode.turns == 3 and int(mask.sum()) > 3
        assert torch.allclose(got[mask], expected[mask], atol=1e-4)
        assert (got[~mask] == 0).all() and episode.logprobs[0] == 0


# Limits


def test_an_agent_that_never_ends_is_ended_and_flagged(caplog):
    executor = MultiTurnAgentExecutor(answers(step(0.5, " no", done=False)), max_turns=3)
    [episode] = play(executor, Script("yes"), max_length=1000)
    assert (episode.turns, episode.ended, episode.truncated, episode.reward) == (3, "turns", True, 1.5)
    assert "1 of 1 episodes were ended at the limit of turns" in caplog.text
    assert MultiTurnAgentExecutor(answers(step())).max_turns == 16


def test_the_context_bounds_the_last_action_and_the_feedback():
    """Room for two turns and two tokens more: they go to the third action and the beginning of its feedback."""
    feedback = " plus plus plus"
    prompt, action, fed = (len(TOKENIZER(text).input_ids) for text in ("how", "yes", feedback))
    engine = Script("yes")
    length = prompt + 2 * (action + fed) + 2
    [episode] = play(answers(step(1.0, feedback, done=False)), engine, ["how"], max_length=length)
    used = [params.max_tokens for _, params in engine.requests]
    assert used == [length - prompt, length - prompt - action - fed, 2] and action == 1
    assert len(episode.token_ids) == length and episode.action_ranges[-1] == (length - 2, length - 1)
    assert (episode.turns, episode.ended, episode.truncated) == (3, "context", True)


def test_limits_of_one_action():
    """max_tokens of the settings bounds every action; an action cut by it flags the episode."""
    engine = Script("yes no yes no", finish_reason="length")
    [episode] = play(answers(step(done=False), step()), engine, params=SamplingParams(max_tokens=2))
    assert [params.max_tokens for _, params in engine.requests] == [2, 2]
    assert [end - start for start, end in episode.action_ranges] == [2, 2]
    assert episode.truncated and episode.ended == "done"


def test_a_prompt_without_room_is_refused():
    length = len(TOKENIZER("how many").input_ids)
    message = f"sample 1: ValueError: the first observation has {length} tokens and the episode's limit is {length}"
    with pytest.raises(AgentError, match=message):
        play(answers(step()), Script("yes"), ["how", "how many"], max_length=length)


# Instances, order, concurrency


def test_sixteen_episodes_at_once_each_with_its_own_instance(policy: Policy):
    """Lengths of 1 to 4 turns; every instance sees its own label and history only; results in the order of samples."""
    made = []

    class Agent(AgentInstanceBase):
        async def __init__(self):
            await asyncio.sleep(0)
            made.append(self)
            self.seen = []

        async def reset(self, states):
            self.turns = 1 + states["label"] % 4
            self.text = states["observation"]
            return {"observation": self.text}

        async def step(self, states):
            await asyncio.sleep(0.001 * (16 - states["label"]))
            assert states["observation_text"] == self.text
            self.seen.append(states["label"])
            feedback = f" {states['label']} no"
            self.text += states["action_text"] + feedback
            done = len(self.seen) == self.turns
            return step(float(states["label"]), feedback, done, extra_logs={"seen": list(self.seen)})

    engine = PolicyEngine(policy, gather_s=0.02)
    prompts = [f"question {n}" for n in range(16)]
    params = SamplingParams(max_tokens=4, seed=1)
    episodes = play(Agent, engine, prompts, list(range(16)), params, tokenizer=policy.tokenizer, max_length=120)
    assert len({id(agent) for agent in made}) == 16
    for n, episode in enumerate(episodes):
        assert (episode.prompt, episode.label, episode.turns) == (prompts[n], n, 1 + n % 4)
        assert episode.extra_logs == {"seen": [n] * episode.turns} and episode.reward == n * episode.turns
    assert engine.requests == 40 and engine.batches < 16  # 40 requests in a few batches
    again = play(
        Agent, PolicyEngine(policy), prompts, list(range(16)), params, tokenizer=policy.tokenizer, max_length=120
    )
    assert [episode.token_ids for episode in again] == [episode.token_ids for episode in episodes]


def test_sync_agents_run_side_by_side_off_the_event_loop():
    """Eight sleeps of 0.2 s one after another would take 1.6 s."""
    threads = set()

    class Agent(AgentInstanceBase):
        def step(self, states):
            threads.add(threading.current_thread())
            time.sleep(0.2)
            return step(1.0)

    began = time.monotonic()
    episodes = play(Agent, Script("yes"), ["how"] * 8)
    assert time.monotonic() - began < 1.2
    assert [episode.reward for episode in episodes] == [1.0] * 8
    assert threading.main_thread() not in threads and len(threads) == 8


def test_close_is_called_also_after_a_fault():
    closed = []

    class Agent(answers(step(done=False), ValueError("x"))):
        def close(self):
            closed.append(self)

    with pytest.raises(AgentError):
        play(Agent, Script("yes"))
    assert len(closed) == 1


def test_samples_of_one_prompt_differ(policy: Policy):
    params = SamplingParams(max_tokens=5, seed=1)
    episodes = play(answers(step()), PolicyEngine(policy), ["how"] * 6, params=params, tokenizer=policy.tokenizer)
    assert len({episode.token_ids for episode in episodes}) == 6


# Faults


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (ZeroDivisionError("by zero"), r"sample 1: turn 2: .*step raised ZeroDivisionError: by zero"),
        (
            {"reward": 1.0, "done": True},
            r"Agent.step returned the keys \['reward', 'done'\], which lack \['rewards', 'environment_feedback'\]; "
            r"expected \['rewards', 'environment_feedback', 'done'\]",
        ),
        (None, r"Agent.step returned NoneType None; expected a dictionary"),
        ((1, 2, 3), r"returned a tuple of 3; expected"),
        (step(reward=float("inf")), r"'rewards' of Agent.step must be one finite number .* got float inf"),
        (step(reward=torch.zeros(2)), r"must be one finite number"),
        (step(reward="1.0"), r"must be one finite number .* got str '1.0'"),
        (step(feedback=["a"]), r"'environment_feedback' of Agent.step must be a text, got list"),
        (step(done="no"), r"'done' of Agent.step must be True or False, got str 'no'"),
        (step(extra_logs=[1]), r"'extra_logs' of Agent.step must be a dictionary, got list"),
        (step(environment_images=["x"]), r"text only"),
    ],
)  # fmt: skip
def test_a_faulty_step_is_told_with_sample_and_turn(faulty, message):
    class Agent(answers(step(done=False), faulty)):
        async def step(self, states):
            return step() if states["label"] != 1 else await super().step(states)

    Agent.__name__ = "Agent"
    with pytest.raises(AgentError, match=message):
        play(Agent, Script("yes"), ["how"] * 3, [0, 1, 2])


def test_a_fault_ends_the_other_episodes():
    ended = []

    class Agent(AgentInstanceBase):
        async def step(self, states):
            if states["label"] == 0:
                raise ValueError("x")
            await asyncio.sleep(60)

        def close(self):
            ended.append(self)

    began = time.monotonic()
    with pytest.raises(AgentError, match="sample 0: turn 1"):
        play(Agent, Script("yes"), ["how"] * 3, [0, 1, 2])
    assert time.monotonic() - began < 10 and len(ended) == 3


@pytest.mark.parametrize("kind", ["sync", "async", "async that blocks"])
def test_a_hanging_step_is_ended_at_its_limit(kind):
    """Also one whose thread, or event loop, cannot be ended: it must not hold up the program, nor later episodes."""

    class Sync(AgentInstanceBase):
        def step(self, states):
            time.sleep(30)

    class Async(AgentInstanceBase):
        async def step(self, states):
            await asyncio.sleep(30)

    class Blocking(AgentInstanceBase):
        async def step(self, states):
            time.sleep(30)

    executor = MultiTurnAgentExecutor({"sync": Sync, "async": Async, "async that blocks": Blocking}[kind])
    executor.step_limit_s = 0.2
    began = time.monotonic()
    with pytest.raises(AgentError, match=r"sample 0: turn 1: .*step took more than 0.2 s"):
        play(executor, Script("yes"))
    assert play(answers(step(0.5)), Script("yes"))[0].reward == 0.5
    assert time.monotonic() - began < 10


def test_coroutines_of_agents_keep_their_event_loop_over_rollouts():
    """Sessions and locks that a file makes once belong to it."""
    loops = []

    class Agent(AgentInstanceBase):
        async def step(self, states):
            loops.append(asyncio.get_running_loop())
            return step(1.0)

    play(Agent, Script("yes"), ["how"] * 3, [0, 1, 2])
    play(Agent, Script("yes"))
    assert len(loops) == 4 and len(set(map(id, loops))) == 1


def test_an_async_agent_that_exits_is_an_error():
    class Agent(AgentInstanceBase):
        async def step(self, states):
            raise SystemExit(3)

    with pytest.raises(AgentError, match="sample 0: turn 1: .*SystemExit in an agent: 3"):
        play(Agent, Script("yes"))


@pytest.mark.parametrize("missing", [float("nan"), None, torch.tensor(float("nan")), np.float32("nan")])
def test_a_reward_of_nan_is_not_scored(missing):
    agent = answers(step(1.0, done=False), step(missing))
    [episode] = play(agent, Script("yes"))
    assert episode.reward is None and episode.scores is None and episode.step_rewards == (1.0, None)
    assert episode.dense_rewards.tolist().count(1.0) == 1 and torch.isfinite(episode.dense_rewards).all()


def test_a_constructor_or_reset_that_raises():
    class Broken(answers(step())):
        def __init__(self):
            raise OSError("no display")

    class BadReset(answers(step())):
        def reset(self, states):
            return {"text": "x"}

    with pytest.raises(AgentError, match=r"Broken\(\) raised OSError: no display at test_agent.py:\d+"):
        play(Broken, Script("yes"))
    with pytest.raises(AgentError, match=r"returned a dictionary with the keys \['text'\]; expected .*'observation'"):
        play(BadReset, Script("yes"))


def test_classes_that_are_no_agents():
    for wrong in (AgentInstanceBase(), int, "x"):
        with pytest.raises(ValueError, match="class with a step method"):
            MultiTurnAgentExecutor(wrong)
    with pytest.raises(ValueError, match="got None"):
        MultiTurnAgentExecutor(None)
    with pytest.raises(AgentError, match="needs an execute method or an agent class"):
        play(AgentExecutorBase(), Script("yes"))
    with pytest.raises(AgentError, match="needs a step method"):
        play(AgentInstanceBase, Script("yes"))
    with pytest.raises(ValueError, match="1 prompts and 0 labels"):
        play(answers(step()), Script("yes"), labels=[])


def test_images_are_refused():
    async def run():
        executor = MultiTurnAgentExecutor(answers(step()))
        await executor.execute("how", None, SamplingParams(), 100, TOKENIZER, Script("yes"), images=["x"])

    with pytest.raises(ValueError, match="images are not supported"):
        asyncio.run(run())


# Reading returns


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (("go on", 0.5, False, {"a": 1}), ("go on", 0.5, False, {"a": 1})),
        ((None, 1, True, None), ("", 1.0, True, {})),
        ((torch.tensor([0.5]), "said so far and on", True, {}), (" and on", 0.5, True, {})),
        ((0.5, "and on", True, None), ("and on", 0.5, True, {})),
        (({"prompt": "result"}, 0.0, False, {}), ("result", 0.0, False, {})),
        (({}, 1.0, True, {"correct": True}), ("", 1.0, True, {"correct": True})),
        (("x", 1.0, False, True, {}), ("x", 1.0, True, {})),
        (("x", 1.0, False, False, {}), ("x", 1.0, False, {})),
        (("said so far: more", 0.0, False, {}), (": more", 0.0, False, {})),
        ({"rewards": 0, "next_observation": "said so far and on", "done": 0}, (" and on", 0.0, False, {})),
        ({"rewards": 0, "next_observation": "and on", "done": 0}, ("and on", 0.0, False, {})),
        (step(torch.tensor([0.5]), None, torch.tensor(True)), ("", 0.5, True, {})),
        (step(0, "said so far", np.bool_(False)), ("said so far", 0.0, False, {})),
    ],
)
def test_forms_of_a_step(returned, expected):
    result = read_step(returned, "step", text_so_far="said so far")
    assert (result.feedback, result.reward, result.done, result.extra_logs) == expected


def test_scores_come_from_the_step_or_its_info():
    assert read_step(step(scores=torch.tensor([0.0])), "step").scores == 0.0
    assert read_step(("x", 1.0, True, {"scores": 0.25}), "step").scores == 0.25
    assert read_step(step(), "step").scores is None
    [episode] = play(answers(step(0.5, done=False), step(0.25)), Script("yes"))
    assert episode.scores == 0.75  # none given: the rewards so far


def test_forms_of_a_reset():
    params = SamplingParams()
    assert read_observation({"observation": "a", "sampling_params": params}, "reset") == ("a", params)
    assert read_observation({"prompt": "a"}, "reset") == ("a", None)
    assert read_observation("a", "reset") == ("a", None)
    assert read_observation(("a", {}), "reset") == ("a", None)
    assert read_observation(({"observation": "a"}, {}), "reset") == ("a", None)
    for wrong in ({"observation": None}, None, 5, ("a",)):
        with pytest.raises(AgentError):
            read_observation(wrong, "reset")


@pytest.mark.parametrize(
    "value", [2, 2.0, True * 2, [2], (2.0,), np.float64(2), torch.tensor(2), torch.tensor([[2.0]])]
)
def test_numbers_that_are_read(value):
    assert read_number(value, "reward") == 2.0 and isinstance(read_number(value, "reward"), float)


def test_unknown_keys_are_told_once(caplog):
    for _ in range(3):
        read_step(step(score=1.0), "Some.step")
    assert caplog.text.count("Some.step returned ('score',), which is not used") == 1


def test_methods_take_states_or_parts_of_them_by_name():
    class ByName(AgentInstanceBase):
        def reset(self, prompt, **kwargs):
            assert kwargs["label"] == "gold"
            return {"prompt": prompt}

        def step(self, action, label=None):
            return {}, float(action == "yes" and label == "gold"), True, {}

    class Parts(AgentInstanceBase):
        reset = None

        async def step(self, observation, action, label, **kwargs):
            assert "sampling_params" in kwargs
            return None, float((observation, action, label) == ("how", "yes", "gold")), True, {}

    class Wrong(AgentInstanceBase):
        def step(self, states, budget):
            return None

    assert play(ByName, Script("yes"), ["how"], ["gold"])[0].reward == 1.0
    assert play(Parts, Script("yes"), ["how"], ["gold"])[0].reward == 1.0
    with pytest.raises(AgentError, match=r"Wrong.step asks for \['states', 'budget'\]; take one dictionary"):
        play(Wrong, Script("yes"))


# Records of executors


RESULT = {
    "observation_tokens": [5, 6, 7, 8, 9],
    "action_ranges": [(1, 3), (4, 5)],
    "reward": 2.0,
    "rollout_log_probs": [0, -1, -2, 0, -3],
}


def test_a_result_without_step_rewards_puts_its_reward_on_the_last_action():
    episode = Episode.of(RESULT)
    assert episode.step_rewards == (0.0, 2.0) and episode.dense_rewards.tolist() == [0, 0, 0, 0, 2.0]
    assert episode.scores == 2.0 and episode.truncated is False and episode.extra_logs == {}


def test_a_changed_reward_wins_over_step_rewards():
    kept = Episode.of({**RESULT, "step_rewards": [0.5, 1.5]})
    changed = Episode.of({**RESULT, "step_rewards": [0.5, 1.0]})
    assert kept.step_rewards == (0.5, 1.5) and changed.step_rewards == (0.0, 2.0)
    assert Episode.of({**RESULT, "reward": math.nan}).reward is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_ranges": [(1, 3), (2, 5)]}, "ordered, disjoint"),
        ({"action_ranges": [(1, 6)]}, "inside the 5 tokens"),
        ({"action_ranges": [(1, 1)]}, "ordered, disjoint"),
        ({"action_ranges": []}, "at least one action"),
        ({"action_ranges": [(0, 2)]}, "prompt of at least one token"),
        ({"rollout_log_probs": [0.0]}, "1 log-probabilities for 5 tokens"),
        ({"reward": "high"}, "'reward' of execute must be one finite number"),
    ],
)
def test_results_that_contradict_themselves(change, message):
    with pytest.raises(AgentError, match=message):
        Episode.of({**RESULT, **change})


def test_results_that_are_none_or_lack_keys():
    with pytest.raises(AgentError, match=r"returned NoneType; .* no result queue"):
        Episode.of(None)
    with pytest.raises(AgentError, match=r"lack \['observation_tokens', 'reward'\]"):
        Episode.of({"action_ranges": []})
