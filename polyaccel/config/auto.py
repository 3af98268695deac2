"""The meaning of `"auto"`: key by key, the caller's argument that decides the value.

The arguments are named as in Hugging Face's `TrainingArguments`, which is where configs with `"auto"` come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyaccel.errors import Problem

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class AutoRule:
    """The hints that decide a key, and the value they give it."""

    arguments: tuple[str, ...]
    value: Callable[..., Any]


def _hint(*arguments: str, value: Callable[..., Any] = lambda hint: hint) -> AutoRule:
    return AutoRule(arguments, value)


def _constant(value: Any) -> AutoRule:
    return AutoRule((), lambda: value)


RULES: dict[str, AutoRule] = {
    "train_batch_size": _hint("train_batch_size"),
    "train_micro_batch_size_per_gpu": _hint("per_device_train_batch_size"),
    "gradient_accumulation_steps": _hint("gradient_accumulation_steps"),
    "gradient_clipping": _hint("max_grad_norm"),
    "optimizer.params.lr": _hint("learning_rate"),
    "optimizer.params.betas": _hint("adam_beta1", "adam_beta2", value=lambda first, second: [first, second]),
    "optimizer.params.eps": _hint("adam_epsilon"),
    "optimizer.params.weight_decay": _hint("weight_decay"),
    "scheduler.params.warmup_min_lr": _constant(0.0),
    "scheduler.params.warmup_max_lr": _hint("learning_rate"),
    "scheduler.params.warmup_num_steps": _hint("warmup_steps"),
    "scheduler.params.total_num_steps": _hint("num_training_steps"),
    "pipeline.stages": _constant(1),
    "fp16.enabled": _hint("fp16"),
    "bf16.enabled": _hint("bf16"),
    "zero_optimization.reduce_bucket_size": _hint("hidden_size", value=lambda width: width * width),
    # Below stage 3 these two have no effect, whatever their value.
    "zero_optimization.stage3_prefetch_bucket_size": _constant(50_000_000),
    "zero_optimization.stage3_param_persistence_threshold": _constant(100_000),
}
"""Every key that may be `"auto"`."""


def take_auto(tree: dict[str, Any]) -> frozenset[str]:
    """Remove the keys of `tree` whose value is `"auto"` and may be; return their dotted names."""
    found = set()
    for key in RULES:
        *parents, name = key.split(".")
        table: Any = tree
        for parent in parents:
            table = table.get(parent) if isinstance(table, dict) else None
        if isinstance(table, dict) and table.get(name) == AUTO:
            del table[name]
            found.add(key)
    return frozenset(found)


def fill_auto(tree: dict[str, Any], keys: frozenset[str], hints: Mapping[str, Any]) -> list[Problem]:
    """Put the values of `keys` into `tree`; return a problem for each that no hint decides.

    A hint is looked up by the dotted key itself, then by the rule's arguments; None counts as absent. The batch sizes
    are left out without a problem when no hint is there, for the others may determine them.
    """
    problems = []
    for key in sorted(keys):
        rule = RULES[key]
        values = [hints.get(argument) for argument in rule.arguments]
        if (given := hints.get(key)) is not None:
            value = given
        elif all(hint is not None for hint in values):
            value = rule.value(*values)
        else:
            if "." in key or key == "gradient_clipping":
                problems.append(Problem(key, AUTO, "needs an argument that decides it", f"{_advice(key)}"))
            continue
        _put(tree, key, value)
    return problems


def _advice(key: str) -> str:
    return f"give {' and '.join(RULES[key].arguments)} (a hint of this name), or write a value"


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = value
