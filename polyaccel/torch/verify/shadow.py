"""The config, weights and random numbers of a verification's runs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polyaccel.config import Config
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.verify.variant import NOISE, Record, Variant

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
_CHOICES = frozenset(
    {
        *("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "maximum", "minimum"),
        *("round", "relu", "relu_", "relu6", "hardtanh"),
    }
)
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


def quiet_config(config: Config) -> Config:
    """Return `config` without what writes to a script's folders and services, which the runs of a verification must
    not do."""
    default = Config()
    written = "run_dir monitors tensorboard csv_monitor wandb comet alerts trace autotuning flops_profiler comms_logger"
    changes = {name: getattr(default, name) for name in written.split()}
    checkpoint = config.checkpoint.model_copy(
        update={name: value for name, value in default.checkpoint if name.startswith(("replica", "keep", "async"))}
    )
    return config.model_copy(update={**changes, "checkpoint": checkpoint})


def shadow_config(config: Config, model: nn.Module) -> Config:
    """Return `config` in float32, with thresholds at which each rewrite acts on a small model."""
    zero = config.zero_optimization
    # All stages need one config.
    numels = model.layer_numels if isinstance(model, PipelineModule) else [one.numel() for one in model.parameters()]
    bucket = min(zero.reduce_bucket_size, max(64, sum(numels) // _BUCKETS))
    exact = {"zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"}
    changes: dict[str, Any] = {
        "fp16": type(config.fp16)(),
        "bf16": type(config.bf16)(),
        "torch_autocast": type(config.torch_autocast)(),
        "low_precision_linear": type(config.low_precision_linear)(),
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
def move_weights(model: nn.Module, variant: Variant) -> None:
    """Move each floating parameter of `model` by the units in the last place, or the noise, of a variant."""
    if not variant.moved and not variant.noise:
        return
    generator = torch.Generator().manual_seed(variant.noise)
    for parameter in model.parameters():
        if parameter.is_floating_point() and variant.noise:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.device)
            parameter.mul_(1 + NOISE * torch.finfo(parameter.dtype).eps * drawn)
        elif parameter.is_floating_point():
            towards = torch.full_like(parameter, float("inf") if variant.moved > 0 else float("-inf"))
            parameter.copy_(torch.nextafter(parameter, towards))


_PASSES = {function: inspect.signature(function) for function in (Tensor.backward, torch.autograd.backward)}


class _RunMode(TorchFunctionMode):
    """A mode that stays active while a backward pass computes blocks again, which torch would suspend it for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _PASSES:
            return self.call(func, args, kwargs)
        given = _PASSES[func].bind(*args, **kwargs).arguments
        tensors = (given.pop("self"),) if func is Tensor.backward else tuple(given.pop("tensors"))
        gradients = given.pop("gradient" if func is Tensor.backward else "grad_tensors", None)
        if given.get("inputs") is not None:
            return func(*args, **kwargs)
        gradients = (gradients,) * len(tensors) if gradients is None or isinstance(gradients, Tensor) else gradients
        pairs = zip(tensors, gradients, strict=True)
        grads = [torch.ones_like(one) if gradient is None else gradient for one, gradient in pairs]
        edges = [get_gradient_edge(one) for one in tensors]  # for which torch suspends no mode
        with self:
            return torch.autograd.backward(edges, grads, **given)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of any other function."""
        raise NotImplementedError


class ChoiceWatch(_RunMode):
    """Record whether the program makes choices that rounding can flip, while this mode is active."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self._record.has_choices |= getattr(func, "__name__", "") in _CHOICES
        return func(*args, **kwargs)


class WithoutDropout(_RunMode):
    """Dropout leaves its input as it is while this mode is active."""

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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


class OtherOrder(_RunMode):
    """Matrix products, convolutions and attention add up in another order while this mode is active.

    Rewrites do so as well: they cut sums over ranks and tiles. Inputs and weights are turned around along the dimension
    of the sum, and inputs along that of samples too, over which the gradients of weights are sums.
    """

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        turned = _TURNED.get(func)
        tensors = [one for one in args[:2] if type(one) in (Tensor, nn.Parameter) and one.is_floating_point()]
        if turned is None or len(tensors) < 2 or any(one.layout is not torch.strided for one in tensors):
            return func(*args, **kwargs)
        return turned(func, *args, **kwargs)


def _linear_turned(func: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if inputs.dim() < 2:
        return func(inputs.flip(-1), weight.flip(-1), bias)
    return func(inputs.flip(0, -1), weight.flip(-1), bias).flip(0)


def _product_turned(func: Any, one: Tensor, other: Tensor, **kwargs: Any) -> Any:
    if one.dim() < 1 or other.dim() < 2:
        return func(one, other, **kwargs)
    return func(one.flip(-1), other.flip(-2), **kwargs)


def _convolution_turned(func: Any, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    channels = 1 - weight.dim()
    if inputs.dim() != weight.dim() or inputs.shape[channels] != weight.shape[1]:  # one sample, or groups
        return func(inputs, weight, *args, **kwargs)
    return func(inputs.flip(0, channels), weight.flip(1), *args, **kwargs).flip(0)


def _attention_turned(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    if dropout_p:  # other random numbers would meet the keys
        return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    elif attn_mask is not None and attn_mask.shape[-1] == 1:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2])
    mask = None if attn_mask is None else attn_mask.flip(-1)
    return func(query, key.flip(-2), value.flip(-2), mask, 0.0, False, **kwargs)


_TURNED: dict[Any, Any] = {
    functional.linear: _linear_turned,
    **dict.fromkeys((torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.bmm, Tensor.mm), _product_turned),
    Tensor.__matmul__: _product_turned,
    **dict.fromkeys((functional.conv1d, functional.conv2d, functional.conv3d), _convolution_turned),
    functional.scaled_dot_product_attention: _attention_turned,
}
