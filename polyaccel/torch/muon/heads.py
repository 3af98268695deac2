"""Attention heads that Muon orthogonalises one by one: which parameters have them, and how many rows each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.sharding.tensor_shard import cuts_of

_log = logging.getLogger(__name__)

_QUERIES = ("q_proj", "query", "wq", "to_q", "q_lin")
_KEYS = ("k_proj", "v_proj", "key", "value", "wk", "wv", "to_k", "to_v", "k_lin", "v_lin")
_FUSED = ("qkv_proj", "query_key_value", "c_attn")
_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
_ATTRIBUTE = "muon_head_dim"
"""What a parameter states of itself, as DeepSpeed marks them."""


def head_rows_of(
    model: nn.Module, names: Mapping[nn.Parameter, str], params: Mapping[str, Any]
) -> dict[nn.Parameter, int]:
    """Return the rows of a head of those parameters whose heads are matrices alone.

    A parameter's attribute `muon_head_dim` says so. With `per_head_muon` in `params`, so do the names of projections
    of queries, keys and values where the model's `config` has heads of which they are made. Fused projections stay
    whole, as in DeepSpeed.

    Raises:
        ConfigError: The config asks for heads, and no parameter has any; or rows are not a multiple of an attribute.
    """
    blocks = cuts_of(model)
    found: dict[nn.Parameter, int] = {}
    heads = _heads_of(getattr(model, "config", None)) if params.get("per_head_muon") else {}
    for parameter, fqn in names.items():
        shape = blocks[parameter].block.shape if parameter in blocks else tuple(parameter.shape)
        rows = getattr(parameter, _ATTRIBUTE, None)
        if rows is not None:
            if len(shape) != 2 or rows < 1 or shape[0] % rows:
                expected = f"{fqn} of shape {tuple(shape)} is not made of heads of {rows} rows, its {_ATTRIBUTE}"
                raise ConfigError([Problem("optimizer.type", "Muon", expected, f"set {_ATTRIBUTE} to a divisor")])
            found[parameter] = rows
        elif len(shape) == 2 and (width := heads.get((_kind(fqn), shape[0]))) is not None:
            found[parameter] = width
    if params.get("per_head_muon"):
        if not found:
            expected = "found no projection of queries, keys or values that is made of the heads of model.config"
            hint = f"set {_ATTRIBUTE}, the rows of a head, on the parameters, or leave the key out"
            raise ConfigError([Problem("optimizer.params.per_head_muon", True, expected, hint)])
        _log.info("heads of %d of %d matrices are orthogonalised one by one", len(found), len(names))
    return found


def _heads_of(config: Any) -> dict[tuple[str, int], int]:
    """The rows of a head, by kind of projection and rows of the projection."""
    config = getattr(config, "text_config", config)
    count = _first(config, _COUNTS)
    if count is None:
        return {}
    hidden = _first(config, _WIDTHS)
    width = getattr(config, "head_dim", None) or (hidden // count if hidden and hidden % count == 0 else None)
    if not width:
        return {}
    keys = _first(config, _KEY_COUNTS) or count
    return {("query", count * width): width, ("key", keys * width): width}


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _kind(fqn: str) -> str:
    """Which projection the module of a weight is, by its name; "" for others."""
    module = fqn.rpartition(".")[0].rpartition(".")[2].lower()
    if module.startswith(_FUSED):
        return ""
    if module.startswith(_QUERIES):
        return "query"
    return "key" if module.startswith(_KEYS) else ""
