"""Figures of evaluation against slow loops that follow docs/metrics.md one row at a time, to 1e-12."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from openrlhf.evaluation.ballots import make_ballots
from openrlhf.evaluation.bootstrap import draw_questions
from openrlhf.evaluation.calibration import calibration, centring_shift
from openrlhf.evaluation.filtering import candidate_thresholds, tradeoff_points
from openrlhf.evaluation.metrics import auroc, auroc_interval, paired_auroc_difference, prefix_scores
from openrlhf.evaluation.paired import mcnemar_p
from openrlhf.evaluation.selection import FIGURES, selection_accuracies, subset_sizes
from openrlhf.evaluation.step_level import step_level
from openrlhf.evaluation.summary import summarise_rows
from openrlhf.evaluation.threshold_choice import split_questions, threshold_at_equal_accuracy

DRAWS = 60


def random_rows(questions=7, seed=0, most=5):
    """Rows with ties in scores and answers, missing answers, and different numbers of completions a question."""
    generator = np.random.default_rng(seed)
    rows = []
    for q in range(questions):
        for sample in range(int(generator.integers(1, most + 1))):
            answer = [None, "3", "5", "8"][generator.integers(0, 4)]
            length = int(generator.integers(1, 7))
            rewards = (generator.integers(-4, 5, length) / 2).tolist()
            rows.append(
                {
                    "question": f"q{q}",
                    "sample": sample,
                    "generated_solution": f"{q} {sample}",
                    "predicted_answer": answer,
                    "expected_answer": "5",
                    "is_correct": answer == "5",
                    "reward": rewards[-1],
                    "partial_rewards": rewards,
                    "cosine_sim": (generator.integers(-4, 5, length) / 8).tolist(),
                    "num_actions": length,
                    "truncated": False,
                }
            )
    return rows


def by_question(rows):
    groups = {}
    for row in rows:
        groups.setdefault(row["question"], []).append(row)
    return groups


def slow_auroc(labels, scores):
    won = pairs = 0
    for label, score in zip(labels, scores, strict=True):
        for other, lower in zip(labels, scores, strict=True):
            if label and not other:
                pairs += 1
                won += 1 if score > lower else 0.5 if score == lower else 0
    return won / pairs if pairs else None


def redrawn(rows, draws):
    """The rows of each draw: every row as often as its question was drawn."""
    names = list(draws.numbers)
    for weights in draws.weights:
        times = dict(zip(names, weights.tolist(), strict=True))
        yield [row for row in rows for _ in range(times[row["question"]])]


def slow_interval(value, figures):
    defined = [figure for figure in figures if figure is not None]
    return [value, *np.percentile(defined, [2.5, 97.5])]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def slow_vote(rows, keep, score, weight=None):
    """Right or wrong: votes of equal answers added up, ties by mean score, then by text."""
    votes, scores = {}, {}
    for row, kept in zip(rows, keep, strict=True):
        if kept and row["predicted_answer"] is not None:
            answer = row["predicted_answer"]
            votes[answer] = votes.get(answer, 0) + (1 if weight is None else weight(row))
            scores.setdefault(answer, []).append(score(row))
    if not votes:
        return False
    most = max(votes.values())
    tied = [answer for answer in votes if abs(votes[answer] - most) < 1e-9]
    means = {answer: sum(scores[answer]) / len(scores[answer]) for answer in tied}
    best = [answer for answer in tied if abs(means[answer] - max(means.values())) < 1e-9]
    return min(best) == rows[0]["expected_answer"]


def goal(row):
    return row["cosine_sim"][-1]


def reward(row):
    return row["reward"]


def slow_choice(name, rows):
    """Expected accuracy of one choice among all the rows given."""
    everyone = [True] * len(rows)
    if name == "mean of samples":
        return sum(row["is_correct"] for row in rows) / len(rows)
    if name == "any correct":
        return float(any(row["is_correct"] for row in rows))
    if name == "majority vote":
        return float(slow_vote(rows, everyone, goal))
    if name == "weighted vote, reward":
        return float(slow_vote(rows, everyone, reward, lambda row: sigmoid(row["reward"])))
    if name == "weighted vote, goal similarity":
        return float(slow_vote(rows, everyone, goal, lambda row: (1 + goal(row)) / 2))
    score = reward if name == "best of n, reward" else goal
    best = [row for row in rows if score(row) == max(map(score, rows))]
    return sum(row["is_correct"] for row in best) / len(best)


def slow_filter(row, threshold, warmup):
    for t in range(warmup, row["num_actions"]):
        if threshold is not None and row["cosine_sim"][t] < threshold:
            return False, t + 1
    return True, row["num_actions"]


def slow_filtered_vote(rows, threshold, warmup):
    """Per question: right, tokens used, tokens, fallback; and per completion kept, right."""
    questions, completions = {}, []
    for name, members in by_question(rows).items():
        outcomes = [slow_filter(row, threshold, warmup) for row in members]
        keep = [kept for kept, _ in outcomes]
        fallback = not all(keep) and not any(
            kept and row["predicted_answer"] is not None for kept, row in zip(keep, members, strict=True)
        )
        total = sum(row["num_actions"] for row in members)
        questions[name] = (
            slow_vote(members, [True] * len(members) if fallback else keep, goal),
            total if fallback else sum(used for _, used in outcomes),
            total,
            fallback,
        )
        completions += [(kept, row["is_correct"]) for kept, row in zip(keep, members, strict=True)]
    return questions, completions


@pytest.mark.parametrize("seed", range(5))
def test_auroc_interval_and_difference_count_pairs_of_every_draw(seed):
    rows = random_rows(12, seed)
    labels, questions = [row["is_correct"] for row in rows], [row["question"] for row in rows]
    first, second = prefix_scores(rows, "partial_rewards", 100), prefix_scores(rows, "cosine_sim", 50)
    assert auroc(labels, first) == pytest.approx(slow_auroc(labels, first), abs=1e-12)
    draws = draw_questions(questions, DRAWS, seed)
    figures, differences = [], []
    for drawn in redrawn([row | {"a": a, "b": b} for row, a, b in zip(rows, first, second, strict=True)], draws):
        truth = [row["is_correct"] for row in drawn]
        a, b = slow_auroc(truth, [row["a"] for row in drawn]), slow_auroc(truth, [row["b"] for row in drawn])
        figures.append(a)
        differences += [] if a is None else [a - b]
    wanted = slow_interval(slow_auroc(labels, first), figures)
    assert auroc_interval(labels, first, questions, DRAWS, seed) == pytest.approx(wanted, abs=1e-12)
    found = paired_auroc_difference(labels, first, second, questions, DRAWS, seed)
    wanted = slow_interval(slow_auroc(labels, first) - slow_auroc(labels, second), differences)
    assert found[:3] == pytest.approx(wanted, abs=1e-12)
    smaller = min(sum(d <= 1e-15 for d in differences), sum(d >= -1e-15 for d in differences))
    assert found.p_value == pytest.approx(min(1, 2 * (smaller + 1) / (len(differences) + 1)), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_choices_with_n_completions_average_over_all_subsets(seed):
    rows = random_rows(6, seed)
    ballots = make_ballots(rows)
    found = selection_accuracies(ballots)  # at most 5 completions: 10 subsets, so votes are exact too
    sizes = subset_sizes(ballots)
    assert sizes == [1, 2, 4, 5][: len(sizes)] and sizes[-1] == max(map(len, by_question(rows).values()))
    for name in FIGURES:
        for q, members in enumerate(by_question(rows).values()):
            for column, size in enumerate(sizes):
                subsets = list(itertools.combinations(members, min(size, len(members))))
                wanted = sum(slow_choice(name, list(subset)) for subset in subsets) / len(subsets)
                assert found[name][q, column] == pytest.approx(wanted, abs=1e-12), (name, q, size)


def test_drawn_subsets_come_near_the_average_over_all():
    rows = random_rows(40, seed=1, most=12)
    ballots = [ballot for ballot in make_ballots(rows) if len(ballot.groups) >= 9]
    rows = [row for row in rows if row["question"] in {ballot.question for ballot in ballots}]
    found = selection_accuracies(ballots, ["majority vote"], subsets=100)["majority vote"][:, 2]  # n = 4
    exact = [
        np.mean([slow_choice("majority vote", list(subset)) for subset in itertools.combinations(members, 4)])
        for members in by_question(rows).values()
    ]
    # 100 draws a question: standard error at most 0.05 for one, 0.05 / sqrt(questions) for their mean
    assert np.abs(found - exact).max() < 0.25
    assert abs(np.mean(found) - np.mean(exact)) < 3 * 0.05 / math.sqrt(len(exact))


def slow_fewer(rows, share):
    """Expected accuracy of the majority vote when each question keeps share * K completions, at least one."""
    total = []
    for members in by_question(rows).values():
        wanted = max(1.0, share * len(members))
        low = math.floor(wanted)
        by_size = []
        for size in (low, min(low + 1, len(members))):
            subsets = list(itertools.combinations(members, size))
            by_size.append(sum(slow_choice("majority vote", list(subset)) for subset in subsets) / len(subsets))
        total.append((low + 1 - wanted) * by_size[0] + (wanted - low) * by_size[1])
    return sum(total) / len(total)


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("seed", range(4))
def test_tradeoff_equals_filtering_and_voting_by_hand(seed, warmup):
    rows = random_rows(8, seed)
    ballots = make_ballots(rows)
    draws = draw_questions([row["question"] for row in rows], DRAWS, seed)
    points = tradeoff_points(ballots, draws, warmup_tokens=warmup)
    # multiples of 1/8: just above each lowest value that occurs behind the warm-up
    lowest = sorted({min(row["cosine_sim"][warmup:]) for row in rows if row["num_actions"] > warmup})
    assert [point["threshold"] for point in points] == [None, *[pytest.approx(low, abs=1e-6) for low in lowest]]
    for point in points:
        questions, completions = slow_filtered_vote(rows, point["threshold"], warmup)
        right, used, total, fallback = (list(column) for column in zip(*questions.values(), strict=True))
        accuracies, savings = [], []
        for drawn in redrawn([{"question": name} for name in questions], draws):
            results = [questions[row["question"]] for row in drawn]
            accuracies.append(sum(result[0] for result in results) / len(results))
            savings.append(1 - sum(result[1] for result in results) / sum(result[2] for result in results))
        wanted = slow_interval(sum(right) / len(right), accuracies)
        assert point["accuracy"] == pytest.approx(wanted, abs=1e-12)
        assert point["tokens_saved"] == pytest.approx(slow_interval(1 - sum(used) / sum(total), savings), abs=1e-12)
        # at most 5 completions: 10 subsets, so the votes of fewer completions are exact
        fewer = slow_fewer(rows, sum(used) / sum(total))
        assert point["fewer_samples"] == pytest.approx(fewer, abs=1e-12)
        kept_correct = [kept for kept, correct in completions if correct]
        kept_wrong = [kept for kept, correct in completions if not correct]
        assert point["correct_kept"] == pytest.approx(sum(kept_correct) / len(kept_correct), abs=1e-12)
        assert point["wrong_dropped"] == pytest.approx(1 - sum(kept_wrong) / len(kept_wrong), abs=1e-12)
        assert point["dropped"] == pytest.approx(1 - sum(k for k, _ in completions) / len(completions), abs=1e-12)
        assert point["fallbacks"] == sum(fallback)


@pytest.mark.parametrize("seed", range(4))
def test_equal_accuracy_equals_a_search_by_hand(seed):
    validation, test = split_questions(random_rows(16, seed), 0.5, seed)
    found = threshold_at_equal_accuracy(validation, test, bootstrap=DRAWS, seed=seed)
    best = (None, 0.0)
    unfiltered, _ = slow_filtered_vote(validation, None, 0)
    for threshold in candidate_thresholds(make_ballots(validation), 100):
        questions, _ = slow_filtered_vote(validation, threshold, 0)
        saved = 1 - sum(q[1] for q in questions.values()) / sum(q[2] for q in questions.values())
        enough = sum(q[0] for q in questions.values()) >= sum(q[0] for q in unfiltered.values())
        if enough and saved > best[1] + 1e-15:
            best = (threshold, saved)
    assert found.threshold == best[0]
    assert found.validation.tokens_saved == pytest.approx(best[1], abs=1e-12)
    before, _ = slow_filtered_vote(test, None, 0)
    after, _ = slow_filtered_vote(test, best[0], 0)
    draws = draw_questions([row["question"] for row in test], DRAWS, seed)
    differences, savings = [], []
    for drawn in redrawn([{"question": name} for name in before], draws):
        names = [row["question"] for row in drawn]
        differences.append(sum(after[name][0] - before[name][0] for name in names) / len(names))
        savings.append(1 - sum(after[name][1] for name in names) / sum(after[name][2] for name in names))
    gained = sum(after[name][0] and not before[name][0] for name in before)
    lost = sum(before[name][0] and not after[name][0] for name in before)
    assert (found.better, found.worse) == (gained, lost)
    wanted = slow_interval((gained - lost) / len(before), differences)
    assert found.accuracy_difference == pytest.approx(wanted, abs=1e-12)
    saved = 1 - sum(q[1] for q in after.values()) / sum(q[2] for q in after.values())
    assert found.saving == pytest.approx(slow_interval(saved, savings), abs=1e-12)
    assert found.fewer_samples == pytest.approx(slow_fewer(test, 1 - saved), abs=1e-12)
    right = sum(after[name][0] for name in after) / len(after)
    assert found.gain_over_fewer.value == pytest.approx(right - found.fewer_samples, abs=1e-12)
    assert found.test.tokens_saved == pytest.approx(saved, abs=1e-12)


def test_mcnemar_equals_scipy():
    for better in range(12):
        for worse in range(12):
            wanted = binomtest(better, better + worse, 0.5).pvalue if better + worse else 1.0
            assert mcnemar_p(better, worse) == pytest.approx(wanted, abs=1e-12)
    assert mcnemar_p(480, 521) == pytest.approx(binomtest(480, 1001, 0.5).pvalue, abs=1e-12)
    assert mcnemar_p(0, 2000) == pytest.approx(0, abs=1e-300)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_equals_a_loop_over_bins(seed):
    generator = np.random.default_rng(seed)
    questions = [f"q{k // 4}" for k in range(80)]
    labels, rewards = generator.integers(0, 2, 80).astype(bool).tolist(), generator.normal(0.5, 2, 80).tolist()
    draws = draw_questions(questions, DRAWS, seed)
    found = calibration(labels, rewards, questions, draws)
    shift = centring_shift(np.array(labels), np.array(rewards))
    assert sum(sigmoid(r - shift) for r in rewards) / 80 == pytest.approx(sum(labels) / 80, abs=1e-12)
    for part, moved in ((found, 0.0), (found["centred"], shift)):
        rows = [
            {"question": q, "p": sigmoid(r - moved), "y": y} for q, r, y in zip(questions, rewards, labels, strict=True)
        ]
        bins = slow_bins(rows)
        assert [(b["low"], b["count"]) for b in part["bins"]] == [(b / 10, len(bins[b])) for b in sorted(bins)]
        for one, members in zip(part["bins"], (bins[b] for b in sorted(bins)), strict=True):
            share, n, z = sum(m["y"] for m in members) / len(members), len(members), 1.959963984540054
            middle = (share + z * z / (2 * n)) / (1 + z * z / n)
            half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
            assert one["predicted"] == pytest.approx(sum(m["p"] for m in members) / n, abs=1e-12)
            assert [one["correct"], one["ci_low"], one["ci_high"]] == pytest.approx(
                [share, middle - half, middle + half], abs=1e-12
            )
        drawn = list(redrawn(rows, draws))
        assert part["ece"] == pytest.approx(slow_interval(slow_ece(rows), map(slow_ece, drawn)), abs=1e-12)
        assert part["brier"] == pytest.approx(slow_interval(slow_brier(rows), map(slow_brier, drawn)), abs=1e-12)


def slow_bins(rows):
    bins = {}
    for row in rows:
        bins.setdefault(min(int(row["p"] * 10), 9), []).append(row)
    return bins


def slow_ece(rows):
    total = 0.0
    for members in slow_bins(rows).values():
        n = len(members)
        total += n / len(rows) * abs(sum(m["p"] for m in members) / n - sum(m["y"] for m in members) / n)
    return total


def slow_brier(rows):
    return sum((row["p"] - row["y"]) ** 2 for row in rows) / len(rows)


@pytest.mark.parametrize("seed", range(4))
def test_step_rules_equal_a_loop_over_steps(seed):
    generator = np.random.default_rng(seed)
    rows = []
    for k in range(24):
        steps = [f"step {s} of {k}" for s in range(generator.integers(2, 7))]
        text = "\n".join(steps)
        ends = [*sorted(generator.choice(len(text), 9, replace=False).tolist()), len(text), len(text)]
        rows.append(
            {
                "question": f"q{k // 2}",
                "steps": steps,
                "generated_solution": text,
                "first_error_step": int(generator.integers(1, len(steps) + 1)),
                "token_ends": ends,
                "partial_rewards": (generator.integers(-6, 7, 11) / 2).tolist(),
                "cosine_sim": (generator.integers(-8, 9, 11) / 8).tolist() if k % 5 else None,
                "reward": 0.0,
            }
        )
    draws = draw_questions([row["question"] for row in rows], DRAWS, seed)
    found = step_level(rows, draws)
    assert found["rows"] == 24 and found["steps"] == sum(len(row["steps"]) for row in rows)
    for score, key in (("goal similarity", "cosine_sim"), ("reward", "partial_rewards")):
        judged = [row for row in rows if row[key] is not None]
        for words in ("lowest", "largest drop of", "first fall of"):
            exact = [row | {"hit": slow_step(words, row, key) == row["first_error_step"]} for row in judged]
            wanted = slow_interval(
                sum(row["hit"] for row in exact) / len(exact),
                [sum(row["hit"] for row in drawn) / len(drawn) if drawn else None for drawn in redrawn(exact, draws)],
            )
            assert found["accuracy"][f"{words} {score}"] == pytest.approx(wanted, abs=1e-12)
            gain = [row["hit"] - 1 / len(row["steps"]) for row in exact]
            assert found["above_chance"][f"{words} {score}"][0] == pytest.approx(sum(gain) / len(gain), abs=1e-12)
            near = [abs((slow_step(words, row, key) or -9) - row["first_error_step"]) <= 1 for row in judged]
            assert found["within_one"][f"{words} {score}"][0] == pytest.approx(sum(near) / len(near), abs=1e-12)
        labels = [s + 1 < row["first_error_step"] for row in judged for s in range(len(row["steps"]))]
        values = [value for row in judged for value in slow_step_values(row, key)[1:]]
        assert found["auroc"][score][0] == pytest.approx(slow_auroc(labels, values), abs=1e-12)
    assert found["chance"][0] == pytest.approx(sum(1 / len(row["steps"]) for row in rows) / 24, abs=1e-12)
    near = [
        sum(abs(s - row["first_error_step"]) <= 1 for s in range(1, len(row["steps"]) + 1)) / len(row["steps"])
        for row in rows
    ]
    assert found["chance_within_one"][0] == pytest.approx(sum(near) / 24, abs=1e-12)
    both = [row for row in rows if row["cosine_sim"] is not None]
    for one in found["differences"]:
        words = one["rule"] if one["rule"] == "lowest" else f"{one['rule']} of"
        hits = [
            [slow_step(words, row, key) == row["first_error_step"] for key in ("cosine_sim", "partial_rewards")]
            for row in both
        ]
        assert one["better"] == sum(a and not b for a, b in hits)
        assert one["worse"] == sum(b and not a for a, b in hits)
        assert one["difference"][0] == pytest.approx(sum(a - b for a, b in hits) / len(hits), abs=1e-12)


def slow_step_values(row, key):
    """The value at the first token, then at the token that holds the last character of each step."""
    values, end = [row[key][0]], -1
    for step in row["steps"]:
        end += len(step) + 1
        values.append(next(row[key][t] for t, upto in enumerate(row["token_ends"]) if upto >= end))
    return values


def slow_step(words, row, key):
    """1-based step that the rule names."""
    before, *values = slow_step_values(row, key)
    falls = [(values[0] if s == 0 else values[s]) - (before if s == 0 else values[s - 1]) for s in range(len(values))]
    if words == "lowest":
        return values.index(min(values)) + 1
    if words == "largest drop of":
        return falls.index(min(falls)) + 1
    return next((s + 1 for s, fall in enumerate(falls) if fall < 0), None)


@pytest.mark.parametrize("seed", range(3))
def test_the_summary_holds_the_same_figures(seed):
    rows = random_rows(10, seed)
    summary = summarise_rows(rows, bootstrap=DRAWS, seed=seed, percentiles=(30, 100))
    labels = [row["is_correct"] for row in rows]
    for percent in (30, 100):
        scores = [row["cosine_sim"][max(math.ceil(percent * row["num_actions"] / 100), 1) - 1] for row in rows]
        found = summary["prefix_auroc"]["goal_similarity"][str(percent)]
        assert found[0] == pytest.approx(slow_auroc(labels, scores), abs=1e-12)
    means = [sum(row["cosine_sim"]) / row["num_actions"] for row in rows]
    assert summary["auroc"]["goal_similarity_mean"][0] == pytest.approx(slow_auroc(labels, means), abs=1e-12)
    draws = draw_questions([row["question"] for row in rows], DRAWS, seed)
    for name, values in summary["accuracy"].items():
        each = {question: slow_choice(name, members) for question, members in by_question(rows).items()}
        drawn = [
            np.mean([each[row["question"]] for row in one]) for one in redrawn([{"question": q} for q in each], draws)
        ]
        assert values == pytest.approx(slow_interval(np.mean(list(each.values())), drawn), abs=1e-12)
        assert list(summary["accuracy_by_n"][name].values())[-1] == pytest.approx(values[0], abs=1e-12)
