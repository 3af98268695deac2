"""Reading torch's distributed checkpoints, by its own library, in the layouts that are about.

`{"model": ..., "optimizer": ...}` as `get_state_dict` gives it, with an optimizer's states by parameter or flat
(`flatten_optimizer_state_dict`: torchtitan, verl), below a name such as `app` (torch's tutorial), or with the model's
own tensors at the root (torchtitan). Its `.metadata` is a pickle, which torch reads without asking: here it is looked
through first, and one that would make anything but the library's own records is refused. The values next to the tensors
are read by `torch.load` with `weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress
from polyaccel.checkpoint.convert.formats.torch_bin import on_disk
from polyaccel.checkpoint.convert.formats.torch_files import NUMBERS, in_tensor, kept_states, with_schedule
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.convert.optimizers import PeerOptimizer
from polyaccel.checkpoint.convert.optimizers import by_position as names_by_position
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.errors import CheckpointError

MODEL, OPTIMIZER, STATE, STEP = "model", "optimizer", "state", "step"
GROUPS = "param_groups"
_MODELS = (MODEL, "module", "state_dict", "model_state_dict", "model_state")
_OPTIMIZERS = (OPTIMIZER, "optim", "optimizers", "optimizer_state_dict", "optim_state_dict", "opt")
_SCHEDULES = ("lr_scheduler", "scheduler", "lr_schedulers", "schedulers", "lr_scheduler_state_dict")
_COUNTS = (("train_state", "step"), ("step",), ("global_step",), ("global_steps",), ("iteration",))
_OTHER_ROOTS = (
    "train_state",
    "dataloader",
    "rng_state",
    "rng",
    "extra_state",
    "scaler",
    "trainer",
    "loops",
    "callbacks",
)
"""Roots that hold no weights, in a checkpoint whose model has no own root."""
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
_CLASSES = {"Adam": "AdamW", "Sgd": "SGD", "Adagrad": "Adagrad", "Adamax": "Adamax"}
"""Of the optimizers that a config names, torch's class with the same states."""


def read(source: Path) -> Incoming:
    """Read the parameters, the optimizer with its groups, the schedule and the count of steps."""
    metadata = _checked_metadata(source)
    files = _Cached(source, metadata)
    found = _sorted(metadata)
    tensors = [_lazy(files, key, entry, fqn, PARAM) for fqn, (key, entry) in found.model.items()]
    counts = {path: _value(files, key) for path, key in found.counts.items()}
    step = next((int(value) for value in counts.values() if isinstance(value, (int, float))), 0)
    counters = {"global_steps": step, "micro_steps": step} if step > 0 else {}
    incoming = Incoming(tensors, counters=counters, left_out=found.left_out)
    if found.schedule:
        state = _nested({path: _value(files, key) for path, key in found.schedule.items()})
        incoming = with_schedule(incoming, state, f"the schedule in {source}")
    peer = _optimizer(files, found, f"the optimizer in {source}")
    return peer.joined(incoming, steps=step)


