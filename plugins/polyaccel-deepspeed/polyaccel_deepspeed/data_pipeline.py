"""DeepSpeed's names of token files and of random layerwise token dropping, over polyaccel's."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from torch import nn

from polyaccel.data import IndexedDataset, IndexedDatasetBuilder
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.token_drop import find_layers

_LTD = "data_efficiency.data_routing.random_ltd"
_WRAPPED = ".random_ltd_layer"


class MMapIndexedDataset(IndexedDataset):
    """Token file, memory-mapped. `skip_warmup` has no effect: nothing is read ahead."""

    def __init__(self, path: str | PathLike[str], skip_warmup: bool = False) -> None:
        super().__init__(fspath(path))

    def size(self, index: int) -> int:
        """Return the number of values of a sequence."""
        return int(self.sizes[index])

    def get_doc_idx(self) -> Any:
        """Return the first sequence of each document, and one more."""
        return self.doc_idx

    def __reduce__(self) -> Any:
        return MMapIndexedDataset, (self.prefix,)


class MMapIndexedDatasetBuilder:
    """Writer of a token file at `out_file`, which ends in .bin."""

    def __init__(self, out_file: str | PathLike[str], dtype: Any = np.int64) -> None:
        name = fspath(out_file)
        if not name.endswith(".bin"):
            raise PolyaccelError(f"a token file is to be written at {name}", hint="let it end in .bin", value=name)
        kind = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else dtype
        self._builder = IndexedDatasetBuilder(name.removesuffix(".bin"), kind)

    def add_item(self, tensor: Any) -> None:
        """Append a tensor."""
        self._builder.add_item(tensor.numpy())

    def add_items(self, arr_list: Any) -> None:
        """Append arrays."""
        for one in arr_list:
            self._builder.add_item(one)

    def add_item_numpy(self, np_array: Any) -> None:
        """Append an array."""
        self._builder.add_item(np_array)

    def end_document(self) -> None:
        """End a document."""
        self._builder.end_document()

    def merge_file_(self, another_file: str) -> None:
        """Append another token file."""
        self._builder.merge(another_file)

    def finalize(self, index_file: str | PathLike[str]) -> None:
        """Write the index, at the place of the .bin file."""
        wanted = f"{self._builder.prefix}.idx"
        if fspath(index_file) != wanted:
            hint = f"write it at {wanted}"
            raise PolyaccelError(f"an index belongs next to its .bin file: {index_file}", hint=hint, value=index_file)
        self._builder.finalize()


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module] | tuple[type[nn.Module], ...]) -> Any:
    """Return `model`, an engine whose config enables random-LTD; its layers are of `convert_type`."""
    drop = getattr(model, "token_drop", None)
    if drop is None:
        expected = "is not enabled for this model"
        hint = "enable it in the config of deepspeed.initialize, and pass the engine"
        raise ConfigError([Problem(f"{_LTD}.enabled", False, expected, hint)])
    layers = find_layers(model.module, drop.total)
    if wrong := {type(one).__name__ for one in layers if not isinstance(one, convert_type)}:
        expected = f"the layers of the model are {sorted(wrong)}, which convert_to_random_ltd does not name"
        raise ConfigError([Problem(f"{_LTD}.total_layer_num", drop.total, expected, "name their class")])
    return model


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """Return the weights by the names that the model has without random-LTD."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return weights without the part of their names that DeepSpeed's wrapper of layers adds."""
    return {name.replace(_WRAPPED, ""): value for name, value in state_dict.items()}
