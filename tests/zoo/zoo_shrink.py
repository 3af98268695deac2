"""Small configs with the structure of large ones: `candidates` of a config of transformers, the smallest first.

Counts of heads, key heads and experts stay small numbers with the same ratios, for they decide how ranks divide a
layer. Widths share one factor. Depth is cut to whole periods of the pattern of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

WORDS, POSITIONS, WINDOW = 96, 64, 4
DRAWN = (12, 72)
"""Ids of words that batches draw from: special tokens lie outside of them."""

_DEPTH = re.compile(r"^(num_(hidden_|encoder_|decoder_)?(layers|blocks)|n_layers?|(en|de)coder_layers|depth)$")
_HEADS = re.compile(r"(^|_)(n_heads?|num_heads|attention_heads|num_(key_value|kv|attn)_heads|n_head_kv)$")
_COUNT = re.compile(
    r"(vocab|window|chunk|kernel|patch|image|num_|n_layer|layers|heads|state_size|d_conv|max_|_act|_id$)"
)
_WIDTH = re.compile(
    r"(hidden_size|intermediate_size|_dim$|^dim$|^d_|n_embd|n_inner|rank$|_width|ffn|_channels$|^embed_dims?$|_size_per_)"
)
_PER_HEAD = re.compile(
    r"(head_dim|rotary_dim|kv_channels|rank$|rope_dim|attention_head_size|d_kv$|_size_per_head|d_head$)"
)
_POSITIONS = re.compile(
    r"^(max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_(sequence|seq)_len(gth)?|seq_length)$"
)
_TOKEN = re.compile(r"(_token_(ids?|index)|_token)$")
_WINDOWS = re.compile(r"(sliding_window|attention_chunk_size|window_size|local_attention|attention_window)$")
_EXPERTS = re.compile(r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
_CHOSEN = re.compile(r"(num_experts_per_tok(en)?|top_?k(_experts)?|moe_k|moe_topk|num_selects|experts_per_tok\w*)$")
_DROPS = re.compile(
    r"(dropout|_pdrop|drop_path|layerdrop|drop_rate|dropout_rate|drop_path_rate|_dropout_prob|jitter_noise)"
)
_NOISE = (
    "mask_time_prob",
    "mask_feature_prob",
    "router_jitter_noise",
    "attention_probs_dropout_prob",
    "label_smoothing",
)
_DROPPED = {
    "model_type",
    "transformers_version",
    "architectures",
    "_name_or_path",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
}

_STATES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {**_STATES, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "falcon_h1": {**_STATES, "mamba_d_ssm": 128},
    "gemma3n_text": {"intermediate_size": 64},
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "granitemoe_swa": {"intermediate_size": 16},
    "granitemoehybrid": {**_STATES, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"], "num_hidden_layers": 3},
    "llama4_text": {"intermediate_size_mlp": 64},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"use_cache": False},
    "reformer": {"is_decoder": True},
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "intermediate_size": 64},
    "xmod": {"default_language": "en_XX"},
}
"""Fields that no rule finds, by type."""


@dataclass(frozen=True)
class Factors:
    """What a config is divided by, and where it is cut."""

    width: int
    heads: int
    least_layers: int = 2
    image: int = 32
    cuts_experts: bool = True


def candidates(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and small copies of `config`, of which the first that can be built and trains is taken."""
    width, heads = _factors(config)
    tried = [
        ("few heads", Factors(width, heads)),
        ("all heads", Factors(width, 1)),
        ("all heads, images of 64", Factors(width, 1, image=64)),
        ("all widths", Factors(1, 1, image=64, cuts_experts=False)),
        ("all widths and images", Factors(1, 1, image=0, cuts_experts=False)),
    ]
    for name, factors in tried:
        yield name, _shrunk(config, factors)


def _parts(config: Any) -> Iterator[Any]:
    """`config` and the configs within."""
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            yield from _parts(part)


