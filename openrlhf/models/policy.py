"""The policy: a causal language model that samples responses to prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessorList

from openrlhf.datasets.tokenize import encode_prompts
from openrlhf.models.key_values import KeyValues, context_of
from openrlhf.models.pretrained import load_tokenizer, quiet_loading
from openrlhf.models.prompt_cache import CacheUnsupported
from openrlhf.models.sampling import RowSampler, SampledResponse, SamplingParams, check_temperature_and_top_p

logger = logging.getLogger(__name__)


class Policy:
    """A causal language model with its tokenizer, used for sampling.

    Args:
        model: any causal language model of transformers.
        tokenizer: its tokenizer; the pad token differs from EOS.
    """

    def __init__(self, model, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
            raise ValueError(
                f"the policy's tokenizer needs a pad token other than EOS, got pad {tokenizer.pad_token!r} and "
                f"EOS {tokenizer.eos_token!r}; load it with openrlhf.models.pretrained.load_tokenizer"
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.stop_ids = _stop_ids(model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
    ) -> Policy:
        """Load model and tokenizer from a Hugging Face folder or hub id.

        Raises:
            ValueError: weights are missing, such as the output layer of a checkpoint that is no language model.
        """
        with quiet_loading():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=dtype, attn_implementation=attn_implementation, output_loading_info=True
            )
        if info["missing_keys"]:
            raise ValueError(f"{path}: no language model, weights are missing: {sorted(info['missing_keys'])[:5]}")
        return cls(model.to(device), load_tokenizer(path))

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(self.model.parameters()).device

    def generate(
        self,
        prompts: list[str],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_tokens: int = 65_536,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[list[str]]:
        """Sample `n` responses to each prompt; text without special tokens.

        Arguments, determinism and errors as in `generate_ids`.
        """
        responses = self.generate_ids(
            encode_prompts(self.tokenizer, prompts),
            n, temperature, top_p, max_new_tokens, seed, batch_tokens, on_batch,
        )  # fmt: skip
        return [
            self.tokenizer.batch_decode(group, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for group in responses
        ]

    @torch.inference_mode()
    def generate_ids(
        self,
        prompt_ids: list[list[int]],
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 128,
        seed: int = 0,
        batch_tokens: int = 65_536,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[list[list[int]]]:
        """Sample `n` responses to each prompt; token ids, ending in EOS unless cut at `max_new_tokens`.

        Prompts are batched by length and padded on the left. The same call with the same arguments on the same machine
        gives the same responses, whatever was drawn before, and leaves the global random state as it was; another
        `batch_tokens` gives other draws.

        Args:
            prompt_ids: token ids of each prompt, at least one each.
            temperature: above 0; 0 takes the most likely token each time and needs n = 1.
            top_p: share of the probability mass to draw from, in (0, 1].
            batch_tokens: upper bound of rows times (prompt + new tokens) in one forward pass; at least one row runs.
            on_batch: called with the number of responses after each batch, for progress bars.
        Raises:
            ValueError: an argument outside its range, or an empty prompt.
        """
        _check_sampling(n, temperature, top_p, max_new_tokens)
        _check_prompts(prompt_ids)
        rows = [index for index in range(len(prompt_ids)) for _ in range(n)]
        rows.sort(key=lambda index: len(prompt_ids[index]))  # stable: copies of one prompt stay together
        lengths = [len(ids) for ids in prompt_ids]
        responses: list[list[list[int]]] = [[] for _ in prompt_ids]
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for batch in _split_rows(rows, lengths, [max_new_tokens] * len(lengths), batch_tokens):
                sampled = self._generate_batch(
                    [prompt_ids[index] for index in batch], temperature, top_p, max_new_tokens
                )
                for index, response in zip(batch, sampled, strict=True):
                    responses[index].append(response)
                if on_batch is not None:
                    on_batch(len(batch))
        return responses

    @torch.inference_mode()
    def sample(
        self, prompt_ids: Sequence[Sequence[int]], params: Sequence[SamplingParams], batch_tokens: int = 65_536
    ) -> list[SampledResponse]:
        """Sample one response to each prompt, with the log-probabilities of its tokens.

        Every row has settings and random numbers of its own (seed and prompt length choose them): up to rounding it
        draws the same alone and in any batch. Only `params` decide; the model's generation config is not looked at.

        Args:
            prompt_ids: token ids of each prompt, at least one each.
            params: of each prompt, with `max_tokens` and `seed`.
            batch_tokens: as in `generate_ids`.
        Raises:
            ValueError: an empty prompt, settings without a seed or max_tokens or outside their range.
        """
        _check_prompts(prompt_ids)
        params = [SamplingParams.of(one) for one in params]
        unset = [row for row, one in enumerate(params) if one.max_tokens is None or one.seed is None]
        if unset:
            raise ValueError(
                f"rows {unset[:5]} need max_tokens and a seed; openrlhf.models.sampling.spread_seeds helps"
            )
        lengths = [len(ids) for ids in prompt_ids]
        rows = sorted(range(len(lengths)), key=lengths.__getitem__)
        responses: list[SampledResponse | None] = [None] * len(prompt_ids)
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in _split_rows(rows, lengths, [one.max_tokens for one in params], batch_tokens):
                sampled = self._sample_batch([list(prompt_ids[row]) for row in batch], [params[row] for row in batch])
                for row, response in zip(batch, sampled, strict=True):
                    responses[row] = response
        finally:
            self.model.train(was_training)
        return responses

    def _sample_batch(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[SampledResponse]:
        """One batch with keys and values of our own, or by generate() where the architecture keeps none."""
        longest = max(len(prompt) + one.max_tokens for prompt, one in zip(prompts, params, strict=True))
        context = context_of(self.model.config)
        if context is None or longest <= context:
            try:
                return self._sample_with_cache(prompts, self._row_sampler(prompts, params))
            except CacheUnsupported as error:
                logger.debug("sampling by generate(): %s", error)
        return self._sample_by_generate(prompts, self._row_sampler(prompts, params))

    def _row_sampler(self, prompts: list[list[int]], params: list[SamplingParams]) -> RowSampler:
        return RowSampler([len(ids) for ids in prompts], params, self.stop_ids, self.tokenizer.decode)

    def _sample_with_cache(self, prompts: list[list[int]], sampler: RowSampler) -> list[SampledResponse]:
        """Equal prompts are computed once, and rows that are over leave the passes."""
        cache = KeyValues(self.model.base_model)
        cache.add([prompt[:-1] for prompt in prompts])
        newest = [prompt[-1] for prompt in prompts]  # not yet run through the model
        while rows := sampler.unfinished:
            waiting: list[Sequence[int]] = [()] * len(prompts)
            for row in rows:
                waiting[row] = (newest[row],)
            logits = cache.append(waiting, through=self.model)[:, -1].float()
            for row, token in zip(rows, sampler.draw(rows, logits), strict=True):
                newest[row] = token
            if any(sampler.ended[row] for row in rows):  # nothing follows them: no more copies of what they hold
                cache.crop([0 if end else n for end, n in zip(sampler.ended, cache.lengths, strict=True)])
        return sampler.responses()

    def _sample_by_generate(self, prompts: list[list[int]], sampler: RowSampler) -> list[SampledResponse]:
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        own_config = self.model.generation_config
        self.model.generation_config = GenerationConfig()  # its penalties and minima would change the distribution
        try:
            self.model.generate(
                input_ids=input_ids.to(self.device),
                attention_mask=attention_mask.to(self.device),
                max_new_tokens=max(one.max_tokens for one in sampler.params),
                eos_token_id=self.stop_ids,
                pad_token_id=self.tokenizer.pad_token_id,
                do_sample=False,
                logits_processor=LogitsProcessorList([sampler]),
            )
        finally:
            self.model.generation_config = own_config
        return sampler.responses()

    def _generate_batch(
        self, prompts: list[list[int]], temperature: float, top_p: float, max_new_tokens: int
    ) -> list[list[int]]:
        input_ids, attention_mask = pad_left(prompts, self.tokenizer.pad_token_id)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
        output = self.model.generate(
            input_ids=input_ids.to(self.device),
            attention_mask=attention_mask.to(self.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=self.stop_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            **{"do_sample": False, **sampling},
        )
        return [cut_after_stop(row, self.stop_ids) for row in output[:, input_ids.shape[1] :].tolist()]


def pad_left(rows: list[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Left-padded ids (B, S) int64 and mask (B, S) int64, 1 on real tokens; for generation only."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def cut_after_stop(ids: list[int], stop_ids: list[int]) -> list[int]:
    """Ids up to and including the first stop id; all of them when there is none."""
    stop = next((position for position, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: stop + 1]


def _split_rows(
    rows: list[int], lengths: Sequence[int], new_tokens: Sequence[int], batch_tokens: int
) -> list[list[int]]:
    """Cut rows, sorted by prompt length, into batches of at most `batch_tokens` tokens, padding included."""
    batches: list[list[int]] = []
    longest = most_new = 0  # of the last batch
    for index in rows:
        longest, most_new = max(longest, lengths[index]), max(most_new, new_tokens[index])
        if batches and (len(batches[-1]) + 1) * (longest + most_new) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest, most_new = lengths[index], new_tokens[index]
    return batches


def _stop_ids(model, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """EOS of the tokenizer first, then the other end tokens that the model's generation config names."""
    named = getattr(model.generation_config, "eos_token_id", None)
    named = named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in [tokenizer.eos_token_id, *named] if token is not None))


def _check_sampling(n: int, temperature: float, top_p: float, max_new_tokens: int) -> None:
    if n < 1 or max_new_tokens < 1:
        raise ValueError(f"n and max_new_tokens must be 1 or more, got n={n} and max_new_tokens={max_new_tokens}")
    check_temperature_and_top_p(temperature, top_p)
    if temperature == 0 and n > 1:
        raise ValueError(f"temperature 0 gives {n} equal responses; pass n=1 or a temperature above 0")


def _check_prompts(prompt_ids: Sequence[Sequence[int]]) -> None:
    empty = [index for index, ids in enumerate(prompt_ids) if not ids]
    if empty:
        raise ValueError(f"prompts {empty[:5]} have no token; a policy needs at least one to continue from")
