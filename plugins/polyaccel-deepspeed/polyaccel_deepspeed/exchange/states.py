"""The optimizer states in DeepSpeed's checkpoints: cut over ranks by stage, or whole in a universal one.

[Note: DeepSpeed's flat groups]
At stages 1 and 2 an optimizer group is one flat vector, of which each rank saved a part: `param_slice_mappings` has
which elements of it belong to which parameter, so a parameter is what ranks have of it, in the order of ranks. At stage
3 every parameter is cut in as many equal parts as there are ranks, the last filled up: a rank saved its parts of all
parameters one after the other, in the order of `param_shapes`, in groups of which only the sequence counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from polyaccel.checkpoint.convert.formats.torch_files import in_tensor
from polyaccel.checkpoint.convert.importing import ImportTensor, LeftOut
from polyaccel.checkpoint.convert.optimizers import PeerOptimizer
from polyaccel.errors import CheckpointError
from polyaccel_deepspeed.exchange.experts import Stacks, owners, stack_of

PARAM = "param"


class StandIn:
    """An object of a class of DeepSpeed: its attributes, and none of its methods."""

    numel: int
    start: int

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments


_ALLOWED: list[Any] = [
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (StandIn, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def load_file(file: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it names {named[1]}, which no checkpoint needs" if named else str(error).partition("\n")[0][:300]
        raise CheckpointError(f"{file} is refused: {why}", hint="fetch it again", value=str(file)) from error


def stages_1_and_2(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any], origin: str) -> PeerOptimizer:
    """Master weights and optimizer states, of all ranks."""
    peer, stacks = PeerOptimizer(origin), Stacks()
    for index, shapes in enumerate(model["param_shapes"]):
        config = model.get("ds_config") or {}
        local: dict[str, set[int]] = {}  # the numbers of experts on a rank
        for stack, number in filter(None, map(stack_of, shapes)):
            local.setdefault(stack, set()).add(number)
        for place, ranks in enumerate(owners(shapes, states, index, config)):
            for fqn, shape in shapes.items():
                parts, numbers = _fragments(peer, fqn, index, [states[rank] for rank in ranks])
                expert = stack_of(fqn)
                for name, value in numbers.items():
                    peer.add_number(fqn if expert is None else expert[0], name, value)
                for kind, each in parts.items():
                    if expert is None:
                        peer.tensors.append(joined(fqn, kind, tuple(shape), each))
                    else:
                        number = place * len(local[expert[0]]) + expert[1]
                        stacks.add(expert[0], kind, number, tuple(shape), each)
    peer.tensors.extend(starmap(joined, stacks.whole()))
    return peer


def _fragments(
    peer: PeerOptimizer, fqn: str, index: int, states: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[Tensor]], dict[str, float]]:
    """By kind, what ranks have of a parameter of group `index`, and its states of one number."""
    parts: dict[str, list[Tensor]] = {}
    numbers: dict[str, float] = {}
    for rank in states:
        fragment = rank["param_slice_mappings"][index].get(fqn)
        if fragment is None:
            continue
        numel, start = fragment.numel, fragment.start
        parts.setdefault(PARAM, []).append(rank["single_partition_of_fp32_groups"][index][start : start + numel])
        for kind, value in (rank["base_optimizer_state"]["state"].get(index) or {}).items():
            if isinstance(value, Tensor) and value.dim() and value.numel() >= start + numel:
                parts.setdefault(kind, []).append(value[start : start + numel])
            elif not _add_number(numbers, kind, value):
                why = f"it has not one value for each element of {fqn!r}"
                peer.left_out.append(LeftOut(f"the optimizer state {kind!r}", why, is_needed=True))
    return parts, numbers


def _add_number(numbers: dict[str, float], kind: str, value: Any) -> bool:
    if isinstance(value, Tensor) and value.numel() != 1:
        return False
    if value is not None:
        numbers[kind] = float(value)
    return True


def stage_3(states: Sequence[Mapping[str, Any]], model: Mapping[str, Any], origin: str) -> PeerOptimizer:
    """Master weights and optimizer states, of all ranks."""
    peer = PeerOptimizer(origin)
    kept = [rank["optimizer_state_dict"]["state"] for rank in states]
    groups = range(len(states[0]["fp32_flat_groups"]))
    flat = {PARAM: [_Sequence(rank["fp32_flat_groups"]) for rank in states]}
    numbers: dict[str, float] = {}
    for kind, value in (kept[0].get(0) or {} if kept[0] else {}).items():
        if isinstance(value, Tensor) and value.dim() and value.numel() == states[0]["fp32_flat_groups"][0].numel():
            flat[kind] = [_Sequence([rank[index][kind] for index in groups]) for rank in kept]
        elif not _add_number(numbers, kind, value):
            why = "it has not one value for each element"
            peer.left_out.append(LeftOut(f"the optimizer state {kind!r}", why, is_needed=True))
    at = 0
    for fqn, shape in [item for shapes in model["param_shapes"] for item in shapes.items()]:
        each = -(-prod(shape) // len(states))
        for kind, ranks in flat.items():
            parts = [part for rank in ranks for part in rank.cut(at, each)]
            peer.tensors.append(joined(fqn, kind, tuple(shape), parts))
        at += each
        for name, value in numbers.items():
            peer.add_number(fqn, name, value)
    return peer


def universal(folder: Path, model: Mapping[str, Any]) -> tuple[PeerOptimizer, Any, Any]:
    """Weights and states, the groups, and the loss scaler of a universal checkpoint."""
    peer = PeerOptimizer(f"the optimizer in {folder}")
    shared, buffers = model.get("shared_params") or {}, model.get("buffer_names") or ()
    shapes = {fqn: tuple(shape) for each in model.get("param_shapes") or () for fqn, shape in each.items()}
    for place in sorted(path for path in (folder / "zero").iterdir() if path.is_dir()):
        fqn = place.name
        if fqn in shared or fqn in buffers:
            continue
        for file in sorted(place.glob("*.pt")):
            tree = load_file(file)
            tensor = tree["param"] if isinstance(tree, Mapping) else tree
            kind = PARAM if file.stem == "fp32" else file.stem
            if isinstance(tensor, Tensor) and (tensor.dim() or kind == PARAM):
                # Of ZeRO 3 the files are flat, and filled up to a multiple of the ranks.
                shape = shapes.get(fqn, tuple(tensor.shape))
                peer.tensors.append(joined(fqn, kind, shape, [tensor.reshape(-1)]))
            elif isinstance(tensor, (Tensor, int, float)):
                peer.add_number(fqn, kind, float(tensor))
    common = folder / "zero" / "optimizer_state.pt"
    saved = load_file(common) if common.is_file() else {}
    groups = saved.get("param_groups") or (saved.get("optimizer_state_dict") or {}).get("param_groups")
    return peer, groups, saved.get("loss_scaler")


def add_groups(peer: PeerOptimizer, groups: Any, model: Mapping[str, Any]) -> None:
    """The groups with their parameters' names, where the files have them: of stage 3 they have the parts of groups."""
    shapes = model.get("param_shapes") or ()
    has_names = len(shapes) == len(groups or ())
    for index, group in enumerate(groups or ()):
        members = (
            [name if (stack := stack_of(name)) is None else stack[0] for name in shapes[index]] if has_names else ()
        )
        peer.add_group(group, dict.fromkeys(members))
    keys = {key for group in peer.groups for key in group}
    if {tensor.kind for tensor in peer.tensors} == {"exp_avg_sq"} and keys <= {"lr", "eps", "weight_decay", "amsgrad"}:
        # DeepSpeed's Adagrad on the host calls the sum of squares so.
        peer.tensors = [replace(tensor, kind="sum") for tensor in peer.tensors]
    if not has_names:
        peer.members = []


class _Sequence:
    """Flat tensors one after the other, which are not joined."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def cut(self, start: int, numel: int) -> Iterator[Tensor]:
        """Elements [start, start + numel), as views."""
        for tensor in self._tensors:
            low, high = max(start, 0), min(start + numel, tensor.numel())
            if low < high:
                yield tensor.reshape(-1)[low:high]
            start -= tensor.numel()


def joined(fqn: str, kind: str, shape: tuple[int, ...], parts: Sequence[Tensor]) -> ImportTensor:
    """The tensor of `shape` whose elements are those of `parts`, in order; more than it has fill up."""
    found = sum(part.numel() for part in parts)
    if found < prod(shape):
        raise CheckpointError(
            f"the checkpoint has {found} of {prod(shape)} elements of {fqn!r} ({kind})",
            hint="give the files of all ranks",
            value=fqn,
        )
    joined = _Sequence(parts)
    like = in_tensor(fqn, kind, parts[0], fqn)

    def read_elements(start: int, numel: int) -> bytes:
        return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in joined.cut(start, numel))

    return replace(like, shape=shape, read=read_elements)
