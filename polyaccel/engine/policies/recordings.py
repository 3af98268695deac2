"""Whether, and how, updates are played from a recording."""

from __future__ import annotations

from polyaccel.accelerators.base import Accelerator
from polyaccel.config import ResolvedConfig
from polyaccel.engine.policies.steps import step_policy
from polyaccel.errors import ConfigError, Problem
from polyaccel.ops.recorded import RECORDED_UPDATE
from polyaccel.zero.update.optimizers import ElementwiseOptimizer, SliceOptimizer
from polyaccel.zero.update.recorded import RecordedOptimizer


def record_updates(
    config: ResolvedConfig, accelerator: Accelerator, optimizer: SliceOptimizer | None
) -> SliceOptimizer | None:
    """Return the optimizer whose updates `config` has recorded: `optimizer` itself where it has none.

    Raises ConfigError where they cannot be recorded.
    """
    if config.graphs == "off" or optimizer is None:
        return optimizer
    reasons: dict[str, str] = {}
    if not accelerator.capabilities().graphs or RECORDED_UPDATE not in accelerator.kernels():
        reasons[f"accelerator {accelerator.name!r} plays no recordings"] = "leave it out; cuda has them"
    if type(optimizer) is not ElementwiseOptimizer:  # others compute more than a row of the table in an update
        hint = "name Adam, AdamW, SGD, Lion, Adagrad or Adamax in the config, with states of 32 bits"
        reasons[f"{optimizer.kind} is not one of the engine's own that update element by element"] = hint
    zero = config.zero_optimization
    for section, what in ((zero.offload_optimizer, "optimizer states"), (zero.offload_param, "parameters")):
        if section.device != "none":
            reasons[f"{what} are not on the device"] = "leave one of the two out"
    if step_policy(config).stochastic_rounding:
        reasons["random numbers of stochastic rounding differ in each update"] = "leave one of the two out"
    if reasons:
        raise ConfigError([Problem("graphs", config.graphs, reason, hint) for reason, hint in reasons.items()])
    assert type(optimizer) is ElementwiseOptimizer  # else it was refused
    return RecordedOptimizer(optimizer.row, accelerator)
