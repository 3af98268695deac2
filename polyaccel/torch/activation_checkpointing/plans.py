"""The plans of the modules that an engine's regions begin with, from one first run to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from operator import is_, itemgetter
from typing import Any

from torch import nn

from polyaccel.torch.activation_checkpointing.globals_of import uses_globals
from polyaccel.torch.activation_checkpointing.kinds import LENGTH, ORDER, STATELESS, may_have_state
from polyaccel.torch.activation_checkpointing.places import STRUCTURE, Attributes, Entries

_DICTS = itemgetter("_parameters", "_buffers", "_modules")
_OF_EACH = itemgetter("training", "_parameters", "_buffers", "_modules")


def _behind(dicts: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """What attribute dicts have behind what each module has."""
    return chain.from_iterable(map(islice, dicts, repeat(LENGTH), repeat(None)))


class ModulePlan:
    """A module's parts, itself among them, and what is to be done about them at each first run.

    [Note: Attribute scan plans]
    To look at each attribute of a block's parts takes longer than to compute a small part. So a plan keeps what it has
    found, and is used again where all dicts of the parts have the very same keys and values.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts, self.ids = parts, set(map(id, parts))
        own = [part.__dict__ for part in parts]
        self.attributes = Attributes(*own)
        self.buffers = [(part, Entries(part._buffers)) for part in parts if part._buffers]
        self.parameters = [
            parameter for part in parts for parameter in part._parameters.values() if parameter is not None
        ]
        self.kinds = [kind for kind in dict.fromkeys(map(type, parts)) if uses_globals(kind)]
        self.held: list[tuple[Any, nn.Module, str]] = []
        """The attributes that may have state."""
        for part, attributes in zip(parts, own, strict=True):
            if may_have_state(attributes):
                self.held += [(value, part, name) for name, value in attributes.items() if name not in STRUCTURE]

    def settle(self) -> bool:
        """Prepare the next use: note contents, drop stateless attributes; return whether possible."""
        self._own = [part.__dict__ for part in self.parts]
        dicts = map(_DICTS, self._own)
        self._contents = [each for one in dicts for each in one]
        self._keys, self._values = list(self._flat_keys()), list(self._flat_values())
        self.held = [each for each in self.held if type(each[0]) not in STATELESS]
        return all(tuple(islice(one, LENGTH)) == ORDER for one in self._own)

    def holds(self) -> bool:
        """Whether the parts have what they had when it was made."""
        return list(self._flat_keys()) == self._keys and all(map(is_, self._flat_values(), self._values))

    def _flat_keys(self) -> Iterator[str]:
        """Without those of each module."""
        return chain(_behind(self._own), chain.from_iterable(self._contents))

    def _flat_values(self) -> Iterator[Any]:
        own = _behind(map(dict.values, self._own))
        contents = chain.from_iterable(map(dict.values, self._contents))
        return chain(chain.from_iterable(map(_OF_EACH, self._own)), own, contents)


class ModulePlans:
    """The plans of the modules that an engine's regions begin with. It refers to them: the engine keeps it."""

    def __init__(self) -> None:
        self._plans: dict[nn.Module, ModulePlan] = {}
        self._misses: Counter[nn.Module] = Counter()

    def get(self, module: nn.Module) -> ModulePlan | None:
        """The plan of `module`, None where it has none that holds."""
        plan = self._plans.get(module)
        if plan is None:
            return None
        if plan.holds():
            self._misses.pop(module, None)
            return plan
        self._misses[module] += 1
        return None

    def keep(self, module: nn.Module, plan: ModulePlan) -> None:
        """Use `plan` the next time, unless attributes of the module have changed in each of some runs."""
        if self._plans.get(module) is not plan:
            if self._misses[module] < _MOST_MISSES and len(self._plans) < _MOST_PLANS and plan.settle():
                self._plans[module] = plan
            else:
                self._plans.pop(module, None)


_MOST_MISSES, _MOST_PLANS = 4, 1000
