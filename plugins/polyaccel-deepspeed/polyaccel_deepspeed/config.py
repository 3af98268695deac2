"""Configs that other projects wrote for DeepSpeed, made into configs of polyaccel.

polyaccel reads DeepSpeed's JSON strictly. What trainers write in addition (`Infinity`, `null` for "leave it out", keys
that DeepSpeed never reads) is altered here, one `Change` for each, and nowhere in polyaccel itself. Anything else that
would change results stays, for polyaccel to refuse by name.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from typing import Any

from polyaccel import comm
from polyaccel.config import Config
from polyaccel.config.keys import walk_keys
from polyaccel.config.load import draft_config, read_tree
from polyaccel.config.resolve import load_resolved
from polyaccel.errors import ConfigError
from polyaccel_deepspeed.auto_values import fill_auto
from polyaccel_deepspeed.change import Change, Tree
from polyaccel_deepspeed.config_defaults import DEFAULTS_RULES
from polyaccel_deepspeed.config_rules import RULES, known_keys, whole_batch
from polyaccel_deepspeed.engine.monitor import DEFAULTS, with_defaults
from polyaccel_deepspeed.engine.monitors import get_monitor_config
from polyaccel_deepspeed.keys.experts import pop_routing
from polyaccel_deepspeed.keys.readers import (
    get_optimizer_name,
    get_optimizer_params,
    get_scheduler_name,
    get_scheduler_params,
)
from polyaccel_deepspeed.keys.settled import settle, wrong_writer
from polyaccel_deepspeed.keys.translated import TRANSLATIONS
from polyaccel_deepspeed.refused_keys import drop_removed, pop_refused

log = getLogger("polyaccel.deepspeed")

_PARAMS = ("optimizer.params", "scheduler.params")
"""Tables of arguments, whose values mean what the optimizer defines."""
_AUTO_IS_DEFAULT = ("zero_optimization", "fp16", "bf16")
"""Sections in which DeepSpeed itself reads "auto" as the key's default."""
_CLIPPING = 1.0
"""DeepSpeed 0.19's `gradient_clipping` where the config has none."""


def normalise(source: Any) -> tuple[Tree, tuple[Change, ...]]:
    """The config that `source` (a path, a mapping, base64) means to DeepSpeed 0.19.8, and what had to be altered.

    The source itself is left alone. Raises ConfigError where there is no JSON object, and with all problems of the
    config where it has a key or an optimizer that is always refused.
    """
    tree = read_text(source)
    if not isinstance(tree, dict):
        return tree, ()
    wrong = wrong_writer(tree)
    changes = [change for rule in _FIRST for change in rule(tree)]
    dropped, refused = settle(tree)
    refused += wrong
    changes += [*pop_routing(tree), *dropped, *(change for rule in _RULES for change in rule(tree))]
    refused += pop_refused(tree)
    if refused:
        draft = draft_config(tree)
        raise ConfigError([*refused, *draft.problems], source=draft.source)
    return tree, tuple(changes)


def read_text(source: Any) -> Any:
    """What is written in `source`. A file may be hjson, as DeepSpeed reads it, where the package hjson is installed.

    Raises ConfigError where there is no JSON.
    """
    if isinstance(source, os.PathLike):
        source = Path(source)
    try:
        tree, problems, name = read_tree(source)
    except ConfigError as error:
        is_path = isinstance(source, str | Path) and os.path.isfile(source)
        if not is_path or find_spec("hjson") is None:
            raise
        hjson = import_module("hjson")
        try:
            tree, problems, name = read_tree(hjson.loads(Path(source).read_text(encoding="utf-8-sig")), str(source))
        except hjson.HjsonDecodeError:
            raise error from None
    if problems:
        raise ConfigError(problems, source=name)
    return tree


def read_config(source: Any) -> tuple[Tree, tuple[Change, ...]]:
    """`normalise`, with what the engine of `deepspeed.initialize` does in addition."""
    tree, changes = normalise(source)
    tree["checkpoint"] = {"async": False, **tree.get("checkpoint", {})}  # scripts read the folder after a save
    return tree, changes


def read_for_check(source: Any, world_size: int, arguments: Mapping[str, Any]) -> tuple[Tree, list[str]]:
    """The entry point of `polyaccel config check --deepspeed`: what `deepspeed.initialize` would train with on
    `world_size` ranks, with "auto" filled as the Trainer of transformers fills it from `arguments`.

    Raises ConfigError where an argument contradicts a value that is written.
    """
    written = read_text(source)
    filled = fill_auto(written, world_size, arguments) if isinstance(written, dict) else ()
    tree, changes = read_config(written)
    changes = (*filled, *changes, *whole_batch(tree, world_size))
    return tree, [str(change) for change in changes]


def log_changes(changes: tuple[Change, ...]) -> None:
    """One line for each."""
    for change in changes:
        log.log(30 if change.is_warning else 20, "%s", change)


def _dotted(tree: Tree) -> Iterator[Change]:
    known = known_keys()
    for key in [key for key in tree if "." in key and key in known]:
        yield Change(key, f"= {tree.pop(key)!r} was dropped: DeepSpeed does not read a dotted key at the top level")


