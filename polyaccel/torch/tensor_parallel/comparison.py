"""Comparison of blocks, whole and cut, before a model is cut: `proven_regions`.

[Note: Comparison of whole and cut blocks]
Names and shapes suggest how a block is cut, and do not prove it. A fused layer may have another layout, a statistic may
need the features of all ranks, a parameter between the cut layers may get a part of its gradient. So each block is
computed on random numbers in this process, once whole and once by ranks that are threads, with the classes and
exchanges of training. Output, gradients of inputs and gradients of parameters are compared. Parameters whose gradients
add up to the whole one become shared weights. A block that differs otherwise is tried with other layouts, and stays
whole where none agrees.

The limit is derived: `_SPREADS` times the distance between float32 and float64 of the whole block, and not less than
the rounding of the largest element. A copy has random parameters ([Note: Copies with random parameters]), so all ranks
decide the same, also for parameters without values. The features between blocks are narrowed in large blocks, because
no rank cuts them. Blocks of equal classes, shapes and numbers are compared once. A block that cannot be called is
reported as not proven.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.comm.base import Communicator
from polyaccel.comm.init.threads import run_threads
from polyaccel.torch.random_copy import random_copy, unchanged_generators
from polyaccel.torch.sharding.tensor_shard import local_slice
from polyaccel.torch.tensor_parallel import names
from polyaccel.torch.tensor_parallel.layouts import other_layouts
from polyaccel.torch.tensor_parallel.parallelize import parallelize_module
from polyaccel.torch.tensor_parallel.plan import CutModule, CutPlan
from polyaccel.torch.tensor_parallel.ranks import host
from polyaccel.torch.tensor_parallel.structure import CutRegion, inputs_of, is_linear
from polyaccel.torch.tensor_parallel.trial_inputs import Call, mapped, recorded_calls

_SPREADS = 64.0
"""Right cuts reach about 2 spreads, faults begin at 4,000 (issue 45)."""
_LARGE = 1 << 18
"""Elements of a block from which on it is narrowed."""
_TOO_LARGE = 1 << 26
_NARROW = 64
_TIMEOUT_S = 60.0
_PLACE = re.compile(r"(idx|index|id|number)$|layer")
"""Names of numbers that say where a block stands."""
_EPS = torch.finfo(torch.float32).eps
_GRADIENT = "gradient of "
_BY_HEAD = 4
"""Dimensions of biases (batch, heads, queries, keys); LongT5 has (1, 1, heads, queries, keys)."""


@dataclass(frozen=True)
class ProvenRegions:
    """Regions that may be cut, and what was found of the others."""

    regions: tuple[CutRegion, ...]
    whole: Mapping[str, str]
    """Regions that stay whole, by name, with the reason."""
    unproven: Mapping[str, str]
    """Regions that are cut as planned and could not be compared, with the reason."""


def proven_regions(model: nn.Module, regions: Sequence[CutRegion], ranks: int) -> ProvenRegions:
    """Compare each region of `model` whole and cut; changes neither model nor generators."""
    modules = dict(model.named_modules())
    if ranks == 1:
        return ProvenRegions(tuple(regions), {}, {})
    roots = {region.name: _root(region) for region in regions}
    prints = {region.name: _fingerprint(modules, roots[region.name], region) for region in regions}
    firsts = {print_: name for name, print_ in reversed(prints.items())}
    first_roots = list(dict.fromkeys(roots[name] for name in firsts.values()))
    widths = {roots[region.name]: _hidden(modules, region) for region in regions}
    kept, whole, unproven, verdicts = list[CutRegion](), dict[str, str](), dict[str, str](), dict[Any, _Verdict]()
    with unchanged_generators():
        calls = recorded_calls(model, first_roots, widths) if first_roots else {}
        for region in regions:
            root, print_ = roots[region.name], prints[region.name]
            if print_ not in verdicts:
                verdicts[print_] = _verdict(modules, root, region, calls.get(root), ranks)
            verdict = verdicts[print_]
            if verdict.is_whole:
                whole[region.name] = verdict.reason
                continue
            if verdict.reason:
                unproven[region.name] = verdict.reason
            kept.append(region if verdict.region is None else _moved(verdict.region, verdict.root, root))
    return ProvenRegions(tuple(kept), whole, unproven)


@dataclass(frozen=True)
class _Verdict:
    root: str
    region: CutRegion | None = None
    """How the region is cut; None as it was planned."""
    is_whole: bool = False
    reason: str = ""


class _Uncomparable(Exception):
    """The whole block cannot be computed by itself."""


def _verdict(modules: Mapping[str, nn.Module], root: str, region: CutRegion, call: Call | None, ranks: int) -> _Verdict:
    if call is None:
        return _Verdict(root, reason="no call of it was recorded")
    block = modules[root]
    own = _moved(region, root, "")
    hows = {module.how for module in region.modules if module.sizes is None}
    if not region.layers and "column" in hows and "row" not in hows:
        return _Verdict(root, reason="its outputs are parts")
    reason = ""
    try:
        comparison = _Comparison(block, own, call, ranks)
    except _Uncomparable as error:
        return _Verdict(root, reason=str(error))
    for layout in (own, *other_layouts(block, own, ranks)):
        for by_head in (False, True) if comparison.has_biases(layout) else (False,):
            agreed, difference = comparison.tried(layout, by_head=by_head)
            if agreed is not None:
                return _Verdict(root, None if agreed is own else _moved(agreed, "", root))
            reason = reason or difference
    return _Verdict(root, is_whole=True, reason=reason)


class _Comparison:
    """A block computed whole, against which ways to cut it are compared."""

    def __init__(self, block: nn.Module, region: CutRegion, call: Call, ranks: int) -> None:
        self._block = block
        self._call = call
        self._ranks = ranks
        numel = sum(one.numel() for one in block.parameters())
        width = next((shape[-1] for shape in call.drawn_shapes()), 0)
        narrow = [(width, _NARROW)] if numel > _LARGE and width > _NARROW else []
        problem = f"it has {numel:,} elements"
        for self._narrowed in [*narrow, *([(width, width)] if numel <= _TOO_LARGE else [])]:
            self._shapes = self._narrow_shapes(region)
            try:
                whole = self._computed(self._copy(), torch.float32)
                break
            except Exception as error:
                problem = _summary(error)
        else:
            raise _Uncomparable(problem)
        try:
            self._exact = self._computed(self._copy().double(), torch.float64)
        except Exception:
            self._exact = {name: one.double() for name, one in whole.items()}
        sizes = {name: float(one.abs().max()) if one.numel() else 0.0 for name, one in self._exact.items()}
        largest = max(size for name, size in sizes.items() if name != "output")
        if not all(isfinite(size) for size in sizes.values()):
            raise _Uncomparable("its numbers are not finite")
        self._limits = {
            name: _SPREADS * max(_distance(whole[name], one), 2 * _EPS * (sizes[name] if name == "output" else largest))
            for name, one in self._exact.items()
        }

    def has_biases(self, region: CutRegion) -> bool:
        """Whether an argument has a matrix for each head: then a block before this one may have cut it."""
        heads = sum(_head_counts(region))
        return any(heads and len(shape) >= _BY_HEAD and shape[-3] == heads for shape in self._call.drawn_shapes())

    def tried(self, region: CutRegion, *, by_head: bool = False) -> tuple[CutRegion | None, str]:
        """Return `region` with shared weights where whole and cut agree, else None and why."""
        try:
            apart, sums = self._distances(region, by_head=by_head)
            if shared := [
                name for name, each in sums.items() if not self._agrees(apart, name) and self._agrees(sums, name)
            ]:
                region = _with_shared(region, [name.removeprefix(_GRADIENT) for name in shared])
                apart, _ = self._distances(region, by_head=by_head)
        except Exception as error:
            return None, f"cut, it raises {_summary(error)}"
        for name in self._limits:
            if not self._agrees(apart, name):
                size = float(self._exact[name].abs().max())
                return None, f"cut, its {name} differs by {apart[name]:.1e} of {size:.1e}"
        return region, ""

    def _agrees(self, apart: Mapping[str, float], name: str) -> bool:
        return apart[name] <= self._limits[name]

    def _distances(self, region: CutRegion, *, by_head: bool) -> tuple[dict[str, float], dict[str, float]]:
        """How far the ranks' tensors are from the whole ones, and of gradients that all have, how far their sum."""
        counts = _head_counts(region) if by_head else ()

        def part(whole: Tensor, rank: int) -> Tensor:
            if whole.dim() < _BY_HEAD or whole.shape[-3] != sum(counts):
                return whole
            return whole.narrow(-3, sum(counts[:rank]), counts[rank])

        copies = [self._copy() for _ in range(self._ranks)]
        shapes = {name: tuple(one.shape) for name, one in copies[0].named_parameters(remove_duplicate=False)}
        plan = CutPlan(type(self._block).__name__, self._ranks, region.modules, region.heads, shapes, "comparison")

        def run(communicator: Communicator) -> dict[str, Tensor]:
            own = copies[communicator.rank]
            parallelize_module(own, communicator, plan, is_logged=False)
            return self._computed(own, torch.float32, lambda whole: part(whole, communicator.rank))

        results = run_threads(self._ranks, run, timeout_s=_TIMEOUT_S, accelerator=host())
        cut = {_GRADIENT + _joined(one.name, name): (one, name) for one in region.modules for name in one.cuts}
        apart, sums = dict[str, float](), dict[str, float]()
        for name, wanted in self._exact.items():
            each = [result[name] for result in results]
            if name in cut:
                wholes = [local_slice(wanted, plan.block(*cut[name], rank)) for rank in range(plan.ranks)]
                apart[name] = max(map(_distance, each, wholes))
            elif name.startswith(_GRADIENT):
                total = torch.stack(each).double().sum(0)
                apart[name], sums[name] = _distance(total / plan.ranks, wanted), _distance(total, wanted)
            else:
                apart[name] = max(_distance(one, part(wanted, rank)) for rank, one in enumerate(each))
        return apart, sums

    def _narrow_shapes(self, region: CutRegion) -> dict[nn.Parameter, tuple[int, ...]]:
        """The shapes of parameters with fewer features where no rank cuts them."""
        hidden, narrow = self._narrowed
        if hidden == narrow:
            return {}
        cut = {_joined(module.name, name): dim for module in region.modules for name, (dim, _) in module.cuts.items()}
        return {
            parameter: tuple(
                narrow if length == hidden and cut.get(name) != dim else length
                for dim, length in enumerate(parameter.shape)
            )
            for name, parameter in self._block.named_parameters()
        }

    def _copy(self) -> nn.Module:
        made = random_copy(self._block, shapes=self._shapes)
        one: Any
        for one in made.modules() if self._shapes else ():
            if type(one).__name__ == "Conv1D":
                one.nf = one.weight.shape[1]
            if isinstance(one, nn.LayerNorm):
                one.normalized_shape = tuple(one.weight.shape)
        return made

    def _computed(
        self, module: nn.Module, dtype: torch.dtype, own: Callable[[Tensor], Tensor] = lambda whole: whole
    ) -> dict[str, Tensor]:
        """The output of `module` and its gradients. `own` gives a rank's part of an argument."""
        args, kwargs, drawn = self._call.made(narrowed=self._narrowed, dtype=dtype, own=own)
        with torch.enable_grad():
            out = _first(module(*args, **kwargs))
            generator = torch.Generator().manual_seed(9)
            (out * torch.randn(out.shape, generator=generator).to(out.dtype)).sum().backward()  # type: ignore[no-untyped-call]
        found = {"output": out.detach()}
        found |= {f"input gradient {place}": one.grad for place, one in enumerate(drawn) if one.grad is not None}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                found[_GRADIENT + name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return found


def _head_counts(region: CutRegion) -> tuple[int, ...]:
    """The query heads of each rank; nothing where a region has none."""
    for head in region.heads:
        for name in names.QUERY_HEADS:
            if (found := head.attributes.get(name) or head.config_numbers.get(name)) is not None:
                return found
    return ()


def _first(value: Any) -> Tensor:
    """The first tensor of what a block returned."""
    found: list[Tensor] = []
    mapped(dict(value) if isinstance(value, Mapping) else value, lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    if not found or not found[0].requires_grad:
        raise TypeError("its output has no gradient")
    return found[0]


def _distance(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.double() - wanted).abs().max()) if wanted.numel() else 0.0


def _summary(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _with_shared(region: CutRegion, names: Sequence[str]) -> CutRegion:
    """`region` with the parameters `names` as whole weights that each rank uses on its own features."""
    by_module: dict[str, list[str]] = {}
    for name in names:
        module, _, own = name.rpartition(".")
        by_module.setdefault(module, []).append(own)
    modules = [one for one in region.modules if one.name not in by_module]
    for one in region.modules:
        if one.name in by_module:
            if one.how != "shared weights":
                raise TypeError(f"{one.name} is cut and shared")
            modules.append(replace(one, names=(*one.names, *by_module.pop(one.name))))
    modules += [CutModule(name, "shared weights", names=tuple(own), why="whole") for name, own in by_module.items()]
    return replace(region, modules=tuple(modules))


def _root(region: CutRegion) -> str:
    """The smallest module that has all of a region."""
    paths = [name.split(".") if name else [] for name in (region.name, *(module.name for module in region.modules))]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _hidden(modules: Mapping[str, nn.Module], region: CutRegion) -> int:
    """The features that enter a region."""
    first = modules[next((module.name for module in region.modules if module.how == "column"), region.modules[0].name)]
    return inputs_of(first) if is_linear(first) else 1


def _moved(region: CutRegion, root: str, to: str) -> CutRegion:
    """`region`, whose names begin with `root`, with names that begin with `to`."""

    def name(whole: str) -> str:
        own = whole[len(root) :].lstrip(".")
        return f"{to}.{own}".strip(".")

    return CutRegion(
        name(region.name),
        tuple(replace(one, name=name(one.name)) for one in region.modules),
        tuple(replace(one, name=name(one.name)) for one in region.heads),
        tuple(name(one) for one in region.layers),
    )


def _fingerprint(modules: Mapping[str, nn.Module], root: str, region: CutRegion) -> Any:
    """What two blocks have in common that are cut in the same way."""
    found: list[Any] = [repr(_moved(region, root, ""))]
    for name, module in modules[root].named_modules():
        numbers = tuple(
            (key, repr(value))
            for key, value in sorted(vars(module).items())
            if not key.startswith("_") and not _PLACE.search(key) and _is_plain(value)
        )
        shapes = tuple((key, tuple(one.shape)) for key, one in module.named_parameters(recurse=False))
        found.append((name, type(module), numbers, shapes))
    return tuple(found)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str)) or callable(value)


def _joined(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter
