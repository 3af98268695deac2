"""Decoding of a batch as transformers' `_sample` does: the same tokens, processors, stopping and output.

[Note: Draws of tokens]
Without a seed tokens are drawn from torch's generator as transformers draws them: one call a step for all rows,
finished ones included. With a seed each sequence has a generator, made from the seed and its number in the call. A
token is where a uniform number falls in the sums of probabilities. Prompts are then computed one by one, so that
neither logits nor draws of a sequence depend on the others.

[Note: Processors of one sequence]
transformers' processors see the padding of a batch, whose width is that of the longest prompt. With a seed those that
read tokens get a sequence without it. A penalty of repetition knows the padding of each row, so a row that is computed
alone has its own penalty.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from polyaccel.torch.generation.decode.model import Decoder

_GOLDEN = 0x9E3779B97F4A7C15
_READERS = ("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor")
"""Processors of transformers that look for runs of tokens in a sequence."""


@dataclass
class Draws:
    """How the next tokens are chosen. See [Note: Draws of tokens]."""

    samples: bool
    seed: int | None

    def __post_init__(self) -> None:
        self._generators: dict[int, torch.Generator] = {}

    def tokens(self, scores: Tensor, sequences: list[int]) -> Tensor:
        """Return the next token of each row of `scores`, whose numbers are `sequences`."""
        if not self.samples:
            return scores.argmax(dim=-1)
        shares = scores.softmax(dim=-1)
        if self.seed is None:
            return torch.multinomial(shares, num_samples=1).squeeze(1)
        sums = shares.double().cumsum(dim=-1)
        drawn = torch.cat([torch.rand(1, generator=self._generator(one), dtype=torch.float64) for one in sequences])
        found = torch.searchsorted(sums, drawn.to(sums.device)[:, None] * sums[:, -1:], right=True).squeeze(1)
        return found.clamp_(max=scores.shape[-1] - 1)

    def _generator(self, sequence: int) -> torch.Generator:
        if sequence not in self._generators:
            assert self.seed is not None
            mixed = (self.seed * _GOLDEN + sequence * 0xBF58476D1CE4E5B9 + 1) % (1 << 63)
            self._generators[sequence] = torch.Generator().manual_seed(mixed)
        return self._generators[sequence]


@dataclass
class Request:
    """A call of `generate`, after transformers has prepared it."""

    ids: Tensor
    """Prompts, padded on the left."""
    lengths: list[int]
    processors: Any
    stopping: Any
    pad: Tensor | None
    draws: Draws
    keeps_scores: bool = False
    keeps_logits: bool = False

    @property
    def ends_early(self) -> bool:
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping)

    def prompt(self, row: int) -> Tensor:
        return self.ids[row, self.padding(row) :]

    def padding(self, row: int) -> int:
        return self.ids.shape[1] - self.lengths[row]

    def processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores of all rows."""
        if self.draws.seed is None or not any(type(one).__name__ in _READERS for one in self.processors):
            return cast("Tensor", self.processors(ids, scores))
        rows = range(len(ids))
        return torch.cat([self.processed_alone(row, ids[row : row + 1], scores[row : row + 1]) for row in rows])

    def processed_alone(self, row: int, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the processed scores of a row. See [Note: Processors of one sequence]."""
        for one in self.processors:
            if isinstance(padding := getattr(one, "prompt_ignore_length", None), Tensor):
                one = copy(one)
                one.prompt_ignore_length = padding[row : row + 1]
            is_cut = self.draws.seed is not None and type(one).__name__ in _READERS
            scores = one(ids[:, self.padding(row) :] if is_cut else ids, scores)
        return scores


@dataclass
class Outcome:
    """Tokens (sequences, length), and scores and logits of each step where they are kept."""

    tokens: Tensor
    scores: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


def decode_batch(decoder: Decoder, call: Request) -> Outcome:
    """Decode all sequences together. A sequence that has ended is not computed further, unless its scores are kept."""
    rows = list(range(len(call.ids)))
    active, ids = rows, call.ids
    logits = first_logits(decoder, call, rows, rows)
    unfinished = torch.ones(len(rows), dtype=torch.long, device=ids.device)
    keeps = call.keeps_scores or call.keeps_logits
    scores: tuple[Tensor, ...] = ()
    raw: tuple[Tensor, ...] = ()
    slots = torch.tensor(rows, device=ids.device)
    positions = torch.tensor(call.lengths, device=ids.device)
    while True:
        logits = logits.to(torch.float32, copy=call.keeps_logits)
        if len(active) < len(rows):  # drawn for all, as transformers does
            whole = logits.new_zeros(len(rows), logits.shape[1])
            whole[slots] = logits
            logits = whole
        found = call.processed(ids, logits)
        scores += (found,) if call.keeps_scores else ()
        raw += (logits,) if call.keeps_logits else ()
        tokens = call.draws.tokens(found, rows)
        if call.ends_early and call.pad is not None:
            tokens = tokens * unfinished + call.pad * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=-1)
        unfinished = unfinished & ~call.stopping(ids, scores)
        if not unfinished.any():
            return Outcome(ids, scores, raw)
        if not keeps and int(unfinished.sum()) < len(active):
            active = unfinished.nonzero().squeeze(1).tolist()
            alive = unfinished[slots].bool()
            for slot in slots[~alive].tolist():
                decoder.release(slot)
            slots, positions = slots[alive].contiguous(), positions[alive].contiguous()
        logits = decoder.step(tokens[slots], slots, positions)
        positions += 1


def first_logits(decoder: Decoder, call: Request, rows: list[int], slots: list[int]) -> Tensor:
    """Return the logits after the prompts of some rows. With a seed they are computed one by one."""
    prompts = [call.prompt(row) for row in rows]
    if call.draws.seed is None:
        return decoder.prefill(prompts, slots)
    return torch.cat([decoder.prefill([one], [slot]) for one, slot in zip(prompts, slots, strict=True)])


def decode_continuously(decoder: Decoder, call: Request, slots: int) -> Outcome:
    """Decode with so many sequences at a time: where one has ended, the next prompt takes its slot."""
    waiting = list(range(len(call.ids)))[::-1]
    at_work: dict[int, int] = {}
    """The sequence of each slot in use."""
    written = {row: call.ids[row : row + 1] for row in waiting}
    step: Callable[..., Tensor] = decoder.step
    while waiting or at_work:
        logits: dict[int, Tensor] = {}
        if at_work:
            places = sorted(at_work)
            rows = [at_work[place] for place in places]
            tokens = torch.stack([written[row][0, -1] for row in rows])
            before = [written[row].shape[1] - call.ids.shape[1] + call.lengths[row] - 1 for row in rows]
            device = call.ids.device
            found = step(tokens, torch.tensor(places, device=device), torch.tensor(before, device=device))
            logits = {row: found[index : index + 1] for index, row in enumerate(rows)}
        free = [place for place in range(slots) if place not in at_work]
        new = [(waiting.pop(), place) for place in free[: len(waiting)]]
        if new:
            found = first_logits(decoder, call, [row for row, _ in new], [place for _, place in new])
            logits.update({row: found[index : index + 1] for index, (row, _) in enumerate(new)})
            at_work.update({place: row for row, place in new})
        for place, row in list(at_work.items()):
            scores = call.processed_alone(row, written[row], logits[row].float())
            token = call.draws.tokens(scores, [row])
            written[row] = torch.cat([written[row], token[:, None]], dim=-1)
            if bool(call.stopping(written[row], ())):
                del at_work[place]
                decoder.release(place)
    longest = max(one.shape[1] for one in written.values())
    filler = call.pad if call.pad is not None else 0
    out = call.ids.new_empty(len(call.ids), longest)
    for row, one in written.items():
        out[row, : one.shape[1]] = one[0]
        out[row, one.shape[1] :] = filler
    return Outcome(out, (), ())
