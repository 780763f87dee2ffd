"""Forward passes over many token sequences: packed rows, responses behind cached prompts, or padded rows.

Packed rows compute what sequences begin with alike once a pack. A prompt that would fill a good part of every pack is
computed once for all its responses instead, and its keys and values are kept. Rows of architectures that allow neither
are padded, those of like length together.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.evaluation.batching import LEAST_PACK, pad_right, response_batches, token_batches, token_packs
from openrlhf.models.packing_support import longest_packed, probe, probe_last
from openrlhf.models.policy import pad_left
from openrlhf.models.prompt_cache import compute_prompts, run_responses, supports_prompt_cache
from openrlhf.models.reward_model import RewardModel
from openrlhf.utils.side_by_side import map_side_by_side

logger = logging.getLogger(__name__)

Rows = Sequence[tuple[int, Sequence[int]]]  # position and token ids of each sequence of a pass
PROBED_TOKENS = 64  # of the longest row with which the model is tried; the rows to come are not known then


@dataclass(frozen=True)
class TokenPass:
    """What one forward pass tells of R sequences, by token; a token may belong to several of them."""

    members: list[int]  # (R,) positions of the sequences
    states: Tensor  # (T, H) last hidden states, model dtype
    values: Tensor  # (T,) float32 the head at every token
    places: Tensor  # (R, S) int64 on the CPU, which of the T is token t of sequence r; where nothing is read maybe any


class SequenceReader:
    """Runs token sequences through a reward model, each as if it were alone.

    Args:
        model: in eval mode.
        batch_tokens: tokens of a forward pass as computed; see `token_packs` and `token_batches`.
        share: compute what sequences begin with alike once, where the architecture allows it; False: padded rows.
        last_only: only the last token of every sequence is read; where the architecture allows it, the last layer of
            packed rows computes no others.
    """

    def __init__(self, model: RewardModel, batch_tokens: int, share: bool = True, last_only: bool = False) -> None:
        self.model = model
        self.batch_tokens = batch_tokens
        self.longest = _longest_packed(model) if share else 0  # tokens of a row that may be packed
        self.caches = share and supports_prompt_cache(model)
        self.narrows = last_only and self.longest > 0 and _allows_last_only(model)

    @torch.inference_mode()
    def read(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> Iterator[TokenPass]:
        """Passes that hold every sequence once.

        Args:
            sequences: N lists of token ids, none empty.
            prompt_lengths: N numbers of tokens in front that need not be read.
        """
        groups = self._long_prompts(sequences, prompt_lengths)
        cached = {i for group in groups for i in group}
        left = [i for i in range(len(sequences)) if i not in cached]
        packed = [i for i in left if len(sequences[i]) <= self.longest]
        whole = [i for i in left if len(sequences[i]) > self.longest]
        if packed and whole:
            logger.info("%d of %d rows have more than %d tokens: scored whole", len(whole), len(left), self.longest)
        packs = token_packs([sequences[i] for i in packed], self.batch_tokens)
        yield from self._map(
            self._read_pack, ([(packed[place], sequences[packed[place]]) for place in pack] for pack in packs)
        )
        yield from self._read_behind_prompts(sequences, prompt_lengths, groups)
        batches = token_batches([len(sequences[i]) for i in whole], self.batch_tokens, self.model.switch_length)
        yield from self._map(
            self._read_rows, ([(whole[place], sequences[whole[place]]) for place in batch] for batch in batches)
        )

    def _map(self, read: Callable[[Rows], TokenPass], batches: Iterable[Rows]) -> Iterator[TokenPass]:
        """Passes over batches, several at once on a CPU: many of their operations are too small for all its cores.

        Not where positions change with the length of a batch: a pass keeps them in the model for its layers to read.
        """
        alone = self.model.device.type != "cpu" or self.model.switch_length is not None
        return map(read, batches) if alone else map_side_by_side(read, batches)

    @torch.inference_mode()
    def _read_pack(self, batch: Rows) -> TokenPass:
        members, sequences = zip(*batch, strict=True)
        ids, mask = pad_right(sequences, 0, "cpu")
        rows = self.model.pack(ids, mask)
        last = self.model.pack_last(rows, mask.sum(1)) if self.narrows else None
        return TokenPass(list(members), *self.model.read_packed(rows, last), (last or rows).places.cpu())

    @torch.inference_mode()
    def _read_rows(self, batch: Rows) -> TokenPass:
        members, sequences = zip(*batch, strict=True)
        ids, mask = pad_right(sequences, self._pad_id, self.model.device)
        out = self.model(ids, mask)
        places = torch.arange(ids.numel()).view(ids.shape)
        return TokenPass(list(members), out.hidden_states.flatten(0, 1), out.values.flatten(), places)

    def _long_prompts(self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> list[list[int]]:
        """Groups of sequences behind one prompt each, too long to be computed again in every pack."""
        switch = self.model.switch_length
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, (one, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
            if self.caches and prompt * LEAST_PACK > self.batch_tokens and (switch is None or len(one) <= switch):
                groups.setdefault(tuple(one[:prompt]), []).append(i)
        return [group for group in groups.values() if len(group) > 1]

    def _read_behind_prompts(
        self, sequences: Sequence[Sequence[int]], prompt_lengths: Sequence[int], groups: Sequence[Sequence[int]]
    ) -> Iterator[TokenPass]:
        prompts = [sequences[group[0]][: prompt_lengths[group[0]]] for group in groups]
        for chunk in token_batches([len(prompt) for prompt in prompts], self.batch_tokens):
            ids, mask = pad_left([prompts[number] for number in chunk], self._pad_id)
            cache = compute_prompts(self.model, ids.to(self.model.device), mask.bool().to(self.model.device))
            rows = [(row, i) for row, number in enumerate(chunk) for i in groups[number]]
            lengths = [(prompt_lengths[i], len(sequences[i]) - prompt_lengths[i]) for _, i in rows]
            # The tokens of the prompts are keys only: twice the tokens of a pass that computes them all.
            for batch in response_batches(*zip(*lengths, strict=True), 2 * self.batch_tokens):
                members = [rows[place][1] for place in batch]
                starts = [prompt_lengths[i] for i in members]
                responses = [sequences[i][start:] for i, start in zip(members, starts, strict=True)]
                ids, mask = pad_right(responses, self._pad_id, self.model.device)
                states, values = run_responses(self.model, cache, [rows[place][0] for place in batch], ids, mask)
                places = torch.zeros(len(members), max(starts) + ids.shape[1], dtype=torch.long)
                for row, start in enumerate(starts):
                    places[row, start : start + ids.shape[1]] = torch.arange(ids.shape[1]) + row * ids.shape[1]
                yield TokenPass(members, states.flatten(0, 1), values.flatten(), places)

    @property
    def _pad_id(self) -> int:
        return self.model.config.pad_token_id


def _longest_packed(model: RewardModel) -> int:
    limit = longest_packed(model) or sys.maxsize
    problem = probe(model, model, model.network.dtype, model.device, min(limit, PROBED_TOKENS))
    if problem is not None:
        logger.info("%s: rows are padded and share nothing (%s)", type(model.network).__name__, problem)
        return 0
    return limit


def _allows_last_only(model: RewardModel) -> bool:
    problem = probe_last(model)
    if problem is not None:
        logger.info("%s: the last layer computes all tokens (%s)", type(model.network).__name__, problem)
    return problem is None
