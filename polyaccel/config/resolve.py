"""From a `Config` and the world size to the `ResolvedConfig` that training runs with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from polyaccel.config.arguments import check_optimizer, check_scheduler
from polyaccel.config.auto import RULES, fill_auto
from polyaccel.config.load import Draft, Source, config_problems, draft_config
from polyaccel.config.problems import validate_tree
from polyaccel.config.root import Config, ResolvedConfig
from polyaccel.config.triad import Triad, solve_triad
from polyaccel.errors import ConfigError, InvariantError, Problem

_logger = logging.getLogger(__name__)
_TRIAD = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MATRIX_UNIT_WIDTH = 8


def resolve_config(config: Config, *, world_size: int, hints: Mapping[str, Any] | None = None) -> ResolvedConfig:
    """`config` with every `"auto"` decided by `hints` and the batch triad solved for `world_size` ranks.

    A hint is named by the dotted key it decides or as in Hugging Face's TrainingArguments (`learning_rate`, ...; see
    `auto.RULES`). Raises ConfigError with all problems.
    """
    return _resolve(Draft(config, (), "config"), world_size, hints or {})


def load_resolved(
    source: Source, *, world_size: int, hints: Mapping[str, Any] | None = None, source_name: str | None = None
) -> ResolvedConfig:
    """`load_config` and `resolve_config` in one, so that the problems of both are reported together."""
    return _resolve(draft_config(source, source_name=source_name), world_size, hints or {})


def _resolve(draft: Draft, world_size: int, hints: Mapping[str, Any]) -> ResolvedConfig:
    problems = list(draft.problems)
    if world_size < 1:
        problems.append(Problem("world_size", world_size, "should be at least 1", "count the ranks that train"))
        raise ConfigError(problems, source=draft.source)
    tree = draft.config.model_dump(exclude_unset=True, by_alias=True)
    undecided = fill_auto(tree, draft.config.auto_keys, hints)
    config, found = validate_tree(Config, tree)
    if config is None:
        raise InvariantError("a config without its offending keys is still refused", value=found)
    config._auto = frozenset(problem.key for problem in undecided)
    # Once more, for what hints decided may contradict any other key, and a Config may have been made by hand.
    problems += [*undecided, *found, *config_problems(config)]
    triad, unsolved = _triad(draft, config, [problem.key for problem in problems], world_size)
    problems += unsolved
    if config.data_parallel_size not in (None, world_size):
        expected = f"should be the world size, {world_size}"
        problems.append(Problem("data_parallel_size", config.data_parallel_size, expected, "leave it out"))
    near = config.zero_optimization.zero_hpz_partition_size
    if world_size % near:
        cure = "use a divisor, such as the ranks of a host"
        problems.append(
            Problem("zero_optimization.zero_hpz_partition_size", near, f"should divide {world_size} ranks", cure)
        )
    if problems:
        raise ConfigError(_unique(problems), source=draft.source)
    return _final(config, triad)


def _triad(draft: Draft, config: Config, blamed: list[str], world_size: int) -> tuple[Triad, list[Problem]]:
    """The solved triad; no second complaint when one of its members was refused already."""
    solved = solve_triad(*(getattr(config, name) for name in _TRIAD), world_size=world_size)
    if isinstance(solved, Triad):
        return solved, []
    if set(_TRIAD) & set(blamed):
        return Triad(1, 1, 1), []
    if open_keys := [name for name in _TRIAD if name in draft.config.auto_keys and getattr(config, name) is None]:
        names = " or ".join(RULES[name].arguments[0] for name in open_keys)
        cure = f'give {names} (a hint of this name, which decides the "auto"), or write a value'
        solved = Problem(solved.key, solved.value, solved.expected, cure)
    return Triad(1, 1, 1), [solved]


def _final(config: Config, triad: Triad) -> ResolvedConfig:
    tree = config.model_dump(exclude_unset=True, by_alias=True)
    tree.update(zip(_TRIAD, (triad.train, triad.micro, triad.gas), strict=True))
    zero = config.zero_optimization
    if zero.overlap_comm is None:
        tree.setdefault("zero_optimization", {})["overlap_comm"] = True
    for name, section in (
        ("optimizer", check_optimizer(config.optimizer)[0]),
        ("scheduler", check_scheduler(config.scheduler)[0]),
    ):
        if section is not None:
            tree[name] = section.model_dump(by_alias=True)
    if config.vocabulary_size is not None and config.vocabulary_size % _MATRIX_UNIT_WIDTH:
        _logger.warning("vocabulary_size = %d is no multiple of %d", config.vocabulary_size, _MATRIX_UNIT_WIDTH)
    return ResolvedConfig.model_validate(tree)


def _unique(problems: list[Problem]) -> list[Problem]:
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        kept.setdefault((problem.key, problem.expected), problem)
    return list(kept.values())
