"""Weights of files, written into a module that no engine has yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import torch_dtype, wrap_torch
from polyaccel.checkpoint import CheckpointReader, FileStorage, TensorEntry, list_checkpoints, open_checkpoint
from polyaccel.checkpoint.convert.importers import find_importer
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming
from polyaccel.checkpoint.format.recognition import recognise, recognise_file
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.errors import CheckpointError
from polyaccel.torch.deferred_init.values import is_deferred

SavedTensor = tuple[str, Callable[[], Tensor]]
"""The name of a tensor, and what reads it."""


def load_weights(module: nn.Module, source: str) -> None:
    """Overwrite the parameters and buffers of `module` with those at `source`: a directory of checkpoints, or files
    that an importer reads. Parameters that have no memory yet get it on the host.

    Raises CheckpointError for what cannot be read, and where a parameter is missing there or has another shape.
    """
    targets = _targets(module)
    missing = {name for name, _ in module.named_parameters()}
    prefix = getattr(module, "base_model_prefix", "")
    for name, read in _saved(source):
        found = name if name in targets else f"{prefix}.{name}"  # base models are saved without it
        if found not in targets:
            continue
        value = read()
        for alias in _write(module, found, value, source):
            missing.discard(alias)
    if missing:
        names = sorted(missing)
        raise CheckpointError(
            f"{source} lacks {len(names)} parameters of the model: {', '.join(names[:8])}",
            hint="give the weights of this model",
            value=names,
        )


def _targets(module: nn.Module) -> set[str]:
    """The names under which tensors may be saved, also the second ones of tied parameters."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name for name, _ in module.named_buffers(remove_duplicate=False)}


def _write(module: nn.Module, name: str, value: Tensor, source: str) -> list[str]:
    """Write `value` into the tensor `name`. Return all names that this tensor has."""
    places = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    target = places[name]
    if target.shape != value.shape:
        shapes = f"{tuple(value.shape)} there and {tuple(target.shape)} in the model"
        raise CheckpointError(f"{name!r} of {source} is {shapes}", hint="give the weights of this model", value=name)
    aliases = [other for other, one in places.items() if one is target]
    if target.is_meta or is_deferred(target):
        own = value.to(target.dtype)
        parameter = nn.Parameter(own, target.requires_grad) if isinstance(target, nn.Parameter) else None
        for alias in aliases:
            owner, _, attribute = alias.rpartition(".")
            part = module.get_submodule(owner)
            if parameter is not None:
                part._parameters[attribute] = parameter
            else:
                part._buffers[attribute] = own
    else:
        with torch.no_grad():
            target.copy_(value)
    return aliases


def _saved(source: str) -> Iterator[SavedTensor]:
    """Every parameter and buffer at `source`."""
    storage = FileStorage(source)
    is_ours = Path(source).is_dir() and any(status.is_good for status in list_checkpoints(storage))
    foreign = None if is_ours else recognise_file(storage) or recognise(storage)
    if foreign is None:
        return _of_checkpoint(open_checkpoint(storage))
    return _of_files(find_importer(foreign.format_name)(Path(foreign.place)))


def _of_checkpoint(saved: CheckpointReader) -> Iterator[SavedTensor]:
    for entry in saved.tensors():
        if entry.kind in (PARAM, BUFFER):
            yield entry.fqn, partial(_read_entry, saved, entry)


def _read_entry(saved: CheckpointReader, entry: TensorEntry) -> Tensor:
    flat = torch.empty(entry.numel, dtype=torch_dtype(entry.dtype))
    if entry.numel:
        saved.read_into(entry.fqn, entry.kind, 0, entry.numel, wrap_torch(flat))
    return flat.view(entry.shape)


def _of_files(incoming: Incoming) -> Iterator[SavedTensor]:
    for one in incoming.weights().tensors:
        yield one.fqn, partial(_read, one)


def _read(saved: ImportTensor) -> Tensor:
    flat = torch.empty(prod(saved.shape), dtype=torch_dtype(saved.dtype))
    if flat.numel():
        wrap_torch(flat).from_bytes(saved.read(0, flat.numel()))
    return flat.view(saved.shape)
