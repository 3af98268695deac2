"""Models with compressed layers: found by the rules of a config, and made plain again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.config import Config, load_config
from polyaccel.engine.policies.compression import (
    CompressionPolicy,
    compression_policy_of,
)
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.compression.bits_by_curvature import curvature_problems, pace_of
from polyaccel.torch.compression.export import make_plain
from polyaccel.torch.compression.fast_paths import keep_calls
from polyaccel.torch.compression.finding import (
    Pruned,
    bypassed,
    groups_problem,
    has_weight,
    matching,
    pruned,
    pruned_twice,
    shared_heads,
    twice,
    unfit,
    weight_of,
)
from polyaccel.torch.compression.formulas import magnitudes
from polyaccel.torch.compression.layers import (
    Clock,
    CompressedLayer,
    Compression,
    Mask,
    as_matrix,
    compressed_class,
    compressed_layers,
    own_class,
)
from polyaccel.torch.compression.students import copy_layers
from polyaccel.torch.deferred_init.values import is_deferred, value_of
from polyaccel.torch.sharding.ownership import record_of

GivenConfig = str | Path | Mapping[str, Any] | Config


def init_compression(model: nn.Module, config: GivenConfig, teacher_model: nn.Module | None = None) -> nn.Module:
    """Compress the layers that a config's `compression_training` names, in place. DeepSpeed's name.

    `initialize` does so too. Call it before where the optimizer is made by the script and `"method": "topk"` adds
    scores, which are parameters. With `layer_reduction` it copies the teacher's layers first.

    Args:
        model: A module that belongs to no engine.
        config: The config: a path, a mapping or a `Config`.
        teacher_model: The model whose layers `layer_reduction` copies.

    Returns:
        The same module.

    Raises:
        ConfigError: A rule names no layer, or one that it cannot compress.
        PolyaccelError: The model belongs to an engine, or `layer_reduction` is on without a teacher.

    Example:
        ```python
        model = polyaccel.init_compression(model, "config.json")
        engine, *_ = polyaccel.initialize(model=model, config="config.json")
        ```
    """
    policy = compression_policy_of(load_config(config))
    if policy.reduction is not None:
        if teacher_model is None:
            raise PolyaccelError("layer_reduction is on, and there is no teacher", hint="pass teacher_model=")
        copy_layers(model, teacher_model, policy.reduction)
    compress(model, policy)
    return model


def redundancy_clean(model: nn.Module, config: GivenConfig) -> nn.Module:
    """Make compressed layers plain again, in place, with the values and sizes that they compute with. DeepSpeed's name.

    What is pruned by rows, heads or channels is gone, from related layers too. Quantised weights have their levels. A
    model that no engine has trained since `init_compression` is taken at the end of its schedule: its weights were
    loaded, or are to be quantised after training. A weight stays tied where all its layers compute the same.

    Args:
        model: A module that `init_compression` or `initialize` compressed; its engine was destroyed.
        config: The config: a path, a mapping or a `Config`.

    Returns:
        The same module, which needs polyaccel no more.

    Raises:
        PolyaccelError: The model belongs to an engine, this rank has a part of it, or nothing of it is compressed and
            the config compresses.

    Example:
        ```python
        engine.destroy()
        model = polyaccel.redundancy_clean(model, "config.json")
        torch.save(model.state_dict(), "small.pt")
        ```
    """
    layers = dict(compressed_layers(model))
    if not layers and not compression_policy_of(load_config(config)).has_rules:
        return model
    if not layers:
        kind = type(model).__name__
        raise PolyaccelError(f"nothing of {kind} is compressed", hint="call init_compression first", value=kind)
    _require_free(layers)
    if any(layer.compression.is_of_part for layer in layers.values()):
        hint = "load its checkpoint into an engine without tensor and pipe ranks, and clean that engine's model"
        raise PolyaccelError("this rank has a part of the model", hint=hint, value=type(model).__name__)
    make_plain(model, layers)
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, config: GivenConfig) -> nn.Module:
    """Copy the teacher's layers that `layer_reduction` names into a student, in place. DeepSpeed's name.

    Args:
        student_model: A module with as many layers as `teacher_layer` names.
        teacher_model: A module of the same structure with more layers.
        config: The config: a path, a mapping or a `Config`.

    Returns:
        The student.

    Raises:
        PolyaccelError: `layer_reduction` is off, or a module or layer that it names does not exist.

    Example:
        ```python
        student = polyaccel.student_initialization(student, teacher, "config.json")
        ```
    """
    reduction = compression_policy_of(load_config(config)).reduction
    if reduction is None:
        raise PolyaccelError("layer_reduction is off", hint='set "layer_reduction": {"enabled": true, ...}')
    copy_layers(student_model, teacher_model, reduction)
    return student_model


# Finding layers.


def compress(model: nn.Module, policy: CompressionPolicy) -> tuple[str, ...]:
    """Compress the layers of `model` that rules name, in place; returns their full names, () where it was done before.

    Raises ConfigError naming every rule that fits no layer, and PolyaccelError for a model of an engine.
    """
    if not (policy.has_rules or policy.curvature) or any(compressed_layers(model)):
        return ()
    clock, layers, problems = Clock(), dict(model.named_modules()), list[Problem]()
    found: dict[str, Compression] = {}

    def layer_named(name: str) -> Compression:
        return found.setdefault(name, Compression(name, clock))

    for rule in policy.weights:
        names = [name for name in matching(layers, rule.modules) if has_weight(layers[name])]
        problems += unfit(rule.key, rule.modules, names) + bypassed(rule.key, names, layers)
        for name in names:
            problems += groups_problem(rule, name, layers[name])
            problems += twice(rule.key, name, layer_named(name).weights)
            found[name].weights = rule
    problems += curvature_problems(policy, layers)
    for of_inputs in policy.inputs:
        names = [
            name for name in matching(layers, of_inputs.modules) if has_weight(layers[name], allows_embedding=False)
        ]
        problems += unfit(of_inputs.key, of_inputs.modules, names) + bypassed(of_inputs.key, names, layers)
        for name in names:
            problems += twice(of_inputs.key, name, layer_named(name).inputs)
            found[name].inputs = of_inputs
    pruning = [row for rule in policy.pruning for row in pruned(layers, rule, problems)]
    problems += pruned_twice(pruning, layers) + shared_heads(pruning, model)
    if problems:
        raise ConfigError(problems)
    for row in pruning:
        for name in (row.name, *(other for other, _ in row.followers)):
            layer_named(name)
    _require_free({name: layers[name] for name in found})
    for name, how in found.items():
        _convert(layers[name], how)
        how.pace = pace_of(name, layers[name], how.weights, policy)
    for row in pruning:
        _prune(layers, row)
    keep_calls(model)
    return tuple(name for name in layers if name in found)


@contextmanager
def without_compression(model: nn.Module) -> Iterator[None]:
    """Inside, the compressed layers of `model` are instances of their own classes, which may get others there."""
    layers = [part for part in model.modules() if isinstance(part, CompressedLayer)]
    kept = [layer.__dict__.pop("compression") for layer in layers]
    for layer in layers:
        layer.__class__ = own_class(layer)
    try:
        yield
    finally:
        for layer, how in zip(layers, kept, strict=True):
            layer.__class__ = compressed_class(type(layer))
            layer.compression = how


# Converting them.


def _convert(layer: nn.Module, how: Compression) -> None:
    layer.__class__ = compressed_class(type(layer))
    assert isinstance(layer, CompressedLayer)  # now
    layer.compression = how
    if how.inputs is not None and how.inputs.is_static:
        layer.register_buffer("input_range", torch.tensor([float("inf"), float("-inf")]))


def _prune(layers: Mapping[str, nn.Module], row: Pruned) -> None:
    layer, rule = layers[row.name], row.rule
    assert isinstance(layer, CompressedLayer)  # converted before
    weight, block = weight_of(layer), 1
    if (dim := row.dim) is None:
        shape = tuple(weight.shape)
    else:
        block = weight.shape[dim] // rule.num_heads if rule.kind == "head" else 1
        shape = (weight.shape[dim] // block,)
    mask = Mask(layer, rule, dim, block, rule.kind)
    layer.register_buffer(f"{rule.kind}_mask", torch.full(shape, -1, dtype=torch.int8, device=_device_of(weight)))
    layer.compression.masks.append(mask)
    if rule.removal is not None:
        sizes = as_matrix(layer, weight).shape
        blocks = [size // one for size, one in zip(sizes, rule.removal.block, strict=True)]
        layer.register_buffer("snip_scores", torch.zeros(blocks, device=_device_of(weight)))
    if rule.is_learned:
        layer.register_parameter(f"{rule.kind}_scores", nn.Parameter(_first_scores(weight, mask, shape)))
    for other, of_other in row.followers:
        follower = layers[other]
        assert isinstance(follower, CompressedLayer)  # converted before
        follower.compression.followed.append((mask, of_other))


def _device_of(weight: Tensor) -> torch.device:
    return torch.device("cpu") if is_deferred(weight) else weight.device


@torch.no_grad()
def _first_scores(weight: Tensor, mask: Mask, shape: tuple[int, ...]) -> Tensor:
    """Return scores that begin with the weight's magnitudes, so that the first mask is that of `l1`."""
    values = value_of(weight)
    if values.is_meta:
        return torch.zeros(shape, device=values.device)
    found = values.abs().float() if mask.dim is None else magnitudes(values, mask.dim, mask.block)
    return (found / found.max().clamp(min=torch.finfo(torch.float32).tiny)).view(shape)


def _require_free(layers: Mapping[str, nn.Module]) -> None:
    for name, layer in layers.items():
        if any(record_of(one) is not None for one in layer.parameters(recurse=False)):
            hint = "compress it before polyaccel.initialize, and clean it after engine.destroy()"
            raise PolyaccelError(f"{name!r} belongs to an engine", hint=hint, value=name)
