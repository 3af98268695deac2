"""`torch.func`'s transforms (grad, vjp, jvp, jacrev, hessian, vmap) while they run a part of the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from polyaccel.errors import ShardingError
from polyaccel.torch.sharding.buffers import explaining_buffer_types


def is_transforming() -> bool:
    """Whether a transform is running on this thread."""
    return _functorch.peek_interpreter_stack() is not None


@contextmanager
def outside_transforms() -> Iterator[None]:
    """What is done inside is done to plain tensors, on which no running transform acts."""
    if not is_transforming():
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


@contextmanager
def explaining_refusal(model: nn.Module) -> Iterator[None]:
    """Explain torch's refusal of transforms over sharded parameters, and of mixed buffer types."""
    try:
        with explaining_buffer_types(model):
            yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error) or "torch.func" not in str(error):
            raise
        raise ShardingError(
            "torch.func.grad, vjp, jacrev or hessian was called in the forward of a module that has sharded "
            "parameters itself, or inside a unit, and does not work there",
            hint="call it in a module whose parameters all belong to its parts (above the units), or use "
            "torch.autograd.grad(..., create_graph=True), or stage 2",
        ) from error


def innermost(tensor: Tensor) -> Tensor:
    """The plain tensor inside the wrappers of transforms, which autograd's own graph has."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor
