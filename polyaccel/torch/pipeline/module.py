"""A model as a sequence of layers, of which a rank builds those of its stage.

[Note: Tied weight owner]
Layers of one `TiedLayerSpec` key are one module. Where they stand on several stages, the first stage that has one is
the owner: there the module's parameters are parameters of the model, there they are updated and saved, and they count
once in every norm. On the other stages the same module holds plain tensors in their place. The owner sends their values
before a step, and gets the gradients that the others have summed before its own last backward pass, which it makes one
with them. By then the others are done: a step's last backward pass ends on the first stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polyaccel.comm.default import default_communicator, is_initialized
from polyaccel.pipeline.partition import layer_weights, split_layers
from polyaccel.pipeline.select import chosen_placement
from polyaccel.pipeline.table import PipelineError
from polyaccel.torch.pipeline.chunk import Chunk, ChunkPlaces, Layer, LayerPlace, Recomputing, class_name
from polyaccel.torch.pipeline.measured import measured_weights
from polyaccel.torch.sharding.buffers import explaining_buffer_types
from polyaccel.torch.sharding.units import set_parts
from polyaccel.verify.variant import active_run

Seeding = Callable[[int], object]
"""Seeds the generators for a layer."""


class LayerSpec:
    """A layer that is built where it is needed: `LayerSpec(nn.Linear, 4, 8)` stands for `nn.Linear(4, 8)`."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise PipelineError(
                f"LayerSpec of {typename!r}", hint="give the class of a layer, then its arguments", value=typename
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is one with all others of the same `key`. `forward_fn(module, inputs)` stands for its `forward`."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[..., Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = (tied_weight_attr,) if isinstance(tied_weight_attr, str) else tuple(tied_weight_attr)

    def called(self, module: nn.Module) -> Layer:
        """What is called for the layer, whose module is `module`."""
        forward_fn = self.forward_fn
        if forward_fn is None:
            return module

        def call(*inputs: Any) -> Any:
            return forward_fn(module, inputs[0] if len(inputs) == 1 else inputs)

        return call


class StageTopology(Protocol):
    """Where ranks stand: DeepSpeed's `ProcessTopology` and its like."""

    def get_dim(self, axis: str) -> int: ...

    def get_coord(self, rank: int) -> Any: ...


class TiedModule(NamedTuple):
    """A module of several stages: `holders` in order, the owner first. On the others `lent` has the parts and names of
    the tensors that stand in for its parameters, in the parameters' order. `also` are further places of the one tensor
    where there is only one."""

    module: nn.Module
    holders: tuple[int, ...]
    lent: tuple[tuple[nn.Module, str], ...]
    also: tuple[tuple[nn.Module, str], ...] = ()


