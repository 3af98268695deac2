"""The layers of a model that rules of compression name, and what is wrong with rules that fit none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from polyaccel.engine.policies.compression import PruningRule, WeightRule
from polyaccel.errors import Problem
from polyaccel.torch.compression.layers import as_matrix, is_transposed, output_dim

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def matching(layers: Mapping[str, nn.Module], expressions: Iterable[str]) -> list[str]:
    each = list(expressions)
    return [name for name in layers if name and any(one == "*" or re.search(one, name) for one in each)]


def has_weight(layer: nn.Module, *, allows_embedding: bool = True) -> bool:
    is_known = isinstance(layer, (nn.Linear, *CONVOLUTIONS)) or is_transposed(layer)
    is_known |= allows_embedding and isinstance(layer, nn.Embedding)
    weight = layer._parameters.get("weight")
    return is_known and weight is not None and weight.is_floating_point()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A layer that is pruned along `dim` of its weight (None: single weights), and followers with their dimensions."""

    rule: PruningRule
    name: str
    dim: int | None
    followers: list[tuple[str, int]]


def pruned(layers: Mapping[str, nn.Module], rule: PruningRule, problems: list[Problem]) -> Iterator[Pruned]:
    """Yield the layers that `rule` prunes, once each, with those that follow it."""
    kinds: tuple[type, ...] = CONVOLUTIONS if rule.kind == "channel" else (nn.Linear,)
    done: set[str] = set()
    for expression, related in zip(rule.modules, rule.related, strict=True):
        names = [
            name
            for name in matching(layers, [expression])
            if has_weight(layers[name], allows_embedding=False)
            and (rule.kind == "sparse" or isinstance(layers[name], kinds) or is_transposed(layers[name]))
            and not any(re.search(one, name) for one in rule.excluded)
        ]
        problems += unfit(rule.key, [expression], names) + bypassed(rule.key, names, layers)
        others = [name for name in matching(layers, related) if _can_follow(layers[name])]
        if related:
            problems += unfit(rule.key, related, others) + bypassed(rule.key, others, layers)
        near = _near(names, others)
        for name in (one for one in names if one not in done):
            mine, layer = near[name], layers[name]
            problems += _size_problems(rule, name, layers, mine)
            dim = None
            if rule.kind != "sparse":
                dim = 1 - output_dim(layer) if rule.kind == "head" else output_dim(layer)
            size = 0 if dim is None else weight_of(layer).shape[dim]
            followers = [(one, follower_dim(layers[one], size, is_head=rule.kind == "head")) for one in mine]
            yield Pruned(rule=rule, name=name, dim=dim, followers=followers)
        done.update(names)


def _near(names: list[str], others: list[str]) -> dict[str, list[str]]:
    """Give each of `others` to the layer whose name begins as its own does for longest, as blocks of a model have."""
    given: dict[str, list[str]] = {name: [] for name in names}
    for other in others:
        if names:
            given[max(names, key=lambda name: _shared_parts(name, other))].append(other)
    return given


