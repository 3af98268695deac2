"""`UntouchedPipeline`: the layers of all stages of a `PipelineModule` on rank 0, as they were before the first rewrite.

[Note: Layers of all stages]
Rank 0 has the layers of its stage. It builds the others of their specs, or copies modules that the script kept, and
leaves out the values of parameters one layer after the other. Stages send it their buffers, and what is trained. Their
classes, shapes and numbers among attributes must be those of what rank 0 has built: a layer that a script changes on
its own stage is another there. Values of parameters follow at the first update.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.accelerators.torch_device import torch_device_of
from polyaccel.config import Config
from polyaccel.engine.runtime import EngineBuilder
from polyaccel.errors import PolyaccelError
from polyaccel.torch.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec, layers_of
from polyaccel.torch.verify.functions import facts_of, trained_part_of
from polyaccel.torch.verify.generators import restore, states_of
from polyaccel.torch.verify.recording import numbers_of
from polyaccel.torch.verify.untouched import (
    NotProvenError,
    Untouched,
    copies_without_values,
    digest_of,
    line_of,
    plain_name,
    require_copyable,
    values_for,
)

_COMPUTING = frozenset({"forward", "__call__", "get_additional_losses", "train", "eval"})
"""Methods by which a subclass can use its own attributes in a step."""


@dataclass(frozen=True, slots=True)
class UntouchedPipeline(Untouched):
    """All layers, with float32 parameters on the meta device. `module` is the whole, on one rank."""

    layers: Sequence[Any]
    """The modules and functions, and specs that give a module which several layers share."""
    extras: Mapping[str, Any]
    """Attributes of a subclass that it may use in a step."""

    @property
    def numel(self) -> int:
        """Elements of all parameters and buffers."""
        return sum(one.numel() for one in (*self.module.parameters(), *self.module.buffers()))

    def with_values(self, values: Mapping[str, Tensor], like: nn.Module, stage: int | None = None) -> nn.Module:
        """Return a copy with `values` by name: a `stage` dealt as `like` is, or all layers and the loss."""
        assert isinstance(like, PipelineModule)  # what an engine of layers has
        memo = values_for(self.module, values)
        made = like.with_layers(copy.deepcopy(self.layers, memo), stage)
        memo[id(self.module)] = made
        made.loss_fn = copy.deepcopy(getattr(self.module, "loss_fn", None), memo)
        vars(made).update(copy.deepcopy(dict(self.extras), memo))
        made.train()
        return made if stage is not None else WholeLayers(made)


class WholeLayers(nn.Module):
    """All layers of a pipeline and its loss as one module, with the pipeline's names."""

    def __init__(self, pipeline: PipelineModule) -> None:
        super().__init__()
        self._modules.update(pipeline._modules)
        self.__dict__["pipeline"] = pipeline

    def forward(self, inputs: Any, labels: Any) -> Any:
        """Compute the loss of a micro-batch."""
        pipeline: PipelineModule = self.__dict__["pipeline"]
        outputs = pipeline(inputs)
        return outputs if pipeline.loss_fn is None else pipeline.loss_fn(outputs, labels)


def is_of_layers(model: nn.Module, runtime: EngineBuilder) -> bool:
    """Whether a `PipelineModule` trains: the script's, or one that is made of the script's `nn.Sequential`."""
    is_list = type(model) is nn.Sequential and runtime.mesh.has_several("pipe")
    return is_list or isinstance(model, PipelineModule)


