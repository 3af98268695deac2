"""The JSON of manifests and commit markers, parsed into checked values: every key, type and range, nothing by position.

Checksums protect from damage, not from those who may write the folder: they can write any numbers. What is refused here
is what no writer of ours leaves, so that a wrong tool is found out by name and not by a traceback, or by its numbers.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""Elements or bytes."""
Crc32 = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
FileName = Annotated[str, Field(strict=True, pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]*\z", max_length=255)]
"""A name in the folder of a save, which cannot lead out of it."""
PieceTree = tuple[Count, Annotated[Count, Field(gt=0)], FileName, Count, Crc32]
"""(start, length, file, offset, crc32)."""
RunsTree = tuple[tuple[tuple[Count, Count], ...], ...]
"""The runs of a block: along each dimension some (start, length)."""
Parsed = TypeVar("Parsed", bound=BaseModel)


class _Tree(BaseModel):
    model_config = ConfigDict(frozen=True)  # what a newer minor version adds is ignored


class CommitTree(_Tree):
    """The JSON of a commit marker."""

    tag: StrictStr
    save: FileName
    manifest_nbytes: Count
    manifest_crc32: Crc32
    saved_at_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


class TensorTree(_Tree):
    """A tensor in a manifest: the pieces of the whole tensor, and those of blocks of it."""

    fqn: StrictStr
    kind: Annotated[str, Field(strict=True, min_length=1)]
    shape: tuple[Count, ...]
    dtype: DType
    pieces: tuple[PieceTree, ...]
    blocks: tuple[tuple[RunsTree, tuple[PieceTree, ...]], ...] = ()


class ManifestTree(_Tree):
    """The JSON of a manifest. A blob is (file, offset, nbytes, crc32)."""

    tag: StrictStr
    world_size: Annotated[int, Field(strict=True, ge=1, lt=2**31)]
    files: dict[FileName, Count]
    tensors: tuple[TensorTree, ...]
    scalars: dict[str, Any]
    blobs: tuple[dict[str, tuple[FileName, Count, Count, Crc32]], ...]
    not_finite: StrictStr = ""
    about: dict[str, Any] = {}
    held: dict[FileName, tuple[tuple[StrictStr, StrictStr], ...]] = {}


class RankFileTree(_Tree):
    """What a rank sends rank 0 about its file. A blob is (name, file, offset, nbytes, crc32)."""

    name: FileName
    nbytes: Count
    tensors: tuple[TensorTree, ...]
    blobs: tuple[tuple[StrictStr, FileName, Count, Count, Crc32], ...]
    not_finite: StrictStr


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`. Raises CheckpointError, naming `what`, for anything else."""
    try:
        tree = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise not_understood(what, f"{type(error).__name__}: {error}") from error
    if not isinstance(tree, dict):
        raise not_understood(what, f"it is a {type(tree).__name__}, not an object")
    return tree


def parsed(model: type[Parsed], tree: dict[str, Any], what: str) -> Parsed:
    """`tree` as a `model`. Raises CheckpointError naming `what` and the first keys that are wrong."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        summary = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found[:4])
        raise not_understood(what, summary) from error


def not_understood(what: str, why: str) -> CheckpointError:
    return CheckpointError(f"{what} cannot be understood: {why[:1000]}", hint="load another tag", value=what)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
