"""Parameters of equal layers, stacked along a leading axis for a scan over layers.

Where parameters are sharded, the engine takes a layer's part of a stacked parameter for its own parameter, for layers
are gathered one by one: layer 3 of `layers.weight` is `layers.weight[3]`. Users and checkpoints have
`layers.weight` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from polyaccel.core.types import ParamSpec
from polyaccel.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's part of the stacked parameter `fqn`, whose shape is `shape`."""

    fqn: str
    index: int
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        """The element of the stacked parameter where this part begins."""
        return self.index * prod(self.shape[1:])


class Stacking:
    """The stacked parameters among `specs`, by name in tree order: those below one of `prefixes`.

    Raises ShardingError for a prefix without parameters, or whose parameters have not the same number of layers.
    """

    def __init__(self, specs: Mapping[str, ParamSpec], prefixes: Sequence[str]) -> None:
        self._specs = specs
        self.layers: dict[str, Layer] = {}
        """By the engine's name of each."""
        self._names: dict[str, tuple[str, ...]] = {}
        self._runs: dict[str, tuple[str, ...]] = {}
        """Prefix of each stacked parameter, and the engine's names below it in order of use."""
        for prefix in prefixes:
            found = [fqn for fqn in specs if fqn == prefix or fqn.startswith(f"{prefix}.")]
            counts = {specs[fqn].shape[0] if specs[fqn].shape else 0 for fqn in found}
            if len(counts) != 1 or not (count := counts.pop()):
                raise ShardingError(
                    f"the parameters below {prefix!r} are not stacked: leading axes {sorted(counts) or 'of none'}",
                    hint="name in `stacked` subtrees of params whose arrays all have one leading axis, over layers",
                    value=prefix,
                )
            for fqn in found:
                self._names[fqn] = tuple(f"{fqn}[{index}]" for index in range(count))
                for index, name in enumerate(self._names[fqn]):
                    self.layers[name] = Layer(fqn, index, specs[fqn].shape)
            run = tuple(self._names[fqn][index] for index in range(count) for fqn in found)
            self._runs.update(dict.fromkeys(found, run))

    def names(self, fqn: str) -> tuple[str, ...]:
        """The engine's names of a parameter: those of its layers, or its own."""
        return self._names.get(fqn, (fqn,))

    def units(self) -> dict[str, str]:
        """The unit of each layer's parameters."""
        return {name: f"{self._runs[layer.fqn][0]} {layer.index}" for name, layer in self.layers.items()}

    def is_stacked(self, fqn: str) -> bool:
        return fqn in self._names

    def specs(self) -> Iterator[ParamSpec]:
        """The parameters as the engine has them, layer by layer."""
        done = set[str]()
        for fqn, spec in self._specs.items():
            for name in self._runs.get(fqn, (fqn,)):
                if name not in done:
                    done.add(name)
                    layer = self.layers.get(name)
                    of = spec if layer is None else self._specs[layer.fqn]
                    yield of if layer is None else replace(of, fqn=name, shape=of.shape[1:])

    def in_whole(self, name: str, shape: tuple[int, ...], start: int) -> tuple[str, tuple[int, ...], int]:
        """Where element `start` of the parameter `name` of this shape stands: user's name, shape, and element."""
        layer = self.layers.get(name)
        return (name, shape, start) if layer is None else (layer.fqn, layer.shape, layer.start + start)


def repeated_blocks(names: Iterable[str]) -> dict[str, str]:
    """Return each parameter's outermost repeated block by name ("" for none): `layers.3`, `Block_3`."""
    paths = {name: name.split(".") for name in names}
    siblings: dict[tuple[str, ...], set[str]] = {}
    for path in paths.values():
        for at, part in enumerate(path):
            if (stem := _NUMBERED.fullmatch(part)) is not None:
                siblings.setdefault((*path[:at], stem[1]), set()).add(part)
    units: dict[str, str] = {}
    for name, path in paths.items():
        ends = (
            at
            for at, part in enumerate(path[:-1], 1)
            if (stem := _NUMBERED.fullmatch(part)) is not None and len(siblings[(*path[: at - 1], stem[1])]) > 1
        )
        units[name] = ".".join(path[: next(ends, 0)])
    return units


_NUMBERED = re.compile(r"((?:.*_)?)\d+")
