"""All layers of a pipeline on one rank, with the values that the stages have: what plain torch trains."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError
from polyaccel.torch.pipeline.module import LayerSpec, PipelineModule, layers_of
from polyaccel.torch.pipeline.whole import merged_tensors
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.verify.generators import restore, states_of


def whole_pipeline(model: PipelineModule, stages: Communicator, device: torch.device) -> PipelineModule:
    """Build all layers of `model`, of which `stages` have some each, and give them the values of the stages.

    Layers are built again of their specs, and copied where the script gave modules. `model` and the generators stay as
    they are. Collective.

    Raises:
        PolyaccelError: On all ranks: a layer cannot be built here, or a rank has blocks of parameters alone.
    """
    failure, whole = "", None
    try:
        whole = _rebuilt(model)
    except Exception as error:  # of a class of the user's
        failure = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    if failures := [one for one in stages.all_gather_object(failure) if one]:
        raise PolyaccelError(
            f"the layers of the PipelineModule cannot be built on one rank: {failures[0]}",
            hint="verify the program with num_stages=1, or give LayerSpecs in place of modules",
            value=failures[0],
        )
    assert whole is not None  # else there is a failure
    values = merged_tensors(_tensors_of(model, device), stages, device)
    with torch.no_grad():
        whole.to(device)
        for name, tensor in (*whole.named_parameters(), *whole.named_buffers()):
            if name in values and tensor.shape == values[name].shape:
                tensor.copy_(values[name])
    trained = {name: one.requires_grad for name, one in model.named_parameters()}
    for flags in stages.all_gather_object(trained):
        for name, one in whole.named_parameters():
            one.requires_grad_(flags.get(name, one.requires_grad))
    whole.train(model.training)
    return whole


def _rebuilt(model: PipelineModule) -> PipelineModule:
    if cuts_of(model):
        raise PolyaccelError("a rank has only its blocks of the parameters", hint="leave tensor ranks out")
    layers, seed = layers_of(model)
    memo: dict[int, Any] = {}
    own = [layer if isinstance(layer, LayerSpec) else copy.deepcopy(layer, memo) for layer in layers]
    states = states_of(torch.device("cpu"))
    try:
        whole = model.with_layers(own, seed=seed)
        whole._complete(own, None)
    finally:
        restore(states, torch.device("cpu"))
    whole.__dict__.update({name: value for name, value in vars(model).items() if name not in vars(whole)})
    return whole


def _tensors_of(model: nn.Module, device: torch.device) -> Mapping[str, Tensor]:
    """The parameters and buffers that this rank has."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: one.detach().to(device) for name, one in named if one.layout is torch.strided and not one.is_meta}


def whole_optimizer(
    model: PipelineModule,
    whole: PipelineModule,
    stages: Communicator,
    client: Any,
    model_parameters: Any,
) -> Any:
    """Return `model_parameters` with those of `whole` in place of those of a stage; None stays None. Collective.

    An optimizer that the script made of its stage's parameters updates those of `whole` from now on.
    """
    own = dict(whole.named_parameters())
    names = {id(one): name for name, one in model.named_parameters()}

    def of_all(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups with the parameters that any stage has in them, in the order of the layers."""
        members = [[names[id(one)] for one in group["params"] if id(one) in names] for group in groups]
        gathered = stages.all_gather_object(members)
        chosen = [{name for names in of_stages for name in names} for of_stages in zip(*gathered, strict=True)]
        return [
            {**group, "params": [one for name, one in own.items() if name in wanted]}
            for group, wanted in zip(groups, chosen, strict=True)
        ]

    if isinstance(client, torch.optim.Optimizer):
        for group, changed in zip(client.param_groups, of_all(client.param_groups), strict=True):
            group["params"] = changed["params"]
    if model_parameters is None:
        return None
    given = list(model_parameters)
    if given and isinstance(given[0], dict):
        return of_all([{**one, "params": list(one["params"])} for one in given])
    return of_all([{"params": given}])[0]["params"]
