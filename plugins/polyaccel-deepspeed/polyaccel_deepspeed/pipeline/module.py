"""`PipelineModule` by DeepSpeed's conventions: a tuple is the one argument of a layer, and tied modules have names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from polyaccel.comm import get_local_rank
from polyaccel.comm.default import default_communicator, is_initialized
from polyaccel.errors import PolyaccelError
from polyaccel.torch.pipeline import module as core
from polyaccel.torch.pipeline.chunk import Layer
from polyaccel_deepspeed.pipeline.grid import PipelineParallelGrid
from polyaccel_deepspeed.pipeline.topology import PipeDataParallelTopology, ProcessTopology

_TIED = "tied_modules"


class LayerSpec(core.LayerSpec):
    """A layer that is built where it is needed."""

    global_rank = -1

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return super().build()


class TiedLayerSpec(LayerSpec, core.TiedLayerSpec):
    """A layer that is one with all others of the same `key`."""


class PipelineModule(core.PipelineModule):
    """polyaccel's, with DeepSpeed's conventions and names. Its arguments are DeepSpeed's, and polyaccel's behind them.

    What a layer gives is the next layer's one argument, a tuple too. Modules of a `TiedLayerSpec` are
    `tied_modules.KEY`. `dynamic_shape` has no effect: shapes may always change.
    """

    spreads_tuples = False

    def _complete(self, specs: Sequence[Any], topology: Any) -> None:
        if _TIED not in self._modules:
            self.tied_modules = nn.ModuleDict()
        self._layer_specs = list(specs)
        self._num_layers = len(self._layer_specs)
        self._grid = PipelineParallelGrid(_topology(self.num_stages) if topology is None else topology)
        self._topo = self._grid.topology()
        self.stage_id, self.global_rank = self.stage, self._grid.global_rank
        self.world_size, self.local_rank = self._grid.world_size, get_local_rank()
        own = [self.parts[chunk] for chunk in sorted(self._chunks)]
        self._local_start, self._local_stop = own[0].start, own[-1].stop

    def _name_of(self, index: int, specs: Sequence[Any]) -> str:
        spec = specs[index]
        return f"{_TIED}.{spec.key}" if isinstance(spec, core.TiedLayerSpec) else super()._name_of(index, specs)

    def _add_layer(self, name: str, module: nn.Module) -> None:
        home, _, key = name.partition(".")
        if home != _TIED:
            super()._add_layer(name, module)
            return
        if _TIED not in self._modules:
            self.tied_modules = nn.ModuleDict()
        self.tied_modules[key] = module

    def _layer_named(self, name: str) -> nn.Module | None:
        home, _, key = name.partition(".")
        if home != _TIED:
            return super()._layer_named(name)
        return self.tied_modules[key] if _TIED in self._modules and key in self.tied_modules else None

    # Places.

    def topology(self) -> ProcessTopology:
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """The grid, which answers as Megatron's `mpu` does."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        return self.num_stages

    def partitions(self) -> list[int]:
        """The first layer of each part of the model, and how many layers there are."""
        return [*(part.start for part in self.parts), self.parts[-1].stop]

    def stage_owner(self, layer_idx: int) -> int:
        """The stage that has a layer."""
        if not 0 <= layer_idx < self._num_layers:
            raise PolyaccelError(
                f"layer {layer_idx} does not exist", hint=f"use 0 to {self._num_layers - 1}", value=layer_idx
            )
        return self.stage_of(layer_idx)

    # Layers.

    @property
    def forward_funcs(self) -> list[Layer]:
        """The layers of this rank, as they are called."""
        chunks = [self._chunks[number] for number in sorted(self._chunks)]
        return chunks[0].layers if len(chunks) == 1 else [layer for chunk in chunks for layer in chunk.layers]

    @property
    def tied_weight_attrs(self) -> dict[str, Any]:
        """The attributes that tied modules share, by key."""
        specs = (spec for spec in self._layer_specs if isinstance(spec, core.TiedLayerSpec))
        return {spec.key: spec.tied_weight_attr for spec in specs if spec.key in self.tied_modules}

    @property
    def activation_checkpoint_interval(self) -> int:
        """How many layers at a time are computed again in backward; 0: none."""
        return next(iter(self._chunks.values())).recomputing.interval

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        self.set_checkpoint_interval(interval)

    @property
    def activation_checkpoint_func(self) -> Callable[..., Any]:
        """What computes them again."""
        return next(iter(self._chunks.values())).recomputing.function

    def set_checkpoint_interval(self, interval: int) -> None:
        """Compute so many layers at a time again in backward. Raises PolyaccelError for less than 0."""
        if interval < 0:
            raise PolyaccelError(f"an interval of {interval} layers", hint="use 0 or more", value=interval)
        for chunk in self._chunks.values():
            chunk.recomputing = chunk.recomputing._replace(interval=interval)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each layer of this rank by `torch.compile`."""
        for chunk in self._chunks.values():
            for at, layer in enumerate(chunk.layers):
                if isinstance(layer, nn.Module):
                    layer.compile(*args, **kwargs)
                else:
                    chunk.layers[at] = torch.compile(layer, *args, **kwargs)

    # Tied weights, which the engine keeps equal.

    def allreduce_tied_weight_gradients(self) -> None:
        """Does nothing: the engine sums their gradients."""

    def get_tied_weights_and_groups(self) -> list[Any]:
        """Nothing: no group of ranks is left to reduce tied weights over."""
        return []

    # DeepSpeed's files of single layers.

    def ckpt_prefix(self, checkpoints_path: str, tag: str) -> str:
        raise _no_layer_files("ckpt_prefix")

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        raise _no_layer_files("ckpt_layer_path")

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        raise _no_layer_files("ckpt_layer_path_list")

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise _no_layer_files("save_state_dict")

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        raise _no_layer_files("load_state_dir")


def _topology(stages: int) -> ProcessTopology:
    world_size = default_communicator().world_size if is_initialized() else 1
    return PipeDataParallelTopology(num_pp=stages, num_dp=world_size // stages)


def _no_layer_files(name: str) -> PolyaccelError:
    return PolyaccelError(
        f"PipelineModule.{name}: a checkpoint of polyaccel has no files of single layers",
        hint="call engine.save_checkpoint and load_checkpoint, or engine.module_state_dict() for the whole model",
        value=name,
    )
