"""Weights as a folder of safetensors files in the layout of the Hugging Face hub, and a receiver that reads it.

Each tensor is written at its own place when it comes, so that the memory of one tensor suffices. The folder gets its
name when all files are on the disk.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import torch
from safetensors import safe_open
from torch import Tensor, nn

from polyaccel.checkpoint.convert.exporting import places_in_files
from polyaccel.errors import CheckpointError
from polyaccel.ops.native import crc32
from polyaccel.torch.weight_transfer.manifest import Manifest, as_bytes, parse_manifest
from polyaccel.torch.weight_transfer.update import WeightPiece, WeightUpdate

DIGESTS = "polyaccel_weights.json"
"""The file with the version and the digest of each tensor."""


class FolderSender:
    """Writes the tensors of `manifest` into the new folder `target`, in files of at most `file_nbytes`.

    Raises CheckpointError if the folder has files already, or cannot be written.
    """

    def __init__(self, target: Path, manifest: Manifest, file_nbytes: int, module: nn.Module) -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(
                f"the folder for weights is not empty: {target}",
                hint="name a new folder for each version",
                value=str(target),
            )
        self._target, self._manifest = target, manifest
        self._draft = target.with_name(f".{target.name}.{uuid4().hex}")
        self._digests: dict[int, int] = {}
        self._resources = ExitStack()
        self._resources.callback(shutil.rmtree, self._draft, ignore_errors=True)
        self._places: dict[int, tuple[BinaryIO, int]] = {}
        self._files: list[BinaryIO] = []
        try:
            self._draft.mkdir(parents=True)
            self._open(places_in_files([info.nbytes for info in manifest.tensors], file_nbytes))
            _write_config(module, self._draft, is_adapter=manifest.is_adapter)
        except BaseException:
            self.close()
            raise

    @property
    def buckets(self) -> int:
        """Files of tensors."""
        return len(self._files)

    def _open(self, files: Sequence[Sequence[int]]) -> None:
        stem = "adapter_model" if self._manifest.is_adapter else "model"
        weight_map = {}
        for number, members in enumerate(files, 1):
            name = f"{stem}.safetensors" if len(files) == 1 else f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
            file = self._resources.enter_context((self._draft / name).open("wb"))
            self._files.append(file)
            # The larger types come first, so that each tensor is aligned to its own.
            ordered = sorted(members, key=lambda place: -self._manifest.tensors[place].dtype.itemsize)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            at, starts = 0, dict[int, int]()
            for place in ordered:
                info = self._manifest.tensors[place]
                starts[place], end = at, at + info.nbytes
                header[info.name] = {
                    "dtype": info.type_name,
                    "shape": list(info.shape),
                    "data_offsets": [at, end],
                }
                weight_map[info.name], at = name, end
            encoded = json.dumps(header, separators=(",", ":")).encode()
            encoded += b" " * (-len(encoded) % 8)
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + at)
            self._places |= {place: (file, 8 + len(encoded) + start) for place, start in starts.items()}
        if len(files) > 1:
            index = {"metadata": {"total_size": self._manifest.nbytes}, "weight_map": weight_map}
            (self._draft / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def add(self, place: int, tensor: Tensor, dtype: torch.dtype) -> None:
        """Write a tensor as `dtype`."""
        file, at = self._places[place]
        data = as_bytes(tensor.to("cpu", dtype).contiguous())
        self._digests[place] = crc32(data)
        file.seek(at)
        file.write(data)

    def finish(self) -> None:
        """Give the folder its name, with all files on the disk."""
        rows = [
            [info.name, info.type_name, list(info.shape), self._digests[place]]
            for place, info in enumerate(self._manifest.tensors)
        ]
        (self._draft / DIGESTS).write_text(json.dumps({**self._manifest.head(), "tensors": rows}))
        for file in self._files:
            file.flush()
        for path in (*self._draft.iterdir(), self._draft):
            _sync(path)
        self._draft.rename(self._target)
        _sync(self._target.parent)

    def abort(self, problem: str) -> None:
        """Nothing is read before the folder has its name."""

    def close(self) -> None:
        """Remove what has no name yet."""
        self._resources.close()


class FolderUpdate(WeightUpdate):
    """The weights of a folder, whose digests are compared."""

    def __init__(self, manifest: Manifest, folder: Path, digests: Sequence[int]) -> None:
        super().__init__(manifest)
        self._folder, self._digests = folder, digests

    def refuse(self, problem: str) -> None:
        """The trainer does not wait for who reads a folder."""

    def _received(self) -> Generator[WeightPiece, None, None]:
        with ExitStack() as stack:
            where: dict[str, Any] = {}
            try:
                for path in sorted(self._folder.glob("*.safetensors")):
                    file = stack.enter_context(safe_open(path, "pt"))
                    where |= dict.fromkeys(file.keys(), file)
            except Exception as error:  # safetensors' own class derives from Exception alone
                raise _unreadable(self._folder, repr(error)) from error
            for place, info in enumerate(self.tensors):
                if info.name not in where:
                    raise _unreadable(self._folder, f"{info.name!r} is in none of its files")
                tensor = where[info.name].get_tensor(info.name)
                is_same = tuple(tensor.shape) == info.shape and tensor.dtype == info.dtype
                if not is_same or crc32(as_bytes(tensor)) != self._digests[place]:
                    raise CheckpointError(
                        f"weights of {info.name!r} in {self._folder} have another digest than was written",
                        hint="send them again",
                        value=info.name,
                    )
                yield WeightPiece(place, 0, tensor.reshape(-1))


def read_weights(folder: str | os.PathLike[str]) -> WeightUpdate:
    """Return the weights that an engine wrote into a folder, to be iterated or loaded once.

    Args:
        folder: Folder of `engine.send_weights`.

    Returns:
        The weights, of which no tensor has been read yet.

    Raises:
        CheckpointError: There is no such folder, or its file of digests is damaged.
        CommError: A later version of polyaccel wrote it.
    """
    path = Path(folder)
    try:
        head = json.loads((path / DIGESTS).read_bytes())
        rows = [(row[:3], int(row[3])) for row in head["tensors"]]
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise _unreadable(path, repr(error)) from error
    return FolderUpdate(parse_manifest(head, [row for row, _ in rows]), path, [digest for _, digest in rows])


def _write_config(module: nn.Module, folder: Path, *, is_adapter: bool) -> None:
    """Write what transformers or PEFT read next to the weights, if the module has it."""
    if is_adapter:
        active: Any = module
        active.peft_config[active.active_adapter].save_pretrained(folder)
        return
    described: Any = copy.deepcopy(getattr(module, "config", None))
    if hasattr(described, "save_pretrained"):
        described.architectures = [type(getattr(module, "_orig_mod", module)).__name__]
        described.save_pretrained(folder)
    generation: Any = getattr(module, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        with suppress(ValueError):  # of values that contradict each other, which transformers refuses to save
            generation.save_pretrained(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unreadable(folder: Path, why: str) -> CheckpointError:
    message = f"no weights can be read from {folder}: {why}"[:500]
    return CheckpointError(message, hint="send them again", value=str(folder))
