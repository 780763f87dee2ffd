"""Keys and values of sequences that grow: tokens are appended, rows are copied, dropped and cut.

Every row ends at the same column of the buffers when it is read, with its padding on the left. So distances between
tokens are what they are without padding, and sliding windows and relative positions see the same as in one unpadded
row. Buffers grow by doubling; no token costs a copy of what is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from openrlhf.models.key_value_buffers import LEAST_ROOM, Buffers
from openrlhf.models.packed_attention import attention_for
from openrlhf.models.prompt_cache import CacheUnsupported, cache_argument
from openrlhf.models.reward_model import rotary_kinds

# By "on a GPU": tokens of a pass over whole sequences, padding included; larger ones leave the caches of a CPU.
PASS_TOKENS = {False: 2048, True: 16384}
PLAIN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
IDLE_SHARE = 0.25  # of the rows of a pass; above it, idle rows are put aside


class KeyValues:
    """Keys and values of R rows of one backbone; tokens are appended, rows copied, dropped and cut.

    Args:
        network: the backbone (`base_model`) of a causal language model or a reward model, in eval mode.
    Attributes:
        lengths: tokens of each row.
        tokens: run through the network so far, padding excluded.
    Raises:
        CacheUnsupported: the architecture keeps no plain keys and values of every token.
    """

    def __init__(self, network: nn.Module) -> None:
        _check_architecture(network)
        self.network = network
        self.device = next(network.parameters()).device
        self.lengths: list[int] = []
        self.tokens = 0
        self._slots: list[int] = []  # of each row; together always the first R
        self._ends: list[int] = []  # column behind the last token of each row
        self._buffers = Buffers(self.device)
        self._argument = cache_argument(network)
        self._longest = min(rotary_kinds(network.config).values(), default=None)
        self._layers = network.config.get_text_config().num_hidden_layers

    @torch.inference_mode()
    def add(self, sequences: Sequence[Sequence[int]]) -> None:
        """New rows at the end that hold these token ids; equal ones are computed once and copied. May be empty."""
        old = len(self.lengths)
        unique = sorted(dict.fromkeys(map(tuple, sequences)), key=len)
        self._resize(old + len(sequences))
        self._slots += range(old, old + len(unique))
        self._ends += [0] * len(unique)
        self.lengths += [0] * len(unique)
        rows_ids = [*[()] * old, *unique]
        for part in self._passes(rows_ids):
            self._run(rows_ids, part, self.network)
        place = {sequence: old + i for i, sequence in enumerate(unique)}
        self.select([*range(old), *(place[tuple(sequence)] for sequence in sequences)])

    @torch.inference_mode()
    def append(self, rows_ids: Sequence[Sequence[int]], through: nn.Module | None = None) -> Tensor:
        """Run new tokens through the network, behind what their rows hold.

        Args:
            rows_ids: token ids, a list a row; rows with an empty one take no part.
            through: a model around the network, such as its causal language model, whose first output is returned.
        Returns:
            (N, W, H) last hidden states of the N rows that got tokens, in their order; row n holds those of its tokens
            and then anything. (0, 0, 0) where no row did.
        Raises:
            ValueError: another number of rows, or a row that passes a length where rotary positions change.
            CacheUnsupported: a layer has not kept what it was given.
        """
        if len(rows_ids) != len(self.lengths):
            raise ValueError(f"expected token ids for {len(self.lengths)} rows, got {len(rows_ids)}")
        parts = self._passes(rows_ids)
        module = self.network if through is None else through
        if len(parts) <= 1:
            return self._run(rows_ids, parts[0], module) if parts else torch.zeros(0, 0, 0, device=self.device)
        active = sorted(row for part in parts for row in part)
        places = {row: place for place, row in enumerate(active)}
        whole = None
        for part in parts:
            output = self._run(rows_ids, part, module)
            if whole is None:
                whole = output.new_zeros(len(active), max(map(len, rows_ids)), output.shape[2])
            whole[[places[row] for row in part], : output.shape[1]] = output
        return whole

    def _passes(self, rows_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows with tokens, in groups for a pass each: of at most PASS_TOKENS and of neighbouring slots."""
        active = [row for row, ids in enumerate(rows_ids) if len(ids)]
        limit, width = PASS_TOKENS[self.device.type == "cuda"], max((len(rows_ids[row]) for row in active), default=0)
        if len(active) * width <= limit:
            return [active] * bool(active)
        parts: list[list[int]] = []
        for row in sorted(active, key=self._slots.__getitem__):
            widest = max(len(rows_ids[member]) for member in [*parts[-1], row]) if parts else 0
            if parts and (len(parts[-1]) + 1) * widest <= limit:
                parts[-1].append(row)
            else:
                parts.append([row])
        return [sorted(part) for part in parts]

    def _run(self, rows_ids: Sequence[Sequence[int]], active: Sequence[int], module: nn.Module) -> Tensor:
        """One pass over the new tokens of some rows, in rising order; the output as `append` gives it."""
        counts = [len(rows_ids[row]) for row in active]
        width = max(counts)
        longest = max(self.lengths[row] + count for row, count in zip(active, counts, strict=True))
        if self._longest is not None and longest > self._longest:
            raise ValueError(
                f"a row would have {longest} tokens, and the positions of {type(self.network).__name__} are others "
                f"beyond {self._longest}: keys and values of its first tokens would be wrong; ask for shorter rows"
            )
        frame = self._buffers.frame
        frame.low, frame.high = self._range_of(active)
        self._align(active, width)
        frame.first = frame.end - max(self.lengths[row] for row in active)

        # In the order of slots: token ids, padded on the right; tokens before them; place of the last one.
        inputs = np.zeros((frame.high - frame.low, width + 2), dtype=np.int64)
        places = [self._slots[row] - frame.low for row in active]
        for row, place, count in zip(active, places, counts, strict=True):
            inputs[place, :count] = rows_ids[row]
            inputs[place, width:] = self.lengths[row], self.lengths[row] + count - 1
        ids, start, last = torch.from_numpy(inputs).to(self.device).tensor_split((width, width + 1), dim=1)
        steps = torch.arange(frame.first - frame.end, width, device=self.device)  # columns, 0 is the first new one
        with attention_for(self.network.config, packed=False):
            output = module(
                input_ids=ids,
                attention_mask=steps >= -start,
                position_ids=torch.minimum(start + steps[-width:], last),
                use_cache=True,
                **{self._argument: self._buffers.cache},
            )[0]
        if self._buffers.layers != self._layers:
            raise CacheUnsupported(_unsupported(self.network, f"only {self._buffers.layers} layers have kept any"))
        for row, count in zip(active, counts, strict=True):
            self.lengths[row] += count
            self._ends[row] = frame.end + count
        self.tokens += sum(counts)
        return output if places == [*range(len(inputs))] else output[places]

    @torch.inference_mode()
    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was: rows may repeat (fork), be left out (drop) or change order."""
        count, taken, places = len(rows), set(), {}
        for i, row in enumerate(rows):  # whoever can stays where it is
            if self._slots[row] < count and self._slots[row] not in taken:
                taken.add(places.setdefault(i, self._slots[row]))
        free = iter(sorted(set(range(count)) - taken))
        moved = [i for i in range(count) if i not in places]
        places |= {i: next(free) for i in moved}
        self._resize(count)
        self._move([rows[i] for i in moved], [places[i] for i in moved])
        self._slots = [places[i] for i in range(count)]
        self._ends = [self._ends[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]

    def crop(self, lengths: Sequence[int]) -> None:
        """Keep the first n tokens of each row.

        Raises:
            ValueError: another number of rows, or more tokens than a row has.
        """
        if len(lengths) != len(self.lengths) or any(
            not 0 <= kept <= length for kept, length in zip(lengths, self.lengths, strict=True)
        ):
            raise ValueError(f"expected at most {self.lengths} tokens to keep, got {list(lengths)}")
        self._ends = [end - length + n for end, length, n in zip(self._ends, self.lengths, lengths, strict=True)]
        self.lengths = list(lengths)

    def _range_of(self, active: Sequence[int]) -> tuple[int, int]:
        """Slots from the first to the last of some rows; the rows are brought together where many idle between them."""
        slots = sorted(self._slots[row] for row in active)
        low, high = slots[0], slots[-1] + 1
        if high - low - len(slots) <= IDLE_SHARE * len(slots):
            return low, high
        count = len(active)
        leaving = [row for row in range(len(self._slots)) if self._slots[row] < count and row not in set(active)]
        entering = [row for row in active if self._slots[row] >= count]
        targets = [self._slots[row] for row in entering + leaving]
        self._move(leaving + entering, targets)
        for row, slot in zip(leaving + entering, targets, strict=True):
            self._slots[row] = slot
        return 0, count

    def _align(self, active: Sequence[int], width: int) -> None:
        """Let some rows end at one column, behind which `width` columns are free in their range of slots."""
        frame = self._buffers.frame
        slots = range(frame.low, frame.high)
        frame.end = max(end for end, slot in zip(self._ends, self._slots, strict=True) if slot in slots)
        if frame.end + width > frame.columns:
            filled = [end - length for end, length in zip(self._ends, self.lengths, strict=True) if length]
            used = range(min([*filled, frame.end]), max(self._ends))
            needed = frame.end + width - used.start
            self._buffers.resize(frame.slots, needed + max(needed, LEAST_ROOM), used)
            self._ends = [max(0, end - used.start) for end in self._ends]
            frame.end -= used.start
        shifted = [row for row in active if self.lengths[row] and self._ends[row] < frame.end]
        if shifted:
            longest = max(self.lengths[row] for row in shifted)
            self._buffers.shift(
                [self._slots[row] for row in shifted],
                [frame.end - self._ends[row] for row in shifted],
                range(frame.end - longest, frame.end),
            )

    def _move(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Copy what some rows hold into slots; all are read before any is written."""
        rows_slots = [(row, slot) for row, slot in zip(rows, slots, strict=True) if self.lengths[row]]
        if rows_slots:
            low = min(self._ends[row] - self.lengths[row] for row, _ in rows_slots)
            high = max(self._ends[row] for row, _ in rows_slots)
            sources, targets = zip(*((self._slots[row], slot) for row, slot in rows_slots), strict=True)
            self._buffers.copy(sources, targets, range(low, high))

    def _resize(self, slots: int) -> None:
        self._buffers.resize(slots, 0, range(max(self._ends, default=0)))


