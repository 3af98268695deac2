"""Layers that ranks share. A module is made one by its class: it stays the object that it was, with its hooks, and is
still an instance of the class it had.

[Note: Classes of tensor-parallel modules]
`shared_as(module, kind)` gives a module a class below both its own and `kind`. A `kind` that is itself a torch class
(`VocabularyEmbedding`) stands below the module's own class, whose `forward` may do more around `super().forward`; the
others stand above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.core.block import Run
from polyaccel.errors import ShardingError
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.low_precision.products import LowPrecision
from polyaccel.torch.sharding.pending import PendingParameter
from polyaccel.torch.sharding.sharded import ShardedParameter
from polyaccel.torch.tensor_parallel.functions import gathered, part_of, shared_weight, summed_, to_shared
from polyaccel.torch.tensor_parallel.products import as_autocast, column_product, row_product
from polyaccel.torch.tensor_parallel.ranks import TensorRanks
from polyaccel.torch.tensor_parallel.regions import Regions
from polyaccel.torch.tensor_parallel.sequence_parallel import TokenStream

_BY_HEAD = 4
_ABSENT = (ShardedParameter, PendingParameter)


class CachedInput:
    """The input that `readers` column layers of one module read. See [Note: Shared input gradient exchange]."""

    def __init__(self, readers: int = 1) -> None:
        self._readers = readers
        self._left = 0
        self._given: tuple[Tensor, int, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedInput:
        copy = memo[id(self)] = CachedInput(self._readers)
        return copy

    def passed(self, x: Tensor) -> Tensor | None:
        """What the first layer gave on of `x`; None where this is the first."""
        if self._given is None or self._given[0] is not x or self._given[1] != x._version:
            return None
        passed = self._given[2]
        self._left -= 1
        if self._left == 0:
            self._given = None
        return passed

    def give(self, x: Tensor, passed: Tensor) -> None:
        """Keep what the first layer gives on of `x` until the last has read it."""
        self._left = self._readers - 1
        self._given = (x, x._version, passed) if self._left and passed.requires_grad else None


@dataclass
class ShardSpec:
    """Tensor-parallel metadata of a module: its process group and shard."""

    ranks: TensorRanks
    regions: Regions
    input: CachedInput = field(default_factory=CachedInput)
    is_transposed: bool = False
    """Whether the weight is (inputs, outputs)."""
    sizes: tuple[int, ...] | None = None
    """Of what is gathered or cut where the layer begins or ends: each rank's part."""
    rows: tuple[Run, ...] | None = None
    """Of a whole weight: the outputs that this rank computes."""
    names: tuple[str, ...] = ()
    """Of whole weights whose gradients have parts: their names."""
    tokens: TokenStream | None = None
    """What passes between blocks, where ranks share its tokens."""
    low_precision: LowPrecision | None = None
    """How a layer multiplies in 8 or 4 bits; None in the type of its operands."""

    @property
    def shared_tokens(self) -> TokenStream | None:
        """`tokens` in a pass whose tokens are shared, else None."""
        return self.tokens if self.tokens is not None and self.tokens.sizes is not None else None


class SharedModule(nn.Module):
    """A module whose `share` defines how the ranks share it."""

    share: ShardSpec


class ColumnLayer(SharedModule):
    """A linear layer that computes some of the outputs. They are gathered where `share.sizes` is not None."""

    weight: Tensor
    bias: Tensor | None

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The outputs of this rank, or all."""
        share = self.share
        weight, bias = present(self.weight), present(self.bias)
        if share.rows is not None:
            weight = _rows(weight, share.rows, 1 if share.is_transposed else 0, share.ranks)
            bias = None if bias is None else _rows(bias, share.rows, 0, share.ranks)
        if (tokens := share.shared_tokens) is not None:
            return tokens.column(*as_autocast(x, weight, bias), transposed=share.is_transposed)
        passed = share.input.passed(x)
        if share.low_precision is not None:
            if passed is None:
                share.input.give(x, passed := to_shared(x, share.ranks))
            out = share.low_precision.apply(passed, weight.t() if share.is_transposed else weight, bias)
            return self._left(out)
        source, weight, bias = as_autocast(x if passed is None else passed, weight, bias)
        if passed is not None:
            out = functional.linear(source, weight.t() if share.is_transposed else weight, bias)
        else:
            out, passed = column_product(source, weight, bias, share.ranks, transposed=share.is_transposed)
            share.input.give(x, passed)
        return self._left(out)

    def _left(self, out: Tensor) -> Tensor:
        share = self.share
        if share.sizes is not None:
            return gathered(out, share.ranks, -1, share.sizes)
        if self.training:
            share.regions.enter(out)
        return out


class RowLayer(SharedModule):
    """A linear layer that has the outputs of some of the inputs added up. `x` is this rank's part of the inputs, or all
    where `share.sizes` is not None."""

    weight: Tensor
    bias: Tensor | None

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """The whole outputs."""
        share = self.share
        if (tokens := share.shared_tokens) is not None:
            operands = as_autocast(x, present(self.weight), present(self.bias))
            return tokens.row(*operands, transposed=share.is_transposed)
        share.regions.leave()
        if share.sizes is not None:
            x = part_of(x, share.ranks, -1, share.sizes)
        if (how := share.low_precision) is not None:
            weight, bias = present(self.weight), present(self.bias)
            out = summed_(how.apply(x, weight.t() if share.is_transposed else weight, None), share.ranks)
            return out if bias is None else out + bias.to(out.dtype)
        x, weight, bias = as_autocast(x, present(self.weight), present(self.bias))
        return row_product(x, weight, bias, share.ranks, transposed=share.is_transposed)


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which each rank has some of the words: `share.rows` has their first and their number."""

    share: ShardSpec

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Embedding's has
        """The embeddings, whole."""
        assert self.share.rows is not None
        ((first, count),) = self.share.rows
        place = input - first
        is_elsewhere = (place < 0) | (place >= count)
        place = place.masked_fill(is_elsewhere, 0)
        padding = None if self.padding_idx is None else self.padding_idx - first
        found = functional.embedding(
            place, present(self.weight), padding if padding is not None and 0 <= padding < count else None
        )
        return summed_(found.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.share.ranks)


class FeatureEmbedding(nn.Embedding):
    """An embedding of which each rank has some of the features of every word: gathered where `share.sizes` is not
    None, else this rank's part."""

    share: ShardSpec

    @outside_graphs
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that nn.Embedding's has
        """The embeddings, whole or in part."""
        found = functional.embedding(input, present(self.weight), self.padding_idx)
        return found if self.share.sizes is None else gathered(found, self.share.ranks, -1, self.share.sizes)


class SharedWeights(SharedModule):
    """A module with whole weights `share.names` that each rank uses on its own features, for example a norm of heads,
    or on its own tokens, where it has a share of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own gives, with weights whose gradients are added up over the ranks."""
        if self.share.tokens is not None and self.share.tokens.sizes is None:
            return super().forward(*args, **kwargs)
        with self.shared_weights():
            return super().forward(*args, **kwargs)

    @contextmanager
    def shared_weights(self, factor: float = 1.0) -> Iterator[None]:
        """Inside, the module's own forward sees the weights `share.names` times `factor`."""
        own = {name: self.__dict__[name] for name in self.share.names if name in self.__dict__}
        for name in self.share.names:
            weight = own.get(name, present(self._parameters[name]))  # what a compressed layer shows in its place
            if weight is not None:
                weight = shared_weight(weight, self.share.ranks)
                # Hides the parameter of this name: modules look among their attributes first.
                self.__dict__[name] = weight if factor == 1.0 else weight * factor
        try:
            yield
        finally:
            for name in self.share.names:
                self.__dict__.pop(name, None)
            self.__dict__.update(own)


