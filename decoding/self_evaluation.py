"""The policy's own opinion of a response: the probability that it answers yes when asked whether it is right so far."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf.datasets.templates import render_chat_prompt
from openrlhf.models.key_values import KeyValues, check_context
from openrlhf.models.policy import Policy

QUESTION = "Is the answer above correct so far? Reply with yes or no."
PLAIN = "\n\nQuestion: " + QUESTION + "\nReply:"
ANSWERS = {True: ("yes", "Yes", " yes", " Yes"), False: ("no", "No", " no", " No")}
_MARK = "\N{BLACK SQUARE}"


class SelfEvaluation:
    """Asks the policy about R responses that grow; prompts and responses are computed once, the question each time.

    Args:
        prompts: R rendered prompts as tokens.
        chat: ask in the turn of a chat that follows the response, by the tokenizer's template.
    Raises:
        ValueError: the tokenizer has no tokens that tell yes from no.
    """

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]], chat: bool = False) -> None:
        self._policy = policy
        text = _follow_up(policy.tokenizer) if chat else PLAIN
        self._question = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        self._answers = [torch.tensor(ids, device=policy.device) for ids in answer_tokens(policy.tokenizer)]
        self._cache = KeyValues(policy.model.base_model)
        self._cache.add(prompts)
        self._starts = list(self._cache.lengths)  # tokens of each prompt

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; a row may repeat."""
        self._cache.select(rows)
        self._starts = [self._starts[row] for row in rows]

    @torch.inference_mode()
    def extend(self, responses: Sequence[Sequence[int]]) -> tuple[list[float], list[int]]:
        """Probability of yes among yes and no after each response, and the tokens that it took to ask.

        Args:
            responses: R ids of the policy, of whole responses that continue those of the last call. An end token is
                left out: the response is asked about, not continued.
        Raises:
            ValueError: response and question outgrow the policy's context.
        """
        news = []
        for ids, start, length in zip(responses, self._starts, self._cache.lengths, strict=True):
            end = len(ids) - 1 if ids and ids[-1] in self._policy.stop_ids else len(ids)
            news.append(list(ids[length - start : end]))
        kept = [length + len(new) for length, new in zip(self._cache.lengths, news, strict=True)]
        totals = [count + len(self._question) for count in kept]
        check_context(totals, self._policy.model.config, "the policy", what="self-evaluation", room=0)
        *asked, last = self._question
        self._cache.append([new + asked for new in news])
        logits = self._cache.append([[last]] * len(news), through=self._policy.model)[:, -1]
        self._cache.crop(kept)
        return yes_share(logits, *self._answers), [len(new) + len(self._question) for new in news]


def yes_share(logits: Tensor, yes: Tensor, no: Tensor) -> list[float]:
    """P(yes) / (P(yes) + P(no)) of R rows, each summed over the tokens of its spellings.

    Args:
        logits: (R, V). yes, no: int64 tokens.
    """
    log_yes, log_no = (logits.float()[:, ids].logsumexp(dim=1) for ids in (yes, no))
    return torch.sigmoid(log_yes - log_no).tolist()


def answer_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """First tokens of the spellings of yes and of no, without those that both may start with.

    Raises:
        ValueError: nothing is left of either.
    """
    yes, no = (
        {tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ANSWERS[truth]}
        for truth in (True, False)
    )
    if not yes - no or not no - yes:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} starts yes and no with the same tokens: "
            "guide without a self-evaluation"
        )
    return sorted(yes - no), sorted(no - yes)


def _follow_up(tokenizer) -> str:
    """What a chat has between an answer and the next one when the user asks the question."""
    turns = [("user", QUESTION), ("assistant", _MARK), ("user", QUESTION)]
    text = render_chat_prompt([{"role": role, "content": content} for role, content in turns], tokenizer)
    parts = text.split(_MARK)
    if len(parts) != 2:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} does not write an answer as it is: "
            "guide without a self-evaluation"
        )
    return parts[1]
