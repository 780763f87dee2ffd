"""Live filtered voting on scripted models: the same draws, votes and tokens as filtering whole samples."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from decoding.pools import PoolSettings, draw_pools
from decoding.records import Question
from decoding.sampling import Piece
from decoding.scoring import TokenScores
from decoding.streams import Stream
from decoding.voting import answer_filtered, answer_pool, make_ballot
from openrlhf.evaluation.filtering import filter_by_goal, filter_outcomes

END = 9  # the stub's EOS; other tokens are digits 0 to 8
LIMIT = 14  # tokens of a response


class ScriptedPolicy:
    """Draws digits from the streams, shifted by the first token of the prompt."""

    def __init__(self, prompts=()) -> None:
        self.ids: list[list[int]] = []
        self.prompts: list[tuple[int, ...]] = []
        self.drawn = 0
        self.filled: list[int] = []  # rows at every draw
        self.added: list[list[tuple[int, ...]]] = []  # prompts of every call

    def add(self, prompts, ids) -> None:
        self.added.append([tuple(prompt) for prompt in prompts])
        self.prompts += self.added[-1]
        self.ids += [list(one) for one in ids]

    def select(self, rows) -> None:
        self.ids, self.prompts = [self.ids[row] for row in rows], [self.prompts[row] for row in rows]

    def text(self, row: int) -> str:
        return "".join(str(token) for token in self.ids[row] if token != END)

    def draw(self, streams: list[Stream], boundary, max_step_tokens: int) -> list[Piece]:
        assert len(streams) == len(self.ids)
        self.filled.append(len(self.ids))
        pieces = []
        for ids, prompt, stream in zip(self.ids, self.prompts, streams, strict=True):
            new, ended = [], ""
            while not ended and len(new) < max_step_tokens:
                u = stream.uniform(len(ids) + len(new))
                new.append(END if u > 0.88 else int(u * 100 + prompt[0]) % 9)
                ended = "eos" if new[-1] == END else "length" if len(ids) + len(new) == LIMIT else ""
            ids += new
            self.drawn += len(new)
            pieces.append(Piece(tuple(new), (0.0,) * len(new), ended))
        return pieces


class ScriptedScorer:
    """Goal similarity and value of every token are a hash of the prompt and the tokens up to it; END is added once."""

    def __init__(self, prompts) -> None:
        self.rows: list[list] = []  # prompt and tokens read

    def add(self, prompts) -> None:
        self.rows += [[prompt, 0] for prompt in prompts]

    def select(self, rows) -> None:
        self.rows = [list(self.rows[row]) for row in rows]

    def extend(self, responses, rows) -> list[TokenScores]:
        found = []
        for row, one in zip([self.rows[row] for row in rows], responses, strict=True):
            ids = list(one.ids) + ([END] if one.over and one.ids[-1] != END else [])
            numbers = [similarity(row[0], ids[: end + 1]) for end in range(row[1], len(ids))]
            scores = np.array(numbers, np.float32)
            found.append(TokenScores(row[1], 2 * scores, scores[:, None]))
            row[1] = max(row[1], len(ids))
        return found


def similarity(prompt: str, ids: list[int]) -> float:
    return (zlib.crc32(repr((prompt, ids)).encode()) % 2001) / 1000 - 1


def grade(question: Question, text: str):
    """The answer is 1 where the last digit is above 6, else 0; after a 0 there is none."""
    answer = None if not text or text[-1] == "0" else str(int(text[-1] > "6"))
    return answer, answer == question.expected_answer


QUESTIONS = [Question(7 * n, f"question {n}", f"policy {n}", f"reward {n}", str(n % 2)) for n in range(12)]
PROMPTS = [[n % 4, n] for n in range(12)]


def draw(settings: PoolSettings, seed: int = 0, scored: bool = True, policy: ScriptedPolicy | None = None):
    scorer = ScriptedScorer if scored else None
    opened = ScriptedPolicy if policy is None else lambda prompts: policy
    pools = draw_pools(QUESTIONS, PROMPTS, opened, scorer, grade, settings, seed)
    return sorted(pools, key=lambda pool: pool.question.index)


def settings_of(**changes) -> PoolSettings:
    return PoolSettings(**{"samples": 5, "check_every": 3, "batch_rows": 12, **changes})


def outcome(pool):
    """All that does not depend on time."""
    return [(one.response, one.answer, one.is_right, one.end, one.below) for one in pool.samples], pool.fallback


def test_a_sample_depends_on_its_stream_only():
    plain = list(map(outcome, draw(settings_of())))
    for changes in ({"batch_rows": 1}, {"batch_rows": 3}, {"batch_rows": 60}, {"check_every": 1}, {"check_every": 99}):
        assert list(map(outcome, draw(settings_of(**changes)))) == plain
    more = draw(settings_of(samples=7))
    assert [outcome(pool)[0][:5] for pool in more] == [samples for samples, _ in plain]
    assert list(map(outcome, draw(settings_of(), seed=1))) != plain


def test_a_response_is_what_its_stream_says():
    pool = draw(settings_of())[4]  # index 28, prompt begins with 0
    for number, one in enumerate(pool.samples):
        stream, ids = Stream(0, 28, number), []
        while len(ids) < LIMIT and END not in ids:
            u = stream.uniform(len(ids))
            ids.append(END if u > 0.88 else int(u * 100) % 9)
        assert list(one.response.ids) == ids
        assert one.response.finished == (END in ids) and one.end == ("finished" if END in ids else "length")
        read = ids if END in ids else [*ids, END]
        wanted = [similarity("reward 4", read[: end + 1]) for end in range(len(read))]
        assert one.response.cosine_sim == pytest.approx(wanted, abs=1e-6)
        assert one.response.reward == one.response.partial_rewards[-1] == pytest.approx(2 * wanted[-1], abs=1e-6)
        assert one.reward_tokens == len(read)


@pytest.mark.parametrize("batch_rows", [1, 4, 12, 100])
def test_no_threshold_that_stops_equals_plain_voting(batch_rows):
    plain = draw(settings_of(batch_rows=7))
    filtered = draw(settings_of(threshold=-1.0, check_every=2, batch_rows=batch_rows))
    assert list(map(outcome, filtered)) == list(map(outcome, plain))
    for one, other in zip(filtered, plain, strict=True):
        vote, (majority,) = answer_filtered(one, 0, {}), answer_pool(other, 0, ["majority"])
        assert (vote.answer, vote.is_correct, vote.policy_tokens) == (
            majority.answer,
            majority.is_correct,
            majority.policy_tokens,
        )


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 99])
def test_live_filter_finds_what_filtering_whole_samples_finds(every, warmup):
    """Same samples kept, same vote, same fallbacks; a stopped sample lives on to the next check at most."""
    plain = draw(settings_of())
    fallbacks = stopped = 0
    reached = min(plain[0].samples[0].response.cosine_sim)  # a similarity that equals the threshold is not below it
    for threshold in (-0.9, -0.7, -0.3, 0.4, reached):
        live = draw(settings_of(threshold=threshold, warmup_tokens=warmup, check_every=every))
        outcomes = filter_outcomes([make_ballot(pool) for pool in plain], [threshold], warmup)
        for place, (one, other) in enumerate(zip(live, plain, strict=True)):
            vote = answer_filtered(one, 0, {})
            assert vote.is_correct == outcomes.right[place, 0] and one.fallback == outcomes.fallback[place, 0]
            assert vote.details["dropped"] == outcomes.dropped[place, 0]
            fallbacks += one.fallback
            for mine, whole in zip(one.samples, other.samples, strict=True):
                kept, used = filter_by_goal(whole.response.cosine_sim, threshold, warmup)
                assert mine.kept == kept
                drawn = len(whole.response.ids) if kept or one.fallback else -(-used // every) * every
                ids = whole.response.ids[:drawn]
                assert mine.response.ids == ids
                assert mine.below == (None if kept else used - 1)
                stopped += mine.end == "goal"
                if mine.end == "goal":
                    assert mine.answer is None and mine.response.reward is None and not mine.response.finished
                    assert len(mine.response.cosine_sim) == mine.reward_tokens == len(ids)
                elif one.fallback:
                    assert mine.response == whole.response
    assert fallbacks >= 1 and (stopped > 20 or every == 99)


def test_a_sample_that_is_taken_up_again_is_drawn_once_and_read_twice():
    """Rows that were given away are read again; those that were stopped last still have theirs."""
    policy = ScriptedPolicy()
    pools = draw(settings_of(threshold=1.0, check_every=2, batch_rows=3), policy=policy)
    assert all(pool.fallback for pool in pools)
    assert policy.drawn == sum(pool.policy_tokens for pool in pools)
    samples = [one for pool in pools for one in pool.samples if len(one.response.ids) > 2]  # all stop after 2 tokens
    twice = [one.reward_tokens - len(one.response.cosine_sim) for one in samples]
    assert set(twice) == {0, 2} and twice.count(2) > 10


def test_free_rows_are_filled_with_whole_questions():
    """A question waits until all its samples have a row: its prompt is read once."""
    policy = ScriptedPolicy()
    draw(settings_of(samples=4, batch_rows=12, check_every=1), policy=policy)
    assert policy.filled[0] == max(policy.filled) == 12
    assert [len(prompts) for prompts in policy.added] == [4 * len(set(prompts)) for prompts in policy.added]
    assert sum(map(len, policy.added)) == 48 and 6 < len(policy.added) < 12
    full = policy.filled[: policy.filled.index(next(rows for rows in policy.filled if rows < 9))]
    assert len(full) > 20  # up to the last questions, no four rows are free


def test_no_more_samples_are_begun_than_may_decide():
    """Of 5 samples 3 are begun: when all give the same answer, the other 2 cannot change it."""
    policy = ScriptedPolicy()
    pools = draw(settings_of(batch_rows=3, stop_when_decided=True), policy=policy)
    assert len(policy.added[0]) == 3
    numbers = []
    for pool, whole in zip(pools, draw(settings_of()), strict=True):
        answers = [one.answer for one in whole.samples[:3]]
        begun = [bool(one.response.ids) for one in pool.samples]
        assert begun == sorted(begun, reverse=True)
        unanimous = len(set(answers)) == 1 and None not in answers
        assert (sum(begun) == 3) == unanimous
        numbers.append(sum(begun))
        assert len(answer_filtered(pool, 0, {}).responses) == sum(begun)
    assert set(numbers) == {3, 4, 5}


def test_stopping_a_decided_vote_never_changes_it():
    saved = decided = 0
    for threshold in (None, -0.9, -0.6, 1.0):
        for rows in (2, 12):
            settings = {"samples": 9, "check_every": 1, "threshold": threshold, "batch_rows": rows}
            full = draw(settings_of(**settings))
            short = draw(settings_of(**settings, stop_when_decided=True))
            for one, other in zip(short, full, strict=True):
                vote, whole = answer_filtered(one, 0, {}), answer_filtered(other, 0, {})
                assert (vote.answer, vote.is_correct, one.fallback) == (whole.answer, whole.is_correct, other.fallback)
                decided += vote.details["decided"]
                saved += whole.policy_tokens - vote.policy_tokens
                for mine, its in zip(one.samples, other.samples, strict=True):
                    assert its.response.ids[: len(mine.response.ids)] == mine.response.ids
    assert decided > 80 and saved > 500


def test_a_vote_of_one():
    plain = draw(settings_of(samples=1))
    for pool in plain:
        (majority,) = answer_pool(pool, 0, ["majority"])
        assert majority.answer == pool.samples[0].answer and majority.is_correct == pool.samples[0].is_right
    for pool in draw(settings_of(samples=1, threshold=1.0, stop_when_decided=True)):
        assert pool.fallback and answer_filtered(pool, 0, {}).policy_tokens == pool.policy_tokens


def test_without_a_scorer_there_is_no_score_and_no_filter():
    pools = draw(settings_of(), scored=False)
    assert all(one.response.reward is None and one.reward_tokens == 0 for pool in pools for one in pool.samples)
    assert [[one.response.ids for one in pool.samples] for pool in pools] == [
        [one.response.ids for one in pool.samples] for pool in draw(settings_of())
    ]
    with pytest.raises(ValueError, match="needs a reward model"):
        draw(settings_of(threshold=0.1), scored=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_is_refused(monkeypatch, bad):
    monkeypatch.setitem(globals(), "similarity", lambda prompt, ids: bad)
    with pytest.raises(ValueError, match="not finite"):
        draw(settings_of(threshold=0.1))


@pytest.mark.parametrize(
    "changes", [{"samples": 0}, {"check_every": 0}, {"batch_rows": 0}, {"threshold": 1.5}, {"warmup_tokens": -1}]
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        settings_of(**changes)
