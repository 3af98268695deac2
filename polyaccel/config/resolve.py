"""From a `Config` and the world size to the `ResolvedConfig` that training runs with.

The batch triad is solved here: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks
with their own batches.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from polyaccel.config.arguments import check_optimizer, check_scheduler
from polyaccel.config.auto import RULES, fill_auto
from polyaccel.config.conflicts import plugin_problems
from polyaccel.config.elastic import compute_elastic_config
from polyaccel.config.load import Draft, Source, check_tree, draft_config
from polyaccel.config.meshes import data_ranks, mesh_problems, ranks_per_block
from polyaccel.config.root import Config, ResolvedConfig
from polyaccel.config.sections.zero import ZeroConfig
from polyaccel.config.spellings import respell_mesh
from polyaccel.errors import ConfigError, Problem

_logger = logging.getLogger(__name__)
_TRIAD = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MATRIX_UNIT_WIDTH = 8
_MOST_SHOWN = 20


def resolve_config(config: Config, *, world_size: int, hints: Mapping[str, Any] | None = None) -> ResolvedConfig:
    """Decide every `"auto"` of `config` by `hints`, and solve the batch sizes for `world_size` ranks.

    The solution satisfies train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x
    data-parallel ranks, as in DeepSpeed.

    Args:
        config: Config to resolve; it stays unchanged.
        world_size: Number of ranks that train.
        hints: Values for `"auto"`, named by the dotted key that they decide, or as in Hugging Face's TrainingArguments
            (`learning_rate`, ...; see `auto.RULES`).

    Returns:
        The config that an engine runs with.

    Raises:
        ConfigError: The config contradicts itself, `world_size` or the hints; the error lists every problem.
    """
    return resolve_draft(Draft(config, (), "config"), world_size, hints or {})


def load_resolved(
    source: Source, *, world_size: int, hints: Mapping[str, Any] | None = None, source_name: str | None = None
) -> ResolvedConfig:
    """Load and resolve a config in one call, so that the problems of both steps are reported together.

    Args:
        source: As in `load_config`.
        world_size: Number of ranks that train.
        hints: As in `resolve_config`.
        source_name: Name of the source in errors.

    Returns:
        The config that an engine runs with.

    Raises:
        ConfigError: The config cannot be read or is wrong; the error lists every problem.
    """
    return resolve_draft(draft_config(source, source_name=source_name), world_size, hints or {})


def resolve_draft(draft: Draft, world_size: int, hints: Mapping[str, Any]) -> ResolvedConfig:
    """Resolve a config that was read. Raises ConfigError with the problems of both steps."""
    problems = list(draft.problems)
    if world_size < 1:
        problems.append(Problem("world_size", world_size, "should be at least 1", "count the ranks that train"))
        raise ConfigError(problems, source=draft.source)
    is_elastic = draft.config.elasticity.enabled
    config, found = _without_auto(draft.config, _TRIAD if is_elastic else (), hints)
    problems += found
    problems += plugin_problems(config)
    problems += mesh_problems(config, world_size)
    data = data_ranks(config, world_size)
    solve = _elastic_triad if is_elastic else _triad
    triad, unsolved = solve(draft, config, [problem.key for problem in problems], data)
    if is_elastic and data != world_size:
        expected, hint = "supports data parallelism only", "remove elasticity or the other axes of the mesh"
        problems.append(Problem("elasticity.enabled", True, expected, hint))
    problems += unsolved
    near = config.zero_optimization.zero_hpz_partition_size
    replicas = ranks_per_block(config, world_size)
    if replicas % near:
        hint = "use a divisor, for example the ranks of a host"
        problems.append(
            Problem("zero_optimization.zero_hpz_partition_size", near, f"should divide {replicas} ranks", hint)
        )
    if problems:
        raise ConfigError(_unique(problems), source=draft.source)
    return _final(config, triad)


def _without_auto(config: Config, decided: Collection[str], hints: Mapping[str, Any]) -> tuple[Config, list[Problem]]:
    """Return `config` with `"auto"` decided by `hints` except those `decided` elsewhere, and its problems."""
    keys = config.auto_keys - set(decided)
    if config._is_checked and not keys:
        return config.model_copy(), []
    tree = config.model_dump(exclude_unset=True, by_alias=True)
    undecided = fill_auto(tree, keys, hints)
    mesh_keys, problems = respell_mesh(tree)
    is_open = frozenset(problem.key for problem in undecided)
    checked, found = check_tree(tree, is_open, config._without_effect, {**config._mesh_keys, **mesh_keys})
    return checked, [*undecided, *problems, *found]


def _triad(draft: Draft, config: Config, blamed: list[str], world_size: int) -> tuple[Triad, list[Problem]]:
    """The solved triad; no second complaint when one of its members was refused already."""
    solved = solve_triad(*(getattr(config, name) for name in _TRIAD), world_size=world_size)
    if isinstance(solved, Triad):
        return solved, []
    if set(_TRIAD) & set(blamed):
        return Triad(1, 1, 1), []
    if open_keys := [name for name in _TRIAD if name in draft.config.auto_keys and getattr(config, name) is None]:
        names = " or ".join(RULES[name].arguments[0] for name in open_keys)
        hint = f'give {names} (a hint of this name, which decides the "auto"), or write a value'
        solved = Problem(solved.key, solved.value, solved.expected, hint)
    return Triad(1, 1, 1), [solved]


def _elastic_triad(draft: Draft, config: Config, blamed: list[str], world_size: int) -> tuple[Triad, list[Problem]]:
    """Return the triad of `elasticity` for `world_size` ranks; written sizes must be equal, or are ignored."""
    section = config.elasticity
    if any(key.startswith("elasticity") for key in blamed):
        return Triad(1, 1, 1), []
    try:
        batch = compute_elastic_config(section)
    except ConfigError as error:
        return Triad(1, 1, 1), list(error.problems)
    if world_size not in batch.world_sizes:
        shown = ", ".join(map(str, batch.world_sizes[:_MOST_SHOWN]))
        more = ", ..." if len(batch.world_sizes) > _MOST_SHOWN else ""
        expected = f"is none of those that elasticity has for {batch.train_batch_size} samples a step: {shown}{more}"
        near = batch.largest(world_size) or batch.world_sizes[0]
        hint = f"start {near} ranks, for example, or change elasticity (max_train_batch_size, micro_batch_sizes)"
        return Triad(1, 1, 1), [Problem("world_size", world_size, expected, hint)]
    micro = batch.micro_batch_size(world_size)
    triad = Triad(batch.train_batch_size, micro, batch.train_batch_size // (micro * world_size))
    problems = []
    for name, decided in zip(_TRIAD, (triad.train, triad.micro, triad.gas), strict=True):
        given = getattr(config, name)
        if given in (None, decided) or name in draft.config.auto_keys:
            continue
        if section.ignore_non_elastic_batch_info:
            sentence = f"{name} = {given} is ignored: elasticity decides it, {decided} on {world_size} ranks"
            config._without_effect = {**config._without_effect, name: sentence}
        else:
            hint = "leave it out, or set elasticity.ignore_non_elastic_batch_info"
            problems.append(Problem(name, given, f"is decided by elasticity: {decided} on {world_size} ranks", hint))
    return triad, problems


def _final(config: Config, triad: Triad) -> ResolvedConfig:
    decided: dict[str, Any] = dict(zip(_TRIAD, (triad.train, triad.micro, triad.gas), strict=True))
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        decided["zero_optimization"] = zero.model_copy(update={"overlap_comm": True})
    decided["optimizer"], _ = check_optimizer(config.optimizer)
    decided["scheduler"], _ = check_scheduler(config.scheduler)
    if config.vocabulary_size is not None and config.vocabulary_size % _MATRIX_UNIT_WIDTH:
        _logger.warning("vocabulary_size = %d is not a multiple of %d", config.vocabulary_size, _MATRIX_UNIT_WIDTH)
    values = {name: getattr(config, name) for name in config.model_fields_set} | decided
    resolved = ResolvedConfig.model_construct(config.model_fields_set | set(decided), **values)
    resolved._mesh_keys = config._mesh_keys
    resolved._without_effect = {**config._without_effect, **_uneven_buckets(zero)}
    return resolved


def _uneven_buckets(zero: ZeroConfig) -> dict[str, str]:
    """A sentence about `allgather_bucket_size` where it asks for other buckets than those that there are."""
    size, reduced = zero.allgather_bucket_size, zero.reduce_bucket_size
    if size in (reduced, ZeroConfig.model_fields["allgather_bucket_size"].default):
        return {}
    key = "zero_optimization.allgather_bucket_size"
    return {key: f"{key} = {size} has no effect: gathers use the buckets of reduce_bucket_size = {reduced}"}


def _unique(problems: list[Problem]) -> list[Problem]:
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        kept.setdefault((problem.key, problem.expected), problem)
    return list(kept.values())


@dataclass(frozen=True, slots=True)
class Triad:
    """Samples of an optimizer step, samples of a forward pass on one rank, forward passes of a step."""

    train: int
    micro: int
    gas: int


def solve_triad(train: int | None, micro: int | None, gas: int | None, *, world_size: int) -> Triad | Problem:
    """Solve the batch triad's unknowns (None), or return why not; one size alone means one micro-batch a step."""
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": gas,
    }
    seen = ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)
    context = f"({seen or 'none of the three is given'}, world size {world_size})"
    if train is None:
        if micro is not None:
            return Triad(micro * (gas or 1) * world_size, micro, gas or 1)
        hint = "give train_batch_size or train_micro_batch_size_per_gpu"
        return Problem("train_batch_size", None, f"cannot be determined {context}", hint)
    if micro is not None and gas is not None:
        if train == micro * gas * world_size:
            return Triad(train, micro, gas)
        expected = f"should be {micro} * {gas} * {world_size} = {micro * gas * world_size} {context}"
        return Problem("train_batch_size", train, expected, "leave one of the three out")
    divisor = (micro or gas or 1) * world_size
    if train % divisor:
        factor = "train_micro_batch_size_per_gpu" if micro else "gradient_accumulation_steps" if gas else ""
        product = f"{factor} * world size" if factor else "the world size"
        near = max(divisor, round(train / divisor) * divisor)
        expected = f"should be a multiple of {product} = {divisor} {context}"
        return Problem("train_batch_size", train, expected, f"use {near}, for example")
    rest = train // divisor
    return Triad(train, micro, rest) if micro is not None else Triad(train, rest, gas or 1)
