"""What will be cut, and how: values that follow from a model's structure and the number of ranks, the same on all
ranks.

A plan holds no tensors. It is shown as a table before training, and `polyaccel.torch.tensor_parallel.parallelize`
carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from polyaccel.core.block import Block, Run
from polyaccel.torch.tensor_parallel.ranks import even_parts

How = Literal["column", "row", "vocabulary", "features", "experts", "shared weights", "shared tail", "head biases"]
"""Which class of `polyaccel.torch.tensor_parallel.layers` a module gets."""

RunsOfRanks = tuple[tuple[Run, ...], ...]
"""Of each rank the (start, length) of what it has along one dimension."""


@dataclass(frozen=True)
class CutModule:
    """How one module is shared."""

    name: str
    how: How
    cuts: Mapping[str, tuple[int, RunsOfRanks]] = field(default_factory=dict)
    """By the module's own parameters: the dimension along which one is cut, and what each rank has."""
    sizes: tuple[int, ...] | None = None
    """Each rank's part of the outputs of a column layer that are gathered, of the inputs of a row layer that are cut,
    of the features of an embedding that are gathered, of the heads of which arguments have biases."""
    rows: RunsOfRanks | None = None
    """The outputs of a whole weight that each rank computes or uses; of a vocabulary each rank's words."""
    names: tuple[str, ...] = ()
    """Whole weights whose gradients have parts; of head biases, the arguments that have those of all heads."""
    is_transposed: bool = False
    attributes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of the module's own that each rank has others of."""
    why: str = ""


@dataclass(frozen=True)
class CutHeads:
    """An attention module whose numbers of heads are each rank's own, and so are those that it reads of its config."""

    name: str
    attributes: Mapping[str, tuple[int, ...]]
    config_numbers: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TokenPlan:
    """Where ranks share tokens: from the first to the last of `blocks`, but inside of the modules `regions`. `weights`
    are those of modules in between, by full name."""

    blocks: tuple[str, ...]
    regions: tuple[str, ...]
    weights: Mapping[str, tuple[str, ...]]

    def is_inside(self, module: str) -> bool:
        """Whether a module is a region, or stands in one."""
        return any(module == region or module.startswith(f"{region}.") for region in self.regions)


@dataclass(frozen=True)
class CutPlan:
    """All that is cut of a model over `ranks` ranks. `shapes` are the whole shapes of its parameters by name."""

    model: str
    ranks: int
    modules: tuple[CutModule, ...]
    heads: tuple[CutHeads, ...]
    shapes: Mapping[str, tuple[int, ...]]
    source: str
    """Where the plan comes from."""
    loss_sizes: tuple[int, ...] | None = None
    """Each rank's words, where logits stay cut and the model's loss takes them so."""
    tokens: TokenPlan | None = None
    """None where every rank has all tokens everywhere."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Blocks that stay whole because they compute something else when they are cut, with the reason."""
    unproven: Mapping[str, str] = field(default_factory=dict)
    """Blocks that are cut and were not compared with the whole ones, with the reason."""

    def block(self, module: CutModule, parameter: str, rank: int) -> Block:
        """What `rank` has of a parameter of `module`."""
        dim, runs = module.cuts[parameter]
        return Block.whole(self.shapes[_joined(module.name, parameter)]).cut(dim, *runs[rank])

    def table(self) -> str:
        """The plan for people: of repeated layers one, with their number."""
        rows: list[tuple[str, ...]] = [("module", "how", "parameter", "whole", f"each of {self.ranks} ranks", "times")]
        counted: dict[tuple[str, ...], int] = {}
        for module in self.modules:
            for line in self._lines(module):
                counted[line] = counted.get(line, 0) + 1
        rows += [(*line, str(times)) for line, times in counted.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        whole, cut = self._numels()
        lines.append(f"{cut:,} of {whole:,} elements are cut; the others are whole on every rank ({self.source})")
        if self.tokens is not None:
            lines.append(
                f"tokens are cut too in {len(self.tokens.blocks)} blocks, outside of attention and feed-forward"
            )
        for text, blocks in (("stays whole", self.whole), ("is cut, and not proven", self.unproven)):
            found = dict.fromkeys(f"{_pattern(name)} {text}: {reason}" for name, reason in blocks.items())
            lines += found
        return "\n".join([f"{self.model} over {self.ranks} tensor ranks", *lines])

    def _lines(self, module: CutModule) -> Iterable[tuple[str, str, str, str, str]]:
        pattern = _pattern(module.name)
        how = module.how
        if module.sizes is not None and how != "head biases":
            how += ", cut inputs" if module.how == "row" else ", gathered"  # type: ignore[assignment]
        if not module.cuts:
            yield pattern, how, ", ".join(module.names) or "weight", "", module.why or "whole"
        for name in module.cuts:
            shapes = [self.block(module, name, rank).local_shape for rank in range(self.ranks)]
            local = " or ".join(dict.fromkeys(_shape(shape) for shape in shapes))
            yield pattern, how, name, _shape(self.shapes[_joined(module.name, name)]), local

    def _numels(self) -> tuple[int, int]:
        cut = {_joined(module.name, name) for module in self.modules for name in module.cuts}
        sizes = {name: _numel(shape) for name, shape in self.shapes.items()}
        return sum(sizes.values()), sum(size for name, size in sizes.items() if name in cut)


def even_runs(count: int, ranks: int, *, unit: int = 1, first: int = 0) -> RunsOfRanks:
    """`count` units in order, each of `unit` indices from `first` on: each rank's are one run."""
    runs, start = [], first
    for part in even_parts(count, ranks):
        runs.append(((start, part * unit),))
        start += part * unit
    return tuple(runs)


def feature_runs(count: int, ranks: int) -> RunsOfRanks:
    """Split `count` features in multiples of eight, four or two: grouped products need 16 bytes."""
    unit = next(unit for unit in (8, 4, 2, 1) if unit == 1 or (count % unit == 0 and count // unit >= ranks))
    return even_runs(count // unit, ranks, unit=unit)


def concatenated(*fused: RunsOfRanks) -> RunsOfRanks:
    """What each rank has of several parts of one dimension, one after another."""
    return tuple(tuple(run for runs in one_rank for run in runs) for one_rank in zip(*fused, strict=True))


def shifted(runs: RunsOfRanks, by: int) -> RunsOfRanks:
    """The same indices, counted from another place."""
    return tuple(tuple((start + by, length) for start, length in one_rank) for one_rank in runs)


def scaled(runs: RunsOfRanks, by: int) -> RunsOfRanks:
    """The indices of which each of these is `by` neighbours."""
    return tuple(tuple((start * by, length * by) for start, length in one_rank) for one_rank in runs)


def lengths(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """How many indices each rank has."""
    return tuple(sum(length for _, length in one_rank) for one_rank in runs)


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel
