"""Guided decoding: step beam search over what a policy samples, steered at every step; many questions in lockstep."""

from __future__ import annotations

import math
import os.path
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from decoding.beam import Beam, Candidate, Selection, mean_logprob, search
from decoding.guidance import Drawn, Judge, Verdict
from decoding.guided_settings import GuidedSettings
from decoding.records import Answered, Decoded, Question
from decoding.sampling import Piece, PolicySession
from decoding.scoring import PrefixScorer, RowText, TokenScores, same_tokenizer
from decoding.self_evaluation import SelfEvaluation
from decoding.streams import Stream
from openrlhf.datasets.tokenize import encode_prompts
from openrlhf.evaluation.decimals import shortest_decimals
from openrlhf.models.key_values import check_context
from openrlhf.models.policy import Policy
from openrlhf.models.reward_model import RewardModel


def decode_guided(
    policy: Policy,
    questions: Sequence[Question],
    settings: GuidedSettings,
    *,
    seed: int = 0,
    model: RewardModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    goals: Sequence[np.ndarray] = (),
    chat: bool = False,
    with_trace: bool = False,
    method: str = "guided",
) -> Iterator[Answered]:
    """Answer questions one batch after another, in order.

    What a question gets depends on its prompts, its index, the settings and the seed alone, up to rounding: not on the
    questions decoded with it. Its seconds are those of its batch divided by the questions in it; its reward_tokens
    count what a self-evaluation reads, too, and not the scoring of responses that nothing has guided.

    Args:
        model, tokenizer, goals: the reward model and (1, H) goal states of it, one a weight; needed where the guidance
            reads them. Where it does not, the responses found are scored once at the end.
        chat: the self-evaluation asks in a chat.
        with_trace: keep all candidates of all steps (`Row.told`).
    Raises:
        ValueError: guidance without what it reads, or a prompt that leaves no room in the policy's context.
    """
    guidance = settings.guidance
    if guidance.reads_reward_model and model is None:
        raise ValueError("guidance by goal or reward needs a reward model")
    if guidance.goal and len(goals) != len(guidance.goal_weights):
        raise ValueError(f"expected a goal state for each of the weights {guidance.goal_weights}, got {len(goals)}")
    unread = [question.index for question in questions if question.reward_prompt is None]
    if model is not None and unread:
        raise ValueError(f"question {unread[0]} has no reward_prompt, which the reward model reads before the response")
    same_tokens = model is not None and same_tokenizer(policy.tokenizer, tokenizer)

    def open_scorer(asked: Sequence[Question]) -> PrefixScorer:
        return PrefixScorer(model, tokenizer, goals, [one.reward_prompt for one in asked], same_tokens)

    for group, prompts in cut_batches(policy, questions, settings):
        started = time.perf_counter()
        scorer = evaluation = None
        if guidance.reads_reward_model:
            scorer = open_scorer(group)
        if guidance.self_evaluation:
            evaluation = SelfEvaluation(policy, prompts, chat)
        judge = Judge(guidance, [question.index for question in group], seed, scorer, evaluation)
        session = PolicySession(
            policy, prompts, temperature=settings.temperature, top_p=settings.top_p,
            max_tokens=settings.max_tokens, stops=settings.stops,
        )  # fmt: skip
        batch = Batch(group, settings, seed, session, judge)
        names = [f"question {question.index}" for question in group]
        found = search(names, batch.extend, settings.beam, batch.uniform, batch.on_step)
        answers = [batch.answer(number, beams, method, with_trace) for number, beams in enumerate(found)]
        if model is not None and scorer is None:
            answers = _score_answers(open_scorer, answers)
        seconds = (time.perf_counter() - started) / len(group)
        yield from (replace(one, seconds=seconds) for one in answers)


