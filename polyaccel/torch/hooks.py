"""Hooks of an engine on the user's module. They belong to that engine and that module, and go with no copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyaccel.errors import ShardingError


class EngineHook:
    """`function` as a hook. A copy of the module shares it, so it must look at which module calls it; a pickle cannot
    have it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            "a module whose parameters are sharded cannot be pickled",
            cure="save engine.module_state_dict() (GatheredParameters does for copies), or call engine.destroy() first",
        )