def context_of(config) -> int | None:
    """Tokens that a model reads at most, as its configuration tells; None where it tells nothing."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [*rotary_kinds(config).values(), *([longest] if longest else [])]
    return min(limits, default=None)


def check_context(
    lengths: Sequence[int], config, name: str, what: str = "prompt", first: int = 0, room: int = 1
) -> None:
    """Refuse sequences that do not fit into the context of a model.

    Args:
        lengths: tokens of each sequence. first: number of the first one.
        name, what: what the error calls the model and a sequence. room: tokens that must be left for a response.
    Raises:
        ValueError: names the first such sequence, its tokens and the limit.
    """
    limit = context_of(config)
    for number, tokens in enumerate(lengths, first):
        if limit is not None and tokens + room > limit:
            least, advice = (
                (f" with at least {room} of a response", "shorten it") if room else ("", "draw fewer tokens")
            )
            raise ValueError(
                f"{what} {number} has {tokens} tokens, and {name} reads {limit}{least}: "
                f"{advice}, leave its question out, or take a model with a longer context"
            )


def _check_architecture(network: nn.Module) -> None:
    """Refuse a network whose configuration or forward pass shows other states than keys and values."""
    names = inspect.signature(type(network).forward).parameters
    if cache_argument(network) not in names:
        raise CacheUnsupported(_unsupported(network, "its forward pass takes none"))
    others = {type(layer).__name__ for layer in DynamicCache(config=network.config).layers} - {
        layer.__name__ for layer in PLAIN_LAYERS
    }
    if others:
        raise CacheUnsupported(_unsupported(network, f"it has layers of kind {', '.join(sorted(others))}"))


def _unsupported(network: nn.Module, why: str) -> str:
    return (
        f"{type(network).__name__} keeps no plain keys and values of every token ({why}): "
        "choose a model with attention in all layers, such as Llama, Qwen or Mistral"
    )