class Batch:
    """Questions that are decoded together: draws and judges their steps for `beam.search`.

    Args:
        session, judge: with one row a question.
    """

    def __init__(
        self, questions: Sequence[Question], settings: GuidedSettings, seed: int, session: PolicySession, judge: Judge
    ) -> None:
        self._questions, self._settings, self._seed = questions, settings, seed
        self._session, self._judge = session, judge
        self._first = {number: number for number in range(len(questions))}  # row of a question's first candidate
        self._rows: list[Row] = []  # of the last step
        self._chosen: dict[tuple[int, int, int], Row] = {}  # by question, step and place among the candidates
        self._traces: list[list[dict]] = [[] for _ in questions]
        self._nodes = [0] * len(questions)  # candidates of each question so far
        self._policy_tokens, self._judge_tokens = [0] * len(questions), [0] * len(questions)

    def extend(self, step: int, going: dict[int, list[Beam]]) -> dict[int, list[Candidate]]:
        """Draw the next steps of all open beams in one batch, and judge them."""
        fan = self._settings.n_samples if step else self._settings.width
        jobs = [
            (number, self._first[number] + beam.place, rank, sample)
            for number, beams in going.items()
            for rank, beam in enumerate(beams)
            for sample in range(fan)
        ]
        pieces = self._draw(step, jobs)
        is_last = step + 1 == self._settings.beam.max_steps
        drawn = [
            Drawn(*job, tuple(self._session.ids[i]), self._session.text(i), bool(piece.ended) or is_last)
            for i, (job, piece) in enumerate(zip(jobs, pieces, strict=True))
        ]
        verdicts = self._judge.read(step, drawn)
        before, self._rows = self._rows, []
        found: dict[int, list[Candidate]] = {number: [] for number in going}
        # Equal steps of one beam tie exactly, whatever the rounding: else it would decide which stands for the others.
        logprobs: dict[tuple, float] = {}
        for one, piece, verdict in zip(drawn, pieces, verdicts, strict=True):
            number = one.question
            if not found[number]:
                self._first[number] = len(self._rows)
            logprob = logprobs.setdefault((one.parent, piece.ids), mean_logprob(piece.logprobs))
            row = Row(one, piece, logprob, verdict, self._nodes[number], before[one.parent] if before else None)
            self._rows.append(row)
            self._nodes[number] += 1
            found[number].append(row.candidate())
            self._policy_tokens[number] += len(piece.ids)
            self._judge_tokens[number] += verdict.tokens
        return found

    def _draw(self, step: int, jobs: Sequence[tuple[int, int, int, int]]) -> list[Piece]:
        """The next steps of jobs (question, row, rank of the beam, sample), which become the session's rows."""
        settings = self._settings
        self._session.select([row for _, row, *_ in jobs])
        streams = [Stream(self._seed, self._questions[number].index, step, *drawing) for number, _, *drawing in jobs]
        pieces: list[Piece] = []
        for start in range(0, len(jobs), settings.rows):
            part = range(start, min(start + settings.rows, len(jobs)))
            pieces += self._session.draw(
                streams[part.start : part.stop], settings.boundary, settings.max_step_tokens, part
            )
        return pieces

    def uniform(self, number: int, step: int, candidate: Candidate) -> float:
        """The random number of a candidate in the selection."""
        key = (self._questions[number].index, step, candidate.parent, candidate.sample)
        return Stream(self._seed, "selection", *key).uniform(0)

    def on_step(self, number: int, step: int, candidates: Sequence[Candidate], selection: Selection) -> None:
        """Remember the chosen rows, and write the step into the trace."""
        rows = self._rows[self._first[number] :][: len(candidates)]
        for place in selection.kept:
            self._chosen[number, step, place] = rows[place]
        told = [row.told(place, selection, rows) for place, row in enumerate(rows)]
        self._traces[number].append({"step": step + 1, "candidates": told})

    def answer(self, number: int, beams: Sequence[Beam], method: str, with_trace: bool) -> Answered:
        """The record of a question whose search is over."""
        responses = []
        for place, beam in enumerate(beams):
            row = self._chosen[number, len(beam.step_scores) - 1, beam.place]
            score = beam.score if math.isfinite(beam.score) else None
            one = Decoded(row.drawn.text, row.drawn.ids, beam.finished, score, sample=place)
            responses.append(one if row.verdict.scores is None else with_scores(one, row.verdict.scores))
        return Answered(
            self._questions[number],
            method,
            self._seed,
            responses,
            policy_tokens=self._policy_tokens[number],
            reward_tokens=self._judge_tokens[number],
            trace=self._traces[number] if with_trace else None,
        )


