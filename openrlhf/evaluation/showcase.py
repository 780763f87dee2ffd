"""Which completions a report shows, in which order, and how they are packed into the page."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from openrlhf.evaluation.heat import cut_token, is_correct, steepest_fall, token_scale, token_texts
from openrlhf.evaluation.step_level import step_ends

Row = Mapping[str, Any]
MAX_EXTRA_LETTERS = 200  # longer values of other keys are not shown
MAX_LOWEST = 4000  # lowest similarities kept of a set, for the shares beside the threshold
_KNOWN_KEYS = frozenset(
    "question generated_solution expected_answer predicted_answer is_correct sample reward partial_rewards cosine_sim "
    "num_actions truncated token_ends".split()
)


class Instructive(NamedTuple):
    """Why a completion is worth a look."""

    place: int  # row in its set
    tier: int  # 0 wrong but rated high, 1 correct but rated low, 2 the others, 3 without a reward
    reason: str


def instructive_order(rows: Sequence[Row]) -> list[Instructive]:
    """Rows, most instructive first.

    First wrong completions whose reward is above the median of the set, highest first; then correct ones below it,
    lowest first; then the others by the steepest fall of the goal similarity (of the reward where there is none); then
    those without a reward.
    """
    scored = [place for place, row in enumerate(rows) if row.get("reward") is not None]
    rewards = np.array([rows[place]["reward"] for place in scored], np.float64)
    ordered = np.sort(rewards)
    ranks = (np.searchsorted(ordered, rewards, "left") + np.searchsorted(ordered, rewards, "right")) / 2
    rank = {place: float(value) / len(scored) for place, value in zip(scored, ranks, strict=True)}
    found = []
    for place, row in enumerate(rows):
        correct = is_correct(row)
        if place not in rank:
            found.append((3, 0.0, Instructive(place, 3, "no reward: the prompt left no room for the response")))
        elif correct is False and rank[place] > 0.5:
            reason = f"wrong, with a reward above {_percent(rank[place])} of the set"
            found.append((0, -rank[place], Instructive(place, 0, reason)))
        elif correct is True and rank[place] < 0.5:
            reason = f"correct, with a reward below {_percent(1 - rank[place])} of the set"
            found.append((1, rank[place], Instructive(place, 1, reason)))
        else:
            name = "reward" if row.get("cosine_sim") is None else "goal similarity"
            fall = steepest_fall(row.get("partial_rewards" if name == "reward" else "cosine_sim"))
            found.append((2, -fall, Instructive(place, 2, f"{name} falls by {fall:.2f} on the way")))
    return [one for _, _, one in sorted(found, key=lambda item: item[:2])]


def choose_rows(rows: Sequence[Row], count: int, seed: int = 0) -> list[int]:
    """Places of at most `count` rows: one half the most instructive of each kind in turn, the rest drawn at random.

    The draw depends on the seed and the completion, so that sets of the same completions, scored by several models,
    show the same ones.

    Returns:
        Places, the two halves interleaved, so that a shorter list is chosen in the same way.
    """
    tiers: dict[int, list[int]] = {}
    for one in instructive_order(rows):
        tiers.setdefault(one.tier, []).append(one.place)
    instructive = (place for turn in itertools.zip_longest(*tiers.values()) for place in turn if place is not None)
    keys = [_digest(seed, row["question"], row["generated_solution"], row.get("sample")) for row in rows]
    drawn = sorted(range(len(rows)), key=keys.__getitem__)
    both = itertools.chain.from_iterable(zip(instructive, drawn, strict=True))
    return list(dict.fromkeys(both))[:count]


def share_out(sizes: Sequence[int], total: int) -> list[int]:
    """`total` places dealt to sets of these sizes as evenly as their sizes allow."""
    shares = [0] * len(sizes)
    for done, index in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[index] = min(sizes[index], (total - sum(shares)) // (len(sizes) - done))
    return shares


def pack_completions(
    scored: Mapping[str, Mapping[str, Sequence[Row]]],
    thresholds: Mapping[tuple[str, str], float | None],
    *,
    max_rows: int,
    max_bytes: int,
    warmup_tokens: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """What the page's script needs to show completions, as plain values for JSON.

    Per-token numbers are base64 of little-endian 16-bit integers: `ends` the letters of each token as JavaScript counts
    them (UTF-16 units), `similarity` in steps of 1/32767, `rewards` in 65535 steps between two given values.

    Args:
        scored: rows by model and set.
        thresholds: the filter's threshold by (model, set); None or absent: no cut at first.
        max_rows, max_bytes: bounds over all sets; rows that would pass `max_bytes` are left out and counted.
        warmup_tokens: response tokens that the filter never judges.
        seed: of the random part of the rows shown.
    Raises:
        ValueError: a row whose per-token lists do not fit together or are not finite (names model, set and row).
    """
    keys = [(label, name) for label, sets in scored.items() for name, rows in sets.items() if len(rows)]
    shares = share_out([len(scored[label][name]) for label, name in keys], max_rows)
    strings = _Strings()
    seen: dict[str, int] = {}
    groups = []
    for (label, name), share in zip(keys, shares, strict=True):
        rows = scored[label][name]
        order = {one.place: (rank, one.reason) for rank, one in enumerate(instructive_order(rows))}
        packed, room, skipped = [], max_bytes // len(keys), 0
        for place in choose_rows(rows, share, seed):
            try:
                one = _pack_row(rows[place], strings, thresholds.get((label, name)), warmup_tokens)
            except ValueError as error:
                raise ValueError(f"{label}, {name}, row {place}: {error}") from error
            size = len(json.dumps(one)) + strings.new_bytes
            if size > room:
                strings.forget_new()
                skipped += 1
                continue
            strings.keep_new()
            room -= size
            digest = _digest(label, name, rows[place]["question"], rows[place]["generated_solution"], one["sample"])
            seen[digest] = seen.get(digest, 0) + 1
            one["id"] = f"c-{digest}" if seen[digest] == 1 else f"c-{digest}-{seen[digest]}"
            one["place"], (one["order"], one["reason"]) = place, order[place]
            packed.append(one)
        groups.append(_pack_group(label, name, rows, thresholds.get((label, name)), warmup_tokens))
        groups[-1] |= {"rows": sorted(packed, key=lambda one: one["order"]), "left_out_for_size": skipped}
    return {"warmup": warmup_tokens, "strings": strings.texts, "groups": groups}


class _Strings:
    """Texts that occur in several rows, once each; those of a row that is given up can be taken back."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.numbers: dict[str, int] = {}
        self.kept = 0

    def number(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]

    @property
    def new_bytes(self) -> int:
        return sum(len(json.dumps(text)) for text in self.texts[self.kept :])

    def keep_new(self) -> None:
        self.kept = len(self.texts)

    def forget_new(self) -> None:
        for text in self.texts[self.kept :]:
            del self.numbers[text]
        del self.texts[self.kept :]