def untouched_pipeline(
    model: nn.Module, config: Config, runtime: EngineBuilder, most: int
) -> tuple[UntouchedPipeline | None, str]:
    """Return all layers of `model`, with `most` parameters and elements of buffers at most, and the reason why not.

    Rank 0 alone has the layers. Collective. No rank raises what a layer raises.
    """
    ranks, mesh = runtime.communicator, runtime.mesh
    place = mesh.coordinates(ranks.rank)
    stage = place.get("pipe", 0)
    own = _Stage.from_model(model, stage) if all(not at or axis == "pipe" for axis, at in place.items()) else None
    gathered = ranks.gather_object(None if own is None else own.as_tree())
    found: UntouchedPipeline | None = None
    plan: dict[str, Any] = {}
    if gathered is not None:
        stages = {at: tree for at, tree in enumerate(gathered) if tree is not None}
        reason = next((tree["reason"] for tree in stages.values() if tree["reason"]), "")
        numel = sum(tree["numel"] for tree in stages.values())
        if not reason and numel > most:
            reason = f"{numel:,} parameters are too many for one rank"
        states = states_of(torch_device_of(runtime.accelerator))
        try:
            if not reason:
                found = _whole(model, config, ranks.world_size, list(stages.values()))
        except NotProvenError as error:
            reason = error.message
        except Exception as error:  # of a class of the user's
            reason = f"the layers of other stages cannot be built on rank 0: {type(error).__name__}: {line_of(error)}"
        finally:
            restore(states, torch_device_of(runtime.accelerator))
        sent = [at for at in stages if at]
        plan = {"reason": reason, "sent": sent, "buffers": [stages[at]["buffers"] for at in sent]}
    plan = ranks.broadcast_object(plan)
    if plan["reason"]:
        return None, plan["reason"]
    device = torch_device_of(runtime.accelerator)
    for at, buffers in zip(plan["sent"], plan["buffers"], strict=True):
        for name, kind, shape in buffers:
            if ranks.rank == at:
                value = _buffers_by_name(model)[name].detach().to(device, copy=True).contiguous()
                ranks.send(wrap_torch(value.reshape(-1).view(torch.uint8)), 0, label="buffers of a stage")
            elif ranks.rank == 0:
                value = torch.empty(shape, dtype=getattr(torch, kind), device=device)
                ranks.recv(wrap_torch(value.view(-1).view(torch.uint8)), at, label="buffers of a stage")
                assert found is not None  # else there is a reason
                _set_buffer(found.module, name, value.cpu())
    return found, ""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a stage has, in plain values."""

    facts: dict[str, str]
    """A line for each module by its name in the whole."""
    trained: dict[str, bool]
    buffers: list[list[Any]]
    """Names, types and shapes of buffers with elements, apart from those of modules that another stage owns."""
    numel: int
    dealing: str
    reason: str

    @staticmethod
    def from_model(model: nn.Module, stage: int) -> _Stage:
        """Read the layers that this rank has. Raises nothing."""
        try:
            if not isinstance(model, PipelineModule):  # whole on every rank
                require_copyable(model)
                return _Stage({}, {}, [], sum(one.numel() for one in model.parameters()) if not stage else 0, "", "")
            return _read(model, stage)
        except NotProvenError as error:
            reason = error.message
        except Exception as error:  # of a class of the user's
            reason = f"stage {stage} cannot be read: {type(error).__name__}: {line_of(error)}"
        return _Stage({}, {}, [], 0, "", reason)

    def as_tree(self) -> dict[str, Any]:
        """Return plain values, to be sent."""
        return {name: getattr(self, name) for name in self.__slots__}


def _read(model: PipelineModule, stage: int) -> _Stage:
    require_copyable(model)
    if model.stage != stage:
        raise NotProvenError(f"the mesh has its stage {model.stage} at {stage}")
    lent = {id(tie.module) for tie in model.ties.values() if tie.holders[0] != model.stage}
    named = {name: module for name, module in _layers_by_name(model) if id(module) not in lent}
    prefixes = tuple(f"{name}." for name, _ in _layers_by_name(model))
    parameters = {plain_name(name): one for name, one in model.named_parameters()}
    buffers = {name: one for name, one in _buffers_by_name(model).items() if not name.startswith("loss_fn.")}
    if foreign := next((name for name in (*parameters, *buffers) if not name.startswith(prefixes)), None):
        raise NotProvenError(f"it has {foreign} outside of its layers")
    own = {name: one for name, one in buffers.items() if name.startswith(tuple(f"{one}." for one in named))}
    for name, one in own.items():
        if type(one) is not Tensor or one.layout is not torch.strided or one.is_meta or one.is_quantized:
            raise NotProvenError(f"the values of the buffer {name} cannot be sent")
    return _Stage(
        facts={name: line for prefix, module in named.items() for name, line in _facts_of(prefix, module)},
        trained={name: one.requires_grad for name, one in parameters.items()},
        buffers=[[name, str(one.dtype)[6:], list(one.shape)] for name, one in own.items() if one.numel()],
        numel=sum(one.numel() for one in (*parameters.values(), *own.values())),
        dealing=_dealing(model),
        reason="",
    )


def _buffers_by_name(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): one for name, one in model.named_buffers()}


def _layers_by_name(model: PipelineModule) -> Iterator[tuple[str, nn.Module]]:
    """The modules of layers that are here, by their names in the whole."""
    for name in dict.fromkeys(model.module_names):
        if (module := model._layer_named(name)) is not None:
            yield name, module


def _facts_of(prefix: str, layer: nn.Module) -> Iterator[tuple[str, str]]:
    for name, one in layer.named_modules(prefix=prefix, remove_duplicate=False):
        if "_orig_mod" in one._modules:
            continue  # the copy has the module that was compiled
        tensors = (*one._parameters.items(), *one._buffers.items())
        shapes = [f"{key} {list(value.shape)} {value.dtype}" for key, value in tensors if value is not None]
        numbers = [f"{key} {value}" for key, value in numbers_of(one)]
        parts = (f"{type(one).__module__}.{type(one).__qualname__}", one.extra_repr(), *shapes, *numbers)
        yield plain_name(name), "; ".join(parts)


def _dealing(model: PipelineModule) -> str:
    """How layers are dealt to stages and run there."""
    recomputing = next(iter(model._chunks.values())).recomputing
    classes = None if recomputing.classes is None else sorted(recomputing.classes)
    parts = [[part.start, part.stop] for part in model.parts]
    facts = (model.num_stages, parts, model.placement, model.schedule, model.chunks, model.spreads_tuples)
    return f"{facts} {recomputing.interval} {facts_of(recomputing.function)} {classes}"


def _whole(model: nn.Module, config: Config, world_size: int, stages: Sequence[Mapping[str, Any]]) -> UntouchedPipeline:
    """All layers, with the buffers of this stage. Raises NotProvenError where they are not those of the stages."""
    if len({tree["dealing"] for tree in stages}) > 1:
        raise NotProvenError("stages recompute other layers")
    if isinstance(model, PipelineModule):
        try:
            specs, seed = layers_of(model)
        except PolyaccelError as error:
            raise NotProvenError(f"{error.message}, and the script has kept none of it") from None
    else:
        specs, seed = list(model.children()), None
    memo = copies_without_values(model)
    layers: list[Any] = []
    modules: dict[str, nn.Module] = {}
    for index, spec in enumerate(specs):
        own = model._layer_named(model.module_names[index]) if isinstance(model, PipelineModule) else None
        if isinstance(spec, LayerSpec):
            key = f"tied {spec.key}" if isinstance(spec, TiedLayerSpec) else str(index)
            if key not in modules and own is not None:
                modules[key] = copy.deepcopy(own, memo)
            elif key not in modules:
                if seed is not None:
                    seed(index)
                modules[key] = _without_values(spec.build())
            layers.append(_given(spec, modules[key]) if isinstance(spec, TiedLayerSpec) else modules[key])
            continue
        if isinstance(spec, nn.Module):
            memo |= {key: one for key, one in copies_without_values(spec).items() if key not in memo}
        elif part := trained_part_of(spec, model):
            raise NotProvenError(f"layer {index} is a function with {part}, which a copy would share")
        layers.append(copy.deepcopy(spec, memo))
    whole = _on_one_rank(model, layers)
    memo[id(model)] = whole
    loss_fn = getattr(model, "loss_fn", None)
    functions = {"loss": loss_fn, **{f"tied layer {one.key}": one.forward_fn for one in specs if _is_tied(one)}}
    for name, function in functions.items():
        if part := None if isinstance(function, nn.Module) else trained_part_of(function, model):
            raise NotProvenError(f"the function of the {name} has {part}, which a copy would share")
    whole.loss_fn = copy.deepcopy(loss_fn, memo)
    extras = copy.deepcopy(_extras_of(model, whole), memo)
    _require_as_on_stages(whole, stages)
    lines = [tree["dealing"] for tree in stages[:1]]
    lines += [facts_of(one) for one in (*specs, *functions.values()) if not isinstance(one, (LayerSpec, nn.Module))]
    digest = hashlib.sha256("\0".join((digest_of(whole, config, world_size), *lines)).encode()).hexdigest()
    return UntouchedPipeline(whole, digest, layers, extras)


def _on_one_rank(model: nn.Module, layers: Sequence[Any]) -> PipelineModule:
    return model.with_layers(layers) if isinstance(model, PipelineModule) else PipelineModule(layers, 1)


def _is_tied(spec: Any) -> bool:
    return isinstance(spec, TiedLayerSpec)


def _without_values(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module, copies_without_values(module))


def _given(spec: TiedLayerSpec, module: nn.Module) -> TiedLayerSpec:
    """A spec that gives `module`, and one that gives the module's copy where both are copied."""
    made = copy.copy(spec)
    made.typename, made.module_args, made.module_kwargs = partial(_same, module), (), {}
    if made.build() is not module:
        raise NotProvenError(f"{type(spec).__name__} overrides `build`")
    return made


