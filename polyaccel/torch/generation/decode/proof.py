"""The proof of a structure: its logits are those of the untouched module, and of a small model with large weights.

[Note: Far positions]
A model may compute otherwise behind a position, as one that scales its queries by their distance from the start. So the
small model is compared at its first positions and at the last ones of its config, or of the call if those are farther.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from polyaccel.ops.base import KernelTable
from polyaccel.torch.generation.decode import parts
from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.model import Decoder
from polyaccel.torch.generation.decode.small import SPREADS, require_own_forwards, small_model, spread
from polyaccel.torch.generation.decode.structure import Choice, Structure, structure_of
from polyaccel.torch.weight_groups import GroupedLayer

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float64: 1e-8}
"""The largest difference of logits, as a share of the largest logit: that of sums in another order."""

_OF_INTEGERS = 1e-3
"""The same for weights in groups of integers, whose kernels round inputs to 16 bits: a least bound. The small model of
the class has no such weights."""

_LENGTHS = (5, 3)

_PROVED: WeakKeyDictionary[nn.Module, tuple[Any, Choice | str]] = WeakKeyDictionary()
"""The choice of each model, or why it has none, with what was compared."""


def proved(model: nn.Module, structure: Structure, kernels: KernelTable, capacity: int = 0) -> Structure:
    """Return the structure with the choice whose logits are the model's, on two prompts and a step of decoding.

    It is compared once, and again when classes, shapes, types or adapters of the model have changed, or a call has more
    tokens (`capacity`) than its config and all calls before. Raises Unsupported if none has the model's logits.
    """
    known = _PROVED.get(model)
    positions = max(capacity, int(getattr(model.config, "max_position_embeddings", None) or 0))
    if known is not None:
        positions = max(positions, known[0][-1])
    compared = (*_signature(model), positions)
    if known is None or known[0] != compared:
        known = compared, _agreed(model, _compared(model, structure, kernels, positions))
        _PROVED[model] = known
    choice = known[1]
    if isinstance(choice, str):
        raise Unsupported(choice)
    return next(one for one in structure.choices() if one.choice == choice)


def _compared(model: nn.Module, structure: Structure, kernels: KernelTable, positions: int) -> Choice | str:
    try:
        require_own_forwards(model)
        choices = _choices_of_class(model, kernels, positions)
        return next(iter(_fitting(model, structure, kernels, choices)))
    except Unsupported as reason:
        return str(reason)


def _agreed(model: nn.Module, found: Choice | str) -> Choice | str:
    """What was found, unless another rank of the model found none: all of them have to make the same calls."""
    ranks = parts.ranks_of(model)
    if ranks is None:
        return found
    device = next(model.parameters()).device
    failed = ranks.maximum(torch.tensor([float(isinstance(found, str))], device=device))
    return "another tensor rank has other logits" if failed.item() and not isinstance(found, str) else found


def _choices_of_class(model: nn.Module, kernels: KernelTable, positions: int) -> list[Choice]:
    """The choices with which a small model of the class has its logits. See [Note: Weights that show]."""
    small = small_model(model)
    structure = structure_of(small)
    choices = [one.choice for one in structure.choices()]
    if "position_ids" not in signature(type(small).forward).parameters:
        raise Unsupported(f"{type(model).__name__} takes no positions")
    if structure.positions is not None:
        positions = min(positions, len(parts.values(structure.positions.weight)) - structure.offset)
    for deviation in SPREADS:
        spread(small, deviation)
        for first in (0, max(0, positions - max(_LENGTHS) - 1)):  # see [Note: Far positions]
            choices = _fitting(small, structure, kernels, choices, first)
    return choices


def _fitting(
    model: nn.Module, structure: Structure, kernels: KernelTable, choices: list[Choice], first: int = 0
) -> list[Choice]:
    """Those of `choices` with which the decoder has the module's logits for prompts from position `first` on. Raises
    Unsupported if none has."""
    prompts, wanted = _of_model(model, structure, first)
    share = BOUNDS[wanted[0].dtype]
    if any(isinstance(part, GroupedLayer) for part in model.modules()):
        share = max(share, _OF_INTEGERS)
    bound = share * max(float(one.float().abs().max()) for one in wanted)
    best, fitting = float("inf"), []
    for one in structure.choices():
        if one.choice not in choices:
            continue
        try:
            found = _of_decoder(one, kernels, prompts, first)
        except RuntimeError:
            continue  # shapes of another choice
        if any(x.shape != y.shape for x, y in zip(found, wanted, strict=True)):
            continue
        difference = max(float((x.float() - y.float()).abs().max()) for x, y in zip(found, wanted, strict=True))
        best = min(best, difference)
        if difference <= bound:
            fitting.append(one.choice)
    if not fitting:
        raise Unsupported(f"logits of {type(model).__name__} differ by {best:.2g}, more than {bound:.2g}")
    return fitting


def _of_model(model: nn.Module, structure: Structure, first: int) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts with a token more, and the untouched module's logits of their last two tokens."""
    device = next(structure.embedding.parameters()).device
    prompts = [
        (torch.arange(length + 1, device=device) * 7919 + 13 * length) % structure.vocabulary for length in _LENGTHS
    ]
    both = []
    for prompt in prompts:
        named = {"position_ids": torch.arange(first, first + len(prompt), device=device)[None]} if first else {}
        both.append(model(input_ids=prompt[None], use_cache=False, **named).logits[0, -2:])
    return prompts, [torch.stack([one[0] for one in both]), torch.stack([one[1] for one in both])]


def _of_decoder(structure: Structure, kernels: KernelTable, prompts: list[Tensor], first: int) -> list[Tensor]:
    decoder = Decoder(structure, kernels, len(prompts), max(_LENGTHS) + 1, first=first)
    ended = decoder.prefill([prompt[:-1] for prompt in prompts], range(len(prompts)))
    slots = torch.arange(len(prompts), device=ended.device)
    positions = torch.tensor(_LENGTHS, device=ended.device)
    return [ended, decoder.step(torch.stack([prompt[-1] for prompt in prompts]), slots, positions)]


def _signature(model: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (
            name,
            type(part),
            type(part).forward,
            id(part.__dict__.get("forward")),
            getattr(part, "merged", None),
            str(getattr(part, "active_adapters", "")),
            getattr(part, "disable_adapters", None),
            tuple((key, tuple(one.shape), one.dtype) for key, one in part.named_parameters(recurse=False)),
        )
        for name, part in model.named_modules()
    )