class HeadBiases(SharedModule):
    """Attention that gets biases of all heads in some of its arguments `share.names`, and takes those of its heads.
    They are (batch, heads, queries, keys), or with batch and heads as one dimension. Learned ones (MPNet) get their
    whole gradient on each rank."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's own gives."""
        given = signature(super().forward).bind(*args, **kwargs)
        for name in self.share.names:
            if isinstance(biases := given.arguments.get(name), Tensor):
                given.arguments[name] = self._own(biases)
        return super().forward(*given.args, **given.kwargs)

    def _own(self, biases: Tensor) -> Tensor:
        ranks, sizes = self.share.ranks, self.share.sizes
        assert sizes is not None
        if biases.dim() == _BY_HEAD:
            return part_of(biases, ranks, 1, sizes) if biases.shape[1] == sum(sizes) else biases
        by_head = biases.reshape(-1, sum(sizes), *biases.shape[1:])
        return part_of(by_head, ranks, 1, sizes).reshape(-1, *biases.shape[1:])


class SharedExperts(SharedWeights):
    """Experts of which each rank computes some of the inner features: what enters is shared, what leaves is added up,
    and so are biases `share.names` of what leaves, a part of which each rank adds."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The experts' whole output."""
        with self.shared_weights(1.0 / self.share.ranks.size):
            return self._summed(*args, **kwargs)

    def _summed(self, *args: Any, **kwargs: Any) -> Tensor:
        ranks = self.share.ranks
        args = tuple(_shared(each, ranks) for each in args)
        kwargs = {name: _shared(each, ranks) for name, each in kwargs.items()}
        if self.training:
            self.share.regions.enter(args[0])
        try:
            out: Tensor = super(SharedWeights, self).forward(*args, **kwargs)
        finally:
            self.share.regions.leave()
        return summed_(out.contiguous(), ranks)


class SharedTail(SharedModule):
    """A whole layer the last `share.rows` of whose outputs each rank uses on its own heads, for example the rotary keys
    that all heads of latent attention have in common."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module's own gives."""
        out: Tensor = super().forward(*args, **kwargs)
        assert self.share.rows is not None
        ((first, count),) = self.share.rows
        return torch.cat([out[..., :first], to_shared(out[..., first : first + count], self.share.ranks)], -1)


def shared_as(module: nn.Module, kind: type, share: ShardSpec) -> None:
    """Make `module` a `kind`. See [Note: Classes of tensor-parallel modules]."""
    become(module, kind, share=share)


def become(module: nn.Module, kind: type, **attributes: Any) -> None:
    """Give `module` a class below its own and `kind`, and the attributes that `kind` has. Raises ShardingError for one
    with a forward among its attributes, which would be called in place of the class's."""
    if "forward" in vars(module):
        raise ShardingError(
            f"a {type(module).__name__} that ranks are to share has a forward that a script gave it",
            hint="replace the forward after polyaccel.initialize, or leave the module out of the mesh",
            value=type(module).__name__,
        )
    module.__class__ = _below(type(module), kind)
    module.__dict__.update(attributes)


def present(parameter: Any) -> Any:
    """The parameter, whose values have been brought here."""
    if type(parameter) in _ABSENT:
        Tensor.detach(parameter)  # has its values brought here, after which it is an ordinary one
    return parameter


_CLASSES: dict[tuple[type, type], type] = {}


def _below(own: type, kind: type) -> type:
    if (own, kind) not in _CLASSES:
        name = f"{kind.__name__}{'' if own.__module__.startswith('torch.') else own.__name__}"
        bases = (own, kind) if issubclass(kind, nn.Embedding) else (kind, own)
        _CLASSES[own, kind] = kind if issubclass(kind, own) else type(name, bases, {"__module__": __name__})
    return _CLASSES[own, kind]


def _rows(weight: Tensor, rows: Sequence[Run], dim: int, ranks: TensorRanks) -> Tensor:
    whole = shared_weight(weight, ranks)
    parts = [whole.narrow(dim, first, count) for first, count in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _shared(value: Any, ranks: TensorRanks) -> Any:
    return to_shared(value, ranks) if isinstance(value, Tensor) and value.is_floating_point() else value