class PipelineModule(nn.Module):
    """Layers, one after the other, of which this rank has those of its stage.

    `layers` are specs, modules and functions. A module among them is named by its place in the whole model, a tied one
    by that of its first layer, so that checkpoints have the same names for any number of stages. `num_stages` (or the
    axis `pipe` of `topology`) are places in the pipeline; more than one need `init_distributed` before.
    `loss_fn(output, labels)` is computed behind the last layer; without one, that layer's output is the loss.
    `partition_method` and `activation_checkpoint_interval` as in the config's section `pipeline`. `seed_layers` calls
    `seed_fn(base_seed + index)` before layer `index` is built (None: `torch.manual_seed`). `schedule` and `chunks`, as
    in that section too, set how many chunks of the model each stage has, and which; None and 0 for one a stage.
    `trial_inputs` are the inputs of a micro-batch, for `partition_method="profiled"`.

    Raises PipelineError for layers that cannot be dealt to so many stages.
    """

    spreads_tuples: ClassVar[bool] = True
    """Whether a tuple that a layer gives is the next layer's arguments, or its only one."""

    def __init__(
        self,
        layers: Sequence[Any],
        num_stages: int | None = None,
        topology: StageTopology | None = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
        schedule: str | None = None,
        chunks: int = 0,
        trial_inputs: Any = None,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.num_stages, self.stage = _place(num_stages, topology)
        self.schedule, self.chunks = schedule, chunks
        self.placement = chosen_placement(schedule or "1f1b", self.num_stages, chunks or None)
        """The stage of each chunk of the model."""
        classes = None if checkpointable_layers is None else frozenset(checkpointable_layers)
        specs = list(layers)
        self.mesh_sizes = _mesh_sizes(self.num_stages, topology)
        """Ranks along each axis of the mesh that the stages and the topology ask for."""
        if not specs:
            raise PipelineError("a model without layers", hint="give a list of layers", value=0)
        names, numels = zip(*_weighed(specs), strict=True)
        self._layer_names: tuple[str, ...] = names
        self.layer_numels: tuple[int, ...] = numels
        """Elements that each layer of the whole model trains."""
        weights = (
            _tried(specs, trial_inputs, names, len(self.placement), spreads=self.spreads_tuples)
            if partition_method.lower() == "profiled"
            else layer_weights(partition_method, names, numels)
        )
        self.parts = split_layers(weights, len(self.placement))
        """The layers of each chunk."""
        seed = torch.manual_seed if seed_fn is None else seed_fn
        self._build(
            specs,
            Recomputing(activation_checkpoint_interval, activation_checkpoint_func, classes),
            (lambda index: seed(base_seed + index)) if seed_layers else None,
        )
        self._complete(specs, topology)

    def _build(self, specs: Sequence[Any], recomputing: Recomputing, seed: Seeding | None) -> None:
        """Build the layers of this stage's chunks, each after `seed` with its index."""
        self.ties: dict[str, TiedModule] = {}
        """The modules of this stage that others have too, by key."""
        self._chunks: dict[int, Chunk] = {}
        self.module_names = tuple(self._name_of(index, specs) for index in range(len(specs)))
        """The name of each layer's module in the whole model."""
        tied: dict[str, nn.Module] = {}
        users: dict[nn.Parameter, list[str]] = {}
        for chunk, part in enumerate(self.parts):
            if self.placement[chunk] != self.stage:
                continue
            built: list[Layer] = []
            for index in part:
                if seed is not None:
                    seed(index)
                built.append(self._built(index, specs, tied))
            before = self.last_layer_of(chunk - 1) if chunk else None
            places = ChunkPlaces(self._place_of(part[0]), self.last_layer_of(chunk), before)
            self._chunks[chunk] = Chunk(built, recomputing, places, spreads=self.spreads_tuples)
            for name in dict.fromkeys(self.module_names[part.start : part.stop]):
                module = self._layer_named(name)
                for parameter in () if module is None else module.parameters():
                    users.setdefault(parameter, []).append(str(chunk))
        set_parts(self, {name: " ".join(users[parameter]) for name, parameter in self.named_parameters()})
        _LAYERS[self] = [_kept(spec) for spec in specs], seed

    def with_layers(
        self, layers: Sequence[Any], stage: int | None = None, seed: Seeding | None = None
    ) -> PipelineModule:
        """Another one of its class with `layers`: those of a `stage`, dealt as these are, or all of them on one rank,
        which recomputes nothing. What a subclass adds is left out."""
        made: PipelineModule = type(self).__new__(type(self))
        nn.Module.__init__(made)
        made.loss_fn, made._layer_names, made.layer_numels = self.loss_fn, self._layer_names, self.layer_numels
        is_whole = stage is None
        made.num_stages, made.stage = (1, 0) if stage is None else (self.num_stages, stage)
        made.schedule, made.chunks = (None, 0) if is_whole else (self.schedule, self.chunks)
        made.placement = (0,) if is_whole else self.placement
        made.parts = (range(len(layers)),) if is_whole else self.parts
        made.mesh_sizes = {} if is_whole else {"pipe": self.num_stages}
        recomputing = next(iter(self._chunks.values())).recomputing
        made._build(layers, Recomputing() if is_whole else recomputing, seed)
        return made

    def _complete(self, specs: Sequence[Any], topology: Any) -> None:
        """Add the other attributes of a subclass, once the layers are built."""

    def stage_of(self, layer: int) -> int:
        """The stage that has layer `layer` of the whole model."""
        return next(self.placement[chunk] for chunk, part in enumerate(self.parts) if layer in part)

    def last_layer_of(self, chunk: int) -> LayerPlace:
        """The last layer of a chunk of the model, which may be of another stage."""
        return self._place_of(self.parts[chunk][-1])

    def _place_of(self, layer: int) -> LayerPlace:
        return LayerPlace(layer, self._layer_names[layer], self.stage_of(layer))

    def get_additional_losses(self) -> Mapping[str, Tensor] | None:
        """What the last stage reports of a micro-batch in addition to the loss that it trains on, for subclasses that
        have some: `PipelineEngine.get_additional_losses` gives the means."""
        return None

    def chunk(self, number: int) -> Chunk:
        """What this stage computes for a chunk of the model that it holds. Raises PipelineError for another."""
        if number not in self._chunks:
            raise PipelineError(
                f"stage {self.stage} has the chunks {list(self._chunks)} of the model, not {number}",
                hint="ask the stage that `placement` names",
                value=number,
            )
        return self._chunks[number]

    def _name_of(self, index: int, specs: Sequence[Any]) -> str:
        """The name of the module of layer `index`: that of the first layer it is tied with."""
        spec = specs[index]
        if isinstance(spec, TiedLayerSpec):
            index = next(at for at, one in enumerate(specs) if isinstance(one, TiedLayerSpec) and one.key == spec.key)
        return str(index)

    def _add_layer(self, name: str, module: nn.Module) -> None:
        """Let `module` be a part of this one."""
        self.add_module(name, module)

    def _layer_named(self, name: str) -> nn.Module | None:
        """The module of that name, if this stage has it."""
        return self._modules.get(name)

    def _built(self, index: int, specs: Sequence[Any], tied: dict[str, nn.Module]) -> Layer:
        """Layer `index`, which becomes a part of this module."""
        spec = specs[index]
        if not isinstance(spec, TiedLayerSpec):
            layer: Layer = spec.build() if isinstance(spec, LayerSpec) else spec
            if isinstance(layer, nn.Module):
                self._add_layer(str(index), layer)
            return layer
        if spec.key not in tied:
            same_key = [
                at for at, other in enumerate(specs) if isinstance(other, TiedLayerSpec) and other.key == spec.key
            ]
            holders = tuple(sorted({self.stage_of(at) for at in same_key}))
            module = tied[spec.key] = spec.build()
            self._add_layer(self.module_names[index], module)
            if len(holders) > 1:
                lent = _lend(module) if holders[0] != self.stage else ()
                self.ties[spec.key] = TiedModule(module, holders, lent)
        return spec.called(tied[spec.key])

    def forward(self, inputs: Any, chunk: int | None = None) -> Any:
        """The output of a chunk, without a number that of all layers that are here. A tuple is given to a layer as its
        arguments. Raises PipelineError where layers of other stages stand between those that are here."""
        if chunk is not None:
            with explaining_buffer_types(self):
                return self.chunk(chunk)(inputs)
        if self.num_stages > 1 and len(self._chunks) > 1:
            raise PipelineError(
                f"stage {self.stage} has the chunks {list(self._chunks)} of the model, and none between them",
                hint="choose one: forward(inputs, chunk=N)",
                value=list(self._chunks),
            )
        for each in self._chunks.values():
            inputs = each(inputs)
        return inputs


_LAYERS: WeakKeyDictionary[nn.Module, tuple[list[Callable[[], Any]], Seeding | None]] = WeakKeyDictionary()


def layers_of(model: PipelineModule) -> tuple[list[Any], Seeding | None]:
    """What a pipeline was made of: all its layers, and what seeds the generators before one is built. Raises
    PipelineError for one of whose layers the script has kept none."""
    kept, seed = _LAYERS[model]
    layers = [one() for one in kept]
    if None in layers:
        index = layers.index(None)
        raise PipelineError(
            f"layer {index} is on stage {model.stage_of(index)} alone", hint="give a LayerSpec for it", value=index
        )
    return layers, seed


def _kept(layer: Any) -> Callable[[], Any]:
    """A layer as it was given; a module of another stage is not kept alive, except in runs of a verification."""
    return ref(layer) if isinstance(layer, nn.Module) and active_run() is None else lambda: layer


def _place(num_stages: int | None, topology: StageTopology | None) -> tuple[int, int]:
    """How many stages there are, and that of this rank: ranks fill the stages one after the other."""
    stages = num_stages if topology is None else topology.get_dim("pipe")
    if stages is None or stages == 1:
        return 1, 0
    if num_stages not in (None, stages):
        raise PipelineError(f"num_stages is {num_stages}, and the topology has {stages}", hint="give one of the two")
    if stages < 1:
        raise PipelineError(f"{stages} stages", hint="at least 1", value=stages)
    if not is_initialized():
        raise PipelineError(
            f"a model of {stages} stages before ranks are connected", hint="call polyaccel.init_distributed() first"
        )
    ranks = default_communicator()
    if topology is not None:
        return stages, int(topology.get_coord(ranks.rank).pipe)
    if ranks.world_size % stages:
        raise PipelineError(
            f"{stages} stages for {ranks.world_size} ranks", hint="use a divisor of the ranks", value=stages
        )
    return stages, ranks.rank // (ranks.world_size // stages)


def _mesh_sizes(stages: int, topology: StageTopology | None) -> dict[str, int]:
    sizes = {"pipe": stages}
    if topology is not None:
        sizes |= {"data": topology.get_dim("data"), "tensor": topology.get_dim("model")}
    return {axis: size for axis, size in sizes.items() if size > 1}


def _lend(module: nn.Module) -> tuple[tuple[nn.Module, str], ...]:
    """Let plain tensors stand in for the parameters of a module that another stage owns. Returns their places."""
    places = [
        (part, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None
    ]
    for part, name, parameter in places:
        del part._parameters[name]
        setattr(part, name, parameter.detach().clone().requires_grad_(parameter.requires_grad))
    return tuple((part, name) for part, name, _ in places)


def _tried(layers: Sequence[Any], inputs: Any, names: Sequence[str], chunks: int, *, spreads: bool) -> list[float]:
    """The seconds of each layer. Raises PipelineError where there is nothing to try them with."""
    if chunks == 1:
        return [1.0] * len(layers)
    if inputs is None:
        raise PipelineError(
            "partition_method 'measured' needs a trial step",
            hint="give PipelineModule(..., trial_inputs=inputs of a micro-batch), or a Sequential that attribute",
            value="profiled",
        )
    makers = [partial(_trial_layer, layer) for layer in layers]
    return measured_weights(makers, inputs, default_communicator(), names, spreads=spreads)


def _trial_layer(layer: Any) -> tuple[nn.Module | None, Layer]:
    """The module of a layer, used by no other layer, and what is called."""
    if isinstance(layer, LayerSpec):
        module = layer.build()
        return module, layer.called(module) if isinstance(layer, TiedLayerSpec) else module
    if isinstance(layer, nn.Module):
        module = deepcopy(layer)
        return module, module
    return None, layer


def _weighed(layers: Sequence[Any]) -> list[tuple[str, int]]:
    """The name of each layer's class and how many elements it trains. Nothing is computed or allocated for that. Tied
    layers weigh as much as any."""
    weighed = []
    for layer in layers:
        if isinstance(layer, LayerSpec):
            with torch.device("meta"):
                built: Any = layer.build()
        else:
            built = layer
        parameters = built.parameters() if isinstance(built, nn.Module) else ()
        weighed.append(
            (class_name(built), sum(parameter.numel() for parameter in parameters if parameter.requires_grad))
        )
    return weighed
