"""The profile of a model: a tree of modules with parameters, operations and times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProfileNode:
    """A module, with all that is inside it.

    `operations` are floating-point operations of products and convolutions in forward passes, `seconds` the time of
    these passes (None: not measured), `calls` their number, `parameters` None where it is unknown whose they are. What
    `children` have is part of what the module has.
    """

    name: str
    """The full name; "" is the model's."""
    kind: str
    """The name of its class."""
    parameters: int | None
    operations: int
    seconds: float | None
    calls: int
    children: tuple[ProfileNode, ...] = ()
    uncounted: tuple[str, ...] = ()
    """Of a model: the operations that ran and are not in `operations`, because they have no formula."""

    @property
    def macs(self) -> int:
        """Multiplications with their additions."""
        return self.operations // 2

    @property
    def rate(self) -> float | None:
        """Operations a second; None without a time."""
        return self.operations / self.seconds if self.seconds else None

    @property
    def label(self) -> str:
        """The last part of the name; the class of the model itself."""
        return self.name.rpartition(".")[2] or self.kind

    def walk(self, depth: int = 0) -> Iterator[tuple[int, ProfileNode]]:
        """Every module below, itself first, with how deep it is."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)


def tree_of(nodes: Mapping[str, ProfileNode]) -> ProfileNode:
    """The tree of `nodes` by full name, which have no children yet; "" is the root. Of a module whose parent is not
    there, the nearest one above has it."""
    below: dict[str, list[str]] = {name: [] for name in nodes}
    for name in nodes:
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in nodes:
                below[parent].append(name)
                break

    def made(name: str) -> ProfileNode:
        one = nodes[name]
        children = tuple(made(child) for child in below[name])
        operations, seconds = one.operations, one.seconds
        if not one.calls:  # a list of modules, which is never called itself
            operations = sum(child.operations for child in children)
            times = [child.seconds for child in children if child.seconds is not None]
            seconds = sum(times) if times else None
        return ProfileNode(name, one.kind, one.parameters, operations, seconds, one.calls, children, one.uncounted)

    return made("")
