"""torch's distributed checkpoints, by its own library: `{"model": ..., "optimizer": ...}` as `get_state_dict` gives it.

Its `.metadata` is a pickle, which torch reads without asking: here it is looked through first, and one that would make
anything but the library's own records is refused.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.tensors import PARAM
from polyaccel.errors import CheckpointError
from polyaccel.exchange.exporting import BUFFER, OutTensor, Progress
from polyaccel.exchange.formats.torch_bin import in_tensor, on_disk
from polyaccel.exchange.importing import Incoming, InTensor

MODEL, OPTIMIZER, STATE, STEP = "model", "optimizer", "state", "step"
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "device",
        *(str(value).split(".")[1] for value in vars(torch).values() if isinstance(value, torch.dtype)),
    },
    "torch._C": {"_TensorMeta"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}
"""The modules of which metadata may name something, and what (None: everything that is a class)."""


def write(out: Path, reader: CheckpointReader, tensors: Sequence[OutTensor], progress: Progress) -> list[str]:
    """Write parameters and buffers under `model`, optimizer states under `optimizer.state`, and the groups. Returns the
    names of the files. Which group a parameter is in is known where there is one group. Raises CheckpointError for
    damage."""
    out.mkdir(parents=True, exist_ok=True)
    with on_disk(out, tensors, progress) as found:
        model = {tensor.name: found[tensor] for tensor in tensors if tensor.tensor.kind in (PARAM, BUFFER)}
        states: dict[str, dict[str, Any]] = {}
        for tensor in tensors:
            if tensor.tensor.kind not in (PARAM, BUFFER):
                states.setdefault(tensor.name, {})[tensor.tensor.kind] = found[tensor]
        tree: dict[str, Any] = {MODEL: model}
        if states:
            steps = reader.scalars.get("param_steps", {})
            for fqn, state in states.items():
                state[STEP] = torch.tensor(float(steps.get(fqn, 0)))
            tree[OPTIMIZER] = {STATE: states, **_groups(reader, sorted(states))}
        with _alone():
            save(tree, checkpoint_id=out, no_dist=True)
    return sorted(path.name for path in out.iterdir() if path.is_file())


def read(source: Path) -> Incoming:
    """The parameters, and the optimizer states of those that have them; without a `model` every tensor is a parameter.

    Raises CheckpointError where `source` is no such checkpoint, or its metadata names what it should not.
    """
    metadata = _checked_metadata(source)
    files = _Cached(source, metadata)
    has_model = any(key.startswith(f"{MODEL}.") for key in metadata.state_dict_metadata)
    tensors, steps = list[InTensor](), dict[str, int]()
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        path = (metadata.planner_data or {}).get(key, (key,))
        match [str(part) for part in path]:
            case [root, *names] if root == MODEL and has_model and names:
                fqn, kind = ".".join(names), PARAM
            case [root, state, fqn, kind] if root in (OPTIMIZER, "optim") and state == STATE:
                if kind == STEP:
                    steps[fqn] = int(_loaded(files, key, entry).item())
                    continue
            case names if not has_model:
                fqn, kind = ".".join(names), PARAM
            case _:
                continue
        tensors.append(_lazy(files, key, entry, fqn, kind))
    groups = _saved_groups(files, metadata)
    return Incoming(tensors, steps=steps, groups=groups if steps else None)


class _Cached(FileSystemReader):
    """A reader of which the metadata was read, and looked through, already."""

    def __init__(self, source: Path, metadata: Metadata) -> None:
        super().__init__(source)
        self._checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked


def _lazy(files: _Cached, key: str, entry: TensorStorageMetadata, fqn: str, kind: str) -> InTensor:
    shape, kept = tuple(entry.size), list[InTensor]()
    like = in_tensor(fqn, kind, torch.empty(0, dtype=entry.properties.dtype), key)

    def read(start: int, numel: int) -> bytes:
        if not kept:  # read once, and let go with its last run
            kept.append(in_tensor(fqn, kind, _loaded(files, key, entry), key))
        data = kept[0].read(start, numel)
        if start + numel == entry.size.numel():
            kept.clear()
        return data

    return InTensor(fqn, kind, shape, like.dtype, read)


def _loaded(files: _Cached, key: str, entry: TensorStorageMetadata) -> torch.Tensor:
    target = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    try:
        with _alone():
            load(target, storage_reader=files, no_dist=True)
    except (RuntimeError, ValueError, OSError, KeyError, CheckpointException) as error:
        raise CheckpointError(
            f"{key!r} of {files.path} cannot be read: {str(error)[:400]}", cure="fetch it again", value=key
        ) from error
    return target[key]


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that there is no process group, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _groups(reader: CheckpointReader, trained: Sequence[str]) -> dict[str, Any]:
    saved = reader.scalars.get("optimizer")
    groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else []
    return {"param_groups": [{**groups[0], "params": list(trained)}]} if len(groups) == 1 else {}


def _saved_groups(files: _Cached, metadata: Metadata) -> list[dict[str, Any]] | None:
    """The hyperparameters of the groups, of which the library keeps each value as bytes of its own: only their number
    is of use here, since a config says them again."""
    numbers = {
        path[2]
        for path in (metadata.planner_data or {}).values()
        if len(path) > 3 and path[:2] in ((OPTIMIZER, "param_groups"), ("optim", "param_groups"))
    }
    return [{} for _ in numbers] or None


def _checked_metadata(source: Path) -> Metadata:
    path = source / ".metadata"
    if not path.is_file():
        raise CheckpointError(
            f"{source} holds no .metadata",
            cure="give the folder that torch.distributed.checkpoint wrote",
            value=str(path),
        )
    try:
        metadata = _Records(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is refused: {error}", cure="fetch it again", value=str(path)) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path} is a {type(metadata).__name__}, no metadata", value=str(path))
    return metadata


class _Records(pickle.Unpickler):
    """Reads what torch's library writes of its own records, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get(module, set())
        found = super().find_class(module, name) if module in _ALLOWED and "." not in name else None
        is_record = isinstance(found, type) and found.__module__ == module
        if found is None or (not is_record if allowed is None else name not in allowed):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no metadata needs")
        return found
