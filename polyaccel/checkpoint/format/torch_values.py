"""Values that scripts and libraries keep next to a model's tensors, as bytes of a checkpoint: states of schedules, of
optimizers on whole parameters, of modules.

The bytes are a safetensors file: its tensors, and in its metadata a tree with the place of each. Reading them makes the
types named here and nothing else; no code is run. What `torch.save` wrote into older checkpoints is read too, as
strictly.
"""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from polyaccel.core import tagged_json
from polyaccel.errors import CheckpointError

_MARK = "__packed__"
_TREE = "tree"
_ZIP = b"PK"  # how files of torch.save begin
_SIMPLE = (bool, int, float, str, bytes, type(None))


def packed(state: Any, what: str) -> bytes:
    """Encode tensors, arrays, plain values, lists, dicts, Counters and sets; errors call it `what`."""
    tensors: dict[str, Tensor] = {}
    tree = _encoded(state, what, tensors)
    try:
        return save(tensors, {_TREE: tagged_json.to_bytes(tree, what).decode("ascii")})
    except (tagged_json.SerializationError, SafetensorError, KeyError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"a checkpoint cannot hold {what}: {error}", hint=_HINT) from error


def unpacked(data: bytes, what: str) -> Any:
    """Decode what `packed` made; raises CheckpointError for anything else."""
    try:
        if data[:2] == _ZIP:
            return torch.load(io.BytesIO(data), weights_only=True, map_location=_storage_here)
        return _decoded(_tree_of(data), load(data))
    except (
        *(RuntimeError, ValueError, TypeError, KeyError, AttributeError, EOFError, RecursionError),
        *(UnpicklingError, BadZipFile, SafetensorError, tagged_json.SerializationError),
    ) as error:
        raise CheckpointError(f"{what} cannot be read: {error}", hint="load another tag") from error


_HINT = "keep tensors, numbers, strings, and lists and dicts of them"


def _encoded(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return _tensor(value, where, tensors)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        name = str(len(tensors))
        tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
        return {_MARK: "array", "name": name, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value)
    if kind in (list, tuple, set, frozenset, torch.Size):
        items = [_encoded(item, f"{where}[{index}]", tensors) for index, item in enumerate(value)]
        if kind in (set, frozenset):
            return {_MARK: "set", "items": items}
        return items if kind is list else tuple(items)
    if isinstance(value, dict):
        return _dict(value, where, tensors)
    if isinstance(value, complex):
        return {_MARK: "complex", "parts": [value.real, value.imag]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {_MARK: kind.__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, (str, float, int)):  # a member of an enum, or another subclass
        return next(base(value) for base in (str, float, int) if isinstance(value, base))
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise CheckpointError(f"a checkpoint cannot hold {where}, a {name}", hint=_HINT, value=name)


def _tensor(value: Tensor, where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise CheckpointError(
            f"a checkpoint cannot hold {where}, a tensor of layout {value.layout} and type {value.dtype} on "
            f"{value.device}",
            hint="keep plain tensors: .to_dense(), .dequantize()",
            value=where,
        )
    name = str(len(tensors))
    tensors[name] = value.detach().cpu().contiguous().clone()
    return {_MARK: "tensor", "name": name, "device": str(value.device)}


def _dict(value: dict[Any, Any], where: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    items = {key: _encoded(item, f"{where}.{key}", tensors) for key, item in value.items()}
    kind = {Counter: "counter", OrderedDict: "ordered"}.get(type(value), "dict")
    if kind == "dict" and _MARK not in items and all(type(key) is str for key in items):
        return items
    pairs = [[_encoded(key, f"a key of {where}", tensors), item] for key, item in items.items()]
    return {_MARK: kind, "items": pairs}


def _decoded(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, (list, tuple)):
        items = [_decoded(item, tensors) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if not isinstance(tree, dict):
        return tree
    if _MARK not in tree:
        return {key: _decoded(item, tensors) for key, item in tree.items()}
    return _MARKED[tree[_MARK]](tree, tensors)


def _pairs(tree: dict[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(_decoded(key, tensors), _decoded(item, tensors)) for key, item in tree["items"]]


_MARKED: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], Any]] = {
    "tensor": lambda tree, tensors: _here(tensors[tree["name"]], tree["device"]),
    "array": lambda tree, tensors: tensors[tree["name"]].numpy().reshape(tree["shape"]),
    "dict": lambda tree, tensors: dict(_pairs(tree, tensors)),
    "ordered": lambda tree, tensors: OrderedDict(_pairs(tree, tensors)),
    "counter": lambda tree, tensors: Counter(dict(_pairs(tree, tensors))),
    "set": lambda tree, tensors: {_decoded(item, tensors) for item in tree["items"]},
    "complex": lambda tree, _: complex(*tree["parts"]),
    "dtype": lambda tree, _: _dtypes()[tree["name"]],
    "device": lambda tree, _: torch.device(tree["name"]),
}


def _dtypes() -> dict[str, torch.dtype]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names of torch are on their way out
        named = [getattr(torch, name) for name in dir(torch)]
    return {str(value).removeprefix("torch."): value for value in named if isinstance(value, torch.dtype)}


def _tree_of(data: bytes) -> Any:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return tagged_json.from_bytes(header["__metadata__"][_TREE].encode("ascii"))


def _here(tensor: Tensor, device: str) -> Tensor:
    """The tensor on the device that it was saved on, if this process has it."""
    return tensor.to(device) if _is_here(device) else tensor


def _storage_here(storage: Any, location: str) -> Any:
    """Map storages of absent devices to the host, for `torch.load`; None leaves the rest to torch."""
    return None if _is_here(location) else storage


def _is_here(device: str) -> bool:
    kind, _, index = device.partition(":")
    try:
        module = torch.get_device_module(kind)
        return bool(module.is_available() and int(index or 0) < module.device_count())
    except (RuntimeError, AttributeError, AssertionError):  # a type of device that this torch has not
        return False
