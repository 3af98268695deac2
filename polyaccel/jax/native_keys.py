"""The keys of a config that native mode refuses, and the axes of devices that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from polyaccel.config import Config, ResolvedConfig
from polyaccel.config.meshes import data_ranks, mesh_problems
from polyaccel.errors import ConfigError, Problem

AXES = ("data", "expert", "sequence", "tensor")
"""The axes of a config's mesh of devices, outermost first. The first two cut the batch."""


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
    if config.mesh.capacity is not None:
        expected = "devices of native mode have equal parts"
        yield Problem("mesh.capacity", list(config.mesh.capacity), expected, 'leave it out, or use "views"')
    if config.comms_logger.enabled:
        expected = "what JAX exchanges inside a program is not seen"
        yield Problem("comms_logger.enabled", True, expected, "use jax.profiler")


def asked_axes(config: Config) -> dict[str, int]:
    """Return the axes of several devices that a config asks for, by name."""
    return {axis: size for axis in AXES[1:] if (size := getattr(config.mesh, axis)) > 1}


def axis_sizes(config: Config, devices: int) -> dict[str, int]:
    """Return the size of each of `AXES` over so many devices. Raises ConfigError for sizes that do not divide them."""
    if config.mesh.pipe > 1:
        key, expected = config.mesh_key("pipe"), "stages of JAX are ranks of views mode"
        raise ConfigError([Problem(key, config.mesh.pipe, expected, "leave it out")], source="initialize")
    if problems := mesh_problems(config, devices):
        raise ConfigError(problems, source="initialize")
    data = data_ranks(config, devices) // config.mesh.expert
    return {"data": data, **{axis: getattr(config.mesh, axis) for axis in AXES[1:]}}


def require_same_axes(config: Config, shape: Mapping[str, int]) -> None:
    """Raise ConfigError where a config asks for other axes than the script's own mesh has."""
    problems = [
        Problem(config.mesh_key(axis), size, f"the script's own mesh has {dict(shape)}", "leave it out")
        for axis, size in asked_axes(config).items()
        if shape.get(axis) != size
    ]
    if problems:
        raise ConfigError(problems, source="initialize")


def without_axes(config: Config) -> Config:
    """Return `config` without the axes that a mesh of JAX has."""
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=dict.fromkeys(AXES[1:], 1))})
