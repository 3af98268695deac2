"""`deepspeed.ops.sparse_attention`: its classes as scripts use them, and the section of the config that they read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparseAttentionUtils,
    SparseSelfAttention,
    VariableSparsityConfig,
)
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from polyaccel.errors import ConfigError, PolyaccelError

# As in DeepSpeed's tutorial on sparse attention, with its comments left out.
SECTION: dict[str, Any] = {
    "mode": "fixed",
    "block": 16,
    "different_layout_per_head": True,
    "num_local_blocks": 4,
    "num_global_blocks": 1,
    "attention": "bidirectional",
    "horizontal_global_attention": False,
    "num_different_global_patterns": 4,
}


@pytest.mark.parametrize(
    "kind",
    [
        DenseSparsityConfig,
        FixedSparsityConfig,
        VariableSparsityConfig,
        BigBirdSparsityConfig,
        BSLongformerSparsityConfig,
        LocalSlidingWindowSparsityConfig,
    ],
)
def test_attention_equals_dense_attention_of_the_layout(kind: Any) -> None:
    attention = SparseSelfAttention(kind(num_heads=2, block=8), attn_mask_mode="mul", max_seq_length=64)
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 2, 40, 4, generator=draws).double() for _ in range(3))
    padding = torch.zeros(3, 1, 1, 40).double()
    padding[1, ..., 33:] = -10000.0
    causal = torch.ones(40, 40).tril()
    layout = attention.get_layout(40).bool()
    assert attention.master_layout.dtype == torch.int64
    seen = layout.repeat_interleave(8, 1).repeat_interleave(8, 2)[None] & causal.bool()
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=padding.masked_fill(~seen, float("-inf")))
    for keys in (key, key.transpose(2, 3)):
        found = attention(query, keys, value, key_padding_mask=padding, attn_mask=causal)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_the_section_is_checked_and_left_to_the_model() -> None:
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "sparse_attention": SECTION}
    deepspeed.initialize(model=nn.Linear(1, 1), config=config)[0].destroy()
    for change in ({"mode": "spiral"}, {"blocks": 16}, {"num_global_blocks": 3}):
        with pytest.raises(ConfigError):
            deepspeed.initialize(model=nn.Linear(1, 1), config=config | {"sparse_attention": SECTION | change})


def test_bert_attends_by_blocks() -> None:
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2)
    layer = BertSparseSelfAttention(config, FixedSparsityConfig(num_heads=2, block=8))
    hidden = torch.randn(2, 32, 8)
    heads = [part(hidden).unflatten(-1, (2, 4)).transpose(1, 2) for part in (layer.query, layer.key, layer.value)]
    wanted = scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2)  # four blocks are one window
    torch.testing.assert_close(layer(hidden, torch.zeros(2, 1, 1, 32)), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(PolyaccelError):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=9, num_attention_heads=2), DenseSparsityConfig(2))


def test_inputs_are_padded_to_blocks() -> None:
    ids, mask = torch.arange(1, 11).reshape(2, 5), torch.ones(2, 5)
    added, padded, masked, kinds, places, embedded = SparseAttentionUtils.pad_to_block_size(
        4, ids, mask, None, None, None, 99, None
    )
    assert (added, padded[:, 5:].tolist(), masked.sum().item()) == (3, [[99] * 3] * 2, 10)
    assert (kinds, places, embedded) == (None, None, None)
    assert SparseAttentionUtils.unpad_sequence_output(added, padded).equal(ids)
    with pytest.raises(PolyaccelError):
        SparseSelfAttention(FixedSparsityConfig(2), key_padding_mask_mode="times")
    with pytest.raises(PolyaccelError):
        SparseSelfAttention(FixedSparsityConfig(2), max_seq_length=64).get_layout(80)
