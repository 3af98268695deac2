"""`deepspeed.compression`, as of DeepSpeed 0.19.5: polyaccel's functions over configs that were written for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import polyaccel
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_deepspeed.config import normalise


def init_compression(model: Any, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None) -> Any:
    """Compress the layers that the config names, in place; returns the model."""
    return polyaccel.init_compression(model, normalise(deepspeed_config)[0], teacher_model=teacher_model)


def redundancy_clean(model: Any, deepspeed_config: Any, mpu: Any = None) -> Any:
    """Make compressed layers plain again, in place, and smaller where they were pruned; returns the model.

    Of an engine it is the engine's module, which the engine has given up.
    """
    if isinstance(model, TorchEngine):
        module = model.module
        model.destroy()
        model = module
    return polyaccel.redundancy_clean(model, normalise(deepspeed_config)[0])


def student_initialization(student_model: Any, teacher_model: Any, deepspeed_config: Any) -> Any:
    """Copy the teacher's layers that the config names into the student, in place; returns the student."""
    return polyaccel.student_initialization(student_model, teacher_model, normalise(deepspeed_config)[0])


def convert_conv1d_to_linear(model: nn.Module, convert_type: type) -> nn.Module:
    """Replace layers of the class `convert_type` (transformers' Conv1D) by linear ones, in place; returns the model."""
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, convert_type):
                setattr(part, name, _linear(child))
    return model


def _linear(layer: Any) -> nn.Linear:
    inputs, outputs = layer.weight.shape
    made = nn.Linear(inputs, outputs, bias=layer.bias is not None, device=layer.weight.device, dtype=layer.weight.dtype)
    with torch.no_grad():
        made.weight.copy_(layer.weight.t())
        if layer.bias is not None:
            made.bias.copy_(layer.bias)
    return made
