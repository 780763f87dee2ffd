"""Step beam search in plain numbers: bug case B16, selection, and the search against brute force."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from decoding.beam import (
    CUT,
    Beam,
    BeamSettings,
    Candidate,
    mean_logprob,
    search,
    select_candidates,
    sigmoid,
    step_score,
    step_similarity,
    weighted_mean,
)

NAN = math.nan
GUIDED = BeamSettings(conf_ratio=1.0, accumulate="last")  # a candidate's score is its guidance


def step(parent, sample, key, guidance, ended="", logprob=-1.0):
    return Candidate(parent, sample, key, logprob, guidance, ended)


def run_script(script, settings, **more):
    """Search one question whose candidates a script gives by step; also the keys of the beams that were extended."""
    extended = []

    def extend(number, going):
        extended.append([beam.candidate.key if beam.candidate else None for beam in going[0]])
        return {0: script(number, going[0]) if callable(script) else script[number]}

    return search(["question 0"], extend, settings, **more)[0], extended


def choose(candidates, settings=GUIDED, uniforms=None, number=0):
    beams = [Beam()] * (1 + max(one.parent for one in candidates))
    return select_candidates(candidates, beams, settings, number, uniforms)


def test_finished_beam_is_set_aside_and_compared_at_the_end():
    script = [
        [step(0, 0, "A", 0.9, "eos"), step(0, 1, "B", 0.5)],
        [step(0, 0, "B1", 0.6, "eos"), step(0, 1, "B2", 0.4)],
    ]
    found, extended = run_script(script, replace(GUIDED, beam_size=2))
    assert [(beam.candidate.key, beam.score, beam.finished) for beam in found] == [("A", 0.9, True), ("B1", 0.6, True)]
    assert extended == [[None], ["B"]]  # never called with A, nor after two have finished


def test_four_equal_candidates_become_one_beam():
    script = [[step(0, sample, "same", 0.5) for sample in range(4)], [step(0, 0, "same end", 0.5, "eos")]]
    found, extended = run_script(script, replace(GUIDED, beam_size=4, max_steps=2))
    assert extended == [[None], ["same"]] and [beam.candidate.key for beam in found] == ["same end"]


def test_empty_continuations_end_within_the_step_limit():
    def nothing(number, beams):
        return [Candidate(parent, sample, "", mean_logprob([])) for parent in range(len(beams)) for sample in range(2)]

    found, extended = run_script(nothing, BeamSettings(beam_size=2, max_steps=5))
    assert len(extended) == 5 and all(len(beams) == 1 for beams in extended)
    assert [(beam.candidate.key, beam.finished) for beam in found] == [("", False)]


def test_best_unfinished_is_returned_and_flagged():
    script = [
        [step(0, 0, "cut", 0.7, CUT), step(0, 1, "open", 0.5)],
        [step(0, 0, "open longer", 0.6), step(0, 1, "worse", 0.1)],
    ]
    found, extended = run_script(script, replace(GUIDED, beam_size=2, max_steps=2))
    assert extended == [[None], ["open"]]  # the one that was cut off is not extended either
    assert [(beam.candidate.key, beam.finished) for beam in found] == [("cut", False)]
    script[1][0] = step(0, 0, "open longer", 0.8)
    assert run_script(script, replace(GUIDED, beam_size=2, max_steps=2))[0][0].candidate.key == "open longer"
    script[1][1] = step(0, 1, "low end", 0.01, "stop")
    found = run_script(script, replace(GUIDED, beam_size=2, max_steps=2))[0]
    assert [(beam.candidate.key, beam.finished) for beam in found] == [("low end", True)]  # a real end goes first


@pytest.mark.parametrize("where", ["logprob", "guidance"])
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_a_score_that_is_no_number_never_beats_a_finite_one(where, bad):
    settings = BeamSettings(beam_size=2, temperature=1.0)
    broken = replace(step(0, 0, "broken", 0.9, "eos"), **{where: bad})
    for order in itertools.permutations([broken, step(0, 1, "low", -1e6), step(0, 2, "lower", -2e6)]):
        selection = choose(list(order), settings, [0.5] * 3)
        assert [order[place].key for place in selection.kept] == ["low", "lower"]
        assert selection.fates[order.index(broken)] == "dropped"


def test_a_question_without_any_score_is_named():
    def extend(number, going):
        return {0: [step(0, 0, "a", 1.0)], 1: [step(0, 0, "a", 1.0 if number == 0 else NAN)]}

    with pytest.raises(ValueError, match=r"question 7, step 2: none of the 1 candidates has a score"):
        search(["question 3", "question 7"], extend, GUIDED)


def test_duplicates_take_the_best_score_and_no_second_place():
    candidates = [step(0, 0, "a", 0.2), step(1, 0, "a", 0.6), step(1, 1, "b", 0.1), step(0, 1, "a", 0.9, "eos")]
    selection = choose(candidates, replace(GUIDED, beam_size=3))
    assert selection.kept == [3, 1, 2]  # the finished "a" is not the open one
    assert selection.fates == ["merged", "kept", "kept", "finished"] and selection.stand_ins == [1, 1, 2, 3]


@pytest.mark.parametrize(("early", "late"), [(0.3, 0.8), (0.8, 0.3)])
def test_equal_finished_responses_of_two_steps_are_one_result(early, late):
    script = [
        [step(0, 0, "A", early, "eos"), step(0, 1, "B", 0.2)],
        [step(0, 0, "A", late, "eos"), step(0, 1, "C", 0.1)],
        [step(0, 0, "D", 0.5, "stop")],
    ]
    found, _ = run_script(script, replace(GUIDED, beam_size=2))
    assert [(beam.candidate.key, beam.score) for beam in found] == [("A", 0.8), ("D", 0.5)]


def test_no_more_finished_beams_than_asked_for():
    script = [
        [step(0, 0, "A", 0.1, "eos"), step(0, 1, "B", 0.5), step(0, 2, "C", 0.4)],
        [step(0, 0, "D", 0.9, "eos"), step(0, 1, "E", 0.7, "eos"), step(1, 0, "F", 0.8, "eos")],
    ]
    found, _ = run_script(script, replace(GUIDED, beam_size=3))
    assert [beam.candidate.key for beam in found] == ["D", "F", "E"]


def test_scores_by_hand():
    settings = BeamSettings(conf_ratio=0.25)
    assert step_score(-2.0, 0.8, settings) == pytest.approx(0.75 * -2.0 + 0.25 * 0.8)
    assert step_score(-2.0, None, settings) == -2.0
    assert step_score(-math.inf, 0.8, BeamSettings(conf_ratio=1.0)) == 0.8  # a weight of 0 times infinity is no NaN
    assert step_score(-2.0, 0.8, BeamSettings(unbiased=True, conf_ratio=0.25)) == 0.8
    assert step_score(-2.0, None, BeamSettings(unbiased=True)) == 0.0
    # -0.5 and 0.5 towards and away: (2 * 0.4 - 1 * 0.7) / 3
    assert weighted_mean([0.4, 0.7, NAN], [2.0, -1.0, 0.0]) == pytest.approx(0.1 / 3)
    with pytest.raises(ValueError, match="at least one weight"):
        weighted_mean([1.0], [0.0])
    assert mean_logprob([-1.0, -3.0]) == -2.0 and mean_logprob([]) == -math.inf
    assert sigmoid(0.0) == 0.5 and sigmoid(2.0) == pytest.approx(1 / (1 + math.exp(-2))) and sigmoid(-1e4) == 0.0
    assert sigmoid(1e4) == 1.0 and math.isnan(sigmoid(NAN))


def test_similarity_of_a_step_by_hand():
    similarities = np.array([[0.5, 0.1], [-0.2, 0.4], [0.3, 0.3]], dtype=np.float32)
    # (3 * first - 1 * second) / 4 of each token: 0.35, -0.25, 0.15
    expected = {"min": -0.25, "mean": 0.25 / 3, "last": 0.15}
    for reduction, value in expected.items():
        assert step_similarity(similarities, (3.0, -1.0), reduction) == pytest.approx(value, abs=1e-7)
    assert step_similarity(similarities[:, :1], (-1.0,), "min") == pytest.approx(-0.5)  # away from the goal


def test_score_of_a_beam_is_the_mean_over_its_steps_or_the_last():
    script = [
        [step(0, 0, "a", 0.9, logprob=-1), step(0, 1, "b", 0.1, logprob=-1)],
        [step(0, 0, "a+", 0.2, "eos", logprob=-3), step(1, 0, "b+", 0.9, "eos", logprob=-1)],
    ]
    # steps of a: (-1 + 0.9) / 2 = -0.05, (-3 + 0.2) / 2 = -1.4; of b: (-1 + 0.1) / 2 = -0.45, (-1 + 0.9) / 2 = -0.05
    found, _ = run_script(script, BeamSettings(beam_size=2))
    assert [(b.candidate.key, round(b.score, 9)) for b in found] == [("b+", -0.25), ("a+", -0.725)]
    assert found[1].step_scores == pytest.approx((-0.05, -1.4))
    found, _ = run_script(script, BeamSettings(beam_size=2, accumulate="last"))
    assert [(b.candidate.key, round(b.score, 9)) for b in found] == [("b+", -0.05), ("a+", -1.4)]


def test_rejected_candidates_are_dropped_unless_all_are():
    settings = replace(GUIDED, beam_size=3, conf_ratio=0.5, reject_sample=True, min_score=0.3)
    candidates = [step(0, 0, "likely", 0.29, logprob=-0.1), step(0, 1, "good", 0.3, logprob=-9), step(0, 2, "x", 0.1)]
    selection = choose(candidates, settings)
    assert selection.kept == [1] and selection.fates == ["rejected", "kept", "rejected"]
    assert choose(candidates, replace(settings, min_score=0.5)).kept == [0, 2, 1]  # none passes: by score


def plackett_luce(weights, size):
    """Probability of every set of `size` places drawn one after another in proportion to their weights."""
    found = Counter()
    for order in itertools.permutations(range(len(weights)), size):
        left, probability = sum(weights), 1.0
        for place in order:
            probability *= weights[place] / left
            left -= weights[place]
        found[frozenset(order)] += probability
    return found


def draw_sets(candidates, settings, number, draws=20_000):
    rng = random.Random(0)
    keys = (
        frozenset(
            candidates[place].key
            for place in choose(candidates, settings, [rng.random() for _ in candidates], number).kept
        )
        for _ in range(draws)
    )
    return {chosen: count / draws for chosen, count in Counter(keys).items()}


@pytest.mark.parametrize(("decay", "number"), [(-1.0, 3), (1.0, 3), (0.5, 1)])
def test_selection_draws_without_replacement_from_the_softmax(decay, number):
    scores = [0.0, 0.4, 0.9, -0.6]
    settings = replace(GUIDED, beam_size=2, temperature=0.8, temperature_decay=decay)
    temperature = 0.4 if decay == 0.5 else 0.8
    expected = plackett_luce([math.exp(score / temperature) for score in scores], 2)
    found = draw_sets([step(0, i, i, score) for i, score in enumerate(scores)], settings, number)
    for chosen, probability in expected.items():
        # Four standard errors of a share of 20,000 draws: at most 0.0142.
        assert found.get(chosen, 0) == pytest.approx(probability, abs=4 * math.sqrt(probability / 20_000))


def test_duplicates_keep_their_weight_only_where_the_selection_is_unbiased():
    candidates = [step(0, i, "thrice", 0.2, logprob=-0.1) for i in range(3)] + [step(0, 3, "once", 0.5, logprob=-9.0)]
    settings = replace(GUIDED, beam_size=1, conf_ratio=0.1, temperature=1.0, unbiased=True)
    share = draw_sets(candidates, settings, 0)[frozenset(["thrice"])]
    assert share == pytest.approx(3 * math.exp(0.2) / (3 * math.exp(0.2) + math.exp(0.5)), abs=0.014)
    biased = [math.exp(0.9 * -0.1 + 0.1 * 0.2), math.exp(0.9 * -9.0 + 0.1 * 0.5)]
    share = draw_sets(candidates, replace(settings, unbiased=False), 0)[frozenset(["thrice"])]
    assert share == pytest.approx(biased[0] / sum(biased), abs=0.014)
    equal = [replace(one, guidance=0.5) for one in reversed(candidates)]
    chosen = choose(equal, replace(settings, temperature=0.0))
    assert [equal[place].key for place in chosen.kept] == ["thrice"]  # more copies decide between equal scores


def test_order_of_the_candidates_does_not_matter():
    rng = random.Random(1)
    for trial in range(200):
        settings = BeamSettings(
            beam_size=rng.randint(1, 4),
            temperature=rng.choice([0.0, 1e-320, 0.3]),
            unbiased=rng.random() < 0.5,
            reject_sample=rng.random() < 0.5,
            min_score=0.4,
        )
        pairs = [
            (step(parent, sample, rng.choice("abcd"), rng.choice([0.1, 0.5, 0.5, NAN]), rng.choice(["", "eos"])), draw)
            for parent in range(2)
            for sample, draw in enumerate([rng.random() for _ in range(3)])
        ]
        pairs.append((step(2, 0, "e", 0.3), 0.5))
        told = set()
        for _ in range(5):
            rng.shuffle(pairs)
            candidates, draws = map(list, zip(*pairs, strict=True))
            selection = choose(candidates, settings, draws)
            told.add(
                (
                    tuple(candidates[place].parent * 3 + candidates[place].sample for place in selection.kept),
                    tuple(
                        sorted(
                            (one.parent, one.sample, fate)
                            for one, fate in zip(candidates, selection.fates, strict=True)
                        )
                    ),
                )
            )
        assert len(told) == 1, trial


def test_vanishing_temperature_is_deterministic():
    candidates = [step(0, i, i, score) for i, score in enumerate([0.1, 0.7, 0.3])]
    settings = replace(GUIDED, beam_size=2, temperature=1e-300)
    assert choose(candidates, settings, [0.0, 0.999999, 0.0]).kept == [1, 2]
    assert choose(candidates, replace(settings, temperature=1.0, temperature_decay=0.1), [0.5] * 3, 400).kept == [1, 2]
    with pytest.raises(ValueError, match="pass uniform"):
        run_script([candidates], settings)


def random_tree(rng, depth=0):
    """Children of a node, each (step score, ended, its children)."""
    ended = ["eos" if depth == 3 or rng.random() < 0.3 else "" for _ in range(rng.randint(1, 3))]
    return [(rng.uniform(-2, 0), end, [] if end else random_tree(rng, depth + 1)) for end in ended]


def leaves(children, path=(), scores=()):
    for place, (score, ended, below) in enumerate(children):
        if ended:
            yield (*path, place), (*scores, score)
        yield from leaves(below, (*path, place), (*scores, score))


@pytest.mark.parametrize("accumulate", ["mean", "last"])
def test_wide_enough_search_equals_brute_force(accumulate):
    rng = random.Random(5)
    for _ in range(50):
        tree = random_tree(rng)

        def extend(number, going, tree=tree):
            found = []
            for parent, beam in enumerate(going[0]):
                path, children = beam.candidate.key if beam.candidate else (), tree
                for place in path:
                    children = children[place][2]
                found += [
                    Candidate(parent, place, (*path, place), score, None, ended)
                    for place, (score, ended, _) in enumerate(children)
                ]
            return {0: found}

        results = search(["q"], extend, BeamSettings(beam_size=100, accumulate=accumulate))[0]
        value = (lambda s: s[-1]) if accumulate == "last" else (lambda s: sum(s) / len(s))
        expected = sorted(((value(scores), path) for path, scores in leaves(tree)), reverse=True)
        assert [(beam.score, beam.candidate.key) for beam in results] == expected
        narrow = search(["q"], extend, BeamSettings(beam_size=1, accumulate="last"))[0]
        children, path = tree, []
        while children:  # width 1 follows the best child
            best = max(range(len(children)), key=lambda place: children[place][0])
            path, children = [*path, best], children[best][2]
        assert [beam.candidate.key for beam in narrow] == [tuple(path)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("beam_size", 0),
        ("max_steps", 0),
        ("conf_ratio", 1.1),
        ("accumulate", "sum"),
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature_decay", 0.0),
        ("min_score", NAN),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        BeamSettings(**{field: value})
