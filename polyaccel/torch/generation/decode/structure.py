"""The structure of a decoder-only model, recognised by the roles of its parts and not by its class.

[Note: Structures are candidates]
Names say which layer is which. They leave choices: residuals one after the other or in parallel, norms before or
after, heads of a fused product together or apart. Every choice is a candidate, and `proof` takes the one whose logits
are those of the untouched module. A part with parameters and without a role makes a model unrecognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.weight_groups import has_weights

_EMBEDDINGS = ("embed_tokens", "wte", "embed_in")
_POSITIONS = ("wpe", "embed_positions")
_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")
_ATTENTIONS = ("self_attn", "attn", "attention")
_FIRST_NORMS = ("input_layernorm", "ln_1", "self_attn_layer_norm")
_SECOND_NORMS = ("post_attention_layernorm", "ln_2", "final_layer_norm")
_MLPS = ("mlp", "block_sparse_moe")
_FUSED = ("c_attn", "qkv_proj", "query_key_value")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
_HEAD_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_ROTATIONS = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary positions whose tables do not depend on the length."""


@dataclass(frozen=True)
class Choice:
    """What names leave open. See [Note: Structures are candidates]."""

    is_parallel: bool
    norms_first: bool
    heads_together: bool


@dataclass(frozen=True)
class Layer:
    """The modules of a block by their roles."""

    attention: nn.Module
    first_norm: nn.Module
    second_norm: nn.Module | None
    mlp: nn.Module | None
    fc: tuple[nn.Module, Any, nn.Module] | None
    inputs: tuple[nn.Module, ...]
    """Queries, keys and values; or one module for all."""
    output: nn.Module
    head_norms: tuple[nn.Module, nn.Module] | None
    scale: float


@dataclass(frozen=True)
class Structure:
    """The modules of a model by their roles, and one choice of what these leave open."""

    embedding: nn.Module
    positions: nn.Module | None
    offset: int
    rotary: nn.Module | None
    layers: tuple[Layer, ...]
    final_norm: nn.Module | None
    head: nn.Module
    heads: int
    key_heads: int
    head_numel: int
    window: int | None
    vocabulary: int
    choice: Choice

    def choices(self) -> Iterator[Structure]:
        """Return this structure with every choice, the likely one first."""
        has_second = self.layers[0].second_norm is not None
        is_fused = len(self.layers[0].inputs) == 1
        likely = self.choice
        for parallel, first, together in product(
            (likely.is_parallel, not likely.is_parallel) if has_second else (True,),
            (True, False) if has_second else (True,),
            (likely.heads_together, not likely.heads_together) if is_fused else (False,),
        ):
            if not (parallel and not first):
                yield replace(self, choice=Choice(parallel, first, together))


def structure_of(model: nn.Module) -> Structure:
    """Recognise a model. Raises Unsupported with the reason where it is not one of known parts."""
    sizes: Any = getattr(model, "config", None)
    if sizes is None or getattr(sizes, "is_encoder_decoder", False):
        raise Unsupported(f"{type(model).__name__} is not a decoder alone")
    body, layers = blocks_of(model)
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    if head is None:
        raise Unsupported(f"{type(model).__name__} has no output embedding")
    named = {name: child for name, child in body.named_children() if has_weights(child) or name == "rotary_emb"}
    embedding = _take(named, _EMBEDDINGS, "embedding")
    positions = _take(named, _POSITIONS)
    final = _take(named, _FINAL_NORMS)
    rotary = named.pop("rotary_emb", None)
    named = {name: child for name, child in named.items() if child is not layers}
    if named:
        raise Unsupported(f"{type(body).__name__} has {', '.join(sorted(named))}")
    if rotary is not None and getattr(rotary, "rope_type", "default") not in _ROTATIONS:
        raise Unsupported(f"rotary positions of the kind {getattr(rotary, 'rope_type', '')!r}")
    head_numel = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads)
    first = layers[0]
    own: Any = getattr(_attention(first), "config", None) or sizes  # with the heads of a tensor rank
    heads = int(own.num_attention_heads)
    key_heads = int(getattr(own, "num_key_value_heads", None) or heads)
    is_parallel = bool(getattr(first, "use_parallel_residual", False))
    return Structure(
        embedding=embedding,
        positions=positions,
        offset=int(getattr(positions, "offset", 0)),
        rotary=rotary,
        layers=tuple(_layer(block, head_numel) for block in layers),
        final_norm=final,
        head=head,
        heads=heads,
        key_heads=key_heads,
        head_numel=head_numel,
        window=_window(sizes),
        vocabulary=int(sizes.vocab_size),
        choice=Choice(is_parallel, True, hasattr(_attention(first), "query_key_value")),
    )


def blocks_of(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that holds the list of blocks, and the list. Raises Unsupported without exactly one."""
    found = [
        (body, child)
        for body in model.modules()
        for child in body.children()
        if isinstance(child, nn.ModuleList) and len(child) and any(hasattr(child[0], name) for name in _ATTENTIONS)
    ]
    if len(found) != 1:
        raise Unsupported(f"{type(model).__name__} has {len(found)} lists of blocks with attention")
    return found[0]


def _window(sizes: Any) -> int | None:
    kinds = getattr(sizes, "layer_types", None)
    if kinds is not None and set(kinds) - {"full_attention", "sliding_attention"}:
        raise Unsupported(f"attention of the kinds {sorted(set(kinds))}")
    window = getattr(sizes, "sliding_window", None)
    return None if window is None or (kinds is not None and "sliding_attention" not in kinds) else int(window)


def _attention(block: nn.Module) -> nn.Module:
    found: nn.Module = next(getattr(block, name) for name in _ATTENTIONS if hasattr(block, name))
    return found


def _layer(block: nn.Module, head_numel: int) -> Layer:
    named = {name: child for name, child in block.named_children() if has_weights(child)}
    attention = _take(named, _ATTENTIONS, "attention")
    first = _take(named, _FIRST_NORMS, "norm before its attention")
    second, mlp = _take(named, _SECOND_NORMS), _take(named, _MLPS)
    fc = None
    if mlp is None and {"fc1", "fc2"} <= named.keys():
        fc = (named.pop("fc1"), getattr(block, "activation_fn", None), named.pop("fc2"))
    if named or (mlp is None and (fc is None or fc[1] is None)):
        raise Unsupported(f"{type(block).__name__} has {', '.join(sorted(named)) or 'no feed-forward part'}")
    parts = {name: child for name, child in attention.named_children() if has_weights(child)}
    fused = _take(parts, _FUSED)
    inputs = (fused,) if fused is not None else tuple(_take(parts, (f"{n}_proj",), f"{n}_proj") for n in "qkv")
    output = _take(parts, _OUTPUTS, "output projection")
    norms = next(((parts.pop(q), parts.pop(k)) for q, k in _HEAD_NORMS if q in parts and k in parts), None)
    if parts or next(attention.parameters(recurse=False), None) is not None:
        raise Unsupported(f"{type(attention).__name__} has {', '.join(sorted(parts)) or 'parameters'}")
    scale = float(getattr(attention, "scaling", head_numel**-0.5))
    return Layer(attention, first, second, mlp, fc, inputs, output, norms, scale)


def _take(named: dict[str, nn.Module], names: tuple[str, ...], needed: str = "") -> Any:
    """Remove and return the module that has one of `names`. Raises Unsupported without one that is `needed`."""
    found = next((name for name in names if name in named), None)
    if found is None and needed:
        raise Unsupported(f"no {needed} among {', '.join(sorted(named)) or 'no parts'}")
    return None if found is None else named.pop(found)