def _empty(tree: Tree) -> Iterator[Change]:
    if "gradient_clipping" in tree and tree["gradient_clipping"] is None:
        tree["gradient_clipping"] = 0.0
        yield Change("gradient_clipping", "= null was read as 0.0, which clips nothing")
    means_null = {key.dotted for key in walk_keys(Config) if not key.is_section and key.field.default is None}
    yield from _drop(
        tree,
        lambda key, value: value is None and not key.startswith(_PARAMS),
        lambda key: None if key in means_null else "= null was dropped, and stands at its default",
    )


def _auto(tree: Tree) -> Iterator[Change]:
    yield from _drop(
        tree,
        lambda key, value: value == "auto" and key.partition(".")[0] in _AUTO_IS_DEFAULT,
        lambda key: '= "auto" was dropped: it was not filled in, and DeepSpeed then takes the default',
    )


def _leaves(tree: Tree) -> Iterator[Change]:
    """Make one name of `leaf_module` a list of one, as DeepSpeed reads it."""
    zero = tree.get("zero_optimization")
    table = zero.get("leaf_module") if isinstance(zero, Mapping) else None
    if isinstance(table, dict):
        for key in ("classes", "names", "name_suffixes"):
            if isinstance(table.get(key), str):
                table[key] = [table[key]]
    yield from ()


def _endless(tree: Tree) -> Iterator[Change]:
    value = tree.get("steps_per_print")
    if isinstance(value, float) and math.isinf(value):
        del tree["steps_per_print"]
        yield Change("steps_per_print", "= Infinity was dropped: no progress lines are printed")


def _monitors(tree: Tree) -> Iterator[Change]:
    for key in DEFAULTS:
        section = tree.get(key)
        if isinstance(section, Mapping) and section.get("enabled") is True:
            tree[key] = with_defaults(key, section)
    yield from ()


def _clipping(tree: Tree) -> Iterator[Change]:
    if "gradient_clipping" not in tree:
        norm = tree.get("zero_optimization", {})
        if isinstance(norm, Mapping) and norm.get("compute_grad_norm", True) is False:
            return
        tree["gradient_clipping"] = _CLIPPING
        yield Change(
            "gradient_clipping",
            f"is left out, which means {_CLIPPING} to DeepSpeed 0.19: gradients are clipped at that norm; write 0.0 to "
            "clip nothing",
            is_warning=True,
        )


def _parameters_at_rest(tree: Tree) -> Iterator[Change]:
    zero = tree.get("zero_optimization")
    if isinstance(zero, dict) and zero.get("stage", 0) != 3 and isinstance(zero.get("offload_param"), Mapping):
        if zero["offload_param"].get("device", "none") != "none":
            yield Change("zero_optimization.offload_param", "was dropped: parameters are sharded at stage 3 only")
        del zero["offload_param"]


_FIRST: tuple[Callable[[Tree], Iterator[Change]], ...] = (_dotted, _empty, _auto, *TRANSLATIONS)
_RULES: tuple[Callable[[Tree], Iterator[Change]], ...] = (
    _endless,
    _leaves,
    drop_removed,
    _monitors,
    _clipping,
    _parameters_at_rest,
    *RULES,
    *DEFAULTS_RULES,
)


def _drop(
    tree: Tree, is_wanted: Callable[[str, Any], bool], says: Callable[[str], str | None], above: str = ""
) -> Iterator[Change]:
    """Remove the keys for which `is_wanted(dotted key, value)`; `says` gives the change's words, None for no line."""
    for name in list(tree):
        key = f"{above}{name}"
        if is_wanted(key, tree[name]):
            del tree[name]
            what = says(key)
            if what is not None:
                yield Change(key, what)
        elif isinstance(tree[name], dict):
            yield from _drop(tree[name], is_wanted, says, f"{key}.")


class ZeroStageEnum(IntEnum):
    """The stages, by DeepSpeed's names."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedConfig:
    """A config that was read as DeepSpeed reads it: the batch sizes solved for `world_size` ranks, or for those there
    are. Top-level keys and those of `data_types` are attributes; `get` gives them as they are written."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None, world_size: int | None = None) -> None:
        tree, changes = normalise(config)
        resolved = load_resolved(tree, world_size=world_size or comm.get_world_size())
        self._param_dict = tree
        self._resolved = resolved
        self.changes = changes
        self.train_batch_size = resolved.train_batch_size
        self.train_micro_batch_size_per_gpu = resolved.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = resolved.gradient_accumulation_steps
        self.gradient_clipping = resolved.gradient_clipping
        self.zero_optimization_stage = resolved.zero_optimization.stage
        self.zero_enabled = resolved.zero_optimization.stage > 0
        self.zero_config = resolved.zero_optimization
        self.float16_config, self.bfloat16_config = resolved.fp16, resolved.bf16
        self.optimizer_name, self.optimizer_params = get_optimizer_name(tree), get_optimizer_params(tree)
        self.scheduler_name, self.scheduler_params = get_scheduler_name(tree), get_scheduler_params(tree)
        self.monitor_config = get_monitor_config(tree)

    def __getattr__(self, name: str) -> Any:
        for section in () if name.startswith("_") else (self._resolved, self._resolved.data_types):
            if name in type(section).model_fields:
                return getattr(section, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get(self, key: str, default: Any = None) -> Any:
        """A top-level key, as the config has it."""
        return self._param_dict.get(key, default)
