"""Biases that follow the load: how the experts of `Mixture` layers with a `bias_rate` stay balanced without a loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.comm.groups import get_sequence_data_parallel_group
from polyaccel.core.types import ReduceOp
from polyaccel.torch.experts import gates
from polyaccel.torch.experts.layer import Mixture


def loss_free_balancer(model: nn.Module, ranks: Callable[[], Communicator]) -> Callable[[bool], None] | None:
    """What an engine calls after each update of `model`, with whether parameters changed: biases follow the tokens that
    experts got since the last call, or, where nothing changed, forget them. Collective over `ranks()`, those with their
    own batches or parts of sequences. None for a model without these biases."""
    layers = _with_biases(model)
    if not layers:
        return None
    communicator = ranks()

    def after_update(applied: bool) -> None:
        if applied:
            _follow(layers, communicator)
        for layer in layers:
            layer.load = None

    return after_update


def balance_experts(model: nn.Module, group: Communicator | None = None) -> None:
    """Let the biases of every `Mixture` in `model` follow the tokens that experts got since the last call, on all ranks
    of `group` (None: all with their own batches or parts of sequences) together. For training without an engine, after
    each step; every rank calls it. An engine does so itself, and leaves nothing to follow."""
    if layers := _with_biases(model):
        _follow(layers, get_sequence_data_parallel_group() if group is None else group)


def _with_biases(model: nn.Module) -> list[Mixture]:
    return [module for module in model.modules() if isinstance(module, Mixture) and module.bias_rate]


def _follow(layers: Sequence[Mixture], ranks: Communicator) -> None:
    """One exchange for all `layers`."""
    loads = [layer.raised.new_zeros(layer.num_experts) if layer.load is None else layer.load for layer in layers]
    together = torch.cat(loads).contiguous()
    ranks.all_reduce(ranks.accelerator.wrap(together), ReduceOp.SUM, label="tokens of experts")
    for layer, load in zip(layers, together.split_with_sizes([len(one) for one in loads]), strict=True):
        layer.raised += gates.load_direction(load)
        layer.load = None
