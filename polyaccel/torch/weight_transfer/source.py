"""The weights of an engine, whole and under the model's own names, one ZeRO bucket at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import torch_dtype
from polyaccel.core.buffer import Buffer
from polyaccel.errors import PolyaccelError
from polyaccel.torch.sharding.module_adapter import TorchAdapter
from polyaccel.torch.weight_transfer.manifest import TensorInfo
from polyaccel.zero.buckets.bucket_params import BucketParams
from polyaccel.zero.engine import ZeroEngine
from polyaccel.zero.plan.layout import Slot


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a tensor from `start` on, which the rank `owner` of the engine's communicator sends.

    Attributes:
        owner: Rank that has the values.
        place: Number of the tensor.
        start: First element.
        count: Elements.
    """

    owner: int
    place: int
    start: int
    count: int


class WeightSource:
    """Names and values of an engine's weights. Every rank builds it and iterates over `values` to the end.

    Tied parameters are there once, under the first of their names. Persistent buffers follow the parameters.

    Args:
        adapter: The engine's module.
        zero: The engine's step.
        dtype: Type of floating tensors; None leaves each in the type that it computes with.
        adapter_name: The PEFT adapter to take alone; None takes the whole model.
    """

    def __init__(
        self, adapter: TorchAdapter, zero: ZeroEngine, *, dtype: torch.dtype | None, adapter_name: str | None
    ) -> None:
        self._adapter, self._zero = adapter, zero
        entries: dict[str, Any] = adapter.module.state_dict(keep_vars=True)
        names = {key: own_name(key) for key in entries}
        if adapter_name is not None:
            names = names_of(adapter.module, adapter_name)
        params: dict[str, str] = {}
        self._buffers: dict[str, Tensor] = {}
        for key, entry in entries.items():
            if key not in names or not isinstance(entry, Tensor):
                continue
            if isinstance(entry, nn.Parameter) and entry in adapter.names:
                fqn = adapter.names[entry]
                if key == fqn or fqn not in params:
                    params[fqn] = names[key]
            elif not any(entry is other for other in self._buffers.values()):
                self._buffers[names[key]] = entry
        self._places: dict[str, int] = {}
        self._buckets: list[int] = []
        infos: list[TensorInfo] = []
        for param in zero.params:
            slots = [slot for slot in param.bucket.slots if slot.param.fqn in params]
            if slots:
                self._buckets.append(param.bucket.index)
            for slot in slots:
                spec = slot.param
                self._places[spec.fqn] = len(infos)
                infos.append(TensorInfo(params[spec.fqn], _sent(torch_dtype(spec.dtype), dtype), spec.global_shape))
        infos += [TensorInfo(name, _sent(one.dtype, dtype), tuple(one.shape)) for name, one in self._buffers.items()]
        self.infos = tuple(infos)
        """The tensors in the order of `values`."""
        for info in self.infos:
            _ = info.type_name  # a type that cannot be sent is an error before anything is
        self.is_collective = any(param.is_sharded or param.bucket.kind.cut for param in zero.params)
        """Whether ranks communicate in `values`."""

    def values(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the place in `infos` and the value of each tensor on rank 0, valid until the next; nothing elsewhere.
        Collective."""
        is_sender = self._zero.communicator.rank == 0
        needed = {*self._buckets}
        for param in self._zero.params:
            if param.bucket.index not in needed:
                continue
            with self._zero.params.unsharded_view(param.bucket.index) as full:
                for slot in param.bucket.slots if is_sender or param.bucket.kind.cut else ():
                    place = self._places.get(slot.param.fqn)
                    if place is None:
                        continue
                    flat = full.view(slot.offset, slot.param.numel).raw
                    whole = self._adapter.blocks.gather_full(slot.param.fqn, flat.detach().view(slot.param.shape))
                    if is_sender:
                        yield place, whole
        if is_sender:
            for place, buffer in enumerate(self._buffers.values(), len(self._places)):
                yield place, buffer.detach()

    def runs(self) -> list[Run]:
        """Return who sends what, in the order of `infos`: owners of shards send these, rank 0 sends the rest. The same
        on all ranks."""
        found: list[Run] = []
        for param in self._sent_params():
            if self._is_owned(param):
                found += [
                    Run(owner, self._places[piece.fqn], piece.start, piece.length)
                    for owner, part in self._holders(param)
                    for piece in param.bucket.slices(part)
                    if piece.fqn in self._places
                ]
            else:
                places = [self._places[slot.param.fqn] for slot in param.bucket.slots if slot.param.fqn in self._places]
                found += [Run(0, place, 0, self.infos[place].numel) for place in places]
        for place in range(len(self._places), len(self.infos)):
            found.append(Run(0, place, 0, self.infos[place].numel))
        return found

    def run_values(self) -> Iterator[Tensor | None]:
        """Yield the flat values of each of `runs` on its owner, valid until the next; None elsewhere. Collective where
        blocks of tensors are joined, or shards rest off the device."""
        rank = self._zero.communicator.rank
        for param in self._sent_params():
            if self._is_owned(param):
                for owner, part in self._holders(param):
                    for piece in param.bucket.slices(part):
                        if piece.fqn in self._places:
                            own = param.own.view(piece.shard_offset, piece.length).raw.detach()
                            yield own if owner == rank else None
                continue
            with self._zero.params.unsharded_view(param.bucket.index) as full:
                for slot in param.bucket.slots:
                    if slot.param.fqn in self._places:
                        yield self._joined(slot, full) if rank == 0 or param.bucket.kind.cut else None
        for buffer in self._buffers.values():
            yield buffer.detach().reshape(-1) if rank == 0 else None

    def _joined(self, slot: Slot, full: Buffer) -> Tensor:
        flat = full.view(slot.offset, slot.param.numel).raw.detach()
        return self._adapter.blocks.gather_full(slot.param.fqn, flat.view(slot.param.shape)).reshape(-1)

    def _sent_params(self) -> list[BucketParams]:
        needed = {*self._buckets}
        return [param for param in self._zero.params if param.bucket.index in needed]

    def _is_owned(self, param: BucketParams) -> bool:
        """Whether ranks send their own shards: these are on the device, and rows of whole tensors."""
        index = param.bucket.index
        return param.is_sharded and not param.bucket.kind.cut and self._zero.params.gathered[index].source is None

    def _holders(self, param: BucketParams) -> Iterator[tuple[int, int]]:
        """Yield the rank and the number of the shard of all that share a bucket."""
        everybody = self._zero.communicator.ranks
        for part, rank in enumerate(self._zero.params.exact(param.bucket).ranks):
            yield everybody.index(rank), part


def own_name(key: str) -> str:
    """Return a key of a state dict without what torch.compile adds to it, which no other process has."""
    return key.replace("_orig_mod.", "")


def _sent(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and own.is_floating_point else own


def names_of(module: nn.Module, adapter_name: str) -> dict[str, str]:
    """Return the names of a PEFT adapter in its own files by the keys of the module's state dict.

    Raises PolyaccelError without PEFT adapters, or without one of this name.
    """
    known: Mapping[str, Any] = getattr(module, "peft_config", None) or {}
    if adapter_name not in known or not hasattr(module, "get_base_model"):
        raise PolyaccelError(
            f"the model has no PEFT adapter of this name: {adapter_name!r}",
            hint=f"use one of {', '.join(known)}" if known else "wrap the model by peft.get_peft_model",
            value=adapter_name,
        )
    from peft import get_peft_model_state_dict

    marks = {key: torch.empty(0) for key in module.state_dict(keep_vars=True)}
    keys = {id(mark): key for key, mark in marks.items()}
    found = get_peft_model_state_dict(module, marks, adapter_name=adapter_name, save_embedding_layers=False)
    return {keys[id(mark)]: own_name(name) for name, mark in found.items()}


def active_adapter(module: nn.Module) -> str:
    """Return the name of the active PEFT adapter, else "default"."""
    active = getattr(module, "active_adapter", "default")
    return active if isinstance(active, str) else "default"
