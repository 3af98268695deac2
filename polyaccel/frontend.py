"""`polyaccel.initialize`: torch modules go to the torch frontend, functions with their parameters to that of JAX."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from polyaccel.errors import PolyaccelError

if TYPE_CHECKING:
    from polyaccel.jax.engine import JaxEngine
    from polyaccel.torch.engine import TorchEngine

_JAX_HOMES = frozenset({"equinox", "flax"})


@overload
def initialize(*positional: Any, params: None = None, **named: Any) -> tuple[TorchEngine, Any, Any, Any]: ...


@overload
def initialize(*, params: Any, **named: Any) -> JaxEngine: ...


def initialize(*positional: Any, **named: Any) -> Any:
    """Build an engine around a model; loads torch or JAX, whichever the model is of.

    A torch module is taken as by `polyaccel.torch.initialize.initialize`, whose arguments stand in DeepSpeed's order;
    gives `(engine, optimizer, training_dataloader, lr_scheduler)`. With `params`, or a model of flax or equinox, as by
    `polyaccel.jax.initialize.initialize`; gives the engine. Both say what they raise. Raises PolyaccelError where the
    framework is not installed, or too old.
    """
    home = "jax" if "params" in named or _is_of(named.get("model"), _JAX_HOMES) else "torch"
    try:
        module = import_module(f"polyaccel.{home}.initialize")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != home:
            raise
        if error.name != home:
            raise PolyaccelError(
                f"this version of {home} is too old: {error}",
                cure=f"pip install --upgrade 'polyaccel[{home}]'",
                value=home,
            ) from error
        other = ", or pass params= where the model is a function of JAX" if home == "torch" else ""
        raise PolyaccelError(
            f"{home} is not installed", cure=f"pip install 'polyaccel[{home}]'{other}", value=home
        ) from error
    return module.initialize(*positional, **named)


def _is_of(model: object, packages: frozenset[str]) -> bool:
    """Whether a class that `model` is made of comes from one of `packages`."""
    return any(kind.__module__.partition(".")[0] in packages for kind in type(model).__mro__)
