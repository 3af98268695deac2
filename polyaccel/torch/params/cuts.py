"""Which block of a global tensor a parameter is, where a module was cut over ranks.

A module that holds a part of what the whole model has says so itself, in an attribute `parallel_cuts`: a `Cut` for each
of its own parameters that is a block. Its other parameters are whole, and equal on all ranks. The names of parameters
are those of the model before it was cut, so that checkpoints of both have the same names.

[Note: Means over ranks]
Whatever a mesh has for axes, the engine takes the mean of a parameter's gradients over all ranks that hold the same
elements of it, and nothing else. So whoever cuts a module sees to it that each rank hands over the whole gradient of
its own loss: a sum over ranks that compute parts of one loss belongs into the module's backward pass. Where ranks that
hold the same elements have parts of a gradient, the module multiplies each part with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from polyaccel.mesh.block import Block


@dataclass(frozen=True, slots=True)
class Cut:
    """The `block` of the global tensor that this rank holds; along the mesh `axes` other ranks hold other blocks."""

    block: Block
    axes: tuple[str, ...] = ("tensor",)


def cuts_of(module: nn.Module) -> dict[nn.Parameter, Cut]:
    """The parameters of `module` that are blocks of global tensors."""
    found: dict[nn.Parameter, Cut] = {}
    for part in module.modules():
        cuts: Mapping[str, Cut] = getattr(part, "parallel_cuts", None) or {}
        for name, cut in cuts.items():
            parameter = part._parameters.get(name)
            if parameter is not None:
                found[parameter] = cut
    return found
