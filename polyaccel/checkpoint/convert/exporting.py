"""What an export takes of a checkpoint: which tensors, under which names, in which type, in how many files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from polyaccel.checkpoint import CheckpointReader, TensorEntry
from polyaccel.checkpoint.convert.elements import converted, read, runs
from polyaccel.checkpoint.format.pieces import ALIGNMENT_NBYTES
from polyaccel.checkpoint.format.tensors import BUFFER as BUFFER
from polyaccel.checkpoint.format.tensors import PARAM
from polyaccel.core.types import DType
from polyaccel.errors import CheckpointError

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """A tensor on its way out, as `dtype`; formats that can share memory give it its `other_names` too."""

    reader: CheckpointReader
    tensor: TensorEntry
    dtype: DType
    other_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.tensor.fqn

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.numel * self.dtype.itemsize

    def chunks(self, progress: Progress) -> Iterator[bytes]:
        """Yield verified, converted elements in order, in the memory of a piece."""
        for start, length in runs(self.tensor):
            data = converted(read(self.reader, self.tensor, start, length), self.tensor.dtype, self.dtype)
            progress(data.nbytes)
            yield data.tobytes()


def chosen(reader: CheckpointReader, kinds: Sequence[str], dtype: DType | None) -> tuple[ExportTensor, ...]:
    """Return the tensors of `kinds`, sorted by name, floating ones as `dtype` (None: as saved); tied ones once."""
    found = {kind: [tensor for tensor in reader.tensors() if tensor.kind == kind] for kind in kinds}
    held = sorted({tensor.kind for tensor in reader.tensors()})
    for kind, tensors in found.items():
        if not tensors and kind != BUFFER:
            raise CheckpointError(
                f"{reader.tag!r} holds no tensor of the kind {kind!r}",
                hint=f"the kinds there are {', '.join(held)}",
                value=kind,
            )
    names: dict[str, str] = {}
    for kind, tensors in found.items():
        for tensor in tensors:
            if tensor.fqn in names:
                raise CheckpointError(
                    f"{tensor.fqn!r} is a tensor of the kinds {names[tensor.fqn]!r} and {kind!r}: a file of names has "
                    "room for one",
                    hint="export one kind at a time",
                    value=kind,
                )
            names[tensor.fqn] = kind
    return tuple(
        ExportTensor(reader, tensor, dtype if dtype is not None and tensor.dtype.is_floating else tensor.dtype)
        for tensor in sorted((each for tensors in found.values() for each in tensors), key=lambda each: each.fqn)
    )


def default_kinds() -> tuple[str, ...]:
    """The kinds of a module's state dict: parameters, and buffers where there are any."""
    return (PARAM, BUFFER)


def in_files(tensors: Sequence[ExportTensor], most_nbytes: int) -> list[list[ExportTensor]]:
    """Return the tensors of each file. See `places_in_files`."""
    files = places_in_files([tensor.nbytes for tensor in tensors], most_nbytes)
    return [[tensors[place] for place in places] for places in files]


def places_in_files(nbytes: Sequence[int], most_nbytes: int) -> list[list[int]]:
    """Return the places of the tensors of each file, of at most `most_nbytes`; a larger tensor has its own file."""
    files: list[list[int]] = [[]]
    filled = 0
    for place, size in enumerate(nbytes):
        if files[-1] and filled + size > most_nbytes:
            files.append([])
            filled = 0
        files[-1].append(place)
        filled += size
    return files


def file_names(stem: str, suffix: str, count: int) -> list[str]:
    """`model.safetensors`, or `model-00001-of-00002.safetensors` and so on."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{suffix}" for number in range(1, count + 1)]


def index_of(files: Sequence[Sequence[ExportTensor]], names: Sequence[str]) -> dict[str, Any]:
    """The index of several files, as transformers reads it."""
    where = {tensor.name: name for tensors, name in zip(files, names, strict=True) for tensor in tensors}
    total = sum(tensor.nbytes for tensors in files for tensor in tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


@contextmanager
def mapped(folder: Path, tensors: Sequence[ExportTensor], progress: Progress) -> Iterator[list[npt.NDArray[np.uint8]]]:
    """Yield all tensors' bytes in a mapped file in `folder`, which is deleted afterwards."""
    with TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
        path, starts = Path(scratch, "tensors"), list[int]()
        with path.open("wb") as file:
            for tensor in tensors:
                file.write(bytes(-file.tell() % ALIGNMENT_NBYTES))
                starts.append(file.tell())
                for chunk in tensor.chunks(progress):
                    file.write(chunk)
            file.write(b"\0")  # an empty file cannot be mapped
        memory = np.memmap(path, np.uint8, "r+")
        yield [np.asarray(memory[start : start + tensor.nbytes]) for tensor, start in zip(tensors, starts, strict=True)]
