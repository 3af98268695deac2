"""The second look at `optimizer.params` and `scheduler.params`: their type decides which keys they may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyaccel.config.auto import AUTO
from polyaccel.config.section import Section
from polyaccel.config.sections.optimizer import OPTIMIZER_PARAMS, OptimizerConfig
from polyaccel.config.sections.scheduler import SCHEDULER_PARAMS, SchedulerConfig
from polyaccel.config.validation import validate_tree
from polyaccel.errors import Problem


def check_optimizer(
    optimizer: OptimizerConfig | None, auto_keys: frozenset[str] = frozenset()
) -> tuple[OptimizerConfig | None, list[Problem]]:
    """Return the canonical optimizer with all arguments, and problems; unknown classes go to the framework."""
    if optimizer is None:
        return None, []
    name = {known.lower(): known for known in OPTIMIZER_PARAMS}.get(optimizer.type.lower(), optimizer.type)
    params = dict(optimizer.params)
    problems = []
    if "max_grad_norm" in params:
        norm = params.pop("max_grad_norm")
        hint = f'remove it and set "gradient_clipping": {norm} at the top level'
        problems.append(Problem("optimizer.params.max_grad_norm", norm, "is not an optimizer's argument", hint))
    typed, more = _check("optimizer", OPTIMIZER_PARAMS.get(name), params, auto_keys)
    if name == "SGD" and not more and typed["nesterov"] and (typed["momentum"] == 0 or typed["dampening"] != 0):
        expected = f"needs momentum above 0 ({typed['momentum']}) and dampening 0 ({typed['dampening']})"
        more.append(Problem("optimizer.params.nesterov", True, expected, "set momentum, e.g. 0.9"))
    return optimizer.model_copy(update={"type": name, "params": type(optimizer.params)(typed)}), [*problems, *more]


def check_scheduler(
    scheduler: SchedulerConfig | None, auto_keys: frozenset[str] = frozenset()
) -> tuple[SchedulerConfig | None, list[Problem]]:
    """The schedule with every argument, and the problems of its arguments, like `check_optimizer`."""
    if scheduler is None:
        return None, []
    exact = {known.lower(): known for known in SCHEDULER_PARAMS}.get(scheduler.type.lower(), scheduler.type)
    if exact != scheduler.type:  # DeepSpeed takes these names in one spelling and would look for a torch class
        expected = "is not how this schedule is spelt"
        return scheduler, [Problem("scheduler.type", scheduler.type, expected, f"did you mean {exact!r}?")]
    typed, problems = _check("scheduler", SCHEDULER_PARAMS.get(exact), dict(scheduler.params), auto_keys)
    return scheduler.model_copy(update={"params": type(scheduler.params)(typed)}), problems


def _check(
    section: str, model: type[Section] | None, params: Mapping[str, Any], auto_keys: frozenset[str]
) -> tuple[dict[str, Any], list[Problem]]:
    prefix = (section, "params")
    if model is None:
        hint = '"auto" is not available for this key; write a value'
        return dict(params), [
            Problem(f"{section}.params.{name}", AUTO, "needs a value", hint) for name, v in params.items() if v == AUTO
        ]
    valid, problems = validate_tree(model, params, prefix=prefix)
    # A required argument that is "auto" is missing until hints decide it.
    problems = [problem for problem in problems if problem.value is not None or problem.key not in auto_keys]
    return (dict(params) if valid is None else valid.model_dump()), problems
