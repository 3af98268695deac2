"""Orbax checkpoints, by their own library: a tree of arrays, `params` and where we wrote it those of
`polyaccel.checkpoint.convert.trees`.

The library is in no extra: it is imported when a checkpoint of its kind is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from polyaccel.accelerators.memory.numpy import numpy_dtype
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.convert.exporting import ExportTensor, Progress, mapped
from polyaccel.checkpoint.convert.importing import ImportTensor, Incoming, LeftOut
from polyaccel.checkpoint.convert.trees import (
    BUFFERS,
    ENGINE,
    OPTAX,
    OPTIMIZER,
    PARAMS,
    blob_of,
    files_of,
    nested,
    packed,
    path_of,
    tensor_at,
    unpacked,
)
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError, ShardingError


def write(
    out: Path, tensors: Sequence[ExportTensor], progress: Progress, reader: CheckpointReader | None = None
) -> list[str]:
    """Write the tree from a mapped temporary file, with the run's values of `reader`; return the names of its files."""
    ocp = _library()
    out.parent.mkdir(parents=True, exist_ok=True)
    with mapped(out.parent, tensors, progress) as found:
        leaves: dict[tuple[str, ...], Any] = {}
        for tensor, data in zip(tensors, found, strict=True):
            flat = data.view(numpy_dtype(tensor.dtype))
            leaves[path_of(tensor.name, tensor.tensor.kind)] = flat.reshape(tensor.shape)
        if reader is not None and reader.scalars:
            leaves[(ENGINE,)] = packed(reader.scalars)
            for name, file in files_of(reader.rank_blobs(0) | reader.owned_blobs()).items():
                leaves[OPTIMIZER, OPTAX, name] = file[name]
        tree = nested(leaves)
        most_nbytes = max((tensor.nbytes for tensor in tensors), default=0)
        with ocp.Checkpointer(_handler(ocp, most_nbytes)) as checkpointer:
            checkpointer.save(out.absolute(), args=ocp.args.PyTreeSave(tree), force=True)
    return sorted(each.name for each in out.iterdir())


def _handler(ocp: Any, most_nbytes: int) -> Any:
    """Return a writer of arrays that makes no copies where the library allows; `most_nbytes`: the largest array."""
    kinds = ocp.type_handlers
    try:
        handler = kinds.NumpyHandler(deepcopy_host_arrays=False)
    except TypeError:  # an older version, which always copies
        handler = kinds.NumpyHandler()
    others = (import_module("jax").Array, kinds.ArrayHandler())  # without it the library warns
    registry = kinds.create_type_handler_registry((np.ndarray, handler), others)
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry, save_concurrent_gb=1 + -(-most_nbytes // (1 << 30))
    )


def read(source: Path) -> Incoming:
    """Read the arrays of `trees`, or all arrays where there is no `params`, each when it is asked for."""
    ocp = _library()
    source = _item(source.absolute())
    left_out = dict[str, LeftOut]()
    try:
        found = ocp.PyTreeCheckpointer().metadata(source)
        tree = getattr(found.item_metadata, "tree", None)
    except (ValueError, OSError, KeyError, AttributeError) as error:
        raise _unreadable(source, str(error)) from error
    if not isinstance(tree, (Mapping, list, tuple)):
        raise _unreadable(source, "it holds no tree of arrays")
    tensors = []
    scalars: dict[str, Any] | None = None
    optax: dict[str, Any] = {}
    is_ours = PARAMS in tree and ENGINE in tree
    for path, leaf in _leaves(tree):
        root = path[0]
        if is_ours and path == (ENGINE,):
            scalars = unpacked(_one(ocp, source, tree, path))
            continue
        if is_ours and path[:2] == (OPTIMIZER, OPTAX):
            optax[".".join(path[2:])] = _one(ocp, source, tree, path)
            continue
        place: tuple[str, str] | None = (".".join(path), PARAM)
        if PARAMS in tree:
            place = tensor_at(path) if is_ours or root in (PARAMS, BUFFERS, OPTIMIZER) else None
        if place is None:
            is_needed = root in ("opt_state", OPTIMIZER)
            left_out[root] = LeftOut(f"{root!r} of {source}", "not the parameters", is_needed)
            continue
        fqn, kind = place
        try:
            dtype = DType.parse(np.dtype(leaf.dtype).name)
        except (ShardingError, TypeError) as error:
            raise CheckpointError(
                f"{fqn!r} in {source} is of the type {leaf.dtype}, which polyaccel has not", value=str(leaf.dtype)
            ) from error
        tensors.append(_lazy(ocp, source, tree, path, fqn, kind, tuple(leaf.shape), dtype))
    blobs = {OPTAX: blob_of(optax)} if optax else {}
    return Incoming(tensors, run=scalars, blobs=blobs, left_out=[*left_out.values()])