def _pack_row(row: Row, strings: _Strings, threshold: float | None, warmup_tokens: int) -> dict[str, Any]:
    curves = {"rewards": row.get("partial_rewards"), "similarity": row.get("cosine_sim")}
    actions = int(row.get("num_actions") or 0)
    for name, curve in curves.items():
        if curve is not None and len(curve) != actions:
            raise ValueError(f"expected {actions} numbers (num_actions) as {name}, got {len(curve)}")
        if curve is not None and not np.isfinite(np.asarray(curve, np.float64)).all():
            raise ValueError(f"expected finite numbers as {name}")
    similarity = None if curves["similarity"] is None else np.asarray(curves["similarity"], np.float64)
    lowest = _lowest(similarity, warmup_tokens)
    texts = token_texts(row)
    text = row["generated_solution"]
    extra = {
        key: value for key, value in row.items() if key not in _KNOWN_KEYS and isinstance(value, str | int | float)
    }
    extra = {key: str(value) for key, value in extra.items() if len(str(value)) <= MAX_EXTRA_LETTERS}
    return {
        "question": strings.number(row["question"]),
        "text": strings.number(text),
        "expected": _text_or_none(row.get("expected_answer")),
        "predicted": _text_or_none(row.get("predicted_answer")),
        "correct": is_correct(row),
        "sample": row.get("sample"),
        "reward": _rounded(row.get("reward")),
        "tokens": actions,
        "truncated": bool(row.get("truncated")),
        "last": None if similarity is None or not actions else _rounded(similarity[-1]),
        "lowest": _rounded(lowest),
        "fall": _rounded(steepest_fall(curves["rewards"] if similarity is None else similarity)),
        "wrong_step": _wrong_step(row),
        "cut": cut_token(similarity, threshold, warmup_tokens),  # exact; the page's own numbers are rounded
        "ends": None if texts is None else _integers(_utf16_lengths(texts), "<u2"),
        "rewards": None if curves["rewards"] is None else _pack_rewards(np.asarray(curves["rewards"], np.float64)),
        "similarity": None if similarity is None else _integers(np.round(similarity * 32767), "<i2"),
        "extra": extra,
    }


