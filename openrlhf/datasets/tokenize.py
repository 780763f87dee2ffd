"""Token ids of prompts and responses, and pairs that fit a length.

Prompt and response are always tokenised apart. This equals tokenising them together wherever no token straddles the
boundary, gives both responses of a pair the same prompt ids, and is what a generator sees.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream

OnLong = Literal["truncate", "drop", "error"]
ON_LONG: tuple[str, ...] = ("truncate", "drop", "error")
REASONS: tuple[str, ...] = (
    "kept",
    "truncated",
    "too_long",
    "prompt_too_long",
    "empty_response",
    "identical",
    "identical_after_truncation",
)

_without_dummy_prefix: WeakKeyDictionary[Any, tuple[int, Tokenizer]] = WeakKeyDictionary()


@dataclass(frozen=True)
class TokenizedPair:
    """Two responses to one prompt as token ids."""

    prompt_ids: list[int]  # starts with BOS where the tokenizer or the template has one; no EOS added
    chosen_ids: list[int]  # at least one token, then exactly one EOS
    rejected_ids: list[int]  # the same
    margin: float | None = None  # reward units


def encode_prompts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of rendered prompts.

    The tokens that the tokenizer puts in front (BOS) are added unless the text already starts with them; the ones it
    puts behind (EOS, SEP) are not added, because a response follows. Special tokens written in the text keep their ids.

    Args:
        tokenizer: a transformers tokenizer with a `tokenizers` backend.
        texts: N rendered prompts.
    Returns:
        N lists of ids, not truncated.
    """
    backend = _backend(tokenizer)
    front = _front_tokens(tokenizer)
    rows = _encode_batch(backend, texts)
    return [ids if ids[: len(front)] == front else front + ids for ids in rows]


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one rendered prompt; see encode_prompts."""
    return encode_prompts(tokenizer, [text])[0]


def encode_continuations(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts that follow other tokens and are followed by more: no BOS, no dummy leading space, no EOS.

    Special tokens written in the text keep their ids.
    """
    return _encode_batch(_response_backend(tokenizer), texts)


