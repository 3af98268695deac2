"""The parts of a model that can be cut, found by names and shapes: attention, feed-forward layers, experts, words.

A *region* is what has to be cut together: layers by columns, and the layer by rows that adds their outputs up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor, nn

from polyaccel.errors import ShardingError
from polyaccel.torch.tensor_parallel import names
from polyaccel.torch.tensor_parallel.heads import HeadParts, cut_heads
from polyaccel.torch.tensor_parallel.plan import (
    CutHeads,
    CutModule,
    RunsOfRanks,
    concatenated,
    feature_runs,
    lengths,
    scaled,
    shifted,
)


@dataclass(frozen=True)
class CutRegion:
    """Modules that are cut together; `layers` are the linear ones among them."""

    name: str
    modules: tuple[CutModule, ...]
    heads: tuple[CutHeads, ...]
    layers: tuple[str, ...]


def is_linear(module: nn.Module | None) -> bool:
    """Whether the module is a linear layer that can be cut: torch's, or Hugging Face's Conv1D."""
    if module is not None and "forward" in vars(module):
        return False  # a script replaced it, as TRL does for products in float32: a class that shares has no say
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward or type(module).__name__ in names.LINEARS
    return is_conv1d(module)


def is_conv1d(module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(weight, Tensor)


def inputs_of(layer: nn.Module) -> int:
    return int(layer.weight.shape[0 if is_conv1d(layer) else 1])  # type: ignore[index]


def outputs_of(layer: nn.Module) -> int:
    return int(layer.weight.shape[1 if is_conv1d(layer) else 0])  # type: ignore[index]


def column(name: str, layer: nn.Module, runs: RunsOfRanks, *, gathered: bool = False) -> CutModule:
    """`layer` cut by outputs."""
    turned = is_conv1d(layer)
    cuts = {"weight": (1 if turned else 0, runs)}
    if layer.bias is not None:
        cuts["bias"] = (0, runs)
    sizes = lengths(runs)
    own = {"nf" if turned else "out_features": sizes}
    return CutModule(name, "column", cuts, sizes if gathered else None, is_transposed=turned, attributes=own)


def column_of_whole(name: str, layer: nn.Module, runs: RunsOfRanks) -> CutModule:
    """A layer that stays whole, of which each rank computes the outputs that its heads need."""
    turned = is_conv1d(layer)
    own = {"nf" if turned else "out_features": lengths(runs)}
    why = "whole: fewer key heads than ranks"
    return CutModule(name, "column", rows=runs, is_transposed=turned, attributes=own, why=why)


def row(name: str, layer: nn.Module, runs: RunsOfRanks, *, split: bool = False) -> CutModule:
    """`layer` cut by inputs."""
    turned = is_conv1d(layer)
    sizes = lengths(runs)
    own = {"nx" if turned else "in_features": sizes}
    cuts = {"weight": (0 if turned else 1, runs)}
    return CutModule(name, "row", cuts, sizes if split else None, is_transposed=turned, attributes=own)


class Structure:
    """The modules of `model` by name, and the regions among them over `ranks` ranks."""

    def __init__(self, model: nn.Module, ranks: int) -> None:
        self.modules = dict(model.named_modules())
        self.ranks = ranks
        self.config = getattr(model, "config", None)

    def regions(self) -> Iterator[CutRegion]:
        """All regions, outer modules first. Raises ShardingError for attention with fewer heads than ranks."""
        for name, module in self.modules.items():
            region = self._attention(name, module) or self._feed_forward(name, module) or self._experts(name, module)
            if region is not None:
                yield region

    def linear(self, *path: str) -> nn.Module | None:
        """The linear layer of that name; None where there is none."""
        found = self.modules.get(_join(*path))
        return found if is_linear(found) else None

    def _attention(self, name: str, module: nn.Module) -> CutRegion | None:
        fused = self._child(name, names.FUSED)
        interleaved = self._child(name, names.INTERLEAVED)
        if getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False):
            fused, interleaved = fused or interleaved, None  # Falcon's one key and one value come after all queries
        query, key, value = (self._child(name, each) for each in (names.QUERY, names.KEY, names.VALUE))
        if fused is None and interleaved is None and (query is None or key is None or value is None):
            return None
        out = self._child(name, names.ATTENTION_OUT)
        if out is None and "." in name:
            sibling = _join(name.rpartition(".")[0], *names.ATTENTION_OUTSIDE)
            out = sibling if self.linear(sibling) is not None else None
        if out is None:
            return None
        width = inputs_of(self.modules[out])
        size = self._head_size(module, width)
        if size is None or width % size:
            return None
        queries = width // size
        keys = self._key_heads(module, fused or interleaved, query, key, value, queries, size)
        if keys is None or keys < 1:
            return None
        parts = cut_heads(queries, keys, self.ranks, name)
        found = list(self._projections(parts, size, queries, keys, fused, interleaved, query, key, value))
        found.append(row(out, self.modules[out], parts.query_runs(size)))
        extra = self._head_extras(name, module, parts, size, queries, [each.name for each in found])
        if extra is None:
            return None
        heads = CutHeads(
            name, self._numbers(module, parts, queries, keys, size), _config_numbers(self.config_of(module), parts)
        )
        return CutRegion(name, (*found, *extra), (heads,), tuple(each.name for each in found))

    def _key_heads(
        self, module: nn.Module, fused: str | None, query: str | None, key: str | None, value: str | None,
        queries: int, size: int,
    ) -> int | None:  # fmt: skip
        """How many key heads there are; None where the shapes are not those of attention."""
        if fused is None:
            assert query is not None
            assert key is not None
            assert value is not None
            wide = [outputs_of(self.modules[each]) for each in (query, key, value)]
            return wide[1] // size if wide[0] == queries * size and wide[1] == wide[2] else None
        others = outputs_of(self.modules[fused]) - (0 if query is not None else queries * size)
        if query is not None and outputs_of(self.modules[query]) != queries * size:
            return None
        return None if others % (2 * size) else others // (2 * size)

    def _projections(
        self, parts: HeadParts, size: int, queries: int, keys: int, fused: str | None, interleaved: str | None,
        query: str | None, key: str | None, value: str | None,
    ) -> Iterator[CutModule]:  # fmt: skip
        q, k = parts.query_runs(size), parts.key_runs(size)
        if interleaved is not None:
            unit = (queries // keys + 2) * size
            if not parts.are_keys_cut:
                raise ShardingError(
                    f"{interleaved} keeps queries, keys and values of {keys} key heads together, which "
                    f"{self.ranks} tensor ranks cannot share",
                    hint=f"set tensor_parallel.autotp_size to {keys} or less",
                    value=keys,
                )
            yield column(interleaved, self.modules[interleaved], parts.key_runs(unit))
            return
        if fused is not None:
            pieces = [k, shifted(k, keys * size)]
            if query is None:
                pieces = [q, *(shifted(each, queries * size) for each in pieces)]
            else:
                yield column(query, self.modules[query], q)
            runs = concatenated(*pieces)
            make = column if parts.are_keys_cut else column_of_whole
            yield make(fused, self.modules[fused], runs)
            return
        assert query is not None
        yield column(query, self.modules[query], q)
        for each in (key, value):
            assert each is not None
            make = column if parts.are_keys_cut else column_of_whole
            yield make(each, self.modules[each], k)

    def _head_extras(
        self, name: str, module: nn.Module, parts: HeadParts, size: int, queries: int, layers: Sequence[str]
    ) -> list[CutModule] | None:
        """What else of an attention module works on heads; None where something does in an unknown way."""
        runs = parts.query_runs(1)
        found = []
        if biases := self._biases(module):
            found.append(CutModule(name, "head biases", sizes=lengths(runs), names=biases, why="of all heads"))
        own = {each: (0, runs) for each, p in module.named_parameters(recurse=False) if p.shape[0] == queries}
        if len(own) < len(list(module.parameters(recurse=False))):
            return None
        if own:
            found.append(CutModule(name, "shared weights", own))
        for child_name, child in module.named_children():
            path = _join(name, child_name)
            parameters = dict(child.named_parameters())
            if path in layers or not parameters:
                continue
            if isinstance(child, nn.Embedding) and child.embedding_dim == queries:
                own_width = {"embedding_dim": lengths(runs)}
                found.append(CutModule(path, "features", {"weight": (1, runs)}, attributes=own_width))
            elif all(p.shape == (size,) and "." not in each for each, p in parameters.items()):
                found.append(CutModule(path, "shared weights", names=tuple(parameters)))
            elif any(path == _parent(layer) for layer in layers):
                continue  # a module around the layer that is cut already
            elif child_name in names.AFTER_ATTENTION:
                continue
            else:
                return None
        return found

    def _biases(self, module: nn.Module) -> tuple[str, ...]:
        """The arguments by which attention gets biases of all heads that its model makes outside of it (ALiBi)."""
        arguments = signature(module.forward).parameters
        if "alibi" in arguments:
            return ("alibi", "attention_mask") if getattr(self.config_of(module), "alibi", True) else ()
        is_made_here = hasattr(module, "has_relative_attention_bias")
        return ("position_bias",) if "position_bias" in arguments and not is_made_here else ()

    def _feed_forward(self, name: str, module: nn.Module) -> CutRegion | None:
        ups = [_join(name, each) for each in names.UP if self.linear(name, each) is not None]
        downs = [_join(name, each) for each in names.DOWN if self.linear(name, each) is not None]
        if not ups and not downs:
            apart = _join(name, *names.UP_APART), _join(name, *names.DOWN_APART)
            if all(self.linear(each) is not None for each in apart):
                ups, downs = [apart[0]], [apart[1]]
        if not ups or len(downs) != 1:
            return None
        width = inputs_of(self.modules[downs[0]])
        others = [child for child in module.children() if not is_linear(child)]
        if width != outputs_of(self.modules[downs[0]]) and any(
            each.shape == (width,) for child in others for each in child.parameters(recurse=False)
        ):
            return None  # a norm of the inner features, which needs all of them
        runs = feature_runs(width, self.ranks)
        wide = [outputs_of(self.modules[up]) for up in ups]
        if wide == [2 * width]:
            of_ups = concatenated(runs, shifted(runs, width))
        elif set(wide) == {width}:
            of_ups = runs
        else:
            return None
        found = [*(column(up, self.modules[up], of_ups) for up in ups), row(downs[0], self.modules[downs[0]], runs)]
        return CutRegion(name, tuple(found), (), tuple(each.name for each in found))

    def _experts(self, name: str, module: nn.Module) -> CutRegion | None:
        """Experts in tensors of three dimensions: (experts, outputs, inputs), or the other way round."""
        up, down = (module._parameters.get(each) for each in ("gate_up_proj", "down_proj"))
        if up is None or down is None or up.dim() != 3 or down.dim() != 3:
            return None
        biases = [each for each in ("gate_up_proj_bias", "down_proj_bias") if each in module._parameters]
        if {each for each, _ in module.named_parameters()} != {"gate_up_proj", "down_proj", *biases}:
            return None
        turned = bool(getattr(module, "is_transposed", False))
        of_up, of_down = (2, 1) if turned else (1, 2)
        width = down.shape[of_down]
        runs = feature_runs(width, self.ranks)
        if up.shape[of_up] != 2 * width:
            return None
        is_fused = getattr(module, "is_concatenated", True)
        of_both = concatenated(runs, shifted(runs, width)) if is_fused else scaled(runs, 2)
        cuts = {"gate_up_proj": (of_up, of_both), "down_proj": (of_down, runs)}
        if "gate_up_proj_bias" in biases:
            cuts["gate_up_proj_bias"] = (1, of_both)
        own = {each: lengths(runs) for each in names.EXPERT_WIDTHS if getattr(module, each, None) == width}
        cut = CutModule(name, "experts", cuts, attributes=own, names=tuple(biases[1:]))
        return CutRegion(name, (cut,), (), (_join(name, "gate_up_proj"), _join(name, "down_proj"), name))

    def _numbers(
        self, module: nn.Module, parts: HeadParts, queries: int, keys: int, size: int
    ) -> dict[str, tuple[int, ...]]:
        """The numbers of heads and of their features that the module keeps."""
        by_value = {
            **dict.fromkeys(names.QUERY_HEADS, (queries, parts.query_counts)),
            **dict.fromkeys(names.KEY_HEADS, (keys, parts.key_counts)),
            **dict.fromkeys(names.GROUPS, (queries // keys, parts.groups)),
        }
        found = {name: each for name, (whole, each) in by_value.items() if getattr(module, name, None) == whole}
        for name in names.WIDTHS:
            kept = getattr(module, name, None)
            if kept == queries * size:
                found[name] = tuple(count * size for count in parts.query_counts)
            elif kept == keys * size:
                found[name] = tuple(count * size for count in parts.key_counts)
        return found

    def _head_size(self, module: nn.Module, width: int) -> int | None:
        for source in (module, self.config_of(module)):
            for name in names.HEAD_SIZE:
                size = getattr(source, name, None)
                if isinstance(size, int) and size > 0:
                    return size
            heads = query_heads(source)
            if heads:
                return width // heads
        return None

    def config_of(self, module: nn.Module) -> Any:
        return getattr(module, "config", None) or self.config

    def _child(self, name: str, known: Iterable[str]) -> str | None:
        found = [_join(name, each) for each in known if self.linear(name, each) is not None]
        return found[0] if len(found) == 1 else None


def query_heads(source: Any) -> int | None:
    """How many heads a module or a config has."""
    for name in names.QUERY_HEADS:
        heads = getattr(source, name, None)
        if isinstance(heads, int) and heads > 0:
            return heads
    return None


def _config_numbers(config: Any, parts: HeadParts) -> dict[str, tuple[int, ...]]:
    """The numbers of heads for an attention module that asks its config."""
    found: dict[str, tuple[int, ...]] = {}
    for known, counts in ((names.QUERY_HEADS, parts.query_counts), (names.KEY_HEADS, parts.key_counts)):
        found |= {name: counts for name in known if isinstance(getattr(config, name, None), int)}
    return found


def _join(*path: str) -> str:
    return ".".join(part for part in path if part)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