def _pack_group(
    label: str, name: str, rows: Sequence[Row], threshold: float | None, warmup_tokens: int
) -> dict[str, Any]:
    scored = [row for row in rows if row.get("reward") is not None]
    similarities = [row["cosine_sim"] for row in scored if row.get("cosine_sim") is not None]
    lowest: dict[str, str] = {}
    for word, wanted in (("correct", True), ("wrong", False)):
        values = [
            _lowest(np.asarray(row["cosine_sim"], np.float64), warmup_tokens)
            for row in scored
            if row.get("cosine_sim") is not None and is_correct(row) == wanted
        ]
        values = np.sort([2.0 if value is None else value for value in values])  # never judged: never below
        if len(values) > MAX_LOWEST:
            values = values[np.linspace(0, len(values) - 1, MAX_LOWEST).round().astype(int)]
        lowest[word] = _integers(np.round(np.minimum(values, 1.0) * 32767), "<i2")
    return {
        "model": label,
        "set": name,
        "total": len(rows),
        "threshold": threshold,
        "similarity_scale": token_scale(similarities),
        "reward_scale": token_scale(
            [row["partial_rewards"] for row in scored if row.get("partial_rewards") is not None]
        ),
        "lowest": lowest,
    }


def _wrong_step(row: Row) -> list[int] | None:
    """First and last token of the first wrong step, where the row says which one that is."""
    first, token_ends = row.get("first_error_step"), row.get("token_ends")
    if token_ends is None or isinstance(first, bool) or not isinstance(first, int | float) or first < 1:
        return None
    ends = step_ends(row["generated_solution"], row.get("steps"))
    if ends is None or first > len(ends):
        return None
    begin = 0 if first == 1 else ends[int(first) - 2]
    last = np.searchsorted(token_ends, ends[int(first) - 1])
    return [int(np.searchsorted(token_ends, begin, "right")), min(int(last), len(token_ends) - 1)]


def _lowest(similarity: np.ndarray | None, warmup_tokens: int) -> float | None:
    judged = None if similarity is None else similarity[warmup_tokens:]
    return None if judged is None or len(judged) == 0 else float(judged.min())


def _pack_rewards(values: np.ndarray) -> list[Any]:
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    steps = (values - low) / (high - low) * 65535 if high > low else np.zeros(len(values))
    return [low, high, _integers(np.round(steps), "<u2")]


def _utf16_lengths(texts: Iterable[str]) -> list[int]:
    """Letters as JavaScript counts them: two for those beyond the basic plane, such as emoji."""
    return [len(text) + sum(letter > "\uffff" for letter in text) for text in texts]


def _integers(values: Any, kind: str) -> str:
    values = np.asarray(values)
    bounds = np.iinfo(kind)
    if len(values) and (values.min() < bounds.min or values.max() > bounds.max):
        raise ValueError(f"expected numbers in [{bounds.min}, {bounds.max}], got {values.min()} to {values.max()}")
    return base64.b64encode(values.astype(kind).tobytes()).decode("ascii")


def _rounded(value: Any) -> float | None:
    return None if value is None else float(f"{float(value):.6g}")


def _text_or_none(value: Any) -> str | None:
    return None if value is None else str(value)


def _percent(share: float) -> str:
    return f"{int(100 * share)}%"  # rounded down: never 100% of a set that holds the row itself


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:12]