def encode_responses(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of responses, as they continue a prompt: no BOS, no dummy leading space, exactly one EOS at the end.

    Raises:
        ValueError: the tokenizer has no EOS token.
    """
    eos_id = _eos_id(tokenizer)
    return [_strip_end(ids, eos_id) + [eos_id] for ids in encode_continuations(tokenizer, texts)]


def encode_response(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one response; see encode_responses."""
    return encode_responses(tokenizer, [text])[0]


def encode_responses_with_ends(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """As encode_responses, with the place in the text where each token ends.

    Returns:
        N pairs (ids, ends) of equal length: token t is text[ends[t - 1] : ends[t]], with 0 before the first. Ends never
        fall; a token that completes no new character, and EOS, repeat the end before it. Counted in characters.
    """
    return _encode_with_ends(_response_backend(tokenizer), _eos_id(tokenizer), texts)


def encode_dialogues_with_ends(tokenizer: Any, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    """Token ids of texts of prompt and response whose boundary is not known; start as prompts, end as responses.

    Returns:
        N pairs (ids, ends) as encode_responses_with_ends; a token in front that is not in the text ends at 0.
    """
    front = _front_tokens(tokenizer)
    encoded = []
    for ids, ends in _encode_with_ends(_backend(tokenizer), _eos_id(tokenizer), texts):
        missing = [] if ids[: len(front)] == front else front
        encoded.append((missing + ids, [0] * len(missing) + ends))
    return encoded


def _encode_with_ends(backend: Tokenizer, eos_id: int, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
    backend.no_truncation()
    backend.no_padding()
    encoded = []
    for row in backend.encode_batch(list(texts), add_special_tokens=False):
        ids = _strip_end(row.ids, eos_id)
        ends = list(accumulate([end for _, end in row.offsets[: len(ids)]], max))
        encoded.append((ids + [eos_id], ends + [ends[-1] if ends else 0]))
    return encoded


def decode_response_with_ends(
    tokenizer: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], keep_special: bool = False
) -> tuple[str, list[int]]:
    """Text of a sampled response as it continues its prompt, with the place where each token ends.

    A leading space that decoding the response alone would drop is kept.

    Args:
        keep_special: write special tokens, such as EOS, into the text.
    Returns:
        The text and A ends as of encode_responses_with_ends. A character of which bytes are missing at the very end is
        left out.
    """
    stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=not keep_special)
    backend = _backend(tokenizer)
    chunks = [stream.step(backend, token) or "" for token in response_ids]
    return "".join(chunks), list(accumulate(map(len, chunks)))


def fit_response(
    prompt_ids: list[int], response_ids: list[int], eos_id: int, max_len: int, on_long: OnLong = "truncate"
) -> tuple[list[int] | None, str]:
    """Fit one response behind its prompt into max_len tokens.

    Args:
        response_ids: with or without EOS at the end; cut at its end where it is too long. Prompts are never cut.
        max_len: tokens of prompt + response + EOS.
        on_long: "truncate" cuts a long response, "drop" drops it, "error" raises.
    Returns:
        (at least one token and exactly one EOS behind it, "kept" or "truncated"), or (None, "empty_response",
        "prompt_too_long" where no response token fits behind the prompt, or "too_long").
    Raises:
        ValueError: on_long is "error" and the response does not fit; on_long is unknown.
    """
    if on_long not in ON_LONG:
        raise ValueError(f"on_long: expected one of {ON_LONG}, got {on_long!r}")
    response = _strip_end(response_ids, eos_id)
    if not response:
        return None, "empty_response"
    room = max_len - len(prompt_ids) - 1  # response tokens that fit before the EOS
    is_long = len(response) > room
    if is_long and on_long == "error":
        raise ValueError(
            f"a response needs {len(prompt_ids) + len(response) + 1} tokens (prompt {len(prompt_ids)}, response "
            f"{len(response)}, EOS 1), and max_len is {max_len}: raise --max_len or choose on_long truncate or drop"
        )
    if room < 1:
        return None, "prompt_too_long"
    if is_long and on_long == "drop":
        return None, "too_long"
    response = _strip_end(response[:room], eos_id)
    return (response + [eos_id], "truncated" if is_long else "kept") if response else (None, "empty_response")


def build_pair(
    prompt_ids: list[int],
    chosen_ids: list[int],
    rejected_ids: list[int],
    eos_id: int,
    max_len: int,
    on_long: OnLong = "truncate",
    margin: float | None = None,
) -> tuple[TokenizedPair | None, str]:
    """Fit one pair into max_len tokens: both responses as :func:`fit_response` does, and the pair only with both.

    Returns:
        (pair, "kept" or "truncated"), or (None, reason) with a reason of REASONS.
    Raises:
        ValueError: on_long is "error" and a response does not fit; on_long is unknown.
    """
    chosen, rejected = _strip_end(chosen_ids, eos_id), _strip_end(rejected_ids, eos_id)
    if not chosen or not rejected:
        return None, "empty_response"
    if chosen == rejected:
        return None, "identical"
    (chosen, chosen_reason), (rejected, rejected_reason) = (
        fit_response(prompt_ids, ids, eos_id, max_len, on_long) for ids in (chosen, rejected)
    )
    if chosen is None or rejected is None:
        return None, chosen_reason if chosen is None else rejected_reason
    if chosen == rejected:
        return None, "identical_after_truncation"
    was_cut = "truncated" in (chosen_reason, rejected_reason)
    return TokenizedPair(list(prompt_ids), chosen, rejected, margin), "truncated" if was_cut else "kept"


def _eos_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no EOS token: set tokenizer.eos_token first")
    return tokenizer.eos_token_id


def _strip_end(ids: Sequence[int], eos_id: int) -> list[int]:
    """The ids without the EOS tokens at their end."""
    end = len(ids)
    while end and ids[end - 1] == eos_id:
        end -= 1
    return list(ids[:end])


def _encode_batch(backend: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    backend.no_truncation()
    backend.no_padding()
    return [row.ids for row in backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def _backend(tokenizer: Any) -> Tokenizer:
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} {tokenizer.name_or_path!r} has no tokenizer.json: "
            "convert it to a fast tokenizer (load it with use_fast=True and save it with save_pretrained)"
        )
    return tokenizer.backend_tokenizer


def _front_tokens(tokenizer: Any) -> list[int]:
    """Ids that the tokenizer puts in front of every text."""
    probe = _encode_batch(_backend(tokenizer), ["a"])[0]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    starts = [i for i in range(len(full) - len(probe) + 1) if full[i : i + len(probe)] == probe]
    return list(full[: starts[0]]) if probe and starts else []


def _response_backend(tokenizer: Any) -> Tokenizer:
    """The tokenizer's backend without the space that sentencepiece-like tokenizers put in front of a text.

    "The" at the start of a text is "▁The" to them, but "The" where it follows a prompt that ends in a new line.
    """
    backend = _backend(tokenizer)
    normalizer, normalizer_changed = _edited(backend.normalizer, "normalizers")
    pre_tokenizer, pre_tokenizer_changed = _edited(backend.pre_tokenizer, "pretokenizers")
    if not normalizer_changed and not pre_tokenizer_changed:
        return backend
    vocab_size = backend.get_vocab_size(with_added_tokens=True)
    cached = _without_dummy_prefix.get(tokenizer)
    if cached and cached[0] == vocab_size:
        return cached[1]
    changed = copy.deepcopy(backend)
    if normalizer_changed:
        sequence = normalizers.Sequence([])
        sequence.__setstate__(normalizer)
        changed.normalizer = sequence
    if pre_tokenizer_changed:
        sequence = pre_tokenizers.Sequence([])
        sequence.__setstate__(pre_tokenizer)
        changed.pre_tokenizer = sequence
    _without_dummy_prefix[tokenizer] = (vocab_size, changed)
    return changed


def _edited(component: Any, key: str) -> tuple[bytes, bool]:
    """State of a normalizer or pre-tokenizer as a sequence without dummy prefixes, and whether that changed it."""
    if component is None:
        return b"", False
    state = json.loads(component.__getstate__())
    steps = state[key] if state["type"] == "Sequence" else [state]
    kept, changed = [], False
    for step in steps:
        if step["type"] == "Prepend":
            changed = True
            continue
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            step, changed = {**step, "prepend_scheme": "never"}, True
        if step["type"] == "ByteLevel" and step.get("add_prefix_space"):
            step, changed = {**step, "add_prefix_space": False}, True
        kept.append(step)
    return json.dumps({"type": "Sequence", key: kept}).encode(), changed
