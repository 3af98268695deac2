"""A proof on a small model of the same class, whose weights show what those of a new model hide.

[Note: Weights that show]
Weights of a new model are small: its scores of attention are nearly equal, so positions, caps and clips hardly change
its logits. In bf16 they change them by less than the bound of rounding. So the class is proved first, in fp32 and with
large weights. Its parts must be those of the model, and a replaced `forward` of one would be bypassed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyaccel.torch.generation.decode.errors import Unsupported
from polyaccel.torch.generation.decode.structure import blocks_of
from polyaccel.torch.shrunk_config import shrunk

SPREADS = (0.3, 1.0)
"""Deviations of the weights: with the first most scores count, with the second caps and clips are reached."""


def small_model(model: nn.Module) -> nn.Module:
    """Return a small fp32 model of the class and the parts of `model`. Raises Unsupported if there is none."""
    config: Any = model.config
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = shrunk(config)[0]
            small._attn_implementation = getattr(config, "_attn_implementation", None)
            built: nn.Module = type(model)(small).eval().float()
    except Exception as error:
        raise Unsupported(f"no small {type(model).__name__}: {type(error).__name__}: {error}") from None
    if unknown := parts_of(model) - parts_of(built):
        raise Unsupported(
            f"{type(model).__name__} has other parts: {', '.join(sorted(one.__name__ for one in unknown))}"
        )
    return built


def parts_of(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of the blocks and of what these hold, except single layers."""
    _, blocks = blocks_of(model)
    return {type(one) for block in blocks for one in (block, *block.children()) if _holds_parts(one)}


def _holds_parts(module: nn.Module) -> bool:
    """Whether it holds others, and not as an adapter of one layer."""
    return not hasattr(module, "base_layer") and any(True for _ in module.children())


@torch.no_grad()
def spread(model: nn.Module, deviation: float) -> None:
    """Draw all parameters again."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * deviation
        parameter.copy_(drawn if parameter.dim() > 1 else 1 + drawn)


def require_own_forwards(model: nn.Module) -> None:
    """Raise Unsupported if a part that holds others, or an embedding, has a `forward` that is not its class's."""
    for name, part in model.named_modules():
        own = part.__dict__.get("forward")
        if own is None or not (isinstance(part, nn.Embedding) or any(True for _ in part.children())):
            continue
        inner = getattr(own, "__func__", getattr(own, "func", own))
        places = (getattr(inner, "__module__", None), type(own).__module__)
        if not any(str(place).startswith("polyaccel") for place in places):
            raise Unsupported(f"{name or 'the model'} has another forward than its class")
