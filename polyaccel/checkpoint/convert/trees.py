"""A checkpoint as a tree of arrays, as orbax saves it and as `engine.state_dict()` of JAX engines gives it.

A tensor `a.b` is the leaf `b` of the branch `a`: parameters below `params`, buffers and carried state below `buffers`
or `state`, optimizer states below `optimizer` and their kind. States of an optax transformation on whole parameters are
below `optimizer` and `optax`, by their paths. `engine` has the plain values: JSON in an array of bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyaccel.accelerators.memory.numpy import NumpyBuffer, numpy_dtype
from polyaccel.checkpoint.format.commit import Commit, write_commit
from polyaccel.checkpoint.format.manifest import decode_plain, encode_plain
from polyaccel.checkpoint.format.pieces import MAX_PIECE_NBYTES, PieceSpec, RankFile, TensorPiece, reading
from polyaccel.checkpoint.format.tensors import BUFFER, PARAM
from polyaccel.checkpoint.load.cooperative.blobs import OWNED
from polyaccel.checkpoint.parsing import json_object
from polyaccel.checkpoint.save.protocol import SaveContents, SavePart, manifest_of, publish
from polyaccel.checkpoint.storage.memory import MemoryStorage
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

PARAMS, BUFFERS, STATE, OPTIMIZER, ENGINE = "params", "buffers", "state", "optimizer", "engine"
OPTAX = "optax"
"""The branch of `optimizer`, and the blob of rank 0, with states of an optax transformation on whole parameters."""
OWNED_OPTAX = f"{OWNED}{OPTAX}."
"""The blob with those of another rank, whose number follows."""
_ROOTS = {PARAM: (PARAMS,), BUFFER: (BUFFERS,)}
_SAVE, _STEP_NBYTES = "save-0001-00000000", 4096

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A checkpoint in memory: tensors by name and kind, plain values, and states of optax on whole parameters."""

    tensors: Mapping[tuple[str, str], Array]
    scalars: Mapping[str, Any]
    optax: Mapping[str, Array] = field(default_factory=dict)


def path_of(fqn: str, kind: str) -> tuple[str, ...]:
    """Return the place of a tensor in the tree."""
    return (*_ROOTS.get(kind, (OPTIMIZER, kind)), *fqn.split("."))


def tensor_at(path: Sequence[str]) -> tuple[str, str] | None:
    """Return name and kind of the tensor at a place of a tree; None where there is none. A tree that is one array has
    the name that the engine gives it: `params` or `state`."""
    match path:
        case [root, *names] if root == PARAMS:
            return ".".join(names) or PARAMS, PARAM
        case [root, *names] if root in (BUFFERS, STATE):
            return ".".join(names) or STATE, BUFFER
        case [root, kind, *names] if root == OPTIMIZER and kind != OPTAX:
            return ".".join(names) or PARAMS, kind
    return None


def nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Return nested dicts of the leaves at these paths."""
    tree: dict[str, Any] = {}
    for (*branch, last), leaf in leaves.items():
        at = tree
        for name in branch:
            at = at.setdefault(name, {})
        at[last] = leaf
    return tree


def packed(scalars: Mapping[str, Any]) -> Array:
    """Return plain values as JSON in bytes, filled up with spaces, so that the length is that of earlier steps."""
    text = json.dumps(encode_plain(dict(scalars), ENGINE), separators=(",", ":")).encode("ascii")
    length = _STEP_NBYTES
    while length < len(text):
        length *= 2
    return np.frombuffer(text.ljust(length), np.uint8).copy()


def unpacked(values: Any) -> dict[str, Any]:
    """Return the plain values of `packed`. Raises CheckpointError for any other array."""
    try:
        found = decode_plain(json_object(np.asarray(values, np.uint8).tobytes(), f"the leaf {ENGINE!r}"))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the leaf {ENGINE!r} is not bytes of JSON: {error}", value=ENGINE) from error
    decoded: dict[str, Any] = found
    return decoded


def blob_of(arrays: Mapping[str, Array]) -> bytes:
    """Return the states of an optax transformation as a checkpoint has them."""
    held = io.BytesIO()
    np.savez(held, **arrays)  # type: ignore[arg-type]  # a stub takes `allow_pickle` for one of the names
    return held.getvalue()


def files_of(blobs: Mapping[str, bytes]) -> dict[str, Mapping[str, Array]]:
    """Return the states of all ranks by name, each in the file that reads it when it is asked for that name.

    Raises ValueError, KeyError, TypeError or OSError for other bytes.
    """
    found: dict[str, Mapping[str, Array]] = {}
    for name, blob in blobs.items():
        if name == OPTAX or name.startswith(OWNED_OPTAX):
            saved = np.load(io.BytesIO(blob), allow_pickle=False)
            found |= {key: saved for key in saved.files if key != "allow_pickle"}
    return found


def gathered(communicator: Communicator, contents: SaveContents) -> WholeCheckpoint:
    """Return what all ranks save, whole on each of them. Collective; its memory is that of the result and a piece."""
    pieces = list(contents.pieces())
    plans = communicator.all_gather_object([_described(piece.spec) for piece in pieces])
    tensors: dict[tuple[str, str], Array] = {}
    for rank, plan in enumerate(plans):
        for at, (fqn, kind, shape, dtype, start, length) in enumerate(plan):
            whole = tensors.setdefault((fqn, kind), np.empty(tuple(shape), numpy_dtype(DType.parse(dtype))))
            target = whole.reshape(-1)[start : start + length]
            if rank == communicator.rank:
                target[...] = np.frombuffer(pieces[at].buffer.to_bytes(), whole.dtype)
            if communicator.world_size > 1:
                _broadcast(target.view(np.uint8), rank, communicator)
    blobs: dict[str, bytes] = {}
    lengths = communicator.all_gather_object({name: len(blob) for name, blob in contents.rank_blobs.items()})
    for rank, found in enumerate(lengths):
        for name, length in found.items():
            flat = np.empty(length, np.uint8)
            if rank == communicator.rank:
                flat[...] = np.frombuffer(contents.rank_blobs[name], np.uint8)
            if communicator.world_size > 1:
                _broadcast(flat, rank, communicator)
            blobs[name] = flat.tobytes()
    return WholeCheckpoint(tensors, contents.scalars, {key: file[key] for key, file in files_of(blobs).items()})


def _described(spec: PieceSpec) -> tuple[Any, ...]:
    if spec.block is not None:
        raise CheckpointError(f"{spec.fqn!r} is cut along several axes, and has no place in a tree", value=spec.fqn)
    return spec.fqn, spec.kind, tuple(spec.shape), spec.dtype.value, spec.start, spec.length


def _broadcast(flat: Array, root: int, communicator: Communicator) -> None:
    for low in range(0, flat.size, MAX_PIECE_NBYTES):
        part = flat[low : low + MAX_PIECE_NBYTES]
        travels = communicator.allocate(part.size, DType.UINT8)
        if root == communicator.rank:
            travels.copy_from(NumpyBuffer(part))
        communicator.broadcast(travels, root, label="state_dict").wait()
        part[...] = np.frombuffer(travels.to_bytes(), np.uint8)


def in_memory(whole: WholeCheckpoint, tag: str) -> MemoryStorage:
    """Return a storage with `whole` as the checkpoint `tag`. Equal ones have equal bytes, whichever rank makes them."""

    def pieces() -> Iterator[TensorPiece]:
        for (fqn, kind), array in sorted(whole.tensors.items(), key=lambda item: item[0]):
            flat = NumpyBuffer(np.ascontiguousarray(array).reshape(-1))
            yield TensorPiece(fqn, kind, array.shape, flat.dtype, 0, flat)

    blobs = {OPTAX: blob_of(whole.optax)} if whole.optax else {}
    part = SavePart.checked(0, SaveContents(pieces, whole.scalars, blobs), {})
    storage, file, folder = MemoryStorage(tag), RankFile(part.layout.name), f"{tag}/{_SAVE}"
    storage.write(f"{folder}/{file.name}", file.chunks(part.layout, reading(part.contents)))
    data = manifest_of(tag, [file], part.scalars, part.about).to_json()
    publish(storage, folder, data, {file.name: file.nbytes})
    write_commit(storage, Commit.create(tag, _SAVE, data, 0.0))
    return storage
