"""States of torch's optimizers and schedules, as their `state_dict` gives them, on their way in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from polyaccel.checkpoint.convert.formats.torch_files import in_tensor
from polyaccel.checkpoint.convert.importing import Incoming, LeftOut
from polyaccel.checkpoint.convert.optimizers import PeerOptimizer, by_position, plain_value
from polyaccel.checkpoint.format.torch_values import packed
from polyaccel.core.tagged_json import is_serializable
from polyaccel.errors import CheckpointError

CLIENT_SCHEDULE = "client_schedule"
"""Where an engine looks for the state of a schedule that is not the config's, as bytes."""
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""States that are one number for a parameter, also for a parameter without dimensions."""


def optimizer_from(state_dict: Any, origin: str) -> PeerOptimizer:
    """Return the optimizer of a `state_dict()` whose parameters are numbers or names."""
    peer = PeerOptimizer(origin)
    groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
    states = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not isinstance(groups, list) or not isinstance(states, Mapping) or not all(map(_is_group, groups)):
        peer.left_out.append(LeftOut(origin, "it is not what torch's optimizers give", is_needed=True))
        return peer
    keys = [key for group in groups for key in group["params"]]
    has_names = bool(keys) and all(isinstance(key, str) for key in keys)
    names = {key: key for key in keys} if has_names else by_position(groups)
    for key, state in states.items():
        if key not in names or not isinstance(state, Mapping):
            peer.left_out.append(LeftOut(f"the state of {key!r} in {origin}", "it is in no group", is_needed=True))
            continue
        add_states(peer, names[key], state)
    for group in groups:
        peer.add_group(group, [names[key] for key in group["params"]])
    if not has_names:
        peer.positions = [len(group["params"]) for group in groups]
    return peer


def add_states(peer: PeerOptimizer, owner: str, state: Mapping[str, Any]) -> None:
    """Add the states of one parameter. What is neither a tensor nor a number is left out, as needed."""
    has_elements = any(isinstance(value, torch.Tensor) and value.dim() for value in state.values())
    for name, value in state.items():
        if value is None:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and (value.dim() or (name not in NUMBERS and not has_elements)):
            try:
                peer.tensors.append(in_tensor(owner, name, value, peer.origin))
            except CheckpointError as error:
                peer.left_out.append(LeftOut(f"{name!r} of {owner!r} in {peer.origin}", error.message, is_needed=True))
        elif is_tensor or isinstance(value, (int, float)):
            peer.add_number(owner, name, float(value))
        else:
            why = f"a {type(value).__name__}"
            peer.left_out.append(LeftOut(f"{name!r} of {owner!r} in {peer.origin}", why, is_needed=True))


def with_schedule(incoming: Incoming, state: Any, origin: str) -> Incoming:
    """`incoming` with the state of a learning-rate schedule; left out, as needed, where it cannot be kept."""
    if isinstance(state, Mapping) and state:
        plain = {str(key): plain_value(value) for key, value in state.items()}
        if is_serializable(plain):
            return replace(incoming, lr_scheduler=plain)
        try:
            return replace(incoming, blobs={CLIENT_SCHEDULE: packed(dict(state), origin)})
        except CheckpointError as error:
            why = error.message
    else:
        why = f"a {type(state).__name__}"
    return replace(incoming, left_out=[*incoming.left_out, LeftOut(origin, why, is_needed=True)])


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))
