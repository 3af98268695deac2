"""The meaning of "auto", as the Trainer of transformers gives it before `deepspeed.initialize` is called.

Source: `HfTrainerDeepSpeedConfig` of transformers 5.23, whose numbers a test compares with these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyaccel.config.auto import AUTO
from polyaccel.errors import ConfigError, Problem
from polyaccel_deepspeed.change import Change, Tree

DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "fp16": False,
    "bf16": False,
}
"""The defaults of TrainingArguments."""
_DERIVED = ("hidden_size", "num_training_steps")
"""What the Trainer learns from the model and the data."""


def fill_auto(tree: Tree, world_size: int, arguments: Mapping[str, Any]) -> tuple[Change, ...]:
    """Write values for "auto" into `tree`; the values come from `arguments`, then from batch sizes that are written,
    then from TrainingArguments' defaults.

    Raises ConfigError for an unknown argument, and for one that contradicts a value that is written.
    """
    known = [*DEFAULTS, *_DERIVED]
    problems = [
        Problem(f"--set {name}", value, "is not an argument that decides a value", f"use one of {', '.join(known)}")
        for name, value in arguments.items()
        if name not in known
    ]
    if problems:
        raise ConfigError(problems, source="--set")
    changes = list[Change]()
    for key, value, names in _values(tree, world_size, {**DEFAULTS, **_written_sizes(tree), **arguments}):
        table, name = _table_of(tree, key)
        if table is None or name not in table:
            continue
        if table[name] == AUTO:
            table[name] = value
            changes.append(Change(key, f'= "auto" was filled with {value!r}'))
        elif table[name] not in (None, value) and any(each in arguments for each in names):
            said = ", ".join(f"{each} = {arguments[each]!r}" for each in names if each in arguments)
            problems.append(Problem(key, table[name], f"contradicts {said}", 'write "auto", or leave the argument out'))
    if problems:
        raise ConfigError(problems, source="--set")
    return tuple(changes)


def _written_sizes(tree: Tree) -> dict[str, int]:
    """The arguments that the Trainer refuses unless they are what the config has."""
    keys = {
        "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    return {name: tree[key] for name, key in keys.items() if isinstance(tree.get(key), int)}


def _values(tree: Tree, world_size: int, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Each key that may be "auto", its value, and the arguments that decide it."""
    micro, steps = given["per_device_train_batch_size"], given["gradient_accumulation_steps"]
    yield "train_micro_batch_size_per_gpu", micro, ("per_device_train_batch_size",)
    yield "gradient_accumulation_steps", steps, ("gradient_accumulation_steps",)
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    yield "train_batch_size", world_size * micro * steps, batch
    yield "gradient_clipping", given["max_grad_norm"], ("max_grad_norm",)
    yield "optimizer.params.lr", given["learning_rate"], ("learning_rate",)
    betas = [given["adam_beta1"], given["adam_beta2"]]
    yield "optimizer.params.betas", betas, ("adam_beta1", "adam_beta2")
    yield "optimizer.params.eps", given["adam_epsilon"], ("adam_epsilon",)
    yield "optimizer.params.weight_decay", given["weight_decay"], ("weight_decay",)
    yield "scheduler.params.warmup_min_lr", 0, ()
    yield "scheduler.params.warmup_max_lr", given["learning_rate"], ("learning_rate",)
    yield "fp16.enabled", given["fp16"], ("fp16",)
    yield "bf16.enabled", given["bf16"], ("bf16",)
    width = given.get("hidden_size")
    if width is not None:
        yield "zero_optimization.reduce_bucket_size", width * width, ()
        zero = tree.get("zero_optimization")
        if isinstance(zero, Mapping) and zero.get("stage") == 3:
            yield "zero_optimization.stage3_prefetch_bucket_size", int(0.9 * width * width), ()
            yield "zero_optimization.stage3_param_persistence_threshold", 10 * width, ()
    if given.get("num_training_steps") is not None:
        yield "scheduler.params.total_num_steps", given["num_training_steps"], ("num_training_steps",)
    yield "scheduler.params.warmup_num_steps", max(1, given["warmup_steps"]), ("warmup_steps",)


def _table_of(tree: Tree, key: str) -> tuple[Tree | None, str]:
    """The table in which the dotted `key` stands, and its name there."""
    *parents, name = key.split(".")
    table: Any = tree
    for parent in parents:
        table = table.get(parent) if isinstance(table, dict) else None
    return (table if isinstance(table, dict) else None), name
