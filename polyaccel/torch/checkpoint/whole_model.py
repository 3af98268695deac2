"""A module's weights as its users have them, at every stage: whole, under the module's own names, as a state dict or as
one file that tools outside of any training engine read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.engine.replica_groups import folder_of
from polyaccel.errors import CheckpointError
from polyaccel.observability.timing import OUTSIDE, PhaseTimer
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.torch.sharding.sharded import EngineHook
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.outer_step import ReplicaGroup


class HasWholeModel:
    """The part of an engine that gives and takes whole weights."""

    adapter: TorchAdapter
    zero: ZeroEngine
    communicator: Communicator
    replica_group: ReplicaGroup | None
    timer: PhaseTimer

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state dict with full parameters, at every stage. Collective.

        Args:
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            State dict on every rank, under the module's own names.
        """
        return whole_state_dict(self.adapter, self.zero, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load full parameters; master weights get them in their own precision. Collective.

        Args:
            state_dict: State dict of full parameters, equal on all ranks.
            strict: Require the module's names exactly, as in torch.

        Raises:
            RuntimeError: On every rank and with nothing changed: names or shapes differ, as torch raises it.
        """
        load_whole_state_dict(self.adapter, self.zero, state_dict, strict=strict)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full model's state dict to one file, in the dtypes that it computes with. Collective; rank 0
        writes.

        Args:
            save_dir: Folder, created if missing.
            save_filename: Name of the file; one that ends in `.safetensors` has that format, any other torch's.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: On every rank: the file cannot be written.
        """
        with self.timer(OUTSIDE):
            entries = self._entries_of_writer(exclude_frozen=exclude_frozen_parameters)
            write_whole_model(entries, self.communicator, folder_of(self.replica_group, save_dir), save_filename)
        return True

    def _entries_of_writer(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """The whole model's state dict on rank 0, in host memory; empty elsewhere. Every rank calls it."""
        return entries_of_writer(self.adapter, self.zero, exclude_frozen=exclude_frozen)


def whole_state_dict(adapter: TorchAdapter, zero: ZeroEngine, *, exclude_frozen: bool) -> dict[str, Any]:
    """The state dict of the adapter's module with whole parameters, on every rank. Collective."""
    zero.params.wait_all_gathers()
    state: dict[str, Any] = adapter.module.state_dict()
    whole: dict[str, Tensor] = {}
    for name, parameter in adapter.module.named_parameters(remove_duplicate=False):
        fqn = adapter.names[parameter]
        if exclude_frozen and not adapter.is_trained(fqn):
            state.pop(name, None)
        elif adapter.blocks.is_cut(fqn) and name in state:
            if fqn not in whole:
                whole[fqn] = adapter.blocks.gather_full(fqn, state[name])
            state[name] = whole[fqn]
    return state


def load_whole_state_dict(
    adapter: TorchAdapter, zero: ZeroEngine, state_dict: Mapping[str, Any], *, strict: bool
) -> None:
    """Take over whole parameters, equal on all ranks; master weights get them in their own precision.

    Collective. Raises RuntimeError, as torch does, on every rank and before anything changed, where the names or shapes
    on any rank are others. Hooks of a module's own that rename entries are torch's to run: then torch compares.
    """
    adapter.adopt_changes()
    zero.params.wait_all_gathers()
    state_dict = own_blocks(adapter, state_dict)
    require_fitting(adapter.module, state_dict, zero.communicator, strict=strict)
    with zero.consistency.changing("loading a state_dict"):
        adapter.module.load_state_dict(state_dict, strict=strict)
        for name, parameter in adapter.module.named_parameters(remove_duplicate=False):
            if name in state_dict:
                adapter.write(adapter.names[parameter], state_dict[name])
    adapter.forget_changes()
    adapter.on_update()


def require_fitting(
    module: nn.Module, state_dict: Mapping[str, Any], communicator: Communicator, *, strict: bool
) -> None:
    """Raise RuntimeError on every rank where any rank's `module` refuses `state_dict`. Collective."""
    found = communicator.all_gather_object(_differences(module, state_dict, strict=strict))
    lines = [f"rank {rank}: {'; '.join(each)}" for rank, each in enumerate(found) if each]
    if lines:
        raise RuntimeError(f"no state_dict of this {type(module).__name__}: " + "\n  ".join(lines))


def own_blocks(adapter: TorchAdapter, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state_dict` with this rank's blocks in place of whole tensors; what has another shape stays, to be refused."""
    blocks = {}
    for name, parameter in adapter.module.named_parameters(remove_duplicate=False):
        fqn, value = adapter.names[parameter], state_dict.get(name)
        if isinstance(value, Tensor) and adapter.blocks.is_cut(fqn) and value.shape == adapter.blocks.global_shape(fqn):
            blocks[name] = adapter.blocks.block_of(fqn, value)
    return {**state_dict, **blocks} if blocks else state_dict


def _differences(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> list[str]:
    """What keeps `module` from taking `state_dict` over, in sentences; nothing is changed."""
    if any(
        not isinstance(getattr(hook, "hook", hook), EngineHook)  # torch wraps those that it was given publicly
        for part in module.modules()
        for hook in part._load_state_dict_pre_hooks.values()
    ):
        return []
    ours = module.state_dict(keep_vars=True)
    own = {
        f"{prefix}."
        for prefix, part in module.named_modules()
        if type(part)._load_from_state_dict is not nn.Module._load_from_state_dict
    }
    named = {key for key in ours.keys() ^ state_dict.keys() if f"{key.rpartition('.')[0]}." not in own}
    problems = []
    for what, names in (("Missing", named & ours.keys()), ("Unexpected", named & state_dict.keys())):
        if strict and names:
            problems.append(f"{what} key(s): {', '.join(sorted(names)[:8])}")
    for key in ours.keys() & state_dict.keys():
        there, here = state_dict[key], ours[key]
        if not isinstance(here, Tensor):
            continue
        if not isinstance(there, Tensor):
            problems.append(f"{key} is a {type(there).__name__}, not a tensor")
        elif there.shape != here.shape and not (here.dim() == 0 and there.shape == (1,)):
            problems.append(
                f"size mismatch for {key}: {tuple(there.shape)} is given, the module has {tuple(here.shape)}"
            )
    return problems


def write_whole_model(
    entries: dict[str, Any], communicator: Communicator, folder: str | os.PathLike[str], filename: str
) -> None:
    """Write rank 0's host `entries`. Collective; raises CheckpointError on all ranks."""
    problem = ""
    if communicator.rank == 0:
        try:
            _write(entries, Path(folder) / filename)
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
    problem = communicator.broadcast_object(problem)
    if problem:
        path = str(Path(folder) / filename)
        raise CheckpointError(
            f"the weights cannot be written to {path}: {problem}",
            hint="look at the folder's room and rights",
            value=path,
        )


def entries_of_writer(adapter: TorchAdapter, zero: ZeroEngine, *, exclude_frozen: bool) -> dict[str, Any]:
    """Return the state dict on rank 0 in host memory, bucket by bucket; empty elsewhere. Collective."""
    adapter.require_not_handed_over()
    zero.consistency.require()
    adapter.adopt_changes()
    values = {}
    is_writer = zero.communicator.rank == 0
    for param in zero.params:
        with zero.params.unsharded_view(param.bucket.index) as full:
            for slot in param.bucket.slots if is_writer or param.bucket.kind.cut else ():
                flat = full.view(slot.offset, slot.param.numel).raw
                whole = adapter.blocks.gather_full(slot.param.fqn, flat.detach().view(slot.param.shape))
                if is_writer:
                    values[slot.param.fqn] = whole.to("cpu", copy=True)
    if not is_writer:
        return {}
    entries: dict[str, Any] = {}
    for key, entry in adapter.module.state_dict(keep_vars=True).items():
        if isinstance(entry, nn.Parameter) and entry in adapter.names:
            fqn = adapter.names[entry]
            if adapter.is_trained(fqn) or not exclude_frozen:
                entries[key] = values[fqn]
        else:
            entries[key] = entry.detach().to("cpu", copy=True) if isinstance(entry, Tensor) else entry
    return entries


def _write(entries: dict[str, Any], path: Path) -> None:
    """A temporary file in the target's folder first, so that a crash leaves no half file under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        if path.suffix == ".safetensors":
            save_file(_apart({name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}), draft)
        else:
            torch.save(entries, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _apart(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each name with its own memory, for the format has no sharing: tied weights are written under every name."""
    seen: set[int] = set()
    apart = {}
    for name, entry in entries.items():
        key = entry.untyped_storage().data_ptr()
        apart[name] = entry.clone() if key in seen else entry.contiguous()
        seen.add(key)
    return apart
