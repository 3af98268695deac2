"""The classes of `engine.optimizer`: each engine's has the class that it has in DeepSpeed at that stage and precision.

All are the engine's `ZeroOptimizer`; a class adds the names under which scripts ask for the loss scale and for the
optimizer inside. At stage 0 in fp32, DeepSpeed wraps nothing: `isinstance` answers False to all of them, and True
to FusedAdam for the config's Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import proxy

import torch

from polyaccel.config import ResolvedConfig
from polyaccel.torch.api.optimizer import ZeroOptimizer
from polyaccel.torch.engine.torch_engine import TorchEngine
from polyaccel_deepspeed.engine.optimizer_states import OptimizerStates, load_states, state_dict_of
from polyaccel_deepspeed.engine.optimizers import FusedAdam, NamedOptimizer


class EngineOptimizer(ZeroOptimizer):
    """An engine's optimizer with DeepSpeed's attributes."""

    overflow = False
    """Whether the last step was skipped."""
    _engine: TorchEngine
    _inner: torch.optim.Optimizer | None = None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the script gave; without one, this optimizer itself. Its groups are the engine's."""
        return self if self._inner is None else self._inner

    @property
    def state(self) -> OptimizerStates:  # type: ignore[override]  # torch's is a dict
        """What this rank has of each parameter's states."""
        return OptimizerStates(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, and this rank's part of the states: only a run on as many ranks can load it."""
        return state_dict_of(self.param_groups, super().state_dict()["param_groups"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on this rank."""
        groups = [{key: value for key, value in one.items() if key != "params"} for one in state_dict["param_groups"]]
        super().load_state_dict({"param_groups": groups})
        load_states(self.param_groups, state_dict.get("state", {}))

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied with now."""
        return self._engine.get_loss_scale()

    @property
    def cur_scale(self) -> float:
        """`loss_scale` by another name."""
        return self._engine.get_loss_scale()

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self._engine.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """Whether `engine.scale` has to multiply a loss before `loss.backward()`."""
        return self.dynamic_loss_scale or self.loss_scale != 1.0


class DeepSpeedOptimizer:
    """The class of an engine's optimizer where DeepSpeed wraps one."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """The class of an engine's optimizer at stages 1 to 3."""


class DeepSpeedZeroOptimizer(EngineOptimizer, ZeROOptimizer):
    """The class at stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(EngineOptimizer, ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The class at stage 3."""


class BF16_Optimizer(EngineOptimizer, ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """The class at stage 1 in bf16 with gradients accumulated in fp32."""


class FP16_Optimizer(EngineOptimizer, DeepSpeedOptimizer):  # noqa: N801 - DeepSpeed's name
    """The class at stage 0 in 16 bits, for DeepSpeed's fused Adam."""


class FP16_UnfusedOptimizer(EngineOptimizer, DeepSpeedOptimizer):  # noqa: N801 - DeepSpeed's name
    """The class at stage 0 in 16 bits, for other optimizers."""


class PlainFusedAdam(EngineOptimizer, FusedAdam):
    """The class at stage 0 in fp32 for the config's Adam, which DeepSpeed does not wrap: `isinstance` knows it."""


def wrap(engine: TorchEngine, client: Any, raw_config: Mapping[str, Any]) -> None:
    """Give `engine.optimizer` DeepSpeed's class; `client` is the optimizer that the script gave, or a callable, or
    None, and `raw_config` the config as written."""
    optimizer = engine.optimizer
    optimizer.__class__ = _class_of(engine.runtime.config, client, raw_config)
    optimizer._engine = proxy(engine)
    if isinstance(client, torch.optim.Optimizer):
        optimizer._inner = client
    if isinstance(client, NamedOptimizer):
        client.state = optimizer.state


def _class_of(config: ResolvedConfig, client: Any, raw_config: Mapping[str, Any]) -> type[EngineOptimizer]:
    stage = config.zero_optimization.stage
    if stage == 3:
        return DeepSpeedZeroOptimizer_Stage3
    if stage == 1 and config.bf16.enabled and config.data_types.grad_accum_dtype == "fp32":
        return BF16_Optimizer
    if stage > 0:
        return DeepSpeedZeroOptimizer
    section = config.optimizer
    written = (raw_config.get("optimizer") or {}).get("params") or {}
    is_fused = section is not None and section.type in ("Adam", "AdamW") and not written.get("torch_adam")
    if not (config.fp16.enabled or config.bf16.enabled):
        return PlainFusedAdam if client is None and is_fused else EngineOptimizer
    if client is not None:
        return FP16_Optimizer if type(client).__name__ == "FusedAdam" else FP16_UnfusedOptimizer
    return FP16_Optimizer if is_fused else FP16_UnfusedOptimizer