def _same(module: nn.Module) -> nn.Module:
    return module


def _extras_of(model: nn.Module, whole: PipelineModule) -> dict[str, Any]:
    """The attributes that a subclass may use in a step: none where only its constructor has them."""
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PipelineModule) and kind is not PipelineModule]
    is_used = _COMPUTING & {name for kind in classes for name in vars(kind)}
    has_own_loss = getattr(getattr(model, "loss_fn", None), "__self__", None) is model
    if not is_used and not has_own_loss:
        return {}
    return {name: value for name, value in vars(model).items() if name not in vars(whole)}


def _require_as_on_stages(whole: PipelineModule, stages: Sequence[Mapping[str, Any]]) -> None:
    """Raise NotProvenError unless the layers of the stages are those of `whole`; let it train what they train."""
    if not any(tree["facts"] for tree in stages):
        return  # each rank has all
    facts = {name: line for prefix, layer in _layers_by_name(whole) for name, line in _facts_of(prefix, layer)}
    on_stages: dict[str, str] = {}
    for tree in stages:
        on_stages |= tree["facts"]
    for name in dict.fromkeys((*facts, *on_stages)):
        if _in_float32(facts.get(name, "")) != _in_float32(on_stages.get(name, "")):
            raise NotProvenError(f"layer {name} is another on its stage than a layer that is built on rank 0")
    trained = {name: one for tree in reversed(stages) for name, one in tree["trained"].items()}
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def _in_float32(line: str) -> str:
    """A line of facts with the types of copies."""
    return line.replace("torch.bfloat16", "torch.float32").replace("torch.float16", "torch.float32")


def _set_buffer(whole: nn.Module, name: str, value: Tensor) -> None:
    path, _, own = name.rpartition(".")
    is_short = value.dtype in (torch.bfloat16, torch.float16)
    whole.get_submodule(path)._buffers[own] = value.float() if is_short else value
