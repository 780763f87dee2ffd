"""Rewards of the responses of preference sets, the responses of one prompt together; written in order, resumable."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from openrlhf.datasets.jsonl import append_jsonl, read_jsonl
from openrlhf.datasets.tokenize import encode_prompts, encode_responses
from openrlhf.evaluation.batching import cut_windows
from openrlhf.evaluation.preference_sets import PreferenceItem
from openrlhf.evaluation.resuming import open_scores
from openrlhf.evaluation.scoring import EncodedCompletion, ScoredCompletion, ScoringBar, fit_response
from openrlhf.utils.ranks import Ranks

logger = logging.getLogger(__name__)

_ENCODE_ITEMS = 64  # prompts tokenised at a time
Encoded = tuple[list[EncodedCompletion], list[int]]  # responses of an item, and their tokens before any cut


class WindowScorer(Protocol):
    """What scores token sequences; `openrlhf.evaluation.scoring.Scorer` is one."""

    window_tokens: int  # tokens of a good window
    ranks: Ranks

    def score(
        self,
        encoded: Sequence[EncodedCompletion],
        questions: Sequence[str] | None,
        name_of: Callable[[int], str],
        bar: ScoringBar | None,
    ) -> list[ScoredCompletion]:
        """Scores of one window, in order; the same in every process."""


def encode_items(tokenizer: Any, items: Sequence[PreferenceItem], max_len: int) -> list[Encoded]:
    """Token ids of all responses of each item, cut as in training: prompts never, responses before their EOS."""
    texts = list(dict.fromkeys(item.prompt for item in items))
    prompts = dict(zip(texts, encode_prompts(tokenizer, texts), strict=True))
    responses = iter(encode_responses(tokenizer, [text for item in items for text in item.responses]))
    encoded = []
    for item in items:
        whole = [next(responses) for _ in item.responses]
        cut = [fit_response(prompts[item.prompt], ids, max_len) for ids in whole]
        encoded.append((cut, [len(ids) for ids in whole]))
    return encoded


def score_preferences(
    items: Sequence[PreferenceItem],
    tokenizer: Any,
    scorer: WindowScorer,
    *,
    max_len: int,
    out_path: str | Path | None = None,
    settings: dict[str, Any] | None = None,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Score preference items; with several processes all call this alike and get all rows.

    With `out_path` rows are appended window by window in order; a second call with the same items and settings goes on
    where the first one was killed.

    Args:
        max_len: tokens of prompt + response + EOS.
        out_path: JSONL file, written by the main process; `<stem>.settings.json` beside it holds `settings`.
        settings: what the scores depend on besides the items.
    Returns:
        One row an item: `row`, `id`, `subset`, `prompt`, `responses`, `num_chosen`, and for each response `rewards`
        (None where the prompt leaves no room), `goal_similarity` at its last token (None as a whole without a goal
        state), `lengths` (tokens before any cut, EOS included) and `truncated`.
    Raises:
        ValueError: a reward that is not finite (names the row), or `out_path` holds other rows or settings.
    """
    path = None if out_path is None else Path(out_path)
    rows: list[dict[str, Any]] = []
    if path is not None:
        found = _resume(path, settings or {}, items) if scorer.ranks.rank == 0 else []
        rows = scorer.ranks.gather_objects(found)[0]  # what the main process found, once it has mended the file
    total = sum(len(item.responses) for item in items)
    done = sum(len(row["responses"]) for row in rows)
    with ScoringBar(total, done, disable=not progress or scorer.ranks.rank > 0) as bar:
        for window in _windows(tokenizer, items[len(rows) :], max_len, scorer.window_tokens):
            first = len(rows)
            flat = [one for encoded, _ in window for one in encoded]
            names = [f"row {items[first + i].row}" for i, (encoded, _) in enumerate(window) for _ in encoded]
            scored = iter(scorer.score(flat, None, names.__getitem__, bar))
            for encoded, lengths in window:
                rows.append(_scored_row(items[len(rows)], [next(scored) for _ in encoded], lengths))
            if path is not None and scorer.ranks.rank == 0:
                append_jsonl(path, rows[first:])
    return rows


def _scored_row(item: PreferenceItem, scored: Sequence[ScoredCompletion], lengths: list[int]) -> dict[str, Any]:
    has_goal = any(one.cosine_sim is not None for one in scored)
    last = [None if one.cosine_sim is None else float(one.cosine_sim[-1]) for one in scored]
    return _identity(item) | {
        "rewards": [None if one.reward is None else float(one.reward) for one in scored],
        "goal_similarity": last if has_goal else None,
        "lengths": lengths,
        "truncated": [bool(one.truncated) for one in scored],
    }


def _identity(item: PreferenceItem) -> dict[str, Any]:
    return {
        "row": item.row,
        "id": item.id,
        "subset": item.subset,
        "prompt": item.prompt,
        "responses": list(item.responses),
        "num_chosen": item.num_chosen,
    }


def _windows(
    tokenizer: Any, items: Sequence[PreferenceItem], max_len: int, window_tokens: int
) -> Iterator[list[Encoded]]:
    encoded = (
        one
        for start in range(0, len(items), _ENCODE_ITEMS)
        for one in encode_items(tokenizer, items[start : start + _ENCODE_ITEMS], max_len)
    )
    return cut_windows(encoded, window_tokens, lambda one: sum(len(response) for response in one[0]))


def _resume(path: Path, settings: dict[str, Any], items: Sequence[PreferenceItem]) -> list[dict[str, Any]]:
    """Rows already in the file, checked to be of these items."""
    if not open_scores(path, settings):
        return []
    rows = [row for _, row in read_jsonl(path)]
    if len(rows) > len(items):
        raise ValueError(f"{path} holds {len(rows)} rows for {len(items)}; remove it to score anew")
    for number, (row, item) in enumerate(zip(rows, items, strict=False)):
        if any(row.get(key) != value for key, value in _stored(_identity(item)).items()):
            raise ValueError(f"{path}: row {number} belongs to another set; remove the file to score anew")
    if rows:
        logger.info("%s: %d of %d rows are scored already", path, len(rows), len(items))
    return rows


def _stored(value: dict[str, Any]) -> dict[str, Any]:
    """The value as it comes back from the file."""
    return json.loads(json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