def _item(source: Path) -> Path:
    """The folder of a tree in what a CheckpointManager wrote: of the newest step, or of one."""
    if (source / "_METADATA").is_file() or not source.is_dir():
        return source
    steps = sorted((int(each.name), each) for each in source.iterdir() if each.name.isdecimal())
    step = steps[-1][1] if steps else source
    items = [step / name for name in ("default", "state", "params", "items")]
    return next((each for each in items if each.is_dir()), step)


def _lazy(
    ocp: Any,
    source: Path,
    tree: Any,
    path: tuple[str, ...],
    fqn: str,
    kind: str,
    shape: tuple[int, ...],
    dtype: DType,
) -> ImportTensor:
    kept: list[Any] = []

    def read_elements(start: int, numel: int) -> bytes:
        if not kept:  # read once, and let go with its last run
            kept.append(np.ascontiguousarray(_one(ocp, source, tree, path)).reshape(-1))
        data: bytes = kept[0][start : start + numel].tobytes()
        if start + numel == prod(shape):
            kept.clear()
        return data

    return ImportTensor(fqn, kind, shape, dtype, read_elements)


def _one(ocp: Any, source: Path, tree: Any, path: tuple[str, ...]) -> Any:
    """One array of the tree, the others left where they are."""
    asked = _mapped(tree, lambda other: 0 if other == path else ocp.PLACEHOLDER)
    arguments = _mapped(tree, lambda other: ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        found = ocp.PyTreeCheckpointer().restore(
            source, args=ocp.args.PyTreeRestore(item=asked, restore_args=arguments)
        )
    except (ValueError, OSError, KeyError) as error:
        raise _unreadable(source, str(error)) from error
    for name in path:
        found = found[name] if isinstance(found, Mapping) else found[int(name)]
    return found


def _mapped(tree: Any, make: Callable[[tuple[str, ...]], Any], path: tuple[str, ...] = ()) -> Any:
    """A tree of the same form, with what `make` gives for the path of each leaf."""
    if isinstance(tree, Mapping):
        return {name: _mapped(child, make, (*path, str(name))) for name, child in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_mapped(child, make, (*path, str(index))) for index, child in enumerate(tree)]
    return tree if tree is None else make(path)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from _leaves(child, (*path, str(name)))
    elif isinstance(tree, (list, tuple)):
        for index, child in enumerate(tree):
            yield from _leaves(child, (*path, str(index)))
    elif hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield path, tree


def _library() -> Any:
    try:
        return import_module("orbax.checkpoint")
    except ImportError as error:
        raise CheckpointError(
            f"orbax cannot be imported: {error}", hint="pip install orbax-checkpoint", value="orbax"
        ) from error


def _unreadable(source: Path, why: str) -> CheckpointError:
    hint = "give the folder that a checkpointer of orbax saved a tree in"
    return CheckpointError(f"{source} is not a checkpoint of orbax: {why[:300]}", hint=hint, value=str(source))
