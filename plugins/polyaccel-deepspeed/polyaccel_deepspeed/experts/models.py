"""DeepSpeed's questions about models with layers of experts, groups of their parameters for an optimizer, and the mesh
sizes of the layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel import comm
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.pipeline import PipelineModule
from polyaccel_deepspeed.experts.layer import MoE

log = getLogger("polyaccel.deepspeed")
_KEY = "expert_parallel.autoep_size"


def with_expert_ranks(tree: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The config with the ranks that share experts, by the `ep_size` of the model's layers.

    Where layers differ, the largest counts that no layer has fewer experts than: what a layer computes does not depend
    on it. Raises ConfigError where the config has another number.
    """
    layers = [(module.ep_size, module.num_experts) for module in model.modules() if isinstance(module, MoE)]
    if isinstance(model, PipelineModule) and comm.is_initialized():  # the layers of this stage
        of_ranks: list[Any] = [None] * comm.get_world_size()
        comm.all_gather_object(of_ranks, layers)
        layers = [tuple(layer) for of_rank in of_ranks for layer in of_rank]
    sizes = sorted({size for size, _ in layers})
    if not sizes or sizes[-1] == 1:
        return tree
    fewest = min(experts for _, experts in layers)
    size = max(each for each in sizes if each <= fewest)
    if len(sizes) > 1:
        log.warning("layers of experts ask for ep_size %s: all are spread over %d ranks", sizes, size)
    section = dict(tree.get("expert_parallel", {}))
    if section.get("enabled") and section.get("autoep_size", 1) not in (1, size):
        said = f"contradicts the layers of experts, whose ep_size is {size}"
        raise ConfigError([Problem(_KEY, section["autoep_size"], said, "set it once, or to the same value")])
    return {**tree, "expert_parallel": {**section, "enabled": True, "autoep_size": size}}


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are layers of experts, and how many experts the first has."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` is experts'."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that are not experts', and those that are."""
    given = list(params)
    return [one for one in given if not is_moe_param(one)], [one for one in given if is_moe_param(one)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients that there are, of both kinds of parameters."""
    parts = split_params_into_shared_and_expert_params(one for one in group if one.grad is not None)
    shared, experts = ([one.grad.to(one.dtype) for one in part if one.grad is not None] for part in parts)
    return shared, experts


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """`param_groups` without experts' parameters, then groups of these with the same settings, `"moe": True` and the
    ranks' name as `name`: one for each group and name, cut into several that have no more than `max_group_size`
    elements. The dicts that are given lose those parameters. polyaccel does not need these groups."""
    if isinstance(param_groups, dict):
        found: list[dict[str, Any]] = [param_groups]
    elif isinstance(param_groups, (list, tuple)):
        found = list(param_groups)
    else:
        kind = type(param_groups).__name__
        raise PolyaccelError(f"groups of parameters as a {kind}", hint="pass a dict, or a list of dicts", value=kind)
    split = []
    for group in found:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        for name in sorted({expert.group_name for expert in experts}):  # type: ignore[attr-defined]
            members = [expert for expert in experts if expert.group_name == name]  # type: ignore[attr-defined]
            parts = [members] if max_group_size is None else _in_parts(members, max_group_size)
            split += [{**group, "name": name, "moe": True, "params": part} for part in parts]
    return found + split


def _in_parts(members: Sequence[nn.Parameter], most: float) -> list[list[nn.Parameter]]:
    """`members` in order, in lists of no more than `most` elements, or of one parameter."""
    parts: list[list[nn.Parameter]] = []
    held = 0
    for member in members:
        numel = getattr(member, "ds_numel", member.numel())
        if not parts or held + numel > most:
            parts.append([])
            held = 0
        parts[-1].append(member)
        held += numel
    return parts


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a group is one of experts' parameters."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups in which experts' parameters stand apart."""
    if not isinstance(model_parameters, list) or not all(isinstance(one, (Tensor, dict)) for one in model_parameters):
        kind = type(model_parameters).__name__
        raise PolyaccelError(f"parameters as a {kind}", hint="pass a list of parameters, or of dicts", value=kind)
    if model_parameters and isinstance(model_parameters[0], torch.Tensor):
        one = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(one)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
