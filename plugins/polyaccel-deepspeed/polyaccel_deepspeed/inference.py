"""`deepspeed.init_inference`: DeepSpeed's keys in, the engine of `polyaccel.init_inference` out."""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger
from pathlib import Path
from typing import Any

import torch

from polyaccel.config.inference import load_inference_config
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.engine import inference_engine
from polyaccel.torch.inference import init_inference as init_torch
from polyaccel_deepspeed.config import read_text
from polyaccel_deepspeed.initialize import init_distributed
from polyaccel_deepspeed.origin import refuse_another, tell_whose
from polyaccel_deepspeed.utils import keep_lines_from_root

log = getLogger("polyaccel.deepspeed")

_DTYPES: dict[Any, str] = {
    torch.float32: "fp32", "torch.float32": "fp32", "fp32": "fp32", "float32": "fp32", "float": "fp32",
    torch.float16: "fp16", "torch.float16": "fp16", "fp16": "fp16", "float16": "fp16", "half": "fp16",
    torch.bfloat16: "bf16", "torch.bfloat16": "bf16", "bf16": "bf16", "bfloat16": "bf16", "bfloat": "bf16",
    torch.int8: "int8", "torch.int8": "int8", "int8": "int8",
}  # fmt: skip
_OTHER_NAMES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
}
_DEFAULTS: dict[str, Any] = {
    "replace_with_kernel_inject": False, "dtype": torch.float16, "tensor_parallel": {}, "enable_cuda_graph": False,
    "use_triton": False, "triton_autotune": False, "zero": {}, "triangular_masking": True, "moe": {}, "quant": {},
    "checkpoint": None, "base_dir": "", "set_empty_params": False, "save_mp_checkpoint_path": None,
    "checkpoint_config": {}, "return_tuple": True, "training_mp_size": 1, "replace_method": "auto",
    "injection_policy": None, "injection_policy_tuple": None, "config": None, "max_out_tokens": 1024,
    "min_out_tokens": 1, "transposed_mode": False, "mp_size": 1, "mpu": None, "ep_size": 1, "ep_group": None,
    "ep_mp_group": None, "moe_experts": [1], "moe_type": "standard", "tp_grain_size": 64,
    "keep_module_on_host": False,
}  # fmt: skip
"""DeepSpeed's keys, with its defaults."""
_READ = {
    "replace_with_kernel_inject",
    "dtype",
    "tensor_parallel",
    "checkpoint",
    "base_dir",
    "max_out_tokens",
    "mp_size",
}
_NO_EFFECT = {
    "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking", "set_empty_params", "return_tuple",
    "replace_method", "injection_policy", "injection_policy_tuple", "min_out_tokens", "transposed_mode",
    "tp_grain_size", "keep_module_on_host", "moe_type", "config",
}  # fmt: skip
"""Keys about DeepSpeed's kernels and its replacement of layers."""


class InferenceEngine(inference_engine.InferenceEngine):
    """An engine that `deepspeed.init_inference` made. Its `config` is the model's own."""

    def adopt(self) -> None:
        """Show the model's config, which pipelines of transformers read."""
        self.config = getattr(self._own_module, "config", None)  # type: ignore[assignment]  # as there

    @property
    def mp_world_size(self) -> int:
        """The number of tensor ranks."""
        return self.mesh.size_of(("tensor",))


