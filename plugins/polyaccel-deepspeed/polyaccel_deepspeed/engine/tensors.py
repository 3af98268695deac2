"""Tensor parallelism as scripts ask for it in code: `tp_model_init` and `set_autotp_mode`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from polyaccel.config.keys import value_of
from polyaccel.errors import ConfigError, Problem

_KEY = "tensor_parallel.autotp_size"
_asked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def set_autotp_mode(training: bool = False) -> None:
    """Accepted. Models are cut for training, where the config or `tp_model_init` sets it."""


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Mapping[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """`model`, whose layers `initialize` will cut over `tp_size` ranks. The config of the engine chooses its types.

    Raises ConfigError where `config`, or another call, has another number of ranks.
    """
    stated = dict((config or {}).get("tensor_parallel", {})).get("autotp_size", 0)
    for other in (stated, _asked.get(model, 0)):
        if other not in (0, tp_size):
            raise ConfigError([Problem(_KEY, other, f"contradicts tp_model_init, which has {tp_size}", _HINT)])
    _asked[model] = tp_size
    return model


def with_tensor_ranks(tree: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The config with what `tp_model_init` has set for `model`. Raises ConfigError where the two differ."""
    asked = _asked.get(model)
    if asked is None:
        return tree
    section = dict(tree.get("tensor_parallel", {}))
    if section.get("autotp_size", 0) not in (0, asked):
        said = f"contradicts tp_model_init, which had {asked}"
        raise ConfigError([Problem(_KEY, section["autotp_size"], said, _HINT)])
    return {**tree, "tensor_parallel": {**section, "autotp_size": asked}}


def with_layer_specs(tree: dict[str, Any], written: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The config without the layer specs of other types of models.

    Raises ConfigError where `strict_mode` is on and a linear layer has no spec.
    """
    partition = value_of(tree, "tensor_parallel.partition_config")
    raw = value_of(written, "tensor_parallel.partition_config")
    if not isinstance(partition, dict) or not isinstance(partition.get("layer_specs"), list):
        return tree
    kind = str(getattr(getattr(model, "config", None), "model_type", "")).lower()
    asked = [[str(one).lower() for one in spec.get("model_types") or ()] for spec in raw["layer_specs"]]
    kept = [spec for spec, kinds in zip(partition["layer_specs"], asked, strict=True) if kind in kinds or not kinds]
    if raw.get("strict_mode") is True:
        patterns = [pattern for spec in kept for pattern in spec.get("patterns", ())]
        linear = (f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Linear))
        for name in linear:
            if not any(re.match(pattern, name) for pattern in patterns):
                said = f"is on, and no layer spec matches {name}"
                key, hint = "tensor_parallel.partition_config.strict_mode", 'add one, "skip" leaves it whole'
                raise ConfigError([Problem(key, True, said, hint)])
    changed = {**partition, "layer_specs": kept}
    return {**tree, "tensor_parallel": {**tree["tensor_parallel"], "partition_config": changed}}


_HINT = "set it once, or to the same value"
