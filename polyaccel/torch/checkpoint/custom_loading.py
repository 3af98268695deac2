"""`load_checkpoint(..., custom_load_fn=...)`: a user's own function writes a checkpoint's tensors into the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import dtype_of, torch_dtype
from polyaccel.checkpoint import CheckpointReader
from polyaccel.checkpoint.load.custom_load import GivenValue, GivenValues, call_load_fn, saved_values
from polyaccel.errors import CheckpointError
from polyaccel.torch.checkpoint.whole_model import whole_state_dict
from polyaccel.torch.sharding.buffers import plain_values, strided_tensors
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.zero.engine import ZeroEngine

CustomLoad = Callable[..., Any]
"""Called as `fn(src=state_dict, dst=module)`: writes what it likes of `src`, the checkpoint's parameters and buffers by
their saved names, into `dst`, a copy of the module in which floating parameters are at least float32."""


@dataclass(frozen=True, slots=True)
class CustomLoading:
    """A user's function, and the module's state dict with whole parameters."""

    function: CustomLoad
    whole: Mapping[str, Any]

    @classmethod
    def prepare(cls, function: CustomLoad | None, adapter: TorchAdapter, zero: ZeroEngine) -> CustomLoading | None:
        """Make parameters whole for the function. Collective; None without a function."""
        return None if function is None else cls(function, whole_state_dict(adapter, zero, exclude_frozen=False))

    def values(
        self, adapter: TorchAdapter, saved: CheckpointReader, allocate: Any, saved_name: Callable[[str], str]
    ) -> GivenValues:
        """Return what the user's function makes of the checkpoint, by `saved_name(name)`; changes nothing."""
        src = {name: _tensor(value) for name, value in saved_values(saved, allocate)}
        _add_ties(src, adapter.module, saved_name)
        twin, begin = self._filled(adapter, src)
        theirs = dict(twin.named_parameters(remove_duplicate=False))
        params, untouched = dict[str, GivenValue](), set[str]()
        for name, parameter in adapter.module.named_parameters(remove_duplicate=False):
            fqn, found = adapter.names[parameter], theirs.get(name)
            if found is None:
                raise CheckpointError(f"custom_load_fn took the parameter {name!r} off dst", value=name)
            if (id(found), found._version, found.data_ptr()) == begin[fqn]:
                untouched.add(fqn)
            else:
                params.setdefault(fqn, _value(found))
        buffers = {
            name: value
            for name, value in twin.state_dict(keep_vars=True).items()
            if name not in theirs and isinstance(value, Tensor)
        }
        given = {name: _value(plain_values(value)) for name, value in strided_tensors(buffers.items())}
        return GivenValues(params, given, untouched - params.keys())

    def state_dict(self, adapter: TorchAdapter, src: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict that the function makes of another one. Nothing of the module changes."""
        found: dict[str, Any] = self._filled(adapter, src)[0].state_dict()
        return found

    def _filled(
        self, adapter: TorchAdapter, src: Mapping[str, Any]
    ) -> tuple[nn.Module, dict[str, tuple[int, int, int]]]:
        twin, begin = self._twin(adapter)
        call_load_fn(self.function, src, twin)
        return twin, begin

    def _twin(self, adapter: TorchAdapter) -> tuple[nn.Module, dict[str, tuple[int, int, int]]]:
        """Return a copy of the module with whole parameters, and their identities until written."""
        memo: dict[int, Any] = {}
        begin = {}
        for name, parameter in adapter.module.named_parameters(remove_duplicate=False):
            if id(parameter) in memo:
                continue
            value = self.whole[name].detach()
            wide = torch.float32 if value.is_floating_point() and value.itemsize < 4 else value.dtype
            copy = nn.Parameter(value.to(wide, copy=True), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = copy
            begin[adapter.names[parameter]] = (id(copy), copy._version, copy.data_ptr())
        memo[-1] = list(memo.values())  # their ids stay theirs
        try:
            return deepcopy(adapter.module, memo), begin
        except Exception as error:
            raise CheckpointError(
                f"custom_load_fn gets a copy of the module, and copy.deepcopy raised {type(error).__name__}: {error}",
                hint="give the class of the part that cannot be copied a __deepcopy__, or use name_map",
                value=type(error).__name__,
            ) from error


def _add_ties(src: dict[str, Tensor], module: nn.Module, saved_name: Callable[[str], str]) -> None:
    """A tied parameter was saved once: let `src` have it under each of its names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(saved_name(name))
    for tied in names.values():
        saved = [src[name] for name in tied if name in src]
        for name in tied if saved else ():
            src.setdefault(name, saved[0])


def _tensor(value: GivenValue) -> Tensor:
    flat = torch.from_numpy(value.data) if value.data.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(torch_dtype(value.dtype)).reshape(value.shape)


def _value(tensor: Tensor) -> GivenValue:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return GivenValue(tuple(tensor.shape), dtype_of(tensor.dtype), flat.view(torch.uint8).numpy())
