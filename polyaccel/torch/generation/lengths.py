"""The size of a call of `generate`, by its arguments: tokens of a sequence, and bytes of its keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError

_NEW_TOKENS = 20
"""What transformers generates where nothing is stated."""


def require_length(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], most: int) -> None:
    """Raise PolyaccelError if sequences may become longer than `most` tokens, by the arguments of `generate`."""
    length, new = _lengths(module, inputs, named)
    if length + new > most:
        raise PolyaccelError(
            f"prompt and new tokens may exceed max_out_tokens = {most}: {length} + {new}",
            hint='raise "max_out_tokens", or ask for fewer new tokens',
            value=length + new,
        )


def cache_nbytes(
    module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], *, batch_size: int | None, dtype: torch.dtype
) -> int:
    """Return the bytes that keys and values of all sequences take at their longest, by the model's config.

    Args:
        module: A model of transformers. Of other modules nothing is known: 0.
        inputs: Arguments of `generate`.
        named: Named arguments of `generate`.
        batch_size: Sequences that are decoded at a time; None for all.
        dtype: Type of keys and values.

    Returns:
        Bytes, without windows and other savings of single models.
    """
    described: Any = getattr(module, "config", None)
    if described is None or _stated(module, named, "use_cache") is False:
        return 0
    is_encoder_decoder = bool(getattr(described, "is_encoder_decoder", False))
    text = described.get_text_config(decoder=True) if hasattr(described, "get_text_config") else described
    layers = _first(text, "decoder_layers", "num_decoder_layers", "num_hidden_layers")
    heads = _first(text, "num_key_value_heads", "decoder_attention_heads", "num_attention_heads")
    queries = _first(text, "decoder_attention_heads", "num_attention_heads")
    dim = _first(text, "head_dim", "d_kv") or (_first(text, "hidden_size", "d_model") // queries if queries else 0)
    prompts = _prompts(inputs, named)
    rows = 1 if prompts is None else len(prompts)
    if batch_size is not None:
        rows = min(rows, batch_size)
    copies = (_stated(module, named, "num_beams") or 1) * (_stated(module, named, "num_return_sequences") or 1)
    length, new = _lengths(module, inputs, named)
    tokens = length + new
    if is_encoder_decoder and prompts is not None:
        tokens += prompts.shape[1]  # keys and values of what is encoded
    return int(2 * layers * heads * dim * tokens * rows * copies * dtype.itemsize)


def _lengths(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[int, int]:
    """The most tokens of a prompt, and how many may follow."""
    is_decoder_alone = not getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    names = ("inputs", "input_ids", "inputs_embeds") if is_decoder_alone else ("decoder_input_ids",)
    given = [*(inputs[:1] if is_decoder_alone else ()), *(named.get(name) for name in names)]
    length = max((one.shape[1] for one in given if isinstance(one, Tensor) and one.dim() > 1), default=1)
    new = _stated(module, named, "max_new_tokens")
    if new is not None:
        return length, int(new)
    whole = _stated(module, named, "max_length")
    return length, int(whole) - length if whole else _NEW_TOKENS


def _prompts(inputs: Sequence[Any], named: Mapping[str, Any]) -> Tensor | None:
    given = [*inputs[:1], *(named.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "input_features"))]
    return next((one for one in given if isinstance(one, Tensor) and one.dim() > 1), None)


def _stated(module: nn.Module, named: Mapping[str, Any], name: str) -> Any:
    config = named.get("generation_config") or getattr(module, "generation_config", None)
    value = named.get(name)
    return getattr(config, name, None) if value is None else value


def _first(config: Any, *names: str) -> int:
    """The first of the attributes that a config has as a number; 0 without one."""
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if isinstance(value, int) and value > 0), 0)
