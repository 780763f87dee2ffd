"""Which responses of one prompt are used, and in which training example each of them is."""

from __future__ import annotations

import random
from collections.abc import Sequence

from openrlhf.datasets.tokenize import OnLong, fit_response


def fit_responses(
    prompt_ids: list[int],
    correct: Sequence[list[int]],
    wrong: Sequence[list[int]],
    eos_id: int,
    max_len: int,
    on_long: OnLong = "truncate",
) -> tuple[list[list[int] | None], list[str]]:
    """Fit the responses of one prompt into max_len tokens, each by itself, and leave out what is not different then.

    Args:
        correct, wrong: token ids; see fit_response for these and the further arguments and what raises.
    Returns:
        (ids, reasons) of the correct and then the wrong responses: "kept" or "truncated" with ids, a reason of
        fit_response, "same_tokens" or "conflicting_tokens" without.
    """
    fitted = [fit_response(prompt_ids, ids, eos_id, max_len, on_long) for ids in (*correct, *wrong)]
    keys = [None if ids is None else tuple(ids) for ids, _ in fitted]
    conflicting = (set(keys[: len(correct)]) & set(keys[len(correct) :])) - {None}
    seen: set[tuple[int, ...]] = set()
    for i, key in enumerate(keys):
        if key in conflicting or key in seen:
            fitted[i] = None, "conflicting_tokens" if key in conflicting else "same_tokens"
        elif key is not None:
            seen.add(key)
    return [ids for ids, _ in fitted], [reason for _, reason in fitted]


def deal(
    correct: Sequence[int], wrong: Sequence[int], limit: int, rng: random.Random
) -> list[tuple[list[int], list[int]]]:
    """Share out the responses of one prompt among examples; none is in two of them.

    There are ceil(n / limit) examples for n responses, but not more than correct or than wrong ones, so that each has
    both. They are dealt round in turn after shuffling, first the correct ones and then, going on where these ended, the
    wrong ones. What an example then has beyond the limit is left out of its more numerous side.

    Args:
        correct, wrong: numbers of the responses. limit: responses an example, at least 2.
    Returns:
        (correct, wrong) of each example; none where either is empty.
    """
    count = min(-(-(len(correct) + len(wrong)) // limit), len(correct), len(wrong))
    correct, wrong = rng.sample(correct, len(correct)), rng.sample(wrong, len(wrong))
    examples = [(correct[i::count], wrong[(i - len(correct)) % count :: count]) for i in range(count)]
    for sides in examples:
        while sum(map(len, sides)) > limit:
            max(sides, key=len).pop()
    return examples
