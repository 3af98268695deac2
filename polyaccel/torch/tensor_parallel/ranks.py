"""The ranks that share the layers of a model, as torch tensors see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.detect import host_accelerator
from polyaccel.comm.base import Communicator
from polyaccel.comm.work import Work
from polyaccel.comm.wrappers.staged import StagedCommunicator
from polyaccel.core.types import ReduceOp
from polyaccel.errors import ShardingError


@cache
def host() -> Accelerator:
    """Return the accelerator of host memory."""
    return host_accelerator()


def communicator_for(tensor: Tensor, communicator: Communicator) -> Communicator:
    """Return `communicator` for `tensor`'s memory; trial passes on the host are staged."""
    if not tensor.is_cpu or communicator.accelerator.torch_device_type == "cpu":
        return communicator
    return StagedCommunicator(communicator, host())


def even_parts(count: int, ranks: int) -> tuple[int, ...]:
    """`count` things over `ranks` in order: the first ranks have one more where that does not come out even."""
    least, more = divmod(count, ranks)
    return tuple(least + (rank < more) for rank in range(ranks))


class MatrixProducts(Protocol):
    """The products of a linear layer on matrices, by kernels of the device.

    A protocol, because `MatmulKernels` looks at the layers of this package and is a layer of imports above.
    """

    def suits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether they are worth it for these operands."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`functional.linear(x, weight, bias)`."""

    @property
    def input_grad(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Of the outputs' gradient and the weight."""

    @property
    def weight_grad(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Of the outputs' gradient and the input."""


class TensorRanks:
    """The ranks of `communicator`, which hold blocks of the same weights; `rank` is this one's place among them.

    All ranks call the same methods in the same order, with tensors on their device, or all with tensors on the host. A
    model and its copies share one object.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.rank = communicator.rank
        self.size = communicator.world_size
        self.products: MatrixProducts | None = None
        """What computes products of layers; None for torch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorRanks:
        return self

    def start_sum(self, tensor: Tensor) -> Work:
        """Add the contiguous `tensor` up over the ranks, in place; it belongs to the work until that is waited for."""
        ranks = self._ranks(tensor)
        return ranks.all_reduce(ranks.accelerator.wrap(tensor), ReduceOp.SUM, async_op=True, label="tensor parallel")

    def broadcast(self, tensor: Tensor) -> None:
        """Write the first rank's values into the contiguous `tensor`."""
        if self.size > 1 and tensor.numel():
            ranks = self._ranks(tensor)
            ranks.broadcast(ranks.accelerator.wrap(tensor), 0, label="initial parameters")

    def sum(self, tensor: Tensor) -> Tensor:
        """The contiguous `tensor`, added up over the ranks in place."""
        if self.size > 1 and tensor.numel():
            ranks = self._ranks(tensor)
            ranks.all_reduce(ranks.accelerator.wrap(tensor), ReduceOp.SUM, label="tensor parallel")
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The contiguous `tensor`, in place the largest of the ranks' elements at each position."""
        if self.size > 1 and tensor.numel():
            ranks = self._ranks(tensor)
            ranks.all_reduce(ranks.accelerator.wrap(tensor), ReduceOp.MAX, label="tensor parallel")
        return tensor

    def gathered(self, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """All ranks' parts side by side along `dim`, where rank r's has `sizes[r]` elements."""
        dim = self._checked(part, dim, sizes, sizes[self.rank])
        if self.size == 1:
            return part.contiguous()
        counts = [size * _row(part, dim) for size in sizes]
        # Of the last shape, not a view of it, or autograd would refuse that a model changes it in place.
        whole = part.new_empty((*part.shape[:dim], sum(sizes), *part.shape[dim + 1 :]))
        flat = whole.view(-1)
        ranks = self._ranks(part)
        wrap = ranks.accelerator.wrap
        ranks.all_gather(wrap(flat), wrap(part.contiguous()), counts=counts, label="tensor parallel")
        if _leading(part, dim) == 1:
            return whole
        parts = zip(flat.split_with_sizes(counts), sizes, strict=True)
        return torch.cat([each.view(*part.shape[:dim], size, *part.shape[dim + 1 :]) for each, size in parts], dim)

    def summed_part(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part of the sum of all ranks' `whole` along `dim`, where rank r's has `sizes[r]` elements."""
        dim = self._checked(whole, dim, sizes, sum(sizes))
        if self.size == 1:
            return whole.contiguous()
        counts = [size * _row(whole, dim) for size in sizes]
        if _leading(whole, dim) == 1:
            source = whole.contiguous().view(-1)
        else:
            source = torch.cat([each.reshape(-1) for each in whole.split_with_sizes(list(sizes), dim)])
        out = whole.new_empty((*whole.shape[:dim], sizes[self.rank], *whole.shape[dim + 1 :]))
        ranks = self._ranks(whole)
        wrap = ranks.accelerator.wrap
        ranks.reduce_scatter(wrap(out.view(-1)), wrap(source), ReduceOp.SUM, counts=counts, label="tensor parallel")
        return out

    def part(self, whole: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """This rank's part of `whole` along `dim`, a view."""
        dim = self._checked(whole, dim, sizes, sum(sizes))
        return whole.narrow(dim, self.first(sizes), sizes[self.rank])

    def first(self, sizes: Sequence[int]) -> int:
        """Where this rank's part begins, where rank r's has `sizes[r]` elements."""
        return [0, *accumulate(sizes)][self.rank]

    def _ranks(self, tensor: Tensor) -> Communicator:
        return communicator_for(tensor, self.communicator)

    def _checked(self, tensor: Tensor, dim: int, sizes: Sequence[int], expected: int) -> int:
        """`dim` from 0 on. Raises ShardingError where the tensor does not have as many elements there as it should."""
        dim = dim % max(tensor.dim(), 1)
        if len(sizes) != self.size or tensor.dim() == 0 or tensor.shape[dim] != expected:
            raise ShardingError(
                f"a tensor of shape {tuple(tensor.shape)} has not the {expected} elements along dim {dim} of parts "
                f"{list(sizes)} over {self.size} ranks",
                hint="the parts are those of the whole tensor, one a rank",
                value=tuple(tensor.shape),
            )
        return dim


def _row(tensor: Tensor, dim: int) -> int:
    """Elements of `tensor` for each index of `dim`."""
    return _leading(tensor, dim) * tensor.shape[dim + 1 :].numel()


def _leading(tensor: Tensor, dim: int) -> int:
    return tensor.shape[:dim].numel()
