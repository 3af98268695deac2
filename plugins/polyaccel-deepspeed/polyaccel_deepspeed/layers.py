"""`deepspeed.module_inject.layers`: linear layers of which each rank of a group computes a part.

A layer is made of a whole `nn.Linear`. Its parameters keep their parts and have Megatron's marks, by which an engine
over the same tensor ranks takes them for parts. Without a group of several ranks it is the layer itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Function
from torch.nn import functional

from polyaccel.core.block import Block
from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.tensor_shard import TensorShard


class TensorRanksLayer(nn.Module):
    """A linear layer whose weight is cut along `_dim` over the ranks of `mp_group`."""

    _dim = 0
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, module: nn.Module, mp_group: Any = None, skip_partition: bool = False, **kwargs: Any) -> None:
        super().__init__()
        self.mp_group = mp_group
        self.tp_world_size = 1 if mp_group is None else dist.get_world_size(mp_group)
        self.tp_index = 0 if mp_group is None else dist.get_rank(mp_group)
        self.name = kwargs.get("name")
        self.support_training = True
        self.weight, self.bias = module.weight, module.bias  # type: ignore[assignment]
        length = self.weight.shape[self._dim]
        ranks = self.tp_world_size
        self._sizes = [length] * ranks if skip_partition else even_sizes(length, ranks)
        if self.tp_world_size > 1 and not skip_partition:
            cut = {"weight": self._keep(self.weight, self._dim)}
            if self._dim == 0 and self.bias is not None:
                cut["bias"] = self._keep(self.bias, 0)
            self.parallel_cuts = cut

    def _keep(self, parameter: nn.Parameter, dim: int) -> TensorShard:
        """Leave a parameter this rank's part, marked as such."""
        shape, start = tuple(parameter.shape), sum(self._sizes[: self.tp_index])
        parameter.data = parameter.data.narrow(dim, start, self._sizes[self.tp_index]).clone()
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
        return TensorShard(Block.whole(shape).cut(dim, (start, self._sizes[self.tp_index])))

    @torch.no_grad()
    def gather_params(self, params_list: Sequence[Tensor | None]) -> None:
        """Make the parameters in `params_list` whole, in place. Collective over the group."""
        for place, each in enumerate(params_list):
            if each is not None and self.tp_world_size > 1 and (place == 0 or self._dim == 0):
                each.data = _joined(each.data, self.mp_group, self._dim, self._sizes)

    @torch.no_grad()
    def _tp_partition(self, params_list: Sequence[Tensor | None]) -> None:
        """Leave whole parameters in `params_list` this rank's parts, in place."""
        start = sum(self._sizes[: self.tp_index])
        for place, each in enumerate(params_list):
            if each is not None and self.tp_world_size > 1 and (place == 0 or self._dim == 0):
                each.data = each.data.narrow(self._dim, start, self._sizes[self.tp_index]).clone()


class LinearLayer(TensorRanksLayer):
    """Some of the outputs on each rank, of inputs that all ranks have. `gather_output` gives all of them."""

    def __init__(
        self,
        module: nn.Module,
        mp_group: Any = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, mp_group, skip_partition, **kwargs)
        self.gather_output = gather_output

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - DeepSpeed's name
        """The outputs of this rank's part."""
        if self.tp_world_size > 1:
            out = functional.linear(_SummedBackward.apply(input, self.mp_group), self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            out = functional.linear(input, self.weight, self.bias)
        if self.gather_output and self.tp_world_size > 1:
            out = _Gathered.apply(out, self.mp_group, self._sizes, self.tp_index)  # type: ignore[no-untyped-call]
        return out

    @classmethod
    def from_weights(
        cls,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        gather_output: bool = False,
    ) -> LinearLayer:
        """A layer over given tensors, or a new one of `weight_shape`, that is not cut."""
        shape = weight_shape if weight is None else weight.shape
        assert shape is not None
        linear = nn.Linear(shape[1], shape[0], bias=bias is not None)
        if weight is not None:
            linear.weight.data = weight
        if bias is not None:
            linear.bias.data = bias
        return cls(linear, skip_partition=True, gather_output=gather_output)


class LinearAllreduce(TensorRanksLayer):
    """All outputs, added up over the ranks, of inputs of which each rank has the part that `LinearLayer` gives."""

    _dim = 1

    def __init__(self, module: nn.Module, mp_group: Any, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **kwargs)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - DeepSpeed's name
        """The whole outputs."""
        out = functional.linear(input, self.weight)
        if self.tp_world_size > 1:
            out = _Summed.apply(out, self.mp_group)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """`LinearAllreduce` of inputs that all ranks have whole."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - DeepSpeed's name
        """The whole outputs."""
        if sum(self._sizes) != input.shape[-1]:
            raise ShardingError(
                f"{input.shape[-1]} features came to a layer of {sum(self._sizes)}",
                hint="give the whole input on every rank",
                value=input.shape[-1],
            )
        if self.tp_world_size > 1:
            start, size = sum(self._sizes[: self.tp_index]), self._sizes[self.tp_index]
            return super().forward(_SummedBackward.apply(input, self.mp_group).narrow(-1, start, size))  # type: ignore[no-untyped-call]
        return super().forward(input)


def even_sizes(whole: int, ranks: int) -> list[int]:
    """The lengths of parts that differ by one at most, the longer ones first."""
    least, more = divmod(whole, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _joined(part: Tensor, group: Any, dim: int, sizes: Sequence[int]) -> Tensor:
    """All ranks' parts along `dim`, of `sizes`."""
    part = part.movedim(dim, 0).contiguous()
    padded = functional.pad(part, (0, 0) * (part.dim() - 1) + (0, max(sizes) - part.shape[0]))
    every = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(every, padded, group=group)
    whole = torch.cat([each[:size] for each, size in zip(every, sizes, strict=True)])
    return whole.movedim(0, dim).contiguous()


class _SummedBackward(Function):
    """The input, whose gradient is added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(Function):
    """The sum of the ranks' inputs, whose gradient each of them gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(Function):
    """All ranks' last dimensions, of which each gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, sizes: Sequence[int], rank: int) -> Tensor:
        ctx.start, ctx.size = sum(sizes[:rank]), sizes[rank]
        return _joined(x, group, -1, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(-1, ctx.start, ctx.size).contiguous(), None, None, None
