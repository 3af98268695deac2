"""`deepspeed.initialize` and `deepspeed.init_distributed`: DeepSpeed's arguments in, polyaccel's engine out."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from logging import getLogger
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

from polyaccel import comm
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.torch.initialize import initialize as initialize_torch
from polyaccel_deepspeed.accelerator import get_accelerator
from polyaccel_deepspeed.config import log_changes, read_config, read_text
from polyaccel_deepspeed.config_rules import whole_batch
from polyaccel_deepspeed.engine.engine import DeepSpeedEngine
from polyaccel_deepspeed.engine.groups import stand_along
from polyaccel_deepspeed.engine.hybrid import DeepSpeedHybridEngine
from polyaccel_deepspeed.engine.optimizers import NamedOptimizer
from polyaccel_deepspeed.engine.parameters import describe
from polyaccel_deepspeed.engine.schedules import adopt
from polyaccel_deepspeed.engine.tensors import with_layer_specs, with_tensor_ranks
from polyaccel_deepspeed.engine.updates import SLICE_OPTIMIZERS
from polyaccel_deepspeed.experts.models import with_expert_ranks
from polyaccel_deepspeed.keys.experts import require_routing
from polyaccel_deepspeed.keys.translated import UNMANAGED
from polyaccel_deepspeed.origin import refuse_another, refuse_stages, refuse_uncounted, tell_whose
from polyaccel_deepspeed.pipeline.engine import PipelineEngine
from polyaccel_deepspeed.pipeline.module import PipelineModule
from polyaccel_deepspeed.utils import keep_lines_from_root

log = getLogger("polyaccel.deepspeed")


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Build an engine around `model`, and return (engine, optimizer, training_dataloader, lr_scheduler).

    Arguments and errors are `polyaccel.initialize`'s; the config may be one that was written for DeepSpeed, and what is
    altered in it is logged.
    """
    refuse_another()
    keep_lines_from_root()
    if model is None:
        raise NoModelError("initialize was called without a model", hint="pass model=, a torch.nn.Module")
    written = _the_config(args, config, config_params)
    tree, changes = read_config(written)
    raw = read_text(written)
    require_routing(raw, model)
    refuse_stages(sys._getframe(1).f_globals.get("__name__", ""), _stages_of(model, tree))
    tree = with_expert_ranks(with_tensor_ranks(with_layer_specs(tree, raw, model), model, mpu), model)
    if isinstance(optimizer, NamedOptimizer):
        tree["optimizer"] = optimizer.section()
        model_parameters = optimizer.param_groups
    if dist_init_required is not False or dist.is_initialized():
        init_distributed(distributed_port=distributed_port, config=tree)
    refuse_uncounted(comm.get_world_size())
    changes = (*changes, *whole_batch(tree, comm.get_world_size()))
    engine, own_optimizer, loader, schedule = initialize_torch(
        model,
        optimizer=None if isinstance(optimizer, NamedOptimizer) else optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        mpu=mpu,
        mesh_param=mesh_param,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
        distributed_port=None,
        dist_init_required=dist_init_required,
        config=tree,
        engine_class=_engine_class(tree),
        pipeline_engine_class=PipelineEngine,
        slice_optimizers=SLICE_OPTIMIZERS,
    )
    assert isinstance(engine, DeepSpeedEngine)  # asked for
    if engine.global_rank == 0:
        tell_whose()
        log_changes(changes)
    if lr_scheduler is None:
        adopt(schedule)
    if isinstance(optimizer, NamedOptimizer):
        optimizer.follow(own_optimizer)
    engine.client_lr_scheduler, engine.training_data = lr_scheduler, training_data
    if raw.get(UNMANAGED) is False:
        engine.leave_accumulation_to_caller()
    stand_along(engine.mesh)
    engine.adopt(written if isinstance(written, Mapping) else tree, optimizer, collate_fn)
    if engine.zero_optimization_partition_weights():
        describe(model, engine.world_size)
    return engine, own_optimizer, loader, schedule


def _stages_of(model: torch.nn.Module, tree: Mapping[str, Any]) -> int:
    if isinstance(model, PipelineModule):
        return model.num_stages
    found = [1]
    for section, key in (("pipeline", "stages"), ("mesh", "pipe")):
        part = tree.get(section)
        stages = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(stages, int):  # what else it may be, such as "auto", the config's reader decides
            found.append(stages)
    return max(found)


def _engine_class(tree: Mapping[str, Any]) -> type[DeepSpeedEngine]:
    section = tree.get("hybrid_engine") or {}
    return DeepSpeedHybridEngine if section.get("enabled") else DeepSpeedEngine


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join all ranks, as `polyaccel.init_distributed`. torch's default group exists afterwards, of a single rank too.

    `dist_backend="gloo"` asks for ranks on CPUs, whose collectives polyaccel carries by what is fastest there.
    """
    comm.init_distributed(
        None if dist_backend == "gloo" else dist_backend,
        auto_mpi_discovery,
        None if distributed_port == _USUAL_PORT else distributed_port,
        verbose,
        timeout,
        init_method,
        dist_init_required,
        config,
        rank,
        world_size,
    )
    if get_accelerator().communication_backend_name() == "nccl":
        log_nccl_variables(os.environ)
    if not dist.is_initialized() and comm.get_world_size() == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def log_nccl_variables(environment: Mapping[str, str]) -> None:
    """Log NCCL's variables of every node on rank 0, where nodes may have others. Collective."""
    mine = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    first_of_node = mine if comm.get_local_rank() == 0 else None
    found: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(found, (socket.gethostname(), first_of_node))
    for host, variables in found if comm.get_rank() == 0 else ():
        if variables:
            log.info("%s: %s", host, " ".join(f"{name}={value}" for name, value in sorted(variables.items())))


_USUAL_PORT = 29500
"""DeepSpeed's default, which every script passes on: it asks for no port in particular."""


def _the_config(args: Any, config: Any, config_params: Any) -> Any:
    """The one config among the places where callers put it. Two of them have older names."""
    given = [config if config is not None else config_params]
    given += [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    one = [each for each in given if each is not None]
    if len(one) != 1:
        what = "several configs were given" if one else "no config was given"
        hint = "pass exactly one of config and args.deepspeed_config"
        raise NotOneConfigError([Problem("config", given[1], what, hint)], source="initialize")
    return one[0]


class NoModelError(PolyaccelError, AssertionError):
    """There is no model. DeepSpeed raises an AssertionError."""


class NotOneConfigError(ConfigError, AssertionError):
    """There is no config, or there are several. DeepSpeed raises an AssertionError."""
