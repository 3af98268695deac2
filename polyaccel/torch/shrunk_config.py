"""Configs of transformers with smaller widths, depths and vocabularies, and the structure of large ones.

[Note: Sound small models]
Counts of heads, key heads, groups and experts decide how ranks divide a layer, so they stay. Widths share one factor.
Depth is cut to whole periods of the pattern of layers. A vocabulary keeps its remainder by 64, and numbers of special
tokens are moved inside of it. Windows are shorter than the batches of a proof. All else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

TOKENS = 64
"""Most tokens of a sample that small models are given."""
_WORDS, _WINDOW, _HEAD_WIDTH = 128, 8, 8
_DEPTH = re.compile(r"^(num_(hidden_|encoder_|decoder_)?(layers|blocks)|n_layers?|(en|de)coder_layers|depth)$")
_HEADS = re.compile(r"(^|_)(n_heads?|num_heads|attention_heads|num_(key_value|kv|attn)_heads|n_head_kv)$")
_COUNT = re.compile(
    r"(vocab|window|chunk|kernel|patch|image|num_|n_layer|layers|heads|state_size|d_conv|max_|_act|_id$)"
)
_WIDTH = re.compile(
    r"(hidden_size|intermediate_size|_dim$|^dim$|^d_|n_embd|n_inner|rank$|_width|ffn|_channels$|^embed_dims?$|_size_per_)"
)
_TOKEN = re.compile(r"(_token_(ids?|index)|_token)$")
_WINDOWS = re.compile(r"(sliding_window|attention_chunk_size|window_size|local_attention|attention_window)$")
_PERIOD = re.compile(r"(step|interval|every|period|pattern|freq|every_n\w*)$")
_DENSE = re.compile(r"first_k_dense|num_dense_layers|moe_layer_start")
_DROPPED = frozenset(
    {"model_type", "transformers_version", "architectures", "_name_or_path", "torch_dtype", "dtype", "loss_type"}
)


class SmallVocabulary:
    """Numbers of words, moved inside of a small vocabulary: special tokens stay apart from each other."""

    def __init__(self, size: int) -> None:
        self.size = size if size <= _WORDS else _WORDS + size % 64
        self._special: dict[int, int] = {}

    def special(self, word: int) -> int:
        """Return the place of a special token."""
        if 0 <= word < self.size // 2:
            return word
        return self._special.setdefault(word, self.size - 1 - len(self._special) % (self.size // 2))

    def place(self, word: int) -> int:
        """Return the place of any word; negative numbers mark places without one."""
        return self._special.get(word, word if word < 0 else word % (self.size // 2))


def shrunk(whole: Any) -> tuple[Any, SmallVocabulary]:
    """Return a small config of the class of a `whole` one, and its vocabulary."""
    text = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    vocabulary = SmallVocabulary(getattr(text, "vocab_size", None) or _WORDS)
    return type(whole)(**_fields(whole, _factor(whole), vocabulary)), vocabulary


def _parts(config: Any) -> Iterator[Any]:
    """`config` and the configs within."""
    yield config
    for name in getattr(config, "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "to_dict"):
            yield from _parts(part)


def _factor(config: Any) -> int:
    """What all widths are divided by: the smallest width of a head becomes `_HEAD_WIDTH`."""
    own = []
    for part in _parts(config):
        named = {name: value for name, value in part.to_dict().items() if type(value) is int and value > 1}
        heads = [value for name, value in named.items() if _HEADS.search(name)]
        hidden = next((named[name] for name in ("hidden_size", "n_embd", "d_model", "dim") if name in named), None)
        if per_head := named.get("head_dim") or (hidden // max(heads) if hidden and heads else None):
            own.append(per_head)
    factor = max(1, min(own, default=64) // _HEAD_WIDTH)
    factor = 1 << (factor.bit_length() - 1)
    # Heads keep whole widths, and even ones where they are: rotary positions turn pairs.
    while any(one % (factor if one % 2 else 2 * factor) for one in own):
        factor //= 2
    return factor


def _fields(whole: Any, factor: int, vocabulary: SmallVocabulary) -> dict[str, Any]:
    """The fields of the small config."""
    parts = getattr(whole, "sub_configs", None) or {}
    fields = {name: value for name, value in whole.to_dict().items() if name not in _DROPPED}
    depth = max((int(value) for name, value in fields.items() if _DEPTH.match(name) and type(value) is int), default=1)
    layers = _layers(fields, depth)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in parts:
            small[name] = _field(name, value, factor, vocabulary, (depth, layers))
        elif (part := getattr(whole, name, None)) is not None and hasattr(part, "to_dict"):
            small[name] = {**_fields(part, factor, vocabulary), "model_type": part.model_type}
    return small


def _layers(fields: dict[str, Any], depth: int) -> int:
    """Layers of the small config: the first dense ones, and one period of each pattern."""
    numbers = {name: value for name, value in fields.items() if type(value) is int}
    periods = [_period(value) for value in fields.values() if isinstance(value, list) and len(value) == depth > 1]
    periods += [int(value) + 1 for name, value in numbers.items() if _PERIOD.search(name) and 1 < value < min(depth, 9)]
    dense = [int(value) + 1 for name, value in numbers.items() if _DENSE.match(name)]
    least: list[int] = [2, *periods, *dense]
    return min(depth, max(least))


def _period(kinds: list[Any]) -> int:
    """The shortest run after which a list repeats itself, or the place of the last kind that appears."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[at % length] for at, kind in enumerate(kinds)):
            return length
    first: dict[str, int] = {str(kind): at for at, kind in reversed(list(enumerate(kinds)))}
    return max(first.values()) + 1


def _field(name: str, value: Any, factor: int, vocabulary: SmallVocabulary, depths: tuple[int, int]) -> Any:
    """One field of the small config."""
    depth, layers = depths
    if isinstance(value, list) and len(value) == depth > 1 and not isinstance(value[0], dict):
        return value[:layers]
    if _TOKEN.search(name) and isinstance(value, list) and all(type(one) is int for one in value):
        return [vocabulary.special(one) for one in value]
    if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
        return _rope(value, factor)
    if type(value) is not int:
        return value
    if _DEPTH.match(name):
        return min(value, layers)
    if _TOKEN.search(name):
        return vocabulary.special(value)
    if "vocab_size" in name:
        return min(value, vocabulary.size)
    if _WINDOWS.search(name) and value:
        return min(value, _WINDOW)
    if _WIDTH.search(name) and not _COUNT.search(name) and value >= factor:
        return value // factor
    return value


def _rope(rope: dict[str, Any], factor: int) -> dict[str, Any]:
    """Parameters of rotary embeddings for heads of another width."""
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _rope(value, factor)
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            value = value[: max(1, len(value) // factor)]
        elif name == "mrope_section" and isinstance(value, list):
            value = [max(1, one // factor) for one in value]
        small[name] = value
    return small