def _factors(config: Any) -> tuple[int, int]:
    """The factor of widths, and that of counts of heads, over all configs within one."""
    own, counts = [], list[int]()
    for part in _parts(config):
        named = {name: value for name, value in part.to_dict().items() if type(value) is int and value > 1}
        heads = [value for name, value in named.items() if _HEADS.search(name)]
        hidden = next((named[name] for name in ("hidden_size", "n_embd", "d_model", "dim") if name in named), None)
        counts += heads
        per_head = named.get("head_dim") or (hidden // max(heads) if hidden and heads else None)
        if per_head:
            own.append(per_head)
    width = max(1, min(own, default=64) // 8)
    width = 1 << (width.bit_length() - 1)
    factor = 1
    while counts and all(one % (factor * 2) == 0 and one // (factor * 2) >= 2 for one in counts):
        if max(counts) // (factor * 2) < 4:
            break
        factor *= 2
    return width, factor


def _shrunk(config: Any, factors: Factors) -> Any:
    return type(config)(**_fields(config, factors, _Tokens()))


class _Tokens:
    """Numbers of special tokens, moved inside of the small vocabulary, each another one."""

    def __init__(self) -> None:
        self._moved: dict[int, int] = {}

    def __call__(self, token: int) -> int:
        if token < DRAWN[0]:
            return token
        return self._moved.setdefault(token, WORDS - 1 - len(self._moved) % (WORDS - DRAWN[1]))


def _fields(config: Any, factors: Factors, tokens: _Tokens) -> dict[str, Any]:
    """The fields of the small config."""
    parts = getattr(config, "sub_configs", None) or {}
    fields = {name: value for name, value in config.to_dict().items() if name not in _DROPPED}
    depths = {name: value for name, value in fields.items() if _DEPTH.match(name) and type(value) is int}
    layers = _layers(fields, max(depths.values(), default=1), factors.least_layers)
    depth = max(depths.values(), default=1)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name in parts:
            part = getattr(config, name, None)
            if part is not None and hasattr(part, "to_dict"):
                small[name] = {**_fields(part, factors, tokens), "model_type": part.model_type}
            continue
        small[name] = _field(name, value, factors, tokens, depth, layers)
    if small.get("pad_token_id") is None:
        small["pad_token_id"] = 0
    if small.get("decoder_start_token_id") is None and fields.get("is_encoder_decoder"):
        small["decoder_start_token_id"] = 2
    small.pop("use_cache", None)
    small["num_labels"] = 3
    small.update(PARTICULAR.get(config.model_type, {}))
    return small


def _layers(fields: dict[str, Any], depth: int, least: int) -> int:
    """Layers of the small config: the first dense ones, and one period of each pattern."""
    patterns = [value for value in fields.values() if isinstance(value, list) and len(value) == depth > 1]
    numbers = {name: value for name, value in fields.items() if type(value) is int}
    dense = [
        value for name, value in numbers.items() if re.match(r"first_k_dense|num_dense_layers|moe_layer_start", name)
    ]
    every = [
        value
        for name, value in numbers.items()
        if re.search(r"(step|interval|every|period|pattern|freq|every_n\w*)$", name) and 1 < value < min(depth, 9)
    ]
    layers = max([least, *map(_period, patterns), *(value + 1 for value in every), *(one + 1 for one in dense)])
    return min(depth, layers)


def _period(kinds: list[Any]) -> int:
    """The shortest run after which a list repeats itself, or the place of the last kind that appears."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[at % length] for at, kind in enumerate(kinds)):
            return length
    first = {str(kind): at for at, kind in reversed(list(enumerate(kinds)))}
    return max(first.values()) + 1


def _field(name: str, value: Any, factors: Factors, tokens: _Tokens, depth: int, layers: int) -> Any:
    """One field of the small config."""
    number = type(value) is int
    if _DROPS.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return type(value)(0)
    if name in _NOISE:
        return 0.0
    if name == "apply_spec_augment":
        return False
    if isinstance(value, list) and len(value) == depth > 1 and not isinstance(value[0], dict):
        return value[:layers]
    if _DEPTH.match(name) and number:
        return min(value, layers)
    if name == "depths":
        return [min(one, 1) for one in value]
    if _TOKEN.search(name) and number:
        return tokens(value)
    if _TOKEN.search(name) and isinstance(value, list) and all(type(one) is int for one in value):
        return [tokens(one) for one in value]
    if "vocab_size" in name and number and value > WORDS:
        return WORDS
    if _POSITIONS.match(name) and number:
        return min(value, POSITIONS)
    if _WINDOWS.search(name) and number and value:
        return min(value, WINDOW)
    if name in ("image_size", "input_size") and number and factors.image:
        return min(value, factors.image)
    if name == "image_size" and isinstance(value, list) and factors.image:
        return [min(one, factors.image) for one in value]
    if factors.cuts_experts and number and value:
        if _EXPERTS.search(name):
            return min(value, 8)
        if _CHOSEN.search(name) or name in ("n_group", "num_expert_group"):
            return min(value, 2)
        if name == "topk_group":
            return 1
    if _HEADS.search(name) and number and value > 1:
        return max(1, value // factors.heads)
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, factors)
    if number and _WIDTH.search(name) and not _COUNT.search(name):
        by = factors.width if _PER_HEAD.search(name) else factors.width * factors.heads
        return max(1, value // by) if value >= by else value
    return value


def _rope(rope: dict[str, Any], factors: Factors) -> dict[str, Any]:
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _rope(value, factors)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            value = value[: max(1, len(value) // factors.width)]
        elif name == "mrope_section" and isinstance(value, list):
            value = [max(1, one // factors.width) for one in value]
        elif name == "original_max_position_embeddings" and type(value) is int:
            value = POSITIONS // 2
        small[name] = value
    return small
