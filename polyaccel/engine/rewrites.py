"""Rewrites of a user's model: `BaseRewrite`, one kind of change, and `BaseContext`, which applies them in order.

Each frontend has one list: `polyaccel.torch.rewrites` and `polyaccel.jax.rewrites`. Imports no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, ClassVar, Generic, TypeVar

from polyaccel.errors import ConfigError, Problem

log = getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRewrite:
    """One rewrite of a model, as it was applied on this rank."""

    name: str
    """The section of the config that asks for it."""
    modules: tuple[str, ...] = ()
    """Full names of the modules whose class, forward or attributes it replaced; layers of a list by their index."""
    parameters: tuple[str, ...] = ()
    """Full names of the parameters whose values it cut, moved, converted or flattened."""
    unproven: tuple[str, ...] = ()
    """Full names of the modules that it changed without a comparison with what they were."""
    batch_parts: int = 1
    """Parts into which it cuts a batch of this process."""
    remove: Callable[[], object] | None = None
    """Undoes it; None where nothing was changed in place, or this rank no longer has what was before."""
    is_collective: bool = False
    """Whether every rank has to call `remove`."""


@dataclass(kw_only=True)
class BaseContext:
    """What rewrites read, and what they leave for the engine. Each frontend has its own fields."""

    applied: list[AppliedRewrite] = field(default_factory=list)
    """What was applied, in order."""
    without: frozenset[str] = frozenset()
    """Names of rewrites that are off in a run of a verification."""

    def apply(self, rewrites: Sequence[BaseRewrite[Any]]) -> None:
        """Check all active `rewrites`, then apply them in order. Collective; raises before any change."""
        wanted = [one for one in rewrites if one.name not in self.without]
        problems: list[Problem] = []
        for one in wanted:
            try:
                if one.is_on(self):
                    one.check(self)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems, source="initialize")
        for one in wanted:
            if one.is_on(self) and (done := one.apply(self)) is not None:
                self.applied.append(done)
                log.debug("%s: %d modules, %d parameters", done.name, len(done.modules), len(done.parameters))

    def remove(self, *, alone: bool = False) -> None:
        """Undo what can be undone, the last rewrite first. Collective, unless only what this rank can do `alone`."""
        while self.applied:
            one = self.applied.pop()
            if one.remove is not None and not (alone and one.is_collective):
                one.remove()


C = TypeVar("C", bound=BaseContext, contravariant=True)


class BaseRewrite(ABC, Generic[C]):
    """One kind of change to a user's model. It holds no state: what was changed is in `AppliedRewrite`."""

    name: ClassVar[str]
    needs_engine: ClassVar[bool] = False
    """Whether the engine applies it while it is built."""

    @abstractmethod
    def is_on(self, context: C) -> bool:
        """Whether the run asks for it."""

    def check(self, context: C) -> None:
        """Raise ConfigError or PolyaccelError for a request that cannot be met, before anything is changed."""

    @abstractmethod
    def apply(self, context: C) -> AppliedRewrite | None:
        """Make the change; None where this rank's model has nothing to change. Collective."""
