"""Tensor parallelism as scripts ask for it in code: `tp_model_init` and `set_autotp_mode`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn

from polyaccel.config.keys import value_of
from polyaccel.errors import ConfigError, Problem
from polyaccel_deepspeed.layers import TensorRanksLayer

_KEY = "tensor_parallel.autotp_size"


class _Asked(NamedTuple):
    """What `tp_model_init` was called with."""

    size: int
    dtype: torch.dtype | None
    group: Any


_asked: WeakKeyDictionary[nn.Module, _Asked] = WeakKeyDictionary()
_mode = {"training": False}


def set_autotp_mode(training: bool = False) -> None:
    """Set what `is_autotp_training_mode` answers. Models are cut for training whatever it is."""
    _mode["training"] = training


def is_autotp_training_mode() -> bool:
    """Whether `tp_model_init` was called, or `set_autotp_mode(training=True)` after it."""
    return _mode["training"]


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Mapping[str, Any] | None = None, **kwargs: Any
) -> nn.Module:
    """`model`, whose layers `initialize` will cut over `tp_size` ranks. The config of the engine chooses its types, and
    the mesh its ranks: a `tp_group` has to be these.

    Raises ConfigError where `config`, or another call, has another number of ranks.
    """
    stated = dict((config or {}).get("tensor_parallel", {})).get("autotp_size", 0)
    known = _asked.get(model)
    for other in (stated, 0 if known is None else known.size):
        if other not in (0, tp_size):
            raise ConfigError([Problem(_KEY, other, f"contradicts tp_model_init, which has {tp_size}", _HINT)])
    _asked[model] = _Asked(tp_size, dtype, kwargs.get("tp_group"))
    set_autotp_mode(training=True)
    return model


def with_tensor_ranks(tree: dict[str, Any], model: nn.Module, mpu: Any = None) -> dict[str, Any]:
    """The config with what `tp_model_init` has set for `model`, or the groups of its layers of `module_inject`.

    Raises ConfigError where the config has another number of ranks or type, and for a `tp_group` of other ranks than
    the mesh's, or together with an `mpu`, which has other groups.
    """
    asked, by = _asked.get(model), "tp_model_init"
    if (of_layers := _asked_by_layers(model)) is not None and mpu is None:
        asked, by = (of_layers, "its layers") if asked is None else (asked, by)
        if asked.size != of_layers.size:
            said = f"contradicts its layers, which are cut over {of_layers.size} ranks"
            raise ConfigError([Problem(_KEY, asked.size, said, _HINT)])
        _check_group(of_layers, mpu)
    if asked is None:
        return tree
    section = dict(tree.get("tensor_parallel", {}))
    if section.get("autotp_size", 0) not in (0, asked.size):
        said = f"contradicts {by}, which had {asked.size}"
        raise ConfigError([Problem(_KEY, section["autotp_size"], said, _HINT)])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if asked.dtype and dict(tree.get(name) or {}).get("enabled") is True and asked.dtype != dtype:
            said = f"Conflicting dtype: tp_model_init had {asked.dtype}"
            raise ConfigError([Problem(f"{name}.enabled", True, said, f"call it with dtype={dtype}")])
    if asked.group is not None:
        _check_group(asked, mpu)
    return {**tree, "tensor_parallel": {**section, "autotp_size": asked.size}}


def _asked_by_layers(model: nn.Module) -> _Asked | None:
    """The ranks over which layers of `module_inject` were cut; None without such layers."""
    cut = [each for each in model.modules() if isinstance(each, TensorRanksLayer) and each.tp_world_size > 1]
    sizes = sorted({each.tp_world_size for each in cut})
    if len(sizes) > 1:
        said = "are the ranks of different layers of deepspeed.module_inject"
        raise ConfigError([Problem(_KEY, sizes, said, "give all of them one group")])
    return _Asked(sizes[0], None, cut[0].mp_group) if cut else None


def _check_group(asked: _Asked, mpu: Any) -> None:
    key = "tp_model_init.tp_group"
    if mpu is not None:
        hint = "leave one of them out"
        raise ConfigError([Problem(key, "a group", "tp_model_init provided tp_group, and initialize an mpu", hint)])
    ranks = dist.get_process_group_ranks(asked.group)
    first = dist.get_rank() // asked.size * asked.size
    if ranks != [*range(first, first + asked.size)]:
        said, hint = f"its ranks are not the {asked.size} neighbours that share layers", "leave it out"
        raise ConfigError([Problem(key, ranks, said, hint)])


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