def init_inference(model: torch.nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """An engine around `model` that computes and generates; keys stand in `config`, or are given by name.

    Raises ConfigError, a ValueError, for unknown keys, for what does not exist here, and for two values of a key.
    """
    refuse_another()
    keep_lines_from_root()
    keys = _merged(config, kwargs)
    mine = _translate(keys)
    init_distributed()
    engine = init_torch(model, load_inference_config(None, mine), InferenceEngine)
    engine.adopt()
    if engine.communicator.rank == 0:
        tell_whose()
    return engine


def default_inference_config() -> dict[str, Any]:
    """DeepSpeed's keys of `init_inference`, with its defaults."""
    return {key: value.copy() if isinstance(value, dict | list) else value for key, value in _DEFAULTS.items()}


def _merged(config: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """All keys by their usual names. Raises ConfigError for unknown ones, and for two values of one."""
    source = {} if config is None else dict(config) if isinstance(config, Mapping) else read_text(config)
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for given in (source, named):
        for written, value in given.items():
            key = _OTHER_NAMES.get(written, written)
            if key not in _DEFAULTS:
                problems.append(Problem(written, value, "is not a key of init_inference", "remove it"))
            elif key in found and found[key] != value:
                problems.append(Problem(written, value, f"differs from {found[key]!r}", "give one of them"))
            else:
                found[key] = value
    if problems:
        raise ConfigError(problems, source="init_inference")
    return found


def _translate(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `polyaccel.init_inference` that mean the same. Raises ConfigError for what there is not."""
    changed = {key: value for key, value in keys.items() if value != _DEFAULTS[key]}
    problems = [
        Problem(key, value, "does not exist here", "leave it out")
        for key, value in changed.items()
        if key not in _READ | _NO_EFFECT and not (key == "quant" and _is_8_bit(value))
    ]
    dtype = keys.get("dtype", torch.float16)
    if dtype not in _DTYPES:
        problems.append(Problem("dtype", dtype, "should be fp32, fp16, bf16 or int8", "give one of these"))
    tensor = dict(keys.get("tensor_parallel") or {})
    size = tensor.pop("tp_size", 1) if tensor.pop("enabled", True) else 1
    if any(value is not None for value in tensor.values()):
        problems.append(Problem("tensor_parallel", tensor, "the mesh makes its groups itself", "give tp_size alone"))
    if (stated := keys.get("mp_size", 1)) != 1 and size not in (1, stated):
        problems.append(Problem("mp_size", stated, f"differs from tensor_parallel.tp_size = {size}", "give one"))
    if problems:
        raise ConfigError(problems, source="init_inference")
    for key in changed:
        if key in _NO_EFFECT:
            log.info("%s has no effect: layers stay the model's, and are cut by its structure", key)
    mine: dict[str, Any] = {"dtype": _DTYPES[dtype], "tensor_parallel": {"tp_size": stated if stated != 1 else size}}
    if changed.get("checkpoint") is not None:
        mine["checkpoint"] = _place(changed["checkpoint"], str(keys.get("base_dir") or ""))
    if "max_out_tokens" in keys:  # without it DeepSpeed bounds tokens under its own kernels alone
        mine["max_out_tokens"] = keys["max_out_tokens"]
    if keys.get("replace_with_kernel_inject"):
        mine["replace_with_kernel_inject"] = True
    return mine


def _is_8_bit(quant: Any) -> bool:
    """Whether a section `quant` asks for what `"dtype": "int8"` does, or for nothing."""
    if not isinstance(quant, Mapping):
        return False
    weight = quant.get("weight") or {}
    return not quant.get("enabled", True) or weight.get("num_bits", 8) == 8


def _place(checkpoint: Any, base_dir: str) -> str:
    """The file or folder that DeepSpeed's `checkpoint` means: a path, or a description of files, maybe in a file."""
    if isinstance(checkpoint, str) and checkpoint.endswith(".json"):
        checkpoint = read_text(checkpoint)
    if isinstance(checkpoint, str):
        return str(Path(base_dir) / checkpoint)
    files = checkpoint.get("checkpoints") if isinstance(checkpoint, Mapping) else None
    root = Path(base_dir or (checkpoint.get("base_dir") if isinstance(checkpoint, Mapping) else None) or "")
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not files:
        expected, hint = "describes no files", 'give a path, or {"checkpoints": [FILE, ...]}'
        raise ConfigError([Problem("checkpoint", checkpoint, expected, hint)], source="init_inference")
    places = [root / str(file) for file in files]
    if len({one.parent for one in places}) > 1:
        expected = "names files of several folders"
        raise ConfigError([Problem("checkpoint", files, expected, "put them into one")], source="init_inference")
    return str(places[0] if len(places) == 1 else places[0].parent)
