"""What a training needs at its start on this machine, checked without starting one: names and places in a config."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from polyaccel.config import ResolvedConfig
from polyaccel.config.keys import suggest_word
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS
from polyaccel.errors import ConfigError, PolyaccelError, Problem
from polyaccel.registry import PluginGroup, find_plugin


def start_problems(config: ResolvedConfig) -> list[Problem]:
    """Return problems of names, folders and warm-up, without a look at devices: checks run on other machines."""
    return [*_classes(config), *_plugins(config), *_folders(config), *_warmup(config)]


def _classes(config: ResolvedConfig) -> Iterator[Problem]:
    if config.optimizer is not None and config.optimizer.type not in OPTIMIZER_PARAMS:
        yield from _class_problem("optimizer", config.optimizer.type, list(OPTIMIZER_PARAMS))
    if config.scheduler is not None and config.scheduler.type not in SCHEDULER_PARAMS:
        yield from _class_problem("scheduler", config.scheduler.type, list(SCHEDULER_PARAMS))


def _class_problem(section: str, name: str, known: list[str]) -> list[Problem]:
    hint = suggest_word(name, known) or f"use one of {', '.join(known)}, or the exact name of a class of torch"
    problem = Problem(f"{section}.type", name, f"no {section} has this name", hint)
    if find_spec("torch") is None:
        return [problem]
    from polyaccel.torch.api.optimizer import optimizer_class, schedule_class

    try:
        (optimizer_class if section == "optimizer" else schedule_class)(name)
    except ConfigError:
        return [problem]
    return []


def _plugins(config: ResolvedConfig) -> Iterator[Problem]:
    if config.comm.backend is not None:
        try:
            find_plugin(PluginGroup.COMM, config.comm.backend)
        except PolyaccelError as error:
            yield Problem("comm.backend", config.comm.backend, error.message, error.hint)
    if config.accelerator is not None:
        try:
            find_plugin(PluginGroup.ACCELERATORS, config.accelerator)
        except PolyaccelError as error:
            from polyaccel.accelerators.detect import is_a_framework_device

            if not is_a_framework_device(config.accelerator):
                yield Problem("accelerator", config.accelerator, error.message, error.hint)


def _folders(config: ResolvedConfig) -> Iterator[Problem]:
    zero = config.zero_optimization
    for key, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        if section.device == "nvme" and section.nvme_path is not None:
            place = Path(section.nvme_path).absolute()
            while not place.exists() and place != place.parent:
                place = place.parent
            if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
                why = "may not be written to" if place.is_dir() else "is not a directory"
                hint = "name a directory that the training may write to"
                yield Problem(f"zero_optimization.{key}.nvme_path", section.nvme_path, f"{place} {why}", hint)


def _warmup(config: ResolvedConfig) -> Iterator[Problem]:
    params = {} if config.scheduler is None else config.scheduler.params
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    if isinstance(warmup, int) and isinstance(total, int) and warmup > total:
        expected = f"is longer than the whole schedule, total_num_steps = {total}"
        hint = "warm up for fewer steps, or raise total_num_steps"
        yield Problem("scheduler.params.warmup_num_steps", warmup, expected, hint)
