"""flax's `.msgpack` files, by its own library: a tree of arrays, with `params` where there is more than parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError

_PARAMS = "params"


def read(source: Path) -> Incoming:
    """Read the arrays below `params`, or all arrays; leave out what stands next to it."""
    files = [source] if source.is_file() else sorted(source.glob("*.msgpack"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise CheckpointError(f"{source} has not one .msgpack file: {found}", hint="give the file", value=str(source))
    try:
        restore = import_module("flax.serialization").msgpack_restore
        tree = restore(files[0].read_bytes())
    except ImportError as error:
        raise CheckpointError(f"flax cannot be imported: {error}", hint="pip install flax", value="flax") from error
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise CheckpointError(
            f"{files[0]} is not a file of flax: {error}", hint="fetch it again", value=str(files[0])
        ) from error
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{files[0]} holds no tree of arrays", value=str(files[0]))
    left_out = []
    if isinstance(tree.get(_PARAMS), Mapping):
        left_out = [
            LeftOut(f"{name!r} of {files[0].name}", "not the parameters", is_needed=name == "opt_state" and bool(child))
            for name, child in tree.items()
            if name != _PARAMS
        ]
        tree = tree[_PARAMS]
    return Incoming([_in_tensor(name, array, files[0]) for name, array in _leaves(tree)], left_out=left_out)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves(child, (*path, str(name)))
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield ".".join(path), tree


def _in_tensor(fqn: str, value: Any, file: Path) -> ImportTensor:
    array = np.asarray(value)
    flat = np.ascontiguousarray(array).reshape(-1)
    try:
        dtype = DType.parse(array.dtype.name)
    except ShardingError as error:
        raise CheckpointError(
            f"{fqn!r} in {file} is of the type {array.dtype}, which polyaccel has not", value=str(array.dtype)
        ) from error
    return ImportTensor(fqn, PARAM, array.shape, dtype, lambda start, numel: flat[start : start + numel].tobytes())
