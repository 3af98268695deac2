"""What modules return from `get_extra_state`, to and from a checkpoint: rank 0's, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.errors import CheckpointError

_BLOB = "module_extra_states"
_KEY = "_extra_state"  # torch's name of it in a state dict


def is_extra_state(name: str) -> bool:
    """Whether that key of a state dict is the extra state of a module."""
    return name.rpartition(".")[2] == _KEY


def extra_state_blobs(module: nn.Module) -> dict[str, bytes]:
    """The extra states of all parts of `module` as bytes of a checkpoint; nothing where there are none.

    Raises CheckpointError naming the part whose state a checkpoint cannot hold.
    """
    states = {name: part.get_extra_state() for name, part in module.named_modules() if _has_extra_state(part)}
    for name, state in states.items():
        try:
            packed(state, "it")
        except CheckpointError as error:
            raise CheckpointError(
                f"get_extra_state of {name or 'the model'!r} returned what a checkpoint cannot hold: {error.message}",
                hint="return tensors, numbers, strings, and lists and dicts of them",
                value=name,
            ) from error
    return {_BLOB: packed(states, "the extra states of modules")} if states else {}


def merged_blobs(gathered: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """What `extra_state_blobs` gives of a module, from that of each of its parts."""
    states: dict[str, Any] = {}
    for blobs in gathered:
        for blob in blobs.values():
            states |= unpacked(blob, "the extra states of modules")
    return {_BLOB: packed(states, "the extra states of modules")} if states else {}


def saved_extra_states(module: nn.Module, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """The saved extra states of those parts of `module` that have one, by the part's name.

    Raises CheckpointError if they cannot be read.
    """
    if _BLOB not in blobs:
        return {}
    states: dict[str, Any] = unpacked(blobs[_BLOB], "the extra states of modules")
    return {name: states[name] for name, part in module.named_modules() if _has_extra_state(part) and name in states}


def set_extra_states(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Hand each state to its part of `module`."""
    for name, state in states.items():
        module.get_submodule(name).set_extra_state(state)


def _has_extra_state(part: nn.Module) -> bool:
    return type(part).get_extra_state is not nn.Module.get_extra_state
