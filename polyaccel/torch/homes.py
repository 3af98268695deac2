"""Which engine a parameter belongs to: the way from a parameter that a user holds to the buffers it lives in.

Kept beside the parameters, not on them, so that they pickle and copy like any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from polyaccel.torch.adapter import TorchAdapter


@dataclass(eq=False)
class Home:
    """What is known of one parameter of an engine.

    `version` is its version counter when its values were last those that the engine knows. `kind` is its own class and
    `placeholder` what it holds while it has no values; `openings` counts the `GatheredParameters` that it is open in.
    """

    fqn: str
    adapter_ref: ReferenceType[TorchAdapter]
    version: int
    kind: type[nn.Parameter] = nn.Parameter
    placeholder: Tensor | None = None
    openings: int = 0

    @property
    def adapter(self) -> TorchAdapter | None:
        """The owner; None once its engine is gone."""
        return self.adapter_ref()


_homes = WeakIdKeyDictionary()


def home_of(parameter: Tensor) -> Home | None:
    """The home of a parameter; None if it belongs to no engine."""
    home: Home | None = _homes.get(parameter)  # type: ignore[no-untyped-call]
    return home


def settle(parameter: nn.Parameter, fqn: str, adapter: TorchAdapter) -> Home:
    """Make `adapter` the owner of `parameter`."""
    home = _homes[parameter] = Home(fqn, ref(adapter), parameter._version)
    return home


def leave(parameters: Iterable[nn.Parameter]) -> None:
    """`parameters` belong to no engine any more."""
    for parameter in parameters:
        _homes.pop(parameter, None)  # type: ignore[no-untyped-call]


def has_changed(parameter: nn.Parameter) -> bool:
    """Whether somebody wrote to `parameter` since its version was noted."""
    home = home_of(parameter)
    return home is not None and parameter._version != home.version


def note_version(parameter: nn.Parameter) -> None:
    """The values of `parameter` are known to its engine now."""
    home = home_of(parameter)
    if home is not None:
        home.version = parameter._version
