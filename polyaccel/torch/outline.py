"""What a module consists of, so that modules and parameters that somebody adds later are noticed."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import nn


class Outline:
    """The parts of `module` as they are now. Asking for additions costs next to nothing while there are none."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts = list(module.modules())  # kept, so that no new object has the address of an old one
        self._members = self._addresses()

    def _addresses(self) -> list[int]:
        return [id(one) for part in self._parts for of in (part._parameters, part._modules) for one in of.values()]

    def added(self, known: Container[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are not `known`, with their full names."""
        if self._addresses() != self._members:
            yield from ((fqn, one) for fqn, one in self._module.named_parameters() if one not in known)
