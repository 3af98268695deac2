"""The config, weights and random numbers of a verification's runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyaccel.config import Config

_ARITHMETIC = frozenset(
    {
        *("accelerator", "comm", "optimizer", "gradient_clipping", "gradient_allreduce_op", "prescale_gradients"),
        *("gradient_predivide_factor", "zero_optimization", "zero_allow_untested_optimizer"),
        *("zero_force_ds_cpu_optimizer", "activation_checkpointing", "pipeline", "mesh", "tensor_parallel"),
        *("sequence_parallel_size", "sequence_parallel", "expert_parallel", "use_data_before_expert_parallelism"),
        *("tiled_compute", "data_parallel_size"),
    }
)
_BUCKETS = 7
_TILE_TOKENS = 4
_DROPOUTS = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})


def arithmetic_config(config: Config) -> Config:
    """Return `config` with defaults in place of all that does not change what a step computes."""
    default = Config()
    rest = {name: getattr(default, name) for name in Config.model_fields if name not in _ARITHMETIC}
    zero = config.zero_optimization
    offload = type(zero)()
    changes = {"offload_optimizer": offload.offload_optimizer, "offload_param": offload.offload_param}
    return config.model_copy(
        update={**rest, "matrix_kernels": "off", "zero_optimization": zero.model_copy(update=changes)}
    )


def shadow_config(config: Config, model: nn.Module) -> Config:
    """Return `config` in float32, with thresholds at which each rewrite acts on a small model."""
    zero = config.zero_optimization
    numel = max(1, sum(parameter.numel() for parameter in model.parameters()))
    bucket = min(zero.reduce_bucket_size, max(64, numel // _BUCKETS))
    exact = {"zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"}
    changes: dict[str, Any] = {
        "fp16": type(config.fp16)(),
        "bf16": type(config.bf16)(),
        "torch_autocast": type(config.torch_autocast)(),
        "data_types": type(config.data_types)(),
        "communication_data_type": None,
        "zero_optimization": zero.model_copy(
            update={"param_persistence_threshold": 0, "reduce_bucket_size": bucket, **dict.fromkeys(exact, False)}
        ),
    }
    tiles = config.tiled_compute
    if tiles.enabled:
        tokens = {"loss_tokens": tiles.loss_tokens or _TILE_TOKENS, "mlp_tokens": tiles.mlp_tokens or _TILE_TOKENS}
        changes["tiled_compute"] = tiles.model_copy(update=tokens)
    return config.model_copy(update=changes)


@torch.no_grad()
def move_weights(model: nn.Module, units: int) -> None:
    """Move each floating parameter of `model` by `units` in the last place."""
    if units == 0:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point():
            towards = torch.full_like(parameter, float("inf") if units > 0 else float("-inf"))
            parameter.copy_(torch.nextafter(parameter, towards))


class WithoutDropout(TorchFunctionMode):
    """Dropout leaves its input as it is while this mode is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            value: Tensor = args[0] if args else kwargs["input"]
            return value.clone()
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
