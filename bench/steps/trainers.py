"""One training step of each variant. Everybody gets AdamW with the same settings and clipping at 1.0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import PhaseClock
from bench.steps.cases import Job, Variant

_CLIP_NORM = 1.0
_LEARNING_RATE = 3e-4
_BETAS = (0.9, 0.95)
_EPS = 1e-8
_WEIGHT_DECAY = 0.01
_QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}


class Trainer(ABC):
    """A model in training."""

    @abstractmethod
    def step(self, tokens: Tensor, targets: Tensor, clock: PhaseClock) -> float:
        """Forward, backward and update; returns the loss of this rank."""

    def estimate_nbytes(self) -> dict[str, int] | None:
        """Bytes of model states by purpose, where the library has a formula for them."""
        return None


def load_library(variant: Variant) -> Any:
    """The module whose calls `build_trainer` needs, joined to the other ranks; None for plain torch.

    torch's own process group exists already. Apart from the trainer, because imports are not a model's memory.
    """
    if variant.family == "polyaccel":
        polyaccel = import_module("polyaccel")
        polyaccel.init_distributed()
        import_module("polyaccel.torch.initialize")
        return polyaccel
    if variant.family == "deepspeed":
        deepspeed = import_module("deepspeed")
        deepspeed.init_distributed("gloo")
        return deepspeed
    if variant.family == "fsdp2":
        import_module("torch.distributed.fsdp")
    return None


def build_trainer(job: Job, variant: Variant, model: nn.Module, library: Any, world_size: int) -> Trainer:
    if library is not None:
        return EngineTrainer(job, variant, model, library)
    return TorchTrainer(job, variant, model, world_size)


class TorchTrainer(Trainer):
    """torch alone: `local`, DDP, or FSDP2 with a unit for every block."""

    def __init__(self, job: Job, variant: Variant, model: nn.Module, world_size: int) -> None:
        bf16 = job.case.dtype == "bf16"
        if variant.family == "fsdp2":
            shard_module(model, bf16=bf16, world_size=world_size)
            bf16 = False  # FSDP2 casts by itself
        elif variant.family == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        self._model = model
        self._autocast = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=_LEARNING_RATE, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
        )

    def step(self, tokens: Tensor, targets: Tensor, clock: PhaseClock) -> float:
        with clock("forward"), self._autocast:
            loss: Tensor = self._model(tokens, targets)
        with clock("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with clock("update"):
            nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


def shard_module(model: nn.Module, *, bf16: bool, world_size: int) -> None:
    """FSDP2, in the setting that sends least: bf16 for parameters and gradients where bf16 is trained."""
    from torch.distributed.device_mesh import init_device_mesh  # 0.3 s and 50 MB that the others do without
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.bfloat16 if bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    mesh = init_device_mesh("cpu", (world_size,))
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)  # our own model
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class EngineTrainer(Trainer):
    """polyaccel, or DeepSpeed through the same calls with the same JSON."""

    def __init__(self, job: Job, variant: Variant, model: nn.Module, library: Any) -> None:
        self._is_own = variant.family == "polyaccel"
        self._engine = library.initialize(
            model=model, model_parameters=model.parameters(), config=engine_config(job, variant)
        )[0]

    def step(self, tokens: Tensor, targets: Tensor, clock: PhaseClock) -> float:
        with clock("forward"):
            loss: Tensor = self._engine(tokens, targets)
        with clock("backward"):
            self._engine.backward(loss)
        with clock("update"):
            self._engine.step()
        return loss.item()

    def estimate_nbytes(self) -> dict[str, int] | None:
        if not self._is_own:
            return None
        from polyaccel.zero.plan.memory import estimate_memory  # not for ranks that measure another library

        estimate = estimate_memory(self._engine.zero.plan)
        return {row.purpose.value: row.nbytes for row in estimate.rows}


def engine_config(job: Job, variant: Variant) -> dict[str, Any]:
    """The JSON that polyaccel and DeepSpeed are given."""
    return {
        "train_micro_batch_size_per_gpu": job.case.micro_batch,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": _CLIP_NORM,
        "zero_optimization": {"stage": variant.stage, **(_QUANTISED if variant.is_quantised else {})},
        "bf16": {"enabled": job.case.dtype == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": _LEARNING_RATE, "betas": list(_BETAS), "eps": _EPS, "weight_decay": _WEIGHT_DECAY},
        },
    }