class Row:
    """One row of the batch after a step."""

    def __init__(
        self, drawn: Drawn, piece: Piece, logprob: float, verdict: Verdict, node: int, parent: Row | None
    ) -> None:
        self.drawn, self.piece, self.verdict = drawn, piece, verdict
        self.logprob = logprob  # mean over the tokens of the step, nats
        self.node = node  # number among all candidates of the question
        self.parent_node = None if parent is None else parent.node
        self.text_before = "" if parent is None else parent.drawn.text

    def candidate(self) -> Candidate:
        """As the search sees it. Texts that end within a character are told apart by their tokens."""
        one = self.drawn
        key = (one.text, one.ids if one.text.endswith("\ufffd") else ())
        return Candidate(one.rank, one.sample, key, self.logprob, self.verdict.guidance, self.piece.ended)

    def told(self, place: int, selection: Selection, rows: Sequence[Row]) -> dict[str, Any]:
        """Plain JSON values: what was drawn, every part of its score, and what became of it."""
        stand_in = rows[selection.stand_ins[place]]
        numbers = {
            "logprob": self.logprob,
            **self.verdict.parts,
            "guidance": self.verdict.guidance,
            "step_score": selection.step_scores[place],
            "score": selection.scores[place],
        }
        return {
            "id": self.node,
            "parent": self.parent_node,
            "text": self.drawn.text[len(os.path.commonprefix([self.text_before, self.drawn.text])) :],
            "tokens": len(self.piece.ids),
            **{name: _plain(value) for name, value in numbers.items()},
            "similarities": [_plain(value) for value in self.verdict.similarities],
            "ended": self.piece.ended,
            "fate": selection.fates[place],
            **({"into": stand_in.node} if stand_in is not self else {}),
        }


def with_scores(response: Decoded, scores: TokenScores) -> Decoded:
    """A response with the scores of all its tokens, as eval_rm writes them; of several goals a list a token."""
    values = shortest_decimals(scores.values).tolist()
    goals = scores.similarities.shape[1]
    cosines = shortest_decimals(scores.similarities.reshape(-1)).reshape(len(values), goals)
    cosines = cosines[:, 0] if goals == 1 else cosines
    return replace(response, reward=values[-1], partial_rewards=values, cosine_sim=cosines.tolist() if goals else None)


def _plain(value: float | None) -> float | None:
    """Six digits; None where JSON has no number."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _score_answers(
    open_scorer: Callable[[Sequence[Question]], PrefixScorer], answers: list[Answered]
) -> list[Answered]:
    """Answers with the reward model's figures of their responses, which nothing has read so far."""
    owners = [answer.question for answer in answers for _ in answer.responses]
    responses = [one for answer in answers for one in answer.responses]
    told = open_scorer(owners).extend([RowText(r.ids, r.text, True) for r in responses])
    scored = iter(map(with_scores, responses, told))
    return [replace(answer, responses=[next(scored) for _ in answer.responses]) for answer in answers]


def cut_batches(
    policy: Policy, questions: Sequence[Question], settings: GuidedSettings
) -> Iterator[tuple[list[Question], list[list[int]]]]:
    """Questions in order with the tokens of their prompts, as many at a time as the limits of the settings allow."""
    prompts = encode_prompts(policy.tokenizer, [question.policy_prompt for question in questions])
    for question, ids in zip(questions, prompts, strict=True):
        check_context(
            [len(ids)], policy.model.config, "the policy", what="the prompt of question", first=question.index
        )
    start = 0
    for end in range(1, len(questions) + 1):
        rows = (end + 1 - start) * settings.width  # with the next question
        longest = max(map(len, prompts[start : end + 1])) + settings.max_tokens
        if end == len(questions) or rows > settings.rows or rows * longest > settings.cache_tokens:
            yield list(questions[start:end]), prompts[start:end]
            start = end
