"""Reward, per-token value and per-token goal similarity of completions; what questions share is computed once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from openrlhf.datasets.completions import Completion
from openrlhf.datasets.templates import render_question
from openrlhf.datasets.tokenize import encode_prompts, encode_responses_with_ends
from openrlhf.evaluation.batching import cut_windows
from openrlhf.evaluation.decimals import shortest_decimals
from openrlhf.evaluation.goal_state import GoalState, QuestionGoals, goal_similarities
from openrlhf.evaluation.passes import SequenceReader
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.ranks import OneProcess, Ranks

Goal = GoalState | QuestionGoals
BATCH_TOKENS = {False: 2048, True: 16384}  # by "on a GPU": larger batches leave the caches of a CPU
# By the same: completions of about this many batches are sorted together; more of them begin alike then.
WINDOW_BATCHES = {False: 128, True: 16}


@dataclasses.dataclass(frozen=True)
class EncodedCompletion:
    """Token ids of one completion, cut to the length limit."""

    prompt_ids: list[int]
    response_ids: list[int]  # ends in EOS; empty when nothing of the response fits behind the prompt
    truncated: bool  # the end of the response (or all of it) was cut off
    token_ends: list[int] | None = None  # character of the solution where each response token ends

    @property
    def num_actions(self) -> int:
        """Response tokens including EOS."""
        return len(self.response_ids)

    def __len__(self) -> int:
        """Tokens of prompt and response; 0 when nothing of the response fits."""
        return len(self.prompt_ids) + len(self.response_ids) if self.response_ids else 0

    @property
    def ids(self) -> list[int]:
        """Prompt and response; empty when nothing of the response fits."""
        return self.prompt_ids + self.response_ids if self.response_ids else []


@dataclasses.dataclass(frozen=True)
class ScoredCompletion:
    """What scoring adds to the keys of a completion; figures are None when nothing of the response fits."""

    reward: float | None  # reward units, the value at the last token
    partial_rewards: list[float] | None  # (A,) the value head at every response token; (1,) where only the last is read
    cosine_sim: list[float] | None  # goal similarity at the same tokens; None without a goal state
    num_actions: int  # A, response tokens including EOS
    truncated: bool
    token_ends: list[int] | None = None  # (A,) character of the solution where each response token ends


def encode_completions(
    tokenizer, completions: Sequence[Completion], *, template: str, apply_chat_template: bool, max_len: int
) -> list[EncodedCompletion]:
    """Token ids of completions, exactly as a reward model is trained on them.

    A response that is too long loses its end and keeps its EOS; prompts are never cut.

    Args:
        template: prompt template, unused with `apply_chat_template`.
        max_len: tokens of prompt + response + EOS.
    """
    questions = list(dict.fromkeys(one.question for one in completions))
    texts = [
        render_question(question, tokenizer, template=template, apply_chat_template=apply_chat_template)
        for question in questions
    ]
    prompts = dict(zip(questions, encode_prompts(tokenizer, texts), strict=True))
    responses = encode_responses_with_ends(tokenizer, [one.generated_solution for one in completions])
    return [
        fit_response(prompts[one.question], response, max_len, ends)
        for one, (response, ends) in zip(completions, responses, strict=True)
    ]


def fit_response(
    prompt_ids: list[int], response_ids: list[int], max_len: int, token_ends: list[int] | None = None
) -> EncodedCompletion:
    """Cut a response, which ends in EOS, to what fits into max_len tokens behind its prompt."""
    room = max_len - len(prompt_ids)
    if len(response_ids) <= room:
        return EncodedCompletion(prompt_ids, response_ids, False, token_ends)
    if room < 2:  # at least one response token and EOS
        return EncodedCompletion(prompt_ids, [], True, None)
    kept = response_ids[: room - 1] + response_ids[-1:]
    ends = None if token_ends is None else token_ends[: room - 1] + token_ends[room - 2 : room - 1]
    return EncodedCompletion(prompt_ids, kept, True, ends)


def score_encoded(
    model: RewardModel,
    encoded: Sequence[EncodedCompletion],
    *,
    goal: Goal | None = None,
    questions: Sequence[str] | None = None,
    batch_tokens: int | None = None,
    ranks: Ranks | None = None,
    progress: bool = True,
    share_prompts: bool = True,
    last_only: bool = False,
) -> list[ScoredCompletion]:
    """Score token sequences, each as if it were alone.

    Args:
        questions: N question texts, needed with goals per question only.
        batch_tokens: tokens of a forward pass as computed; None: what suits the model's device.
        ranks: processes that share the work; all call this function alike and get all results.
        share_prompts: compute what completions begin with alike once, where the architecture allows it.
        last_only: value and goal similarity of the last token alone, the reward among them: less to compute.
    Returns:
        N records in order.
    Raises:
        ValueError: a reward that is not finite (names the position), or a goal state of another hidden size.
    """
    scorer = Scorer(model, goal, batch_tokens, ranks, share_prompts, last_only)
    scored: list[ScoredCompletion] = []
    with ScoringBar(len(encoded), disable=not progress or scorer.ranks.rank > 0) as bar:
        for window in cut_windows(encoded, scorer.window_tokens):
            first = len(scored)
            asked = None if questions is None else questions[first : first + len(window)]
            scored += scorer.score(window, asked, lambda i, first=first: f"completion {first + i}", bar)
    return scored


class ScoringBar(tqdm):
    """Progress over completions with tokens per second; a token counts once for every completion it is part of."""

    def __init__(
        self, total: int, initial: int = 0, disable: bool = False, desc: str = "scoring", unit: str = "completion"
    ):
        super().__init__(total=total, initial=initial, desc=desc, unit=unit, disable=disable)
        self.tokens = 0

    def add(self, completions: int, tokens: int) -> None:
        """Move by completions that hold this many tokens."""
        self.tokens += tokens
        elapsed = self.format_dict["elapsed"]
        self.set_postfix_str(f"{self.tokens / elapsed:.0f} tokens/s" if elapsed else "", refresh=False)
        self.update(completions)


class Scorer:
    """Scores windows of completions: what they begin with alike is computed once, equal rows too.

    Args:
        model: set to eval mode.
        goal: of the same model.
        batch_tokens, ranks, share_prompts, last_only: as for `score_encoded`.
    Raises:
        ValueError: the goal has another hidden size than the model.
    """

    def __init__(
        self,
        model: RewardModel,
        goal: Goal | None = None,
        batch_tokens: int | None = None,
        ranks: Ranks | None = None,
        share_prompts: bool = True,
        last_only: bool = False,
    ) -> None:
        self.model = model.eval()
        self.last_only = last_only
        self.goal = goal
        on_gpu = model.device.type == "cuda"
        self.ranks = ranks or OneProcess()
        batch_tokens = batch_tokens or BATCH_TOKENS[on_gpu]
        self._reader = SequenceReader(self.model, batch_tokens, share_prompts, last_only)
        self.window_tokens = WINDOW_BATCHES[on_gpu] * batch_tokens * self.ranks.world_size  # tokens of a good window
        self._vectors = None
        if goal is not None:
            vectors = goal.vectors if isinstance(goal, QuestionGoals) else goal.vector
            if vectors.shape[1] != model.hidden_size:
                raise ValueError(
                    f"the goal state has hidden size {vectors.shape[1]}, the reward model {model.hidden_size}; "
                    "run get_representation with this reward model"
                )
            self._vectors = torch.from_numpy(vectors).to(model.device)

    def score(
        self,
        encoded: Sequence[EncodedCompletion],
        questions: Sequence[str] | None = None,
        name_of: Callable[[int], str] = "completion {}".format,
        bar: ScoringBar | None = None,
    ) -> list[ScoredCompletion]:
        """Score one window, in order; with several ranks, a collective call that gives every process all results.

        Args:
            questions: N question texts, needed with goals per question only.
            name_of: what an error calls the completion at a position.
        """
        goal_rows = self._goal_rows(len(encoded), questions)
        prompts: dict[tuple[int, ...], dict[tuple, list[int]]] = {}  # prompt -> response and goal -> positions
        for i, one in enumerate(encoded):
            if one.response_ids:
                responses = prompts.setdefault(tuple(one.prompt_ids), {})
                responses.setdefault((tuple(one.response_ids), goal_rows[i]), []).append(i)

        def tokens_of(group: Sequence[Sequence[int]]) -> int:
            return sum(len(encoded[copies[0]]) for copies in group)

        by_prompt = [list(responses.values()) for responses in prompts.values()]
        fair = max(1, sum(map(tokens_of, by_prompt)) / self.ranks.world_size)
        groups = []
        for group in by_prompt:  # a question of more than one process's share is cut
            pieces = min(len(group), math.ceil(tokens_of(group) / fair))
            groups += [group[piece::pieces] for piece in range(pieces)]
        # The largest first, dealt in turn: every process gets about the same work.
        groups.sort(key=lambda group: -tokens_of(group))
        mine = [copies[0] for group in groups[self.ranks.rank :: self.ranks.world_size] for copies in group]
        start = (bar.n, bar.tokens) if bar is not None else (0, 0)
        own = dict(self._score_rows(encoded, mine, goal_rows, bar))
        found = {i: one for part in self.ranks.gather_objects(own) for i, one in part.items()}
        scored = [ScoredCompletion(None, None, None, 0, True)] * len(encoded)
        for copies in (copies for group in groups for copies in group):
            if not math.isfinite(sum(found[copies[0]].partial_rewards)):  # float32 numbers do not add up to infinity
                raise ValueError(
                    f"{name_of(copies[0])}: the reward model gives a reward that is not finite; check its dtype"
                )
            scored[copies[0]] = found[copies[0]]
            for i in copies[1:]:
                scored[i] = dataclasses.replace(
                    found[copies[0]], truncated=encoded[i].truncated, token_ends=encoded[i].token_ends
                )
        if bar is not None:  # copies, rows that do not fit, and the work of other processes
            tokens = sum(map(len, encoded))
            bar.add(start[0] + len(encoded) - bar.n, start[1] + tokens - bar.tokens)
        return scored

    def _goal_rows(self, count: int, questions: Sequence[str] | None) -> list[int]:
        """Row of `_vectors` for every completion, -1 for none."""
        if not isinstance(self.goal, QuestionGoals):
            return [-1 if self.goal is None else 0] * count
        if questions is None or len(questions) != count:
            raise ValueError("goals per question need the question of every completion")
        return [self.goal.index.get(question, -1) for question in questions]

    def _score_rows(
        self,
        encoded: Sequence[EncodedCompletion],
        rows: Sequence[int],
        goal_rows: Sequence[int],
        bar: ScoringBar | None,
    ) -> Iterator[tuple[int, ScoredCompletion]]:
        """Positions and scores of some positions."""
        prompts = [len(encoded[i].prompt_ids) for i in rows]
        for one in self._reader.read([encoded[i].ids for i in rows], prompts):
            members = [rows[place] for place in one.members]
            counts = [1 if self.last_only else encoded[i].num_actions for i in members]
            starts = [len(encoded[i]) - count for i, count in zip(members, counts, strict=True)]
            responses = zip(one.places.numpy(), starts, counts, strict=True)
            places = np.concatenate([row[start : start + count] for row, start, count in responses])
            partial = shortest_decimals(one.values.float().cpu().numpy()[places]).tolist()
            cosines = self._similarities(one.states, places, [goal_rows[i] for i in members], counts)
            end = 0
            for i, count in zip(members, counts, strict=True):
                part, end = slice(end, end + count), end + count
                cosine = None if cosines is None or goal_rows[i] < 0 else cosines[part]
                values = partial[part]
                tokens = encoded[i]
                yield (
                    i,
                    ScoredCompletion(
                        values[-1], values, cosine, tokens.num_actions, tokens.truncated, tokens.token_ends
                    ),
                )
            if bar is not None:
                bar.add(len(members), sum(len(encoded[i]) for i in members))

    def _similarities(
        self, states: Tensor, places: np.ndarray, goal_rows: Sequence[int], counts: Sequence[int]
    ) -> list[float] | None:
        """Goal similarity of the tokens at `places`, which are counts[r] of each row r, to the goal of the row."""
        goals = np.unique([row for row in goal_rows if row >= 0]).astype(int)
        if not goals.size:
            return None
        found = goal_similarities(states, self._vectors[torch.from_numpy(goals).to(self.model.device)])  # (T, G)
        columns = np.searchsorted(goals, np.maximum(goal_rows, goals[0]))  # of rows without a goal: any
        return shortest_decimals(found.cpu().numpy()[places, np.repeat(columns, counts)]).tolist()
