"""Students that begin with some of their teacher's layers (Wu et al. 2022, XTC, arXiv 2206.01859, section 4)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from polyaccel.engine.policies.compression import LayerReduction
from polyaccel.errors import PolyaccelError
from polyaccel.torch.api.gathered import GatheredParameters


def copy_layers(student: nn.Module, teacher: nn.Module, reduction: LayerReduction) -> None:
    """Copy the teacher's layers into the student's, in the order that `reduction` names. Collective for sharded ones.

    Raises PolyaccelError for a module that is missing or has other tensors.
    """
    for into, out_of in _pairs(reduction):
        mine, theirs = _part(student, into, "student"), _part(teacher, out_of, "teacher")
        parameters = [*mine.parameters(), *theirs.parameters()]
        with GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            _copy(mine, theirs, into)


def _pairs(reduction: LayerReduction) -> Iterator[tuple[str, str]]:
    for index, layer in enumerate(reduction.teacher_layers):
        yield f"{reduction.prefix}.{index}".removeprefix("."), f"{reduction.prefix}.{layer}".removeprefix(".")
    yield from ((name, name) for name in reduction.others)


def _part(model: nn.Module, name: str, role: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise PolyaccelError(
            f"the {role} has no module {name!r}",
            hint="check module_name_prefix, teacher_layer and other_module_name of layer_reduction",
            value=name,
        ) from error


def _copy(mine: nn.Module, theirs: nn.Module, name: str) -> None:
    def tensors(part: nn.Module) -> dict[str, torch.Tensor]:
        return dict([*part.named_parameters(), *part.named_buffers()])

    into, out_of = tensors(mine), tensors(theirs)
    differing = [
        key for key in {*into, *out_of} if key not in into or key not in out_of or into[key].shape != out_of[key].shape
    ]
    if differing:
        raise PolyaccelError(
            f"{name!r} of the student has not the tensors of the teacher's: {min(differing)}",
            hint="give both models layers of one size",
            value=min(differing),
        )
    for key, tensor in into.items():
        tensor.copy_(out_of[key])
