"""`pytorch_model.bin`: a state dict as `torch.save` writes it. Reading allows tensors and plain containers alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress, file_names, in_files, index_of, mapped
from polyaccel.checkpoint.convert.formats.model_files import find_files, with_states
from polyaccel.checkpoint.convert.formats.torch_files import TYPES, in_tensor, load_tree, optimizer_from, with_schedule
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.checkpoint.storage.file import FileStorage
from polyaccel.errors import CheckpointError

STEM, SUFFIX = "pytorch_model", ".bin"


def write(out: Path, tensors: Sequence[ExportTensor], most_nbytes: int, progress: Progress) -> list[str]:
    """Write one file, or several and their index, through mapped temporary files; return their names."""
    out.mkdir(parents=True, exist_ok=True)
    files = in_files(tensors, most_nbytes)
    names = file_names(STEM, SUFFIX, len(files))
    for name, members in zip(names, files, strict=True):
        with on_disk(out, members, progress) as found:
            named = {each: found[tensor] for tensor in members for each in (tensor.name, *tensor.other_names)}
            torch.save(named, out / f".{name}.tmp")
        os.replace(out / f".{name}.tmp", out / name)
    if len(files) > 1:
        names.append(f"{STEM}{SUFFIX}.index.json")
        FileStorage(out).write(names[-1], [json.dumps(index_of(files, names[:-1]), indent=2).encode()])
    return names


@contextmanager
def on_disk(
    folder: Path, tensors: Sequence[ExportTensor], progress: Progress
) -> Iterator[dict[ExportTensor, torch.Tensor]]:
    """The tensors as torch's, over a file in `folder` that is gone when the block is left."""
    with mapped(folder, tensors, progress) as found:
        yield {
            tensor: torch.from_numpy(data).view(TYPES[tensor.dtype]).reshape(tensor.shape)
            for tensor, data in zip(tensors, found, strict=True)
        }


def read(source: Path) -> Incoming:
    """Read tensors of a file or a folder's model, mapped; of tied ones the first. Includes trainers' states."""
    files = find_files(source, SUFFIX)
    trees = {file: _Parts.from_tree(load_tree(file), file) for file in files.files}
    files.check({file: [*parts.weights] for file, parts in trees.items()})
    tensors: list[ImportTensor] = []
    seen: dict[tuple[Any, ...], str] = {}
    for file, parts in trees.items():
        for name, tensor in parts.weights.items():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            if tensor.numel() and seen.setdefault(place, name) != name:
                continue
            tensors.append(in_tensor(name, PARAM, tensor, file))
    incoming = Incoming(tensors)
    for file, parts in trees.items():
        incoming = parts.joined(incoming, file)
    return with_states(incoming, files)


_WEIGHTS = ("state_dict", "model_state_dict", "model", "module", "model_state", "net", "weights")
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_state", "optim")
_SCHEDULES = ("lr_scheduler", "scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict")
_COUNTS = ("global_step", "global_steps", "step", "iteration")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What scripts put into one file: weights alone, or below a name, with more next to."""

    weights: Mapping[str, torch.Tensor]
    others: Mapping[str, Any]

    @classmethod
    def from_tree(cls, tree: Any, file: Path) -> _Parts:
        """Find the parts of `tree`. Raises CheckpointError where it has no tensors by name."""
        if isinstance(tree, Mapping):
            name = next((each for each in _WEIGHTS if isinstance(tree.get(each), Mapping)), None)
            weights = tree if name is None else tree[name]
            others = {} if name is None else {str(key): value for key, value in tree.items() if key != name}
            odd = [key for key, value in weights.items() if not torch.is_tensor(value)]
        else:
            weights, others, odd = {}, {}, [type(tree).__name__]
        if odd:
            raise CheckpointError(
                f"{file} holds more than tensors by name: {str(odd[0])[:100]!r}",
                hint="save a state dict of tensors with torch.save",
                value=str(file),
            )
        return cls(weights, others)

    def joined(self, incoming: Incoming, file: Path) -> Incoming:
        """`incoming` with the optimizer, the schedule and the count of steps; the rest is left out."""
        step = next((value for key, value in self.others.items() if key in _COUNTS and isinstance(value, int)), 0)
        if step > 0:
            incoming = replace(incoming, counters={"global_steps": step, "micro_steps": step})
        rest = []
        for key, value in self.others.items():
            states = value if isinstance(value, list) else [value]
            if value is None or key in _COUNTS or not states:
                continue
            if key in (*_OPTIMIZERS, *_SCHEDULES) and len(states) > 1:
                rest.append(LeftOut(f"{key!r} of {file.name}", f"{len(states)} of them", is_needed=True))
            elif key in _SCHEDULES:
                incoming = with_schedule(incoming, states[0], f"{key!r} of {file.name}")
            elif key in _OPTIMIZERS:
                incoming = optimizer_from(states[0], f"{key!r} of {file.name}").joined(incoming, steps=step)
            else:
                rest.append(LeftOut(f"{key!r} of {file.name}", "neither weights, optimizer nor schedule"))
        return replace(incoming, left_out=[*incoming.left_out, *rest])
