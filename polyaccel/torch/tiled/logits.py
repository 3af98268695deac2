"""The head of a model of transformers, whose logits are not computed before the loss is there.

[Note: Lazy logits]
In a pass with a loss the head gives `LazyLogits`: a tensor with everything but values, which knows the hidden states.
What a model does with each logit by itself before the loss (a scale, a soft cap, a bias, another type) is written down
and done to each tile later; whatever else asks for values is an error that names it. The model's loss function, or its
call of torch's `cross_entropy`, then calls the head once more, with a `LossRequest`, so that parameters that are
elsewhere are brought as for any call.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyaccel.errors import PolyaccelError
from polyaccel.torch.context_parallel.losses import IGNORED, CausalLoss
from polyaccel.torch.sharding.tensor_shard import TensorShard
from polyaccel.torch.tensor_parallel.layers import ColumnLayer, ShardSpec
from polyaccel.torch.tensor_parallel.ranks import MatrixProducts
from polyaccel.torch.tiled.cross_entropy import VocabShard, tiled_cross_entropy

_CONVERSIONS = {"aten::_to_copy", "aten::clone", "aten::alias", "aten::detach"}
_VIEWS = {"view", "reshape", "_unsafe_view", "_reshape_alias"}


@dataclass(frozen=True)
class _Values:
    """Stands for the logits among the arguments of an operation."""


_LOGITS = _Values()


class LazyLogits(Tensor):
    """Logits of `hidden` by `head`, after `operations`, perhaps in other rows. See [Note: Lazy logits]."""

    head: TiledHead
    hidden: Tensor
    operations: tuple[Any, ...]
    is_viewed: bool = False
    """Other logits have the same values, which an operation in place would change too."""

    @staticmethod
    def __new__(
        cls, head: TiledHead, hidden: Tensor, shape: Sequence[int], dtype: torch.dtype, operations: Sequence[Any] = ()
    ) -> LazyLogits:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        made.head, made.hidden, made.operations = head, hidden, tuple(operations)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        one: LazyLogits = next(each for each in (*args, *kwargs.values()) if isinstance(each, LazyLogits))
        name = func._schema.name.removeprefix("aten::")
        if name in _VIEWS:
            return one._viewed(name, args[1])
        is_elementwise = torch.Tag.pointwise in func.tags or func._schema.name in _CONVERSIONS
        others = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each is not one]
        if not is_elementwise or not all(one._has_one_a_word(each) for each in others):
            raise _refusal(name)
        given = [_LOGITS if each is one else _one_a_word(each) for each in args]
        noted = func, tuple(given), {key: _one_a_word(each) for key, each in kwargs.items()}
        if name.endswith("_"):
            if one.is_viewed:
                raise _refusal(name)
            one.operations += (noted,)
            return one
        meta = [
            torch.empty(one.shape, dtype=one.dtype, device="meta")
            if each is one
            else each.to("meta")
            if isinstance(each, Tensor) and each.dim()
            else each
            for each in args
        ]
        dtype = (
            kwargs.get("dtype") or func(*meta, **{**kwargs, **({"device": "meta"} if "device" in kwargs else {})}).dtype
        )
        return cls(one.head, one.hidden, one.shape, dtype, (*one.operations, noted))

    def _viewed(self, name: str, shape: Sequence[int]) -> LazyLogits:
        """The logits of the same tokens in other rows."""
        whole = torch.empty(self.shape, device="meta").reshape(tuple(shape)).shape
        if whole[-1] != self.shape[-1]:
            raise _refusal(name)
        rows = whole[:-1]
        made = type(self)(self.head, self.hidden, (*rows, self.shape[-1]), self.dtype, self.operations)
        self.is_viewed = made.is_viewed = True
        return made

    def _has_one_a_word(self, other: Tensor) -> bool:
        """Whether `other` is a number, or has one for each word, for all tokens the same and without a gradient."""
        if isinstance(other, LazyLogits) or other.dim() == 0:
            return other.dim() == 0
        is_row = other.shape[-1] in (1, self.shape[-1]) and other.numel() == other.shape[-1]
        return is_row and not other.requires_grad and _share_of(self.head.layer) is None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        raise _refusal("numpy")

    def tolist(self) -> Any:
        raise _refusal("tolist")

    def transformed(self, logits: Tensor) -> Tensor:
        """What the model made of `logits`."""
        for func, args, kwargs in self.operations:
            logits = func(*(logits if arg is _LOGITS else arg for arg in args), **kwargs)
        return logits

    def total_loss(self, targets: Tensor, ignored: int) -> Tensor:
        """The sum of the losses of all tokens whose target is not `ignored`."""
        wanted = LossRequest(self, targets.reshape(self.hidden.shape[:-1]), ignored)
        found: Tensor = self.head.layer(wanted)
        return found


def _one_a_word(value: Any) -> Any:
    """`value`, a tensor without the dims of tokens."""
    return value.reshape(-1) if isinstance(value, Tensor) and value.dim() > 1 else value


def _cross_entropy(
    input: Any,  # noqa: A002 - the names are torch's
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORED,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of logits to come."""
    is_plain = weight is None and size_average is None and reduce is None and not label_smoothing
    has_words = target.shape == input.shape[:-1] and not target.is_floating_point() and input.dim() == 2
    if not (isinstance(input, LazyLogits) and is_plain and has_words and reduction in ("mean", "sum")):
        raise _refusal("cross_entropy of other classes, with weights or label smoothing")
    total = input.total_loss(target, ignore_index)
    return total if reduction == "sum" else total / (target != ignore_index).sum().to(total.device)


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
        return logits.total_loss(targets, ignored)


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
