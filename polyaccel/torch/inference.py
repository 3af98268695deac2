"""`polyaccel.init_inference` for torch modules."""

from __future__ import annotations

from logging import getLogger
from typing import Any, TypeVar

import torch
from torch import nn

from polyaccel.config.inference import INTEGER_BITS, InferenceConfig, engine_config
from polyaccel.errors import PolyaccelError
from polyaccel.torch.checkpoint.weights import load_weights
from polyaccel.torch.engine.inference_engine import InferenceEngine
from polyaccel.torch.initialize import initialize

log = getLogger(__name__)
E = TypeVar("E", bound=InferenceEngine)


def init_inference(model: Any, config: InferenceConfig, engine_class: type[E]) -> E:
    """Build an engine around `model`; arguments and errors as in `polyaccel.init_inference`. Collective.

    `engine_class` is for packages that give the engine more methods.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PolyaccelError(f"expected a torch.nn.Module, got {kind}", hint="pass model=", value=kind)
    if config.replace_with_kernel_inject:
        log.info("replace_with_kernel_inject has no effect: the model keeps its layers, over the accelerator's kernels")
    if config.checkpoint is not None:
        load_weights(model, config.checkpoint)
    if config.dtype == "fp32" and any(
        one.is_floating_point() and one.dtype != torch.float32 for one in _tensors(model)
    ):
        model.float()
    if config.dtype in INTEGER_BITS:
        held = {"group_size": config.group_size, "weight_bits": INTEGER_BITS[config.dtype]}
        engine_class = type(engine_class.__name__, (engine_class,), held)
    nothing: dict[str, Any] = dict.fromkeys(
        ("optimizer", "model_parameters", "training_data", "lr_scheduler", "collate_fn", "distributed_port")
    )
    engine, *_ = initialize(
        model.eval(), config=engine_config(config), dist_init_required=None, engine_class=engine_class, **nothing
    )
    assert isinstance(engine, engine_class)  # asked for
    return engine


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
