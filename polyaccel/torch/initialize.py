"""`polyaccel.initialize` for torch modules: everything that a training script passes, made into an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from polyaccel import comm
from polyaccel.comm.default import is_initialized
from polyaccel.config import load_config
from polyaccel.engine.lr_schedules import SCHEDULES, build_schedule
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.runtime import Runtime, compose
from polyaccel.torch.batch import device_of
from polyaccel.torch.client_optimizer import ClientOptimizer, check_sliceable
from polyaccel.torch.data import ShardedDataLoader
from polyaccel.torch.deferred import prepare
from polyaccel.torch.engine import TorchEngine
from polyaccel.torch.leaf_config import mark_configured_leaves
from polyaccel.torch.module_buffers import convert_buffers
from polyaccel.torch.optimizer import ParamGroups, make_groups, torch_optimizer
from polyaccel.torch.sharded import require_whole
from polyaccel.zero.optimizers import SliceOptimizer
from polyaccel.zero.policy import Placement

OptimizerLike = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    config_params: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> tuple[TorchEngine, Any, ShardedDataLoader[Any] | None, Any]:
    """Build an engine around `model`; returns `(engine, optimizer, training_dataloader, lr_scheduler)`.

    `config` (or `config_params`, or `args.deepspeed_config`) is a path, a dict or base64. `optimizer` is an instance or
    a callable that takes parameters, and goes before the config's; `model_parameters` are parameters or group dicts, by
    default all of the model's. `training_data` is a torch Dataset, `lr_scheduler` an instance or a callable that takes
    the optimizer. Joins the other ranks if nobody has yet, unless `dist_init_required` is False. What was not asked for
    is None in the result.

    Raises ConfigError with everything wrong in the config, ShardingError for parameters or an optimizer that cannot be
    cut as asked, CommError when the ranks cannot meet.
    """
    if model is None:
        raise PolyaccelError("initialize was called without a model", cure="pass model=, a torch.nn.Module")
    if mpu is not None:
        raise PolyaccelError("mpu is not available in this version", cure="pass mpu=None: all ranks are data-parallel")
    source = _the_config(args, config, config_params)
    parsed = load_config(source)
    if not is_initialized() and dist_init_required is not False:
        comm.init_distributed(config=parsed, distributed_port=distributed_port)
    runtime = compose(parsed)
    device = device_of(runtime.accelerator)
    runtime.apply_to_process()
    require_whole(model)
    prepare(model)
    _move(model, device)
    convert_buffers(model, runtime.config.data_types)
    if runtime.policy.params is Placement.SHARDED:
        mark_configured_leaves(model, runtime.config.zero_optimization)
    slice_optimizer, groups = _make_optimizer(runtime, model, optimizer, model_parameters)
    engine = TorchEngine(model, runtime, slice_optimizer, groups)
    engine.lr_scheduler = _make_schedule(runtime, engine, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _move(model: nn.Module, device: torch.device) -> None:
    """Put `model` on `device`, every parameter the same object as before: optimizers and callers hold them.

    torch makes new ones where the device's tensors are of another kind than the CPU's; it can exchange what is in them
    instead.
    """
    future = torch.__future__
    as_before = future.get_swap_module_params_on_conversion()
    alike = torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
    future.set_swap_module_params_on_conversion(as_before or not alike)
    try:
        model.to(device)
    finally:
        future.set_swap_module_params_on_conversion(as_before)


def _the_config(args: Any, *given: Any) -> Any:
    """The one config among the places where callers put it."""
    from_args = getattr(args, "deepspeed_config", None)
    sources = {"config": given[0], "config_params": given[1], "args.deepspeed_config": from_args}
    present = {name: source for name, source in sources.items() if source is not None}
    if len(present) != 1:
        what = "no config was given" if not present else "several configs were given"
        raise ConfigError(
            [Problem("config", ", ".join(present) or None, what, f"pass exactly one of {', '.join(sources)}")],
            source="initialize",
        )
    return next(iter(present.values()))


def _make_optimizer(
    runtime: Runtime, model: nn.Module, client: OptimizerLike | None, model_parameters: Iterable[Any] | None
) -> tuple[SliceOptimizer | None, ParamGroups]:
    """The optimizer on slices and its groups: the caller's, else the config's, else none."""
    section = runtime.config.optimizer
    if client is None:
        native = runtime.native_optimizer()
        if native is not None:
            slices, defaults = native
            return slices, make_groups(model_parameters, model, defaults)
        if section is None:
            return None, []  # nothing is trained, so there are no master weights and gradients
        client = torch_optimizer(section.type, section.params, make_groups(model_parameters, model, {}))
    elif not isinstance(client, torch.optim.Optimizer):
        client = client(make_groups(model_parameters, model, {}))
    flat = check_sliceable(
        client,
        sharded=runtime.policy.optim is Placement.SHARDED,
        allow_untested=runtime.config.zero_allow_untested_optimizer,
    )
    names = {parameter: fqn for fqn, parameter in model.named_parameters()}
    groups = client.param_groups
    return ClientOptimizer(client, names, flat=flat), groups


def _make_schedule(runtime: Runtime, engine: TorchEngine, client: Any) -> Any:
    """The learning-rate schedule: the caller's, else the config's, else None."""
    if client is not None:
        is_instance = hasattr(client, "step") and hasattr(client, "state_dict")
        return client if is_instance else client(engine.optimizer)
    section = runtime.config.scheduler
    if section is None:
        return None
    if engine.optimizer is None:
        cure = 'add "optimizer" to the config or pass one'
        raise ConfigError([Problem("scheduler.type", section.type, "there is no optimizer to schedule", cure)])
    if section.type in SCHEDULES:
        return build_schedule(section.type, section.params, engine.optimizer)
    kind = getattr(torch.optim.lr_scheduler, section.type, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.lr_scheduler.LRScheduler)):
        cure = f"use one of {', '.join(SCHEDULES)}, or the exact name of a class of torch.optim.lr_scheduler"
        raise ConfigError([Problem("scheduler.type", section.type, "no schedule has this name", cure)])
    try:
        return kind(engine.optimizer, **section.params)
    except (TypeError, ValueError) as error:
        expected = f"{section.type} refuses them: {error}"
        raise ConfigError([Problem("scheduler.params", dict(section.params), expected)]) from error
