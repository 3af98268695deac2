"""The hyperparameters of `optax.inject_hyperparams`, read and set on an engine."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from polyaccel.errors import PolyaccelError
from polyaccel.jax.optax_optimizer import TransformationOptimizer
from polyaccel.zero.update.optimizers import SliceOptimizer


class Hyperparameters(MutableMapping[str, float]):
    """The numbers that `optimizer` takes from `optax.inject_hyperparams`, by name; none of another optimizer.

    Where several have one name, each has its path in the state of plain optax. A value that is set acts in the next
    update and stays in checkpoints. All ranks must set equal values.
    """

    def __init__(self, optimizer: SliceOptimizer | None) -> None:
        self._optimizer = optimizer if isinstance(optimizer, TransformationOptimizer) else None
        found = {} if self._optimizer is None else self._optimizer.traced.hyperparams
        self._places = {
            name: at
            for name, at in found.items()
            if self._optimizer is not None and self._optimizer.traced.state_paths[at][1].shape == ()
        }

    def __getitem__(self, name: str) -> float:
        if self._optimizer is None:
            raise KeyError(name)
        return self._optimizer.number(self._places[name])

    def __setitem__(self, name: str, value: Any) -> None:
        if self._optimizer is None or name not in self._places:
            raise PolyaccelError(
                f"there is no hyperparameter {name!r} to set among {sorted(self._places)}",
                hint="wrap the transformation: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3)",
                value=name,
            )
        if not self._optimizer.traced.follows_itself(self._places[name]):
            raise PolyaccelError(
                f"the hyperparameter {name!r} follows a schedule, which would overwrite a value that is set",
                hint="give inject_hyperparams a number in place of the schedule",
                value=name,
            )
        self._optimizer.set_number(self._places[name], float(value))

    def __delitem__(self, name: str) -> None:
        raise PolyaccelError(
            f"the hyperparameter {name!r} cannot be deleted", hint="set it to another value", value=name
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return repr(dict(self))


__all__ = ["Hyperparameters"]
