"""Checkpoints of a verification's runs: what they save stays apart from the script's own, and both can be resumed."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.checkpoint.format.torch_values import unpacked
from polyaccel.checkpoint.load.custom_load import BUFFER
from polyaccel.checkpoint.load.reader import open_checkpoint
from polyaccel.engine.counters import StepCounters
from polyaccel.engine.resume import SavedValues
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.torch.checkpoint.contents import CLIENT_SCHEDULE
from polyaccel.torch.checkpoint.load import client_state_of
from polyaccel.torch.checkpoint.loader_states import saved_loader_state
from polyaccel.torch.checkpoint.random_states import RandomStates
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel.torch.verify.shadow import move_weights
from polyaccel.verify.variant import ActiveRun


class _Trained(Protocol):
    """What of an engine is saved."""

    runtime: EngineBuilder
    optimizer: Any
    torch_optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    training_dataloader: Any
    counters: StepCounters
    _own_data: Any

    @property
    def _own_module(self) -> nn.Module: ...


class PlainSaves:
    """The saves of one plain engine, in memory: a run takes a few steps, in one process."""

    def __init__(self, engine: _Trained, run: ActiveRun) -> None:
        self._engine, self._run = engine, run
        self._kept: dict[tuple[str, str], dict[str, Any]] = {}
        self._latest: dict[str, str] = {}

    def save(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        **_: Any,
    ) -> bool:
        """Keep all that a checkpoint has."""
        engine, folder = self._engine, os.path.abspath(save_dir)
        tag = tag or f"global_step{engine.counters.global_steps}"
        parts = self._parts()
        state = {name: copy.deepcopy(one.state_dict()) for name, one in parts.items()}
        self._kept[folder, tag] = {"parts": state, "client_state": copy.deepcopy(dict(client_state or {}))}
        if save_latest:
            self._latest[folder] = tag
        return True

    def _parts(self) -> dict[str, Any]:
        engine = self._engine
        parts = {
            "module": engine._own_module,
            "optimizer": engine.torch_optimizer if engine.optimizer is not None else None,
            "lr_scheduler": engine.lr_scheduler,
            "data": engine.training_dataloader,
            "counters": engine.counters,
        }
        return {name: one for name, one in parts.items() if one is not None}

    def load(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *_: Any,
        **__: Any,
    ) -> tuple[str, dict[str, Any]]:
        """Continue from a save of this run, or else from a checkpoint of an engine."""
        left_out = {"optimizer"} if not load_optimizer_states else set()
        left_out |= {"lr_scheduler"} if not load_lr_scheduler_states else set()
        left_out |= {"optimizer", "lr_scheduler", "data", "counters"} if load_module_only else set()
        folder = os.path.abspath(load_dir)
        kept = self._kept.get((folder, tag or self._latest.get(folder, "")))
        if kept is None:
            return self._load_real(load_dir, tag, left_out)
        for name, part in self._parts().items():
            if name in kept["parts"] and name not in left_out:
                state = copy.deepcopy(kept["parts"][name])
                if name == "optimizer":
                    _load_optimizer(part, state)
                else:
                    part.load_state_dict(state, **({"strict": load_module_strict} if name == "module" else {}))
        self._engine._own_data = None  # its position has changed
        return load_dir, copy.deepcopy(kept["client_state"])

    def _load_real(self, load_dir: str, tag: str | None, left_out: set[str]) -> tuple[str, dict[str, Any]]:
        """Continue from what an engine saved. Collective."""
        engine = self._engine
        runtime, parts = engine.runtime, self._parts()
        saved = open_checkpoint(runtime.storage(load_dir), tag, communicator=runtime.communicator, fallback=True)
        values = SavedValues.model_validate(saved.scalars)
        if "counters" not in left_out:
            engine.counters.load_state_dict(values.counters)
        ranks, loader = runtime.communicator, engine.training_dataloader
        if "data" in parts and "data" not in left_out:
            of_loader = saved_loader_state(loader, saved, values.data, ranks.rank, ranks.world_size)
            if of_loader is not None:
                loader.load_state_dict(of_loader)
        blobs = saved.rank_blobs(0)
        schedule = unpacked(blobs[CLIENT_SCHEDULE], "a schedule") if CLIENT_SCHEDULE in blobs else values.lr_scheduler
        if "lr_scheduler" in parts and "lr_scheduler" not in left_out and schedule is not None:
            engine.lr_scheduler.load_state_dict(schedule)
        if "counters" not in left_out and saved.world_size == runtime.communicator.world_size:
            own = saved.rank_blobs(runtime.communicator.rank)
            RandomStates.from_blobs(own, runtime.accelerator).restore(runtime.accelerator)
        _read_module(engine._own_module, saved)
        if "optimizer" in parts and "optimizer" not in left_out:
            _read_states(engine, saved, values)
        move_weights(engine._own_module, self._run.variant)
        engine._own_data = None
        return f"{saved.storage.location}/{saved.tag}", client_state_of(saved)


def _load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state; the groups stay the objects that the engine and schedules refer to."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in loaded.items() if key != "params"})
    optimizer.param_groups = groups


@torch.no_grad()
def _read_module(module: nn.Module, saved: CheckpointReader) -> None:
    for kind, named in ((PARAM, module.named_parameters()), (BUFFER, module.named_buffers())):
        for name, tensor in named:
            if saved.has(name, kind) and tensor.layout is torch.strided:
                tensor.copy_(_read(saved, name, kind))


def _read(saved: CheckpointReader, name: str, kind: str) -> torch.Tensor:
    """A whole tensor, in its own type."""
    entry = saved.tensor(name, kind)
    flat = torch.empty(entry.numel, dtype=getattr(torch, entry.dtype.value))
    if entry.numel:
        saved.read_into(name, kind, 0, entry.numel, wrap_torch(flat))
    return flat.view(entry.shape)


def _read_states(engine: _Trained, saved: CheckpointReader, values: SavedValues) -> None:
    """The states of each parameter, as torch's optimizers keep them."""
    names = {parameter: name for name, parameter in engine._own_module.named_parameters()}
    kinds: dict[str, list[str]] = {}
    for entry in saved.tensors():
        if entry.kind not in (PARAM, BUFFER):
            kinds.setdefault(entry.fqn, []).append(entry.kind)
    groups = [] if values.optimizer is None else values.optimizer.param_groups
    for group, settings in zip(engine.torch_optimizer.param_groups, groups, strict=False):
        group.update({key: value for key, value in settings.items() if key in group and key != "params"})
    for parameter, name in names.items():
        for kind in kinds.get(name, ()):
            state = engine.torch_optimizer.state[parameter]
            state[kind] = _read(saved, name, kind).to(parameter.device, parameter.dtype).view(parameter.shape)
        if name in kinds:
            numbers = values.client_optimizer.get(name, {})
            steps = {"step": float(values.param_steps[name])} if name in values.param_steps else {}
            for key, number in {**steps, **numbers}.items():
                engine.torch_optimizer.state[parameter].setdefault(key, torch.tensor(number))


def keep_saves_apart(run: ActiveRun, engine: TorchEngine) -> None:
    """Let an engine save to the folder of its run, and load from there what it has saved."""
    folder = run.variant.folder
    if folder is None:
        return
    save, load, written = engine.save_checkpoint, engine.load_checkpoint, set[str]()

    def apart(place: Any) -> str:
        digest = hashlib.sha256(os.path.abspath(str(place)).encode()).hexdigest()[:16]
        return str(Path(folder) / "saved" / digest)

    def save_apart(save_dir: Any, *args: Any, **named: Any) -> Any:
        written.add(apart(save_dir))
        return save(apart(save_dir), *args, **named)

    def load_apart(load_dir: Any, *args: Any, **named: Any) -> Any:
        place = apart(load_dir)
        return load(place if place in written else load_dir, *args, **named)

    vars(engine).update(save_checkpoint=save_apart, load_checkpoint=load_apart, save_16bit_model=lambda *_, **__: True)
