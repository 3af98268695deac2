"""Optimizer states, whole and by the names that torch's optimizers give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.core.types import DType
from polyaccel.torch.api.client_optimizer import ClientOptimizer
from polyaccel.torch.api.whole_states import pack_states, unpack_states
from polyaccel.torch.sharding.tensor_shard import Blocks
from polyaccel.torch.verify.recording import States
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.fragments import read_whole
from polyaccel.zero.plan.policy import ENGINE_STATES


def plain_states(optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, nn.Parameter]]) -> States:
    """The states of an optimizer of torch, by full name of the parameter."""
    return {name: _comparable(optimizer.state.get(one, {})) for name, one in parameters}


def engine_states(step: ZeroEngine, blocks: Blocks, shapes: Mapping[str, torch.Size]) -> States:
    """The states of an engine's optimizer, gathered from the ranks that have shards and blocks of them. Collective.

    States that have not the shape of their parameter are left out where ranks have blocks of it.
    """
    if step.optimizer is None:
        return {}
    client = step.optimizer if isinstance(step.optimizer, ClientOptimizer) else None
    own: dict[str, dict[str, str]] = {}
    for shard in step.shards:
        for piece in shard.slices:
            held = [
                name
                for name in shard.states
                if name not in ENGINE_STATES and (client is None or client.holds(shard, piece.fqn, name))
            ]
            own[piece.fqn] = {name: shard.states[name].dtype.value for name in held}
    numbers = {} if client is None else client.states_by_kind().numbers
    gathered = step.communicator.all_gather_object([own, numbers])
    found: dict[str, dict[str, Tensor | float]] = {}
    for fqn, shape in shapes.items():
        states = found[fqn] = {} if client is not None else {"step": float(step.steps[fqn])}
        for _, each in gathered:
            states |= each.get(fqn, {})
        types: dict[str, str] = {}
        for each, _ in gathered:
            types |= each.get(fqn, {})
        for name, kind in sorted(types.items()):
            flat = read_whole(step, fqn, name, DType.parse(kind), may_be_view=not blocks.is_cut(fqn)).raw
            states[name] = blocks.gather_full(fqn, flat.view(shape))
    wholes_of: Mapping[str, Mapping[str, Any]] = {} if client is None else client.states_of_wholes()
    if client is not None and client.is_sharded:
        kept = pack_states({fqn: _comparable(wholes) for fqn, wholes in wholes_of.items()})
        wholes_of = unpack_states(step.communicator.all_gather_object(kept))
    for fqn, wholes in wholes_of.items():
        for name, value in _comparable(wholes).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or not blocks.is_cut(fqn):
                found[fqn][name] = value
            elif value.shape == shapes[fqn]:
                found[fqn][name] = blocks.gather_full(fqn, value)
    return found


def _comparable(states: Mapping[str, Any]) -> dict[str, Tensor | float]:
    """Tensors and numbers; a tensor of one number counts as that number."""
    found: dict[str, Tensor | float] = {}
    for name, value in states.items():
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found[name] = value.detach()
        elif isinstance(value, (int, float)):
            found[name] = float(value)
    return found
