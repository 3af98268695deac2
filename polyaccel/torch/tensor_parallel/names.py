"""What layers of transformers are called, by the part that they play."""

from __future__ import annotations

LINEARS = ("FalconLinear",)
"""Classes below `nn.Linear` whose own forward computes the same."""
QUERY = ("q_proj", "query", "q", "q_lin", "wq", "to_q", "query_proj", "q_attn")
KEY = ("k_proj", "key", "k", "k_lin", "wk", "to_k", "key_proj")
VALUE = ("v_proj", "value", "v", "v_lin", "wv", "to_v", "value_proj")
FUSED = ("qkv_proj", "c_attn", "Wqkv", "qkv", "in_proj")
"""Queries of all heads, then keys of all, then values of all."""
INTERLEAVED = ("query_key_value",)
"""Of each key head its queries, its key and its value."""
ATTENTION_OUT = ("o_proj", "out_proj", "o", "out_lin", "wo", "dense", "c_proj")
UP = (
    *("gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "wi", "wi_0", "wi_1", "dense_h_to_4h"),
    *("w1", "w3", "lin1", "linear_1", "ff1", "ffn", "pwconv1"),
)
DOWN = (
    "down_proj",
    "fc2",
    "fc_out",
    "c_proj",
    "wo",
    "dense_4h_to_h",
    "w2",
    "lin2",
    "linear_2",
    "ff2",
    "ffn_output",
    "pwconv2",
)
AFTER_ATTENTION = ("LayerNorm",)
"""A norm in a module of attention that comes after its output."""
ATTENTION_OUTSIDE = ("output", "dense")
"""Where BERT and its family have the output of attention, next to the module of its queries."""
UP_APART = ("intermediate", "dense")
DOWN_APART = ("output", "dense")

HEAD_SIZE = (
    *("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_per_head", "attention_head_dim"),
)
QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")
WIDTHS = ("split_size", "all_head_size", "inner_dim", "q_size", "kv_size")
"""Numbers of features of all heads."""
EXPERT_WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim")
