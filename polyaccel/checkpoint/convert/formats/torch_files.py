"""What `torch.save` wrote, read without running any of it: tensors, and state dicts of optimizers and schedules."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.convert.optimizers import PeerOptimizer, by_position, plain_value
from polyaccel.checkpoint.format.torch_values import packed, unpacked
from polyaccel.checkpoint.load.cooperative.blobs import OWNED_STATES
from polyaccel.core.tagged_json import is_serializable
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

TYPES = {dtype: getattr(torch, dtype.value) for dtype in DType}
CLIENT_SCHEDULE = "client_schedule"
"""Where an engine looks for the state of a schedule that is not the config's, as bytes."""
NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""States that are one number for a parameter, also for a parameter without dimensions."""


def load_tree(file: Path) -> Any:
    """Load what `torch.save` wrote, mapped: tensors, plain containers, arguments of a command line."""
    try:
        with torch.serialization.safe_globals([Namespace]):
            try:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(file, map_location="cpu", weights_only=True)  # as torch before 1.6 wrote it
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no tensor needs" if named else str(error).partition("\n")[0][:400]
        raise CheckpointError(
            f"{file} is refused: {why}",
            hint="save a state dict of tensors with torch.save",
            value=str(file),
        ) from error


def in_tensor(fqn: str, kind: str, tensor: torch.Tensor, origin: object) -> ImportTensor:
    """A tensor of torch on its way in. Raises CheckpointError, naming `origin`, for a type that polyaccel has not."""
    known = {theirs: ours for ours, theirs in TYPES.items()}
    if tensor.dtype not in known or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{fqn!r} in {origin} is a {tensor.layout} tensor of {tensor.dtype}, which polyaccel has not",
            hint=f"convert it to a dense one of {', '.join(dtype.value for dtype in known.values())}",
            value=str(tensor.dtype),
        )
    values = tensor.detach()

    def read(start: int, numel: int) -> bytes:
        flat = values.reshape(-1) if values.is_contiguous() else values.contiguous().reshape(-1)
        return flat[start : start + numel].view(torch.uint8).numpy().tobytes() if numel else b""

    return ImportTensor(fqn, kind, tuple(values.shape), known[values.dtype], read)


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


def kept_states(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    """Return the states that an optimizer has for whole parameters whose shapes differ from it, by parameter."""
    found: dict[str, dict[str, Any]] = {}
    for name, blob in reader.owned_blobs().items():
        if name.startswith(OWNED_STATES):
            states = unpacked(blob, "the state of the optimizer")["states"]
            found |= {fqn: dict(values) for fqn, values in states.items() if values}
    return found


def require_no_kept_states(reader: CheckpointReader, form: str) -> None:
    """Raise CheckpointError where an optimizer has states that files of `form` have no place for."""
    kept = kept_states(reader)
    if kept:
        fqn = min(kept)
        raise CheckpointError(
            f"{reader.tag!r} has optimizer states of {fqn!r} in shapes that differ from it, "
            f"{', '.join(sorted(kept[fqn]))}, for which {form} has no place",
            hint="give --kind param to export the weights alone, or --format dcp",
            value=fqn,
        )
