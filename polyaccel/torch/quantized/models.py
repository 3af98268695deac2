"""`polyaccel.quantize_frozen` and `polyaccel.dequantize_frozen`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from logging import getLogger

from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.values import value_of
from polyaccel.torch.quantized.codes import require_format
from polyaccel.torch.quantized.layers import QuantizedLayer, dequantize_layer, is_linear, quantize_layer
from polyaccel.torch.sharding.ownership import record_of

log = getLogger(__name__)
_MATRIX = 2


def quantize_frozen(
    model: nn.Module,
    dtype: str = "nf4",
    *,
    group_size: int = 64,
    double_quant: bool = False,
    skip: Collection[str] | str = (),
) -> tuple[str, ...]:
    """Store the weights of linear layers in 4 or 8 bits, in place; they are frozen and train no more (QLoRA).

    Call it before `initialize`, and before or after PEFT's `get_peft_model`. Layers of adapters, of `modules_to_save`,
    weights that two modules have and heads of models of transformers stay as they are. Of a model of `zero.Init` one
    weight at a time is computed. On the meta device codes have no values, which suffices for `polyaccel plan`.

    Args:
        model: A module, in evaluation or training mode.
        dtype: "nf4", "int4" or "int8".
        group_size: Inputs of a row that share a scale.
        double_quant: Store a scale as a byte, which saves 0.4 bits a weight at groups of 64.
        skip: Names of modules that stay as they are, with all that they hold: full ones, or any part between dots.

    Returns:
        Full names of the layers that are quantised now.

    Raises:
        PolyaccelError: The type or size of groups is unknown, no layer is left to quantise, no module has a name in
            `skip`, or the model belongs to an engine.

    Example:
        ```python
        polyaccel.quantize_frozen(model, "nf4")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
        engine, *_ = polyaccel.initialize(model=model, config=config)
        ```
    """
    require_format(dtype, group_size)
    skip = (skip,) if isinstance(skip, str) else skip
    _require_modules(model, skip)
    layers = dict(_layers_of(model, skip))
    for name, layer in layers.items():
        weight = layer._parameters["weight"]
        assert weight is not None  # or it was not chosen
        if record_of(weight) is not None:
            raise PolyaccelError(
                f"{name!r} belongs to an engine", hint="call quantize_frozen before polyaccel.initialize", value=name
            )
        quantize_layer(layer, value_of(weight), dtype, group_size, double_quant=double_quant)
    if not layers:
        kind = type(model).__name__
        raise PolyaccelError(f"no layer of {kind} was quantised", hint="name fewer modules in skip", value=kind)
    log.info("%d linear layers are stored as %s", len(layers), dtype)
    return tuple(layers)


def dequantize_frozen(model: nn.Module) -> tuple[str, ...]:
    """Give layers of `quantize_frozen` plain weights again, in place: frozen, and rounded as their codes are.

    Args:
        model: A module that belongs to no engine; one that has is free after `engine.destroy()`.

    Returns:
        Full names of the layers.

    Raises:
        PolyaccelError: The model belongs to an engine.

    Example:
        ```python
        polyaccel.dequantize_frozen(model)
        model = model.merge_and_unload()
        ```
    """
    found = {name: part for name, part in model.named_modules() if isinstance(part, QuantizedLayer)}
    for name, layer in found.items():
        if any(record_of(one) is not None for one in layer.parameters(recurse=False)):
            hint = "call engine.destroy() first"
            raise PolyaccelError(f"{name!r} belongs to an engine", hint=hint, value=name)
        dequantize_layer(layer)
    return tuple(found)


def _require_modules(model: nn.Module, names: Collection[str]) -> None:
    """Raise PolyaccelError for a name that no module has: its layers would be quantised."""
    for one in names:
        if not any(_is_inside(name, (one,)) for name, _ in model.named_modules()):
            hint = "name a module in full, or a part of its name between dots"
            raise PolyaccelError(f"no module to skip is named {one!r}", hint=hint, value=one)


def _layers_of(model: nn.Module, skip: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to be quantised, by full name."""
    uses = Counter(id(one) for part in model.modules() for one in part.parameters(recurse=False))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    kept = {name for name, part in model.named_modules() if part is head} | set(skip) | set(_trained_parts(model))
    kept |= set(_heads(model))
    for name, part in model.named_modules():
        weight = dict(part.named_parameters(recurse=False)).get("weight")
        if not isinstance(weight, Tensor) or not is_linear(part) or not weight.is_floating_point():
            continue
        is_plain = weight.dim() == _MATRIX and weight.numel() and uses[id(weight)] == 1 and hasattr(part, "bias")
        if is_plain and not _is_inside(name, kept):
            yield name, part


def _heads(model: nn.Module) -> Iterator[str]:
    """Yield the heads of transformers models: PEFT trains a new head of classes whole."""
    for name, part in model.named_modules():
        body = getattr(type(part), "base_model_prefix", None)
        if isinstance(body, str) and isinstance(getattr(part, body, None), nn.Module):
            yield from (f"{name}.{child}" if name else child for child in part._modules if child != body)


def _trained_parts(model: nn.Module) -> Iterator[str]:
    """Yield the parts of PEFT's modules that are trained: adapters, and copies of whole modules."""
    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        if hasattr(part, "get_base_layer") and "base_layer" in part._modules:
            yield from (f"{prefix}{child}" for child in part._modules if child != "base_layer")
        elif "original_module" in part._modules and "modules_to_save" in part._modules:
            yield name


def _is_inside(name: str, kept: Collection[str]) -> bool:
    parts = name.split(".")
    whole = {".".join(parts[: count + 1]) for count in range(len(parts))}
    return not whole.isdisjoint(kept) or not set(parts).isdisjoint(kept)
