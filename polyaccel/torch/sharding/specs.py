"""A module's parameters as the layout has them: names, shapes, types and optimizer groups, without values. And the
element types of its buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype
from polyaccel.core.types import DType, ParamSpec
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.tensor_shard import cuts_of


def parameter_specs(
    module: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    param_dtype: DType | None,
    trained: Collection[str] = (),
    *,
    sparse_gradients: bool = False,
) -> dict[str, ParamSpec]:
    """The specs of all parameters of `module` by full name; tied ones appear once, under their first name.

    Those of `groups` that require a gradient are trained, and those that `trained` names. Floating ones are held as
    `param_dtype` (None: as they are), but those of a norm with running statistics in the statistics' type, for torch
    computes with both together and statistics rounded to 16 bits would stand still. Gradients of embeddings with
    `sparse=True` travel as rows; with `sparse_gradients` those of all embeddings do.
    Raises ShardingError for a group with parameters that are not the module's, or in another group too.
    """
    params, cuts = dict(module.named_parameters()), cuts_of(module)
    group_of = _group_indices(groups, {parameter: fqn for fqn, parameter in params.items()})
    if param_dtype is None:
        dtypes: dict[nn.Parameter, DType] = {}
    else:
        dtypes = {parameter: param_dtype for parameter in params.values() if parameter.is_floating_point()}
        dtypes.update(_params_with_statistics(module))
    of_rows = _params_with_row_gradients(module, everyone=sparse_gradients)
    return {
        fqn: ParamSpec(
            fqn,
            tuple(parameter.shape),
            dtypes.get(parameter) or _dtype_of(fqn, parameter),
            group_of.get(fqn, 0) if parameter.requires_grad or fqn in trained else 0,
            fqn in group_of and (parameter.requires_grad or fqn in trained),
            None if (cut := cuts.get(parameter)) is None else cut.block,
            () if cut is None else cut.axes,
            cut is None and parameter in of_rows,
        )
        for fqn, parameter in params.items()
    }


def in_gradient_order(specs: Mapping[str, ParamSpec]) -> tuple[ParamSpec, ...]:
    """The reverse of the order of registration, which is nearly always that in which gradients appear."""
    return tuple(reversed(tuple(specs.values())))


def convert_buffers(module: nn.Module, dtype: DType | None, keep_in_fp32: Collection[str] | None) -> tuple[str, ...]:
    """Give the floating buffers of `module` the type `dtype`, in place; None leaves them as they are.
    Returns the names of the modules that had buffers of another type.

    Those of modules that `keep_in_fp32` names, by any part of their full name, stay as they are; None takes the names
    that a Hugging Face model states itself.
    """
    if dtype is None:
        return ()
    changed: dict[str, None] = {}
    wanted = torch_dtype(dtype)
    kept = set((getattr(module, "_keep_in_fp32_modules", None) or ()) if keep_in_fp32 is None else keep_in_fp32)
    for name, part in module.named_modules():
        if kept.isdisjoint(name.split(".")):
            for key, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype is not wanted:
                    part._buffers[key] = buffer.to(wanted)
                    changed[name] = None
    return tuple(changed)


def _dtype_of(fqn: str, parameter: nn.Parameter) -> DType:
    if parameter.is_complex():
        raise ShardingError(
            f"parameter {fqn!r} is of {parameter.dtype}, and the engine trains real ones",
            hint="make torch.view_as_real(value) the parameter, and use torch.view_as_complex of it in forward",
            value=fqn,
        )
    try:
        return dtype_of(parameter.dtype)
    except ShardingError as error:
        raise ShardingError(f"parameter {fqn!r}: {error.message}", hint=error.hint, value=fqn) from None


def require_own_memory(params: Mapping[str, nn.Parameter]) -> None:
    """Raise ShardingError for two of `params`, by name, whose memory overlaps: torch would update it once for each."""
    ranges = sorted(
        (one.data_ptr(), one.data_ptr() + _extent(one) * one.element_size(), fqn)
        for fqn, one in params.items()
        if one.layout is torch.strided and one.numel() and not one.is_meta
    )
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise ShardingError(
                f"parameters {first!r} and {second!r} are two, in one memory (tied by `.data`, or views of one tensor)",
                hint=f"tie them before polyaccel.initialize by giving both modules one nn.Parameter, or let each have "
                f"its own memory: {second}.data = {second}.data.clone()",
                value=(first, second),
            )


def _extent(parameter: nn.Parameter) -> int:
    """How many elements lie between the first and the last one in memory, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))


def _params_with_statistics(module: nn.Module) -> dict[nn.Parameter, DType]:
    """The types of parameters that stand next to running statistics."""
    return {
        parameter: dtype_of(part.running_mean.dtype)
        for part in module.modules()
        if isinstance(part, _NormBase) and part.running_mean is not None
        for parameter in part.parameters(recurse=False)
    }


def _params_with_row_gradients(module: nn.Module, *, everyone: bool) -> set[Tensor]:
    """The weights of embeddings whose gradients travel as rows."""
    return {
        part.weight
        for part in module.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and (everyone or part.sparse) and part.weight.numel()
    }


def _group_indices(groups: Sequence[Sequence[nn.Parameter]], names: dict[nn.Parameter, str]) -> dict[str, int]:
    """The optimizer group of each parameter that is in one. Raises ShardingError for strangers and repetitions."""
    found: dict[str, int] = {}
    for index, group in enumerate(groups):
        for parameter in group:
            fqn = names.get(parameter)
            if fqn is None:
                shape = tuple(parameter.shape)
                raise ShardingError(
                    f"optimizer group {index} has a parameter of shape {shape} that is not the model's",
                    hint="pass parameters of the model that is given to initialize",
                    value=shape,
                )
            if fqn in found:
                raise ShardingError(
                    f"parameter {fqn!r} is in optimizer groups {found[fqn]} and {index}",
                    hint="put every parameter into one group",
                    value=fqn,
                )
            found[fqn] = index
    return found
