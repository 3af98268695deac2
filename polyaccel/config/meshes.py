"""The mesh that a config asks for, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from polyaccel.config.root import Config
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.errors import ConfigError, Problem


def mesh_of(config: Config, world_size: int) -> Mesh:
    """The mesh of `world_size` ranks, whose config has no `mesh_problems`: the axis `data`, or `expert_data` and
    `expert` in its place, and the others where they have more than one rank."""
    others = {axis: MeshAxis(axis, size) for axis, _, size in shared_axes(config)}
    outermost = [others.pop("pipe")] if "pipe" in others else []
    data, (_, experts) = data_ranks(config, world_size), expert_ranks(config)
    batches = [MeshAxis("data", data)]
    if experts > 1:
        batches = [MeshAxis("expert_data", data // experts), MeshAxis("expert", experts)]
        if config.use_data_before_expert_parallelism:
            batches.reverse()
    return Mesh((*outermost, *batches, *others.values()))


def on_mesh(config: Config, sizes: Mapping[str, int]) -> Config:
    """`config` for a mesh whose axes have `sizes`, which the caller states as well (arguments of `initialize`, options
    of a command). Raises ConfigError where it states others."""
    if not sizes:
        return config
    stated: dict[str, dict[str, int | None]] = {"data": {"mesh.data": config.mesh.data}}
    stated |= {axis: dict(keys) for axis, keys in _stated(config).items()}
    problems = [
        Problem(key, given, f"contradicts the {sizes[axis]} that are asked for elsewhere", "give one of the two")
        for axis in sizes
        for key, given in stated[axis].items()
        if given not in (None, 0, 1, sizes[axis])
    ]
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(sizes))})


def data_ranks(config: Config, world_size: int) -> int:
    """Return how many ranks have their own batches; at least 1, whatever the config sets."""
    return max(1, world_size // prod(size for _, _, size in shared_axes(config)))


def expert_ranks(config: Config) -> tuple[str, int]:
    """Return the key that sets how many ranks share experts, and its value; 1 where none do."""
    section = config.expert_parallel
    if section.enabled and section.autoep_size > 1:
        return "expert_parallel.autoep_size", section.autoep_size
    return "mesh.expert", config.mesh.expert


def shared_axes(config: Config) -> Iterator[tuple[str, str, int]]:
    """The axes next to `data` that have more than one rank: name, the key that sets it, size."""
    for axis, keys in _stated(config).items():
        found = [(axis, key, size) for key, size in keys.items() if size > 1]
        yield from found[:1]


def ranks_per_block(config: Config, world_size: int) -> int:
    """How many ranks hold the same block of what tensor ranks share: the fewest that anything is sharded over."""
    return max(1, world_size // prod(size for axis, _, size in shared_axes(config) if axis in ("pipe", "tensor")))


def mesh_problems(config: Config, world_size: int) -> list[Problem]:
    """What keeps `world_size` ranks from standing along the axes that `config` states."""
    problems = []
    for keys in _stated(config).values():
        (key, size), *others = [(key, size) for key, size in keys.items() if size > 1] or [("", 1)]
        for other, theirs in others:
            if theirs != size:
                problems.append(Problem(other, theirs, f"contradicts {key} = {size}", "give one of the two"))
    problems += _pipe_problems(config)
    problems += _expert_problems(config, world_size)
    shared = list(shared_axes(config))
    ranks = prod(size for _, _, size in shared)
    product = " * ".join(key for _, key, _ in shared)
    stated = config.mesh.data
    if world_size % ranks:
        *before, (_, key, size) = shared
        rest = ranks // size
        fitting = [str(size) for size in range(2, world_size + 1) if world_size % (rest * size) == 0]
        together = "".join(f", with {other} = {theirs}" for _, other, theirs in before)
        hint = f"use {' or '.join(fitting)}{together}" if fitting else "leave it out, or start more ranks"
        problems.append(Problem(key, size, f"makes {product} = {ranks}, no divisor of {world_size} ranks", hint))
    elif stated is not None and stated * ranks != world_size:
        times = f" times {product} = {ranks}" if shared else ""
        expected = f"should be {world_size // ranks}: it is{times} to be the {world_size} ranks"
        problems.append(Problem("mesh.data", stated, expected, "leave it out"))
    return problems


def _expert_problems(config: Config, world_size: int) -> list[Problem]:
    key, experts = expert_ranks(config)
    problems, data = [], data_ranks(config, world_size)
    if config.mesh.expert not in (1, experts):
        expected = f"contradicts {key} = {experts}"
        problems.append(Problem("mesh.expert", config.mesh.expert, expected, "give one of the two"))
    if data % experts:
        fitting = [str(size) for size in range(2, data + 1) if data % size == 0]
        hint = f"use {' or '.join(fitting)}" if fitting else "leave it out, or start more ranks"
        problems.append(Problem(key, experts, f"is not a divisor of the {data} ranks with their own batches", hint))
    return problems


def _pipe_problems(config: Config) -> list[Problem]:
    """Report what does not exist yet together with pipeline stages."""
    if not any(axis == "pipe" for axis, _, _ in shared_axes(config)):
        return []
    missing, problems = "does not exist yet together with pipeline stages", []
    if config.tensor_parallel.sequence_sharded:
        problems.append(Problem("tensor_parallel.sequence_sharded", True, missing, "leave it out"))
    return problems


def _stated(config: Config) -> dict[str, dict[str, int]]:
    """Return the size that each key sets for the axes next to `data`, outermost first."""
    tensor = config.tensor_parallel
    return {
        "pipe": {"mesh.pipe": config.mesh.pipe, "pipeline.stages": config.pipeline.stages},
        "sequence": {"mesh.sequence": config.mesh.sequence, "sequence_parallel_size": config.sequence_parallel_size},
        "tensor": {
            "mesh.tensor": config.mesh.tensor,
            "tensor_parallel.autotp_size": tensor.autotp_size,
            "tensor_parallel.tp.tp_size": tensor.tp.tp_size,
        },
    }
