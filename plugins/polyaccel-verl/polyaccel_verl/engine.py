"""verl's contract of a training engine (`verl.workers.engine.base`), over an engine of polyaccel.

How batches become inputs and outputs become log-probabilities is verl's own code for Hugging Face models, which this
class inherits. Parameters, gradients, updates and checkpoints are polyaccel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import EngineRegistry
from verl.workers.engine.base import BaseEngine, BaseEngineCtx
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

import polyaccel
from polyaccel.errors import PolyaccelError

DEVICES = ["cpu", "cuda", "npu"]


class _Loss:
    """A loss whose `backward` is the engine's."""

    def __init__(self, engine: Any, loss: Tensor) -> None:
        self._engine, self._loss = engine, loss

    def backward(self) -> None:
        self._engine.backward(self._loss, scale_wrt_gas=False)


class _Mode(BaseEngineCtx):
    """A phase of training or evaluation. Gradients are forgotten at the end of training."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.module.train(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)


class _OverPolyaccel(FSDPEngineWithLMHead):
    """What differs from verl's engine for FSDP."""

    def _build_model_optimizer(self) -> None:
        module = _with_values_of_rank_0(self._build_module())
        if self._is_lora:
            module = self._build_lora_module(module)
        self.pass_packed_cu_seqlens = False
        precision = self.engine_config.mixed_precision or {}
        self._autocast_dtype = PrecisionType.to_dtype(precision.get("param_dtype", "bf16"))
        self.scaler = None
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        config.update(self.engine_config.polyaccel)
        optimizer = None
        if not self.engine_config.forward_only:
            optimizer = self._build_optimizer(module)
            config["gradient_clipping"] = self.optimizer_config.clip_grad
        self.module, self.optimizer, *_ = polyaccel.initialize(model=module, optimizer=optimizer, config=config)
        self.lr_scheduler = None if optimizer is None else self._build_lr_scheduler(self.optimizer)

    def initialize(self) -> None:
        self._build_model_optimizer()

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "eval", **kwargs)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        """The micro-batches of a call are one accumulation, however many they are."""
        self.module.set_gradient_accumulation_boundary(is_last_micro_batch)
        yield
        if not is_last_micro_batch:
            self.module.step()  # ends the micro-batch, and updates nothing

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> tuple[Any, dict[str, Any]]:
        loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        return (loss if forward_only else _Loss(self.module, loss)), output

    def optimizer_zero_grad(self) -> None:
        self.module.zero_grad()

    def optimizer_step(self) -> float:
        self.module.step()
        norm = self.module.get_global_grad_norm()
        return 0.0 if norm is None else float(norm)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing moves by itself: polyaccel's config says where states rest."""
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.module.save_checkpoint(local_path, client_state={"schedule": self.lr_scheduler.state_dict()})

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **kwargs: Any
    ) -> None:
        _, client_state = self.module.load_checkpoint(local_path)
        self.lr_scheduler.load_state_dict(client_state["schedule"])

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Yield names and whole values, one parameter at a time. Every rank takes all of them."""
        adapted = getattr(self.module.module, "peft_config", None)
        if adapted is None:
            return _whole(self.module.module), None
        return _whole(self.module.module, "lora_"), adapted["default"].to_dict()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Any, dict[str, Any] | None]:
        raise PolyaccelError(
            "shards of single tensors are not exported", hint="use a checkpoint engine of verl that takes whole tensors"
        )

    def disable_adapter(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self.module.module.disable_adapter()
        return found


def _whole(module: nn.Module, only: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a copy of each parameter, gathered alone, and of each saved buffer."""
    entries = module.state_dict(keep_vars=True)
    for name, entry in entries.items():
        if only not in name:
            continue
        with polyaccel.zero.GatheredParameters([entry] if isinstance(entry, nn.Parameter) else []):
            value = entry.detach().clone()
        yield name, value


def _with_values_of_rank_0(module: nn.Module) -> nn.Module:
    """Give parameters and buffers that were made without values those of rank 0. verl loads them there alone."""
    tensors = [*module.parameters(), *module.buffers()]
    lacks = any(one.is_meta for one in tensors)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, lacks)
    if not any(found):
        return module
    if lacks:
        module = module.to_empty(device="cpu")
    for tensor in [*module.parameters(), *module.buffers()]:
        torch.distributed.broadcast(tensor.data, 0)
    return module


@EngineRegistry.register(model_type="language_model", backend="polyaccel", device=DEVICES)
class PolyaccelEngine(_OverPolyaccel):
    """A language model, trained by polyaccel."""


@EngineRegistry.register(model_type="value_model", backend="polyaccel", device=DEVICES)
class PolyaccelEngineWithValueHead(_OverPolyaccel, FSDPEngineWithValueHead):
    """A model of values, trained by polyaccel."""
