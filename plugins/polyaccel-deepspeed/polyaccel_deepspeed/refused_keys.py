"""Keys that DeepSpeed has removed, and its optimizers that polyaccel does not have: no value of them trains.

polyaccel itself has none of them. Keys of which a value is accepted stand in `polyaccel/config/unsupported_keys.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyaccel.config.keys import parent_of, value_of
from polyaccel.errors import Problem
from polyaccel_deepspeed.change import Change, Tree

REMOVED = {
    "amp": "Apex mixed precision",
    "graph_harvesting": "graph harvesting",
    "nebula": "the Nebula checkpoint writer",
    "quantize_training": "quantisation together with compression_training.weight_quantization",
    "zero_optimization.mics_shard_size": "MiCS",
    "zero_optimization.mics_hierarchical_params_gather": "MiCS",
}
"""The features of the removed keys."""
_HINTS = {"amp": "use bf16, fp16 or torch_autocast"}
REFUSED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Values of `optimizer.type`, in lower case, that name optimizers of DeepSpeed alone."""


def drop_removed(tree: Tree) -> Iterator[Change]:
    """Drop the removed keys that are empty or off."""
    for key in REMOVED:
        table, name = parent_of(tree, key)
        value = table.get(name)
        is_off = isinstance(value, Mapping) and value.get("enabled", bool(value)) is False
        if name in table and (not value or is_off):
            del table[name]
            yield Change(key, "was dropped: it is off, and DeepSpeed has removed the feature")


def pop_refused(tree: Tree) -> Iterator[Problem]:
    """Remove the removed keys from `tree`, and yield a problem for each and for an optimizer that does not exist."""
    for key, feature in REMOVED.items():
        table, name = parent_of(tree, key)
        if name in table:
            expected = f"was removed from DeepSpeed: {feature}"
            yield Problem(key, table.pop(name), expected, _HINTS.get(key, "remove it"))
    kind = value_of(tree, "optimizer.type")
    if isinstance(kind, str) and kind.lower() in REFUSED_OPTIMIZERS:
        yield Problem(
            "optimizer.type", kind, "is an optimizer that does not exist yet", "use Adam, AdamW, Lion or Lamb"
        )
