"""The keys of a config that native mode refuses."""

from __future__ import annotations

from collections.abc import Iterator

from polyaccel.config import ResolvedConfig
from polyaccel.errors import Problem


def native_problems(config: ResolvedConfig) -> Iterator[Problem]:
    """Yield the settings of a config that native mode does not have."""
    zero = config.zero_optimization
    if zero.offload_optimizer.device not in ("none", "cpu"):
        key = "zero_optimization.offload_optimizer.device"
        expected = "native mode offloads states to host memory, by JAX's memory kinds"
        yield Problem(key, zero.offload_optimizer.device, expected, 'use "cpu", or "views", which offloads to files')
    if zero.offload_param.device != "none":
        expected = "native mode has its parameters on JAX's devices"
        hint = 'cut them over more devices at stage 3, or use "views", which offloads'
        yield Problem("zero_optimization.offload_param.device", zero.offload_param.device, expected, hint)
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if getattr(zero, name):
            expected = "native mode sends what JAX sends, in the type of parameters"
            yield Problem(f"zero_optimization.{name}", True, expected, 'leave it out, or use "views"')
    if zero.zero_hpz_partition_size > 1:
        expected = "native mode keeps no second copies"
        key, value = "zero_optimization.zero_hpz_partition_size", zero.zero_hpz_partition_size
        yield Problem(key, value, expected, 'leave it out, or use "views"')
    if config.comms_logger.enabled:
        expected = "what JAX exchanges inside a program is not seen"
        yield Problem("comms_logger.enabled", True, expected, "use jax.profiler")
