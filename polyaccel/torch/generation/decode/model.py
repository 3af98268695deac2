"""The decoder: a recognised structure over a cache, for prompts of uneven length and one token of each sequence.

[Note: Sequences in slots]
The cache has slots, one a sequence. Tokens are rows without padding. A row belongs to a slot and has a position there,
so that sequences of any length are computed together, and a slot is free for another sequence when its own has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polyaccel.ops.base import KernelTable
from polyaccel.ops.decode import DECODE_ATTENTION
from polyaccel.torch.generation.decode import parts
from polyaccel.torch.generation.decode.cache import PagedCache, StaticCache
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.parts import Rowwise
from polyaccel.torch.generation.decode.structure import Layer, Structure
from polyaccel.torch.generation.decode.whole_step import MOST_ROWS, WholeStep

_COMPILED = (torch.float32, torch.bfloat16)


@dataclass
class _Block:
    """A block as functions of rows."""

    first_norm: Rowwise
    second_norm: Rowwise | None
    inputs: tuple[Rowwise, ...]
    head_norms: tuple[Any, Any] | None
    output: Rowwise
    mlp: Rowwise
    scale: float
    index: int
    """Which layer of the cache is its own."""
    attend: Any
    """Attention of one new token; None where the framework computes it."""


class Decoder:
    """A model of `structure` with memory for `slots` sequences of at most `capacity` tokens.

    Args:
        structure: The model.
        kernels: Kernels of `DECODE_OPS`.
        slots: Sequences at a time.
        capacity: Tokens of a sequence at most.
        first: Position of each sequence's first token.
    """

    def __init__(
        self, structure: Structure, kernels: KernelTable, slots: int, capacity: int, *, first: int = 0
    ) -> None:
        self._structure = structure
        self._embed = parts.embedding(structure.embedding)
        self._place = None if structure.positions is None else parts.embedding(structure.positions)
        self._final_norm = None if structure.final_norm is None else parts.norm(structure.final_norm)
        self._head = parts.linear(structure.head, kernels)
        self.capacity, self._first = capacity, first
        like = parts.values(structure.embedding.weight)
        self.device = like.device
        self._turns = self._tables(like)
        is_compiled = DECODE_ATTENTION in kernels and like.dtype in _COMPILED and like.device.type == "cpu"
        shape = (len(structure.layers), structure.key_heads, structure.head_numel)
        cache = (
            PagedCache(shape, slots, capacity, like.dtype) if is_compiled else StaticCache(shape, slots, capacity, like)
        )
        self.cache: PagedCache | StaticCache = cache
        self._blocks = [self._block(index, layer, kernels) for index, layer in enumerate(structure.layers)]
        self._whole = self._whole_step(kernels, min(slots, MOST_ROWS))

    def _whole_step(self, kernels: KernelTable, rows: int) -> WholeStep | None:
        """A token of each sequence as one call; None where a part is not known."""
        if not isinstance(self.cache, PagedCache):
            return None
        try:
            return WholeStep(self._structure, kernels, self.cache, self._turns, rows)
        except Unsupported:
            return None

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor] | None:
        rotary = self._structure.rotary
        if rotary is None:
            return None
        places = torch.arange(self._first, self._first + self.capacity, device=like.device)
        cosines, sines = rotary(like.new_empty(1), places[None])
        return cosines[0].contiguous(), sines[0].contiguous()

    def _block(self, index: int, layer: Layer, kernels: KernelTable) -> _Block:
        attend = None
        if isinstance(self.cache, PagedCache):
            fixed = self._turns, self._structure.heads, layer.scale
            attend = kernels[DECODE_ATTENTION](self.cache.layer(index), *fixed)
        mlp = parts.two_layers(*layer.fc, kernels) if layer.fc is not None else parts.mlp(layer.mlp, kernels)
        return _Block(
            parts.norm(layer.first_norm),
            None if layer.second_norm is None else parts.norm(layer.second_norm),
            tuple(parts.linear(one, kernels) for one in layer.inputs),
            None if layer.head_norms is None else (parts.norm(layer.head_norms[0]), parts.norm(layer.head_norms[1])),
            parts.linear(layer.output, kernels),
            mlp,
            layer.scale,
            index,
            attend,
        )

    def prefill(self, prompts: Sequence[Tensor], slots: Sequence[int]) -> Tensor:
        """Compute prompts together and return the logits of their last tokens.

        Args:
            prompts: Tokens of each prompt, one-dimensional, each at least one.
            slots: Slot of each.

        Returns:
            Logits (prompts, vocabulary).
        """
        tokens = torch.cat(tuple(prompts))
        lengths = [len(prompt) for prompt in prompts]
        self._extend(slots, lengths)
        places = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])
        ends = torch.tensor(lengths, device=tokens.device).cumsum(0)
        x = self._embedded(tokens, places)
        turns = None if self._turns is None else (self._turns[0][places], self._turns[1][places])
        for block in self._blocks[:-1]:
            x = self._residual(block, x, partial(self._seen, block, lengths, slots, turns))
        return self._logits(self._ended(self._blocks[-1], lengths, slots, turns, x, ends - 1))

    def step(self, tokens: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Compute one new token of each sequence and return logits (sequences, vocabulary).

        Args:
            tokens: The token of each sequence.
            slots: Slot of each (int64, contiguous).
            positions: Position of each token in its sequence (int64, contiguous).
        """
        self._extend(slots.tolist(), (positions + 1).tolist())
        x = self._embedded(tokens, positions)
        if self._whole is not None and len(x) <= MOST_ROWS:
            return self._whole(x, slots, positions)
        for block in self._blocks:
            x = self._residual(block, x, partial(self._next, block, slots, positions))
        return self._logits(x)

    def release(self, slot: int) -> None:
        """Give up the keys and values of a sequence that has ended."""
        self.cache.release(slot)

    def _extend(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        for slot, length in zip(slots, lengths, strict=True):
            self.cache.extend(slot, length)

    def _embedded(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self._embed(tokens)
        return x if self._place is None else x + self._place(places + (self._first + self._structure.offset))

    def _logits(self, x: Tensor) -> Tensor:
        return self._head(x if self._final_norm is None else self._final_norm(x))

    def _residual(self, block: _Block, x: Tensor, attend: Rowwise) -> Tensor:
        choice = self._structure.choice
        if choice.is_parallel:
            normed = block.first_norm(x)
            other = normed if block.second_norm is None else block.second_norm(x)
            return attend(normed) + block.mlp(other) + x
        assert block.second_norm is not None  # or the choice would be parallel
        if choice.norms_first:
            x = attend(block.first_norm(x)) + x
            return block.mlp(block.second_norm(x)) + x
        x = block.first_norm(attend(x) + x)
        return block.second_norm(block.mlp(x) + x)

    def _heads(self, block: _Block, x: Tensor, *, with_queries: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of rows: (rows, their heads, head). Without queries, those are
        anything."""
        found = self._structure
        rows, head = len(x), found.head_numel
        if len(block.inputs) == 1:
            both = block.inputs[0](x)
            if found.choice.heads_together:
                q, k, v = both.view(rows, found.heads, 3 * head).chunk(3, dim=-1)
            else:
                sizes = [found.heads * head, found.key_heads * head, found.key_heads * head]
                q, k, v = (one.view(rows, -1, head) for one in torch.split(both, sizes, dim=-1))
        else:
            k, v = (project(x).view(rows, -1, head) for project in block.inputs[1:])
            q = block.inputs[0](x).view(rows, -1, head) if with_queries else k
        if block.head_norms is not None:
            q, k = block.head_norms[0](q) if with_queries else q, block.head_norms[1](k)
        return q, k, v

    def _seen(
        self,
        block: _Block,
        lengths: Sequence[int],
        slots: Sequence[int],
        turns: tuple[Tensor, Tensor] | None,
        x: Tensor,
    ) -> Tensor:
        q, k, v = self._heads(block, x)
        if turns is not None:
            q, k = parts.turned(q, *turns), parts.turned(k, *turns)
        outputs, start = [], 0
        for length, slot in zip(lengths, slots, strict=True):
            mine = slice(start, start + length)
            query, key, value = (one[mine].transpose(0, 1)[None] for one in (q, k, v))
            self.cache.write(block.index, slot, key[0], value[0])
            found = _attention(query, key, value, block.scale, is_causal=length > 1)
            outputs.append(found[0].transpose(0, 1).reshape(length, -1))
            start += length
        return block.output(torch.cat(outputs))

    def _ended(
        self,
        block: _Block,
        lengths: Sequence[int],
        slots: Sequence[int],
        turns: tuple[Tensor, Tensor] | None,
        x: Tensor,
        last: Tensor,
    ) -> Tensor:
        """The last block, whose other tokens matter by their keys and values only."""
        choice = self._structure.choice
        inputs = block.first_norm(x) if choice.is_parallel or choice.norms_first else x
        k, v = self._heads(block, inputs, with_queries=False)[1:]
        if turns is not None:
            k = parts.turned(k, *turns)
        for slot, key, value in zip(slots, *(torch.split(one, list(lengths)) for one in (k, v)), strict=True):
            self.cache.write(block.index, slot, key.transpose(0, 1), value.transpose(0, 1))
        places = torch.tensor(lengths, device=x.device) - 1
        used = torch.tensor(list(slots), device=x.device)
        return self._residual(block, x[last], partial(self._next, block, used, places))

    def _next(self, block: _Block, slots: Tensor, positions: Tensor, x: Tensor) -> Tensor:
        q, k, v = self._heads(block, x)
        if block.attend is not None:
            return block.output(block.attend(q, k, v, slots, positions))
        if self._turns is not None:
            turns = self._turns[0][positions], self._turns[1][positions]
            q, k = parts.turned(q, *turns), parts.turned(k, *turns)
        assert isinstance(self.cache, StaticCache)  # without compiled attention
        keys, values = self.cache.keys[block.index], self.cache.values[block.index]
        keys[slots, :, positions], values[slots, :, positions] = k, v
        longest = int(positions.max()) + 1
        seen = torch.arange(longest, device=x.device)[None, None, None] <= positions[:, None, None, None]
        keys, values = keys[slots, :, :longest], values[slots, :, :longest]
        found = _attention(q[:, :, None], keys, values, block.scale, mask=seen)
        return block.output(found.reshape(len(x), -1))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    groups = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups
    )