@dataclass(slots=True)
class _Sorted:
    """The keys of a checkpoint by what they are of: names of the model, (parameter, state) and (parameter or group,
    setting) of the optimizer, paths inside of the schedule."""

    model: dict[str, tuple[str, TensorStorageMetadata]] = field(default_factory=dict)
    states: dict[tuple[Any, str], str] = field(default_factory=dict)
    settings: dict[tuple[Any, str], str] = field(default_factory=dict)
    schedule: dict[tuple[Any, ...], str] = field(default_factory=dict)
    counts: dict[tuple[str, ...], str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def _sorted(metadata: Metadata) -> _Sorted:
    entries = metadata.state_dict_metadata
    planned = metadata.planner_data or {}
    paths = {key: tuple(planned[key]) if key in planned else _split(key) for key in entries}
    roots = {path[0] for path in paths.values()}
    inside = {path[1] for path in paths.values() if len(path) > 2}
    names = {*_MODELS, *_OPTIMIZERS}
    if len(roots) == 1 and not roots & names and inside & names:  # all of it below one name ("app")
        paths = {key: path[1:] for key, path in paths.items()}
    model = next((name for name in _MODELS if any(path[0] == name and len(path) > 1 for path in paths.values())), None)
    found, others = _Sorted(), dict[str, LeftOut]()
    for key, path in paths.items():
        entry, root = entries[key], str(path[0])
        if root in _OPTIMIZERS and len(path) > 1:
            if not _sort_state(found, key, path[1:]):
                what = ".".join(map(str, path))
                others[what] = LeftOut(what, "no state of an optimizer of torch", is_needed=True)
        elif root in _SCHEDULES and len(path) > 1:
            found.schedule[path[1:]] = key
        elif path in _COUNTS:
            found.counts[path] = key
        elif isinstance(entry, TensorStorageMetadata) and (
            (path[0] == model and len(path) > 1) or (model is None and root not in _OTHER_ROOTS)
        ):
            found.model[".".join(map(str, path[1:] if path[0] == model else path))] = key, entry
        elif root in _SCHEDULES or root in _OPTIMIZERS:
            others[root] = LeftOut(root, "it was saved as one value", is_needed=True)
        else:
            others[root] = LeftOut(root, "neither weights, optimizer nor schedule")
    found.left_out = [*others.values()]
    return found


def _split(key: str) -> tuple[str, ...]:
    """The path of a key that was saved without one: what follows a root's name may have dots."""
    root, _, rest = key.partition(".")
    return (root, rest) if rest and root in (*_MODELS, *_OPTIMIZERS, *_SCHEDULES) else (key,)


def _sort_state(found: _Sorted, key: str, path: Sequence[Any]) -> bool:
    """Put a key of the optimizer where it belongs; False where it belongs nowhere."""
    if len(path) == 1:  # flat, where names have dots too: the last part is the name of the state or setting
        kind, _, rest = str(path[0]).partition(".")
        owner, _, name = rest.rpartition(".")
    else:
        kind, owner, name = str(path[0]), path[1], ".".join(map(str, path[2:]))
    into = {STATE: found.states, GROUPS: found.settings}.get(kind)
    if into is None or owner == "" or not name:
        return False
    into[owner, name] = key
    return True


def _optimizer(files: _Cached, found: _Sorted, origin: str) -> PeerOptimizer:
    peer = PeerOptimizer(origin)
    values: dict[Any, dict[str, Any]] = {}
    for (owner, name), key in found.settings.items():
        value = _value(files, key)
        if isinstance(value, _Unreadable):
            peer.left_out.append(LeftOut(f"{name!r} of group {owner} of {origin}", value.why, is_needed=True))
        else:
            values.setdefault(owner, {})[name] = value
    groups = [values[owner] for owner in sorted(owner for owner in values if isinstance(owner, int))]
    is_by_number = bool(groups) and all(isinstance(key, int) for group in groups for key in group.get("params", ()))
    names = {str(key): name for key, name in names_by_position(groups).items()} if is_by_number else {}
    if is_by_number:
        peer.positions = [len(group["params"]) for group in groups]
    for group in groups:
        peer.add_group(group, group.get("params", ()))
    if not groups:  # one for each parameter
        for owner, group in values.items():
            peer.add_group(group, [str(owner)])
    dimensions: dict[str, bool] = {}
    entries = {key: files.read_metadata().state_dict_metadata[key] for key in found.states.values()}
    for (owner, _), key in found.states.items():
        entry = entries[key]
        has_elements = isinstance(entry, TensorStorageMetadata) and len(entry.size) > 0
        dimensions[str(owner)] = dimensions.get(str(owner), False) or has_elements
    for (owner, name), key in found.states.items():
        entry, fqn = entries[key], names.get(str(owner), str(owner))
        if isinstance(entry, TensorStorageMetadata) and (
            len(entry.size) or (name not in NUMBERS and not dimensions[str(owner)])
        ):
            peer.tensors.append(_lazy(files, key, entry, fqn, name))
            continue
        value = _loaded(files, key, entry).item() if isinstance(entry, TensorStorageMetadata) else _value(files, key)
        if isinstance(value, (int, float)):
            peer.add_number(fqn, name, value)
        elif value is not None:
            peer.left_out.append(LeftOut(f"{name!r} of {fqn!r} in {origin}", "no tensor or number", is_needed=True))
    return peer


@dataclass(frozen=True, slots=True)
class _Unreadable:
    why: str


def _value(files: _Cached, key: str) -> Any:
    """What stands next to the tensors; a tensor of one element is its number."""
    metadata = files.read_metadata()
    entry = metadata.state_dict_metadata[key]
    if isinstance(entry, TensorStorageMetadata):
        tensor = _loaded(files, key, entry)
        return tensor.item() if tensor.numel() == 1 else tensor
    place = next((info for index, info in metadata.storage_data.items() if index.fqn == key), None)
    try:
        if place is None or Path(place.relative_path).name != place.relative_path:
            return _Unreadable("its bytes are not in the folder")
        with Path(files.path, place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
        return _Unreadable(str(error).partition("\n")[0][:200])


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _nested(values: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """A tree of dicts, and of lists where the keys count from 0: the library keeps keys as text."""
    tree: dict[Any, Any] = {}
    for path, value in values.items():
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value

    def listed(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        items = {_number(key): listed(value) for key, value in node.items()}
        is_list = bool(items) and set(items) == {*range(len(items))}
        return [items[key] for key in sorted(items)] if is_list else items

    found: dict[str, Any] = {str(key): listed(value) for key, value in tree.items()}
    return found


class _Cached(FileSystemReader):
    """A reader of which the metadata was read, and looked through, already."""

    def __init__(self, source: Path, metadata: Metadata) -> None:
        super().__init__(source)
        self._checked = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._checked


def _lazy(files: _Cached, key: str, entry: TensorStorageMetadata, fqn: str, kind: str) -> ImportTensor:
    shape, kept = tuple(entry.size), list[ImportTensor]()
    like = in_tensor(fqn, kind, torch.empty(0, dtype=entry.properties.dtype), key)

    def read(start: int, numel: int) -> bytes:
        if not kept:  # read once, and let go with its last run
            kept.append(in_tensor(fqn, kind, _loaded(files, key, entry), key))
        data = kept[0].read(start, numel)
        if start + numel == entry.size.numel():
            kept.clear()
        return data

    return ImportTensor(fqn, kind, shape, like.dtype, read)


def _loaded(files: _Cached, key: str, entry: TensorStorageMetadata) -> torch.Tensor:
    target = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
    try:
        with alone():
            load(target, storage_reader=files, no_dist=True)
    except (RuntimeError, ValueError, OSError, KeyError, CheckpointException) as error:
        raise CheckpointError(
            f"{key!r} of {files.path} cannot be read: {str(error)[:400]}", hint="fetch it again", value=key
        ) from error
    return target[key]


def _checked_metadata(source: Path) -> Metadata:
    path = source / ".metadata"
    if not path.is_file():
        raise CheckpointError(
            f"{source} holds no .metadata",
            hint="give the folder that torch.distributed.checkpoint wrote",
            value=str(path),
        )
    try:
        metadata = _Records(io.BytesIO(path.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is refused: {error}", hint="fetch it again", value=str(path)) from error
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


def write(out: Path, reader: CheckpointReader, tensors: Sequence[ExportTensor], progress: Progress) -> list[str]:
    """Write parameters and buffers under `model`, states under `optimizer.state`, and groups; return file names."""
    out.mkdir(parents=True, exist_ok=True)
    with on_disk(out, tensors, progress) as found:
        model = {tensor.name: found[tensor] for tensor in tensors if tensor.tensor.kind in (PARAM, BUFFER)}
        ties = reader.scalars.get("tied_weights") or {}
        model |= {other: model[first] for other, first in ties.items() if first in model}
        states: dict[str, dict[str, Any]] = {}
        for tensor in tensors:
            if tensor.tensor.kind not in (PARAM, BUFFER):
                states.setdefault(tensor.name, {})[tensor.tensor.kind] = found[tensor]
        tree: dict[str, Any] = {MODEL: model}
        is_whole = {tensor.tensor.kind for tensor in tensors} == {tensor.kind for tensor in reader.tensors()}
        kept = kept_states(reader) if is_whole else {}
        if states or kept:
            steps, numbers = reader.scalars.get("param_steps", {}), reader.scalars.get("client_optimizer") or {}
            for fqn, state in states.items():
                own = numbers.get(fqn) or ({} if kept.get(fqn) else {STEP: float(steps.get(fqn, 0))})
                state.update({name: torch.tensor(float(number)) for name, number in own.items()})
            for fqn, values in kept.items():
                states.setdefault(fqn, {}).update(values)
            params = [tensor.name for tensor in tensors if tensor.tensor.kind == PARAM]
            tree[OPTIMIZER] = {STATE: states, **_groups(reader, params)}
        with alone():
            save(tree, checkpoint_id=out, no_dist=True)
    return sorted(path.name for path in out.iterdir() if path.is_file())


@contextmanager
def alone() -> Iterator[None]:
    """Without the warning that there is no process group, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _groups(reader: CheckpointReader, params: Sequence[str]) -> dict[str, Any]:
    """Return the groups with all settings of torch's optimizer of that kind; {} if a parameter has no group."""
    saved = reader.scalars.get("optimizer")
    groups = saved.get("param_groups", []) if isinstance(saved, Mapping) else []
    names = saved.get("param_names") if isinstance(saved, Mapping) else None
    if names is None:
        names = [[*params]] if len(groups) == 1 else None
    if names is None:
        return {}
    defaults = _defaults(str(reader.scalars.get("optimizer_kind") or reader.scalars.get("imported", {}).get("family")))
    found = []
    for group, members in zip(groups, names, strict=True):
        own = {"decoupled_weight_decay" if key == "decoupled" else key: value for key, value in group.items()}
        if defaults:
            own = {key: value for key, value in own.items() if key in defaults or key == "initial_lr"}
        found.append({**defaults, **own, "params": [*members]})
    return {"param_groups": found}


def _defaults(kind: str) -> dict[str, Any]:
    """The settings of torch's optimizer with the states of `kind`; nothing where torch has none."""
    home, _, name = kind.partition(" on ")[0].rpartition(".")
    found = getattr(torch.optim, _CLASSES.get(kind, name), None)
    if home and home.split(".")[:2] != ["torch", "optim"]:
        return {}  # another one of that name
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return {}
    optimizer = found([torch.nn.Parameter(torch.zeros(1, 1))], lr=0.0)  # type: ignore[call-arg]
    return {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