def _shared_parts(one: str, other: str) -> int:
    count = 0
    for mine, theirs in zip(one.split("."), other.split("."), strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _can_follow(layer: nn.Module) -> bool:
    is_norm = isinstance(layer, NORMS) and layer._parameters.get("weight") is not None
    return is_norm or has_weight(layer, allows_embedding=False)


def unfit(key: str, expressions: Iterable[str], names: list[str]) -> list[Problem]:
    if names:
        return []
    hint = "name linear layers, convolutions or embeddings by a part of their full names"
    return [Problem(f"{key}.modules", list(expressions), "no layer that can be compressed so has such a name", hint)]


def twice(key: str, name: str, before: object) -> list[Problem]:
    if before is None:
        return []
    return [Problem(f"{key}.modules", name, "is in another group too", "name each layer in one group")]


def bypassed(key: str, names: Iterable[str], layers: Mapping[str, nn.Module]) -> list[Problem]:
    """The layers of `names` whose weight is read without a call of the layer."""
    expected = "is read by nn.MultiheadAttention without a call of the layer"
    hint = 'leave it out: "^(?!.*out_proj)" is every other layer'
    found = [name for name in names if isinstance(layers[name], NonDynamicallyQuantizableLinear)]
    return [Problem(f"{key}.modules", name, expected, hint) for name in found]


def pruned_twice(rows: Iterable[Pruned], layers: Mapping[str, nn.Module]) -> list[Problem]:
    """The layers of which two rules, or two layers before them, prune the same dimension: no export has both."""
    hint = "prune one of the layers, and name the other one among its related_modules"
    known: dict[tuple[str, int | None], str] = {}
    problems = []
    for row in rows:
        for name, dim in ((row.name, row.dim), *row.followers):
            if (before := known.get((name, dim))) is not None:
                expected = f"is pruned already, with {before!r}"
                problems.append(Problem(f"{row.rule.key}.modules", name, expected, hint))
            known[name, dim] = row.name
    return problems


def shared_heads(rows: Iterable[Pruned], model: nn.Module) -> list[Problem]:
    """Heads that share keys and values with others, by the config of a model of transformers."""
    config = getattr(model, "config", None)
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    key = next((row.rule.key for row in rows if row.rule.kind == "head"), None)
    if key is None or shared is None or shared == heads:
        return []
    expected = f"shares each of {shared} keys among several of {heads} heads"
    return [Problem(f"{key}.modules", type(model).__name__, expected, "prune rows of its feed-forward layers")]


def groups_problem(rule: WeightRule, name: str, layer: nn.Module) -> list[Problem]:
    weight = layer._parameters["weight"]
    assert weight is not None  # or the rule would not fit
    if weight.numel() % rule.groups == 0:
        return []
    key = "compression_training.weight_quantization.shared_parameters.quantize_groups"
    expected = f"does not divide the {weight.numel()} elements of {name!r}"
    return [Problem(key, rule.groups, expected, "use a divisor of every weight's size")]


def _size_problems(
    rule: PruningRule, name: str, layers: Mapping[str, nn.Module], others: list[str]
) -> Iterator[Problem]:
    layer, hint = layers[name], "name layers that follow each other"
    if rule.removal is not None:
        sizes = as_matrix(layer, weight_of(layer)).shape
        if any(size % block for size, block in zip(sizes, rule.removal.block, strict=True)):
            expected = f"does not divide the {tuple(sizes)} outputs and inputs of {name!r}"
            yield Problem(f"{rule.key}.block_pattern", rule.removal.block, expected, "name it in excluded_modules")
    if rule.kind == "sparse":
        return
    if rule.kind == "channel" and getattr(layer, "groups", 1) != 1:
        yield Problem(f"{rule.key}.modules", name, "is a convolution in groups", "leave it out")
    is_head = rule.kind == "head"
    weight = weight_of(layer)
    size = weight.shape[1 - output_dim(layer)] if is_head else weight.shape[output_dim(layer)]
    if is_head and size % rule.num_heads:
        key = "compression_training.head_pruning.shared_parameters.num_heads"
        yield Problem(key, rule.num_heads, f"does not divide the {size} inputs of {name!r}", "give the model's number")
    for other in others:
        theirs = layers[other]
        found = weight_of(theirs).shape[follower_dim(theirs, size, is_head=is_head)]
        if getattr(theirs, "groups", 1) != 1:
            yield Problem(f"{rule.key}.related_modules", other, "is a convolution in groups", hint)
        elif found != size:
            yield Problem(f"{rule.key}.related_modules", other, f"has {found} and not the {size} of {name!r}", hint)


def weight_of(layer: nn.Module) -> Tensor:
    weight = layer._parameters["weight"]
    assert weight is not None  # of layers that were chosen because they have one
    return weight


def follower_dim(layer: nn.Module, size: int, *, is_head: bool) -> int:
    """The dimension of a follower's weight that is pruned: its inputs, or under head pruning its outputs.

    Outputs too where they alone have the `size` of what is pruned: a layer next to the pruned one, whose output is
    multiplied with its output.
    """
    if isinstance(layer, NORMS):
        return 0
    outputs, shape = output_dim(layer), weight_of(layer).shape
    return outputs if is_head or shape[1 - outputs] != size == shape[outputs] else 1 - outputs
