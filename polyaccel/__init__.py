"""polyaccel: one training engine for any accelerator.

Importing this package loads neither torch nor JAX; a public name loads what it needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from polyaccel import checkpointing as checkpointing
    from polyaccel import comm as comm
    from polyaccel import data as data
    from polyaccel import jax as jax
    from polyaccel import torch as torch
    from polyaccel import utils as utils
    from polyaccel import zero as zero
    from polyaccel.accelerators import get_accelerator as get_accelerator
    from polyaccel.accelerators import set_accelerator as set_accelerator
    from polyaccel.comm import init_distributed as init_distributed
    from polyaccel.config import Config as Config
    from polyaccel.config import load_config as load_config
    from polyaccel.engine.run_folder import begin_run as begin_run
    from polyaccel.engine.stop_request import StopRequest as StopRequest
    from polyaccel.errors import ConfigError as ConfigError
    from polyaccel.errors import PolyaccelError as PolyaccelError
    from polyaccel.frontend import add_config_arguments as add_config_arguments
    from polyaccel.frontend import init_inference as init_inference
    from polyaccel.frontend import initialize as initialize
    from polyaccel.observability.progress_view import open_progress as open_progress
    from polyaccel.torch.compression.distillation import distillation_loss as distillation_loss
    from polyaccel.torch.compression.models import init_compression as init_compression
    from polyaccel.torch.compression.models import redundancy_clean as redundancy_clean
    from polyaccel.torch.compression.models import student_initialization as student_initialization
    from polyaccel.torch.engine.inference_engine import InferenceEngine as InferenceEngine
    from polyaccel.torch.engine.torch_engine import TorchEngine as TorchEngine
    from polyaccel.torch.quantized.models import dequantize_frozen as dequantize_frozen
    from polyaccel.torch.quantized.models import quantize_frozen as quantize_frozen

_HOMES = {
    "Config": "polyaccel.config",
    "ConfigError": "polyaccel.errors",
    "InferenceEngine": "polyaccel.torch.engine.inference_engine",
    "PolyaccelError": "polyaccel.errors",
    "StopRequest": "polyaccel.engine.stop_request",
    "TorchEngine": "polyaccel.torch.engine.torch_engine",
    "add_config_arguments": "polyaccel.frontend",
    "begin_run": "polyaccel.engine.run_folder",
    "dequantize_frozen": "polyaccel.torch.quantized.models",
    "distillation_loss": "polyaccel.torch.compression.distillation",
    "get_accelerator": "polyaccel.accelerators",
    "init_compression": "polyaccel.torch.compression.models",
    "init_distributed": "polyaccel.comm",
    "init_inference": "polyaccel.frontend",
    "initialize": "polyaccel.frontend",
    "load_config": "polyaccel.config",
    "open_progress": "polyaccel.observability.progress_view",
    "quantize_frozen": "polyaccel.torch.quantized.models",
    "redundancy_clean": "polyaccel.torch.compression.models",
    "set_accelerator": "polyaccel.accelerators",
    "student_initialization": "polyaccel.torch.compression.models",
}
_ROOMS = ("checkpointing", "comm", "data", "jax", "torch", "utils", "zero")

__all__ = [
    "Config",
    "ConfigError",
    "InferenceEngine",
    "PolyaccelError",
    "StopRequest",
    "TorchEngine",
    "add_config_arguments",
    "begin_run",
    "checkpointing",
    "comm",
    "data",
    "dequantize_frozen",
    "distillation_loss",
    "get_accelerator",
    "init_compression",
    "init_distributed",
    "init_inference",
    "initialize",
    "jax",
    "load_config",
    "open_progress",
    "quantize_frozen",
    "redundancy_clean",
    "set_accelerator",
    "student_initialization",
    "torch",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"polyaccel.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'polyaccel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
