"""The head of a model of transformers, whose logits are not computed before the loss is there.

[Note: Lazy logits]
In a pass with a loss the head gives `LazyLogits`: a tensor with everything but values, which knows the hidden states.
What a model does with each logit by itself before the loss (a scale, a soft cap, another type) is written down and done
to each tile later; whatever else asks for values is an error that names it. The model's loss function then calls the
head once more, with a `LossRequest`, so that parameters that are elsewhere are brought as for any call.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.losses import CausalLoss
from polyaccel.torch.sharding.tensor_shard import TensorShard
from polyaccel.torch.tensor_parallel.layers import ColumnLayer, ShardSpec
from polyaccel.torch.tensor_parallel.ranks import MatrixProducts
from polyaccel.torch.tiled.cross_entropy import VocabShard, tiled_cross_entropy

_CONVERSIONS = {"aten::_to_copy", "aten::clone", "aten::alias", "aten::detach"}


@dataclass(frozen=True)
class _Values:
    """Stands for the logits among the arguments of an operation."""


_LOGITS = _Values()


class LazyLogits(Tensor):
    """Logits of `hidden` by `head`, after `operations`. See [Note: Lazy logits]."""

    head: TiledHead
    hidden: Tensor
    operations: tuple[Any, ...]

    @staticmethod
    def __new__(
        cls, head: TiledHead, hidden: Tensor, shape: Sequence[int], dtype: torch.dtype, operations: Sequence[Any] = ()
    ) -> LazyLogits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.head, made.hidden, made.operations = head, hidden, tuple(operations)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        one: LazyLogits = next(each for each in (*args, *kwargs.values()) if isinstance(each, LazyLogits))
        is_elementwise = torch.Tag.pointwise in func.tags or func._schema.name in _CONVERSIONS
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not one]
        if not is_elementwise or any(each.dim() or isinstance(each, LazyLogits) for each in others):
            raise _refusal(func._schema.name.removeprefix("aten::"))
        noted = func, tuple(_LOGITS if each is one else each for each in args), kwargs
        if func._schema.name.endswith("_"):
            one.operations += (noted,)
            return one
        meta = [torch.empty(one.shape, dtype=one.dtype, device="meta") if each is one else each for each in args]
        dtype = (
            kwargs.get("dtype") or func(*meta, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})}).dtype
        )
        return cls(one.head, one.hidden, one.shape, dtype, (*one.operations, noted))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        raise _refusal("numpy")

    def tolist(self) -> Any:
        raise _refusal("tolist")

    def transformed(self, logits: Tensor) -> Tensor:
        """What the model made of `logits`."""
        for func, args, kwargs in self.operations:
            logits = func(*(logits if each is _LOGITS else each for each in args), **kwargs)
        return logits

    def total_loss(self, targets: Tensor, ignored: int) -> Tensor:
        """The sum of the losses of all tokens whose target is not `ignored`."""
        wanted = LossRequest(self, targets, ignored)
        found: Tensor = self.head.layer(wanted)
        return found


@dataclass(frozen=True)
class LossRequest:
    """What the head is called with for a loss."""

    logits: LazyLogits
    targets: Tensor
    ignored: int


class TiledHead:
    """`forward` of a head, which computes the loss in tiles where `is_deferring` holds. A copy of the layer gets the
    ordinary one, and so does an unpickled layer. `products` compute its products where an engine has some."""

    def __init__(self, layer: nn.Linear, tile_tokens: int | None) -> None:
        self.layer = layer
        self.is_deferring = False
        self.products: MatrixProducts | None = None
        self._tile_tokens = tile_tokens
        self._before = layer.forward
        layer.__dict__["forward"] = self

    def release(self) -> None:
        """Give the layer its own forward back."""
        if self.layer.__dict__.get("forward") is self:
            del self.layer.__dict__["forward"]

    def __call__(self, input: Any) -> Any:  # noqa: A002 - the name that nn.Linear's has
        layer = self.layer
        if isinstance(input, LossRequest):
            return self._loss(input)
        if self.is_deferring:
            return LazyLogits(self, input, (*input.shape[:-1], self._outputs), input.dtype)
        if self.products is not None:
            Tensor.detach(layer.weight)  # has its values brought here, should they be elsewhere
            return self.products.apply(input, layer.weight, layer.bias)
        return self._before(input)

    @property
    def _outputs(self) -> int:
        """How many logits of a token the layer gives: all, where it gathers those of all ranks."""
        share = _share_of(self.layer)
        return self.layer.out_features if share is None or share.sizes is None else sum(share.sizes)

    def _loss(self, wanted: LossRequest) -> Tensor:
        layer, logits = self.layer, wanted.logits
        products, words = self.products, None
        if (share := _share_of(layer)) is not None:
            products, words = share.ranks.products, VocabShard(share.ranks, _first_word(layer))
        for parameter in (layer.weight, layer.bias):
            if parameter is not None:
                Tensor.detach(parameter)  # has its values brought here, should they be elsewhere
        return tiled_cross_entropy(
            logits.hidden,
            layer.weight,
            wanted.targets,
            layer.bias,
            ignore_index=wanted.ignored,
            reduction="sum",
            tile_tokens=self._tile_tokens,
            transform=logits.transformed if logits.operations else None,
            products=products,
            words=words,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copy = memo.get(id(self.layer))
        return self if copy is None else types.MethodType(type(self.layer).forward, copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self.layer, "forward")  # whose attributes are not there yet when this is called


class TiledLoss(CausalLoss):
    """`CausalLoss` for logits to come; `plain` is that of others."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __call__(self, logits: Tensor, labels: Tensor | None, *places: Any, **options: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            return self._plain(logits, labels, *places, **options)
        return super().__call__(logits, labels, *places, **options)

    def _total(self, logits: LazyLogits, targets: Tensor, ignored: int) -> Tensor:
        return logits.total_loss(targets.reshape(logits.hidden.shape[:-1]), ignored)


def _share_of(head: nn.Module) -> ShardSpec | None:
    """What a head has that tensor ranks share, each with some of the words."""
    return head.share if isinstance(head, ColumnLayer) else None


def _first_word(head: nn.Module) -> int:
    cuts: Mapping[str, TensorShard] = head.parallel_cuts  # type: ignore[assignment]
    return cuts["weight"].block.runs[0][0][0]


def _refusal(name: str) -> PolyaccelError:
    return PolyaccelError(
        f"tiled_compute.loss: the model, or a hook, asks for whole logits before the loss ({name}), which are never "
        "there",
        hint='set "tiled_compute": {"loss": false}, or compute the loss by polyaccel.torch.tiled.tiled_cross_entropy',
        value=name,
    )
