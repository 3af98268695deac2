"""The mesh that a config asks for, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from polyaccel.config.root import Config
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.errors import ConfigError, Problem


def mesh_of(config: Config, world_size: int) -> Mesh:
    """Return the mesh of a checked config: `data` or `expert_data` and `expert`, and axes of several ranks."""
    others = {axis: MeshAxis(axis, size) for axis, _, size in shared_axes(config)}
    outermost = [others.pop("pipe")] if "pipe" in others else []
    data, experts = data_ranks(config, world_size), config.mesh.expert
    batches = [MeshAxis("data", data)]
    if experts > 1:
        batches = [MeshAxis("expert_data", data // experts), MeshAxis("expert", experts)]
        if config.use_data_before_expert_parallelism:
            batches.reverse()
    return Mesh((*outermost, *batches, *others.values()))


def on_mesh(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return `config` for a mesh of `sizes` from arguments or options. Raises ConfigError if it states others."""
    if not sizes:
        return config
    problems = []
    for axis, size in sizes.items():
        if (given := getattr(config.mesh, axis)) not in (None, 1, size):
            expected = f"contradicts the {size} that are asked for elsewhere"
            problems.append(Problem(config.mesh_key(axis), given, expected, "give one of the two"))
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(sizes))})


def data_ranks(config: Config, world_size: int) -> int:
    """Return how many ranks have their own batches; at least 1, whatever the config sets."""
    return max(1, world_size // prod(size for _, _, size in shared_axes(config)))


def shared_axes(config: Config) -> Iterator[tuple[str, str, int]]:
    """The axes next to `data` that have more than one rank, outermost first: name, the key that sets it, size."""
    for axis in ("pipe", "sequence", "tensor"):
        if (size := getattr(config.mesh, axis)) > 1:
            yield axis, config.mesh_key(axis), size


def ranks_per_block(config: Config, world_size: int) -> int:
    """How many ranks hold the same block of what tensor ranks share: the fewest that anything is sharded over."""
    return max(1, world_size // prod(size for axis, _, size in shared_axes(config) if axis in ("pipe", "tensor")))


def mesh_problems(config: Config, world_size: int) -> list[Problem]:
    """What keeps `world_size` ranks from standing along the axes that `config` states."""
    problems = _pipe_problems(config)
    problems += _expert_problems(config, world_size)
    problems += _capacity_problems(config, world_size)
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
        of = f"{world_size} ranks / ({product} = {ranks})" if shared else "the world size"
        expected = f"should be {of}, {world_size // ranks}"
        problems.append(Problem(config.mesh_key("data"), stated, expected, "leave it out"))
    return problems


def _expert_problems(config: Config, world_size: int) -> list[Problem]:
    experts, data = config.mesh.expert, data_ranks(config, world_size)
    if data % experts == 0:
        return []
    fitting = [str(size) for size in range(2, data + 1) if data % size == 0]
    hint = f"use {' or '.join(fitting)}" if fitting else "leave it out, or start more ranks"
    expected = f"is not a divisor of the {data} ranks with their own batches"
    return [Problem(config.mesh_key("expert"), experts, expected, hint)]


def _capacity_problems(config: Config, world_size: int) -> list[Problem]:
    given = config.mesh.capacity
    if given is None or len(given) == world_size:
        return []
    expected = f"should have {world_size} numbers, one for each rank"
    return [Problem("mesh.capacity", list(given), expected, "give so many, or leave it out for equal parts")]


def _pipe_problems(config: Config) -> list[Problem]:
    """Report what does not exist yet together with pipeline stages."""
    if config.mesh.pipe == 1:
        return []
    missing, problems = "does not exist yet together with pipeline stages", []
    if config.tensor_parallel.sequence_sharded:
        problems.append(Problem("tensor_parallel.sequence_sharded", True, missing, "leave it out"))
    if config.mesh.capacity is not None:
        problems.append(Problem("mesh.capacity", list(config.mesh.capacity), missing, "leave it out"))
    return problems
