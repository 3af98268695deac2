"""DeepSpeed's names of block-sparse attention, over polyaccel's layouts and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.sparse_attention import BlockPattern, sparse_attention

_KEYS = tuple(field.name for field in fields(BlockPattern))
_MODES = ("add", "mul")


def pattern_of(section: dict[str, Any]) -> BlockPattern:
    """Return the pattern of a section `sparse_attention`. Raises ConfigError where it does not fit."""
    if unknown := [name for name in section if name not in _KEYS]:
        problems = [Problem(f"sparse_attention.{name}", section[name], "is not a known key") for name in unknown]
        raise ConfigError(problems)
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in section.items()}
    return BlockPattern(**values)


class SparsityConfig:
    """A layout of blocks, which subclasses choose."""

    mode = ""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        self.num_heads, self.block, self.different_layout_per_head = num_heads, block, different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def _keep(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self._pattern()

    def _pattern(self) -> BlockPattern:
        values = {name: getattr(self, name) for name in _KEYS if hasattr(self, name)}
        return pattern_of({name: one for name, one in values.items() if one is not None} | {"mode": self.mode})

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout of sequences of so many tokens, (heads, blocks, blocks), of 0 and 1."""
        return self._pattern().layout(self.num_heads, seq_len).long()

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return a layout without a block."""
        if seq_len % self.block:
            hint = "pad the sequence"
            raise PolyaccelError(f"{seq_len} tokens are not whole blocks of {self.block}", hint=hint, value=seq_len)
        return torch.zeros(self.num_heads, seq_len // self.block, seq_len // self.block, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give all heads the layout of the first, unless each has one."""
        if not self.different_layout_per_head:
            layout[1 : self.num_heads] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """All blocks."""

    mode = "dense"


class FixedSparsityConfig(SparsityConfig):
    """Local windows, of which the last blocks are global."""

    mode = "fixed"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._keep(
            num_local_blocks=num_local_blocks,
            num_global_blocks=num_global_blocks,
            attention=attention,
            horizontal_global_attention=horizontal_global_attention,
            num_different_global_patterns=num_different_global_patterns,
        )


class VariableSparsityConfig(SparsityConfig):
    """Random blocks, local windows of several widths, and listed global blocks."""

    mode = "variable"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._keep(
            num_random_blocks=num_random_blocks,
            local_window_blocks=list(local_window_blocks),
            global_block_indices=list(global_block_indices),
            global_block_end_indices=None if global_block_end_indices is None else list(global_block_end_indices),
            attention=attention,
            horizontal_global_attention=horizontal_global_attention,
        )


class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, a window around each block, and the first blocks global."""

    mode = "bigbird"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._keep(
            num_random_blocks=num_random_blocks,
            num_sliding_window_blocks=num_sliding_window_blocks,
            num_global_blocks=num_global_blocks,
            attention=attention,
        )


class BSLongformerSparsityConfig(SparsityConfig):
    """A window around each block, and listed global blocks."""

    mode = "bslongformer"

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._keep(
            num_sliding_window_blocks=num_sliding_window_blocks,
            global_block_indices=list(global_block_indices),
            global_block_end_indices=None if global_block_end_indices is None else list(global_block_end_indices),
            attention=attention,
        )


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A window around each block."""

    mode = "local"

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block)
        self._keep(num_sliding_window_blocks=num_sliding_window_blocks, attention=attention)


class SparseSelfAttention(nn.Module):
    """Self-attention over the blocks of a layout, which is a buffer, for sequences up to `max_seq_length` tokens."""

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        if wrong := [mode for mode in (key_padding_mask_mode, attn_mask_mode) if mode not in _MODES]:
            raise PolyaccelError(f"a mask is to be applied by {wrong[0]!r}", hint='use "add" or "mul"', value=wrong[0])
        self.sparsity_config = sparsity_config
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode

    def get_layout(self, L: int) -> Tensor:  # noqa: N803 - DeepSpeed's name
        """Return the layout of sequences of so many tokens."""
        if L % self.sparsity_config.block or L // self.sparsity_config.block > self.master_layout.shape[-1]:
            hint = f"pad the sequence to blocks of {self.sparsity_config.block}, or raise max_seq_length"
            raise PolyaccelError(f"there is no layout of {L} tokens", hint=hint, value=L)
        blocks = L // self.sparsity_config.block
        return self.master_layout[..., :blocks, :blocks]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attention of (batch, heads, length, width); `key` may have its last dimensions swapped."""
        length = query.shape[2]
        if key.shape[2] != length:
            key = key.transpose(-1, -2)
        bias = None if attn_mask is None else _added(attn_mask.squeeze(), self.attn_mask_mode, query)
        if rpe is not None:
            bias = rpe.to(query.dtype) if bias is None else bias + rpe.to(query.dtype)
        padding = None
        if key_padding_mask is not None:
            padding = _added(key_padding_mask.reshape(len(query), length), self.key_padding_mask_mode, query)
        return sparse_attention(query, key, value, self.get_layout(length), bias=bias, key_bias=padding)


def _added(mask: Tensor, mode: str, query: Tensor) -> Tensor:
    """What a mask adds to scores: itself, or minus infinity where it is 0."""
    if mode == "add":
        return mask.to(query.dtype)
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask == 0, float("-inf"))


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention over the blocks of a layout, of a config of transformers."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            hint = "choose a multiple"
            raise PolyaccelError(
                f"a width of {config.hidden_size} is not {config.num_attention_heads} heads", hint=hint, value=config
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, self.all_head_size) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the mixed values of each token."""
        heads = (self.num_attention_heads, self.attention_head_size)
        parts = [
            part(hidden_states).unflatten(-1, heads).transpose(1, 2) for part in (self.query, self.key, self.value)
        ]
        mixed = self.sparse_self_attention(*parts, key_padding_mask=attention_mask)
        return torch.flatten(mixed.transpose(1, 2), -2)


class SparseAttentionUtils:
    """Helpers around models with sparse attention."""

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[int, Any, Any, Any, Any, Any]:
        """Return how many tokens were added for whole blocks, and the inputs with them."""
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None  # one of the two is a model's input
        batch, length = given.shape[:2]
        more = -length % block_size

        def wider(tensor: Tensor | None, value: int) -> Tensor | None:
            return None if tensor is None else nn.functional.pad(tensor, (0, more), value=value)

        if more and inputs_embeds is not None:
            padding = torch.full((batch, more), pad_token_id, dtype=torch.long, device=inputs_embeds.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(padding)], 1)
        ids, mask = wider(input_ids, pad_token_id), wider(attention_mask, 0)
        return more, ids, mask, wider(token_type_ids, 0), wider(position_ids, pad_token_id), inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Return the output without the tokens that were added."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len] if pad_len else sequence_output
