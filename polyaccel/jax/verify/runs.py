"""The runs of a verification, as `initialize` starts them. See [Note: Shadow runs] in `polyaccel.verify.variant`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from polyaccel.config import Config, ResolvedConfig
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError
from polyaccel.jax.engine import JaxEngine
from polyaccel.jax.optax_on_owners import OptaxOnOwners
from polyaccel.jax.optax_optimizer import OptaxOptimizer
from polyaccel.jax.rewrites import RewriteContext
from polyaccel.jax.verify.recording import StepRecording, values_of
from polyaccel.verify.variant import ActiveRun
from polyaccel.zero.update.optimizers import TrustRatioOptimizer

SLICES = "optax"
"""Name in a proof of the rewrite that runs a transformation on slices. Config optimizers are exact on them."""
_OF_CONFIG = frozenset({"jax", "zero_optimization", "gradient_accumulation_steps", "optimizer"})
"""Rewrites that another config switches off, or nothing."""
_BUCKET_NUMEL = 4096


def float32_config(config: Config) -> Config:
    """Return `config` in float32, with thresholds at which each rewrite acts on a small model."""
    zero, none = config.zero_optimization, type(config.zero_optimization)()
    changes = {
        "param_persistence_threshold": 0,
        "reduce_bucket_size": min(zero.reduce_bucket_size, _BUCKET_NUMEL),
        **dict.fromkeys(
            ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"), False
        ),
        "offload_optimizer": none.offload_optimizer,
        "offload_param": none.offload_param,
    }
    types = ("fp16", "bf16", "data_types", "communication_data_type")
    default = Config()
    return config.model_copy(
        update={
            **{name: getattr(default, name) for name in types},
            "zero_optimization": zero.model_copy(update=changes),
        }
    )


def config_without(config: Config, resolved: ResolvedConfig, devices: int, without: Collection[str]) -> Config:
    """Return `config` without some rewrites; `resolved` has its batch sizes, for processes of so many `devices`."""
    micro, steps = resolved.train_micro_batch_size_per_gpu, resolved.gradient_accumulation_steps
    changes: dict[str, Any] = {}
    if "zero_optimization" in without:
        changes["zero_optimization"] = config.zero_optimization.model_copy(update={"stage": 0})
    if "jax" in without:
        changes["jax"] = config.jax.model_copy(update={"execution": "views"})
        micro *= devices
    if "gradient_accumulation_steps" in without:
        micro, steps = micro * steps, 1
    if changes or "gradient_accumulation_steps" in without:
        sizes = {"train_batch_size": None, "train_micro_batch_size_per_gpu": micro}
        changes |= {**sizes, "gradient_accumulation_steps": steps}
    return config.model_copy(update=changes)


def switch_off(context: RewriteContext, without: Collection[str]) -> None:
    """Leave rewrites out of `context`, whose floating parameters are held in float32.

    Raises PolyaccelError where the run has no whole parameters for a transformation that is to have them.
    """
    context.param_dtype = DType.FLOAT32
    context.without = frozenset(without) - _OF_CONFIG - {"model", SLICES}
    context.with_units = "model" not in without
    context.on_slices = SLICES not in without
    if not context.on_slices and not context.has_whole_parameters:
        raise PolyaccelError("optimizer states are sharded here", hint="switch ZeRO's shards off too")


def record_engine(run: ActiveRun, engine: JaxEngine) -> None:
    """Let the steps of `engine` be recorded. Collective at each step."""
    rank = engine.communicator.rank
    recording = StepRecording(run, rank, values_of(engine), lambda: engine.optimizer.param_groups)
    acted = run.record_of(rank).acted
    for name, count in acted_of(engine).items():
        acted[name] = acted.get(name, 0) + count
    engine.before_update.append(recording.before_update)

    def end_step(loss: float | None) -> None:
        recording.after_update(engine.get_global_grad_norm())
        if engine._rewrites.recomputation is not None:
            acted["activation_checkpointing"] = engine._rewrites.recomputation.count
        recording.end_step(loss)

    engine.after_step.append(end_step)


def acted_of(engine: JaxEngine) -> dict[str, int]:
    """How many modules, parameters and parts of a batch each rewrite changed."""
    acted: dict[str, int] = {}
    for rewrite in engine.rewrites:
        count = len(rewrite.modules) + len(rewrite.parameters)
        if rewrite.name in ("jax", "gradient_accumulation_steps"):
            count += rewrite.batch_parts
        name = (
            SLICES
            if rewrite.name == "optimizer" and isinstance(engine.zero.optimizer, (OptaxOptimizer, OptaxOnOwners))
            else rewrite.name
        )
        acted[name] = acted.get(name, 0) + count
    return acted


def has_plain_update(engine: JaxEngine) -> bool:
    """Whether the update of `engine` can be compared with a plain one."""
    optimizer = engine.zero.optimizer
    return not isinstance(optimizer, TrustRatioOptimizer)
