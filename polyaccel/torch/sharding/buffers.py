"""The buffers of a module as flat values that ranks exchange and checkpoints hold, whatever layout and type they have.

[Note: Non-strided buffers]
Collectives and checkpoints know strided memory of a few element types. A sparse buffer goes as its indices and values,
each under a separate name; a complex one as pairs of reals; an element type that the engine does not know goes bit by
bit as an integer. Where a buffer repeats one element along a dimension (`expand`), it is written to once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch
from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.memory.torch import torch_dtype
from polyaccel.comm.base import Communicator
from polyaccel.core.types import DType
from polyaccel.errors import PolyaccelError, ShardingError


@contextmanager
def explaining_buffer_types(model: nn.Module) -> Iterator[None]:
    """Explain torch's refusal of 16-bit parameters next to buffers of another type; names them."""
    try:
        yield
    except RuntimeError as error:
        dtypes = (each.dtype for each in model.parameters())
        dtype = next((each for each in dtypes if each in _SHORT), None)
        if "type" not in str(error) or dtype is None or not (names := _odd_buffers(model, error, dtype)):
            raise
        said = str(error).strip().partition("\n")[0]
        raise PolyaccelError(
            f"the buffers {', '.join(names)} are not {dtype}, as the parameters are, and torch refuses to compute with "
            f"both types: {said}",
            hint=f'set "data_types": {{"buffer_dtype": "{_SHORT[dtype]}"}}, or convert in forward: x.to(buffer.dtype)',
            value=names[0],
        ) from error


_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _odd_buffers(model: nn.Module, error: RuntimeError, dtype: torch.dtype) -> list[str]:
    """The names of floating buffers that are not of `dtype`, of the innermost module that was computing."""
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    innermost = next((one for one in reversed(running) if isinstance(one, nn.Module)), None)
    prefix = next((f"{name}." if name else "" for name, module in model.named_modules() if module is innermost), None)
    if innermost is None or prefix is None:
        return []
    buffers = innermost.named_buffers(recurse=False)
    return [f"{prefix}{name}" for name, one in buffers if one.is_floating_point() and one.dtype != dtype]


_KNOWN = frozenset(torch_dtype(dtype) for dtype in DType)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that give the strided tensors which a sparse one consists of."""


def strided_tensors(buffers: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The strided tensors that hold the values of `buffers`, by name. Raises ShardingError for a buffer without any."""
    for name, buffer in buffers:
        if buffer.layout in _SPARSE:
            for method in _SPARSE[buffer.layout]:
                yield f"{name}.{method.removeprefix('_')}", getattr(buffer.detach(), method)()
        elif buffer.layout is not torch.strided or buffer.is_quantized or buffer.is_nested:
            kind = "nested" if buffer.is_nested else "quantized" if buffer.is_quantized else str(buffer.layout)
            raise ShardingError(
                f"the buffer {name!r} is a {kind} tensor, which ranks cannot exchange and checkpoints cannot hold",
                hint="keep it as a plain attribute of the module, or register its parts as buffers",
                value=name,
            )
        else:
            yield name, buffer


def plain_values(tensor: Tensor) -> Tensor:
    """The values of a strided tensor, contiguous and in a type that the engine has."""
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    values = values.contiguous()
    return values if values.dtype in _KNOWN else values.view(_BITS[values.element_size()])


@torch.no_grad()
def set_plain_values(tensor: Tensor, values: Tensor) -> None:
    """Write `values` into a strided tensor: the inverse of `plain_values`."""
    if tensor.is_complex():
        values = torch.view_as_complex(values)
    elif tensor.dtype not in _KNOWN:
        values = values.view(tensor.dtype)
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.copy_(values)


def broadcast_buffers(module: nn.Module, accelerator: Accelerator, communicator: Communicator) -> None:
    """Broadcast rank 0's buffers. Raises ShardingError on all ranks where they do not fit."""
    if communicator.world_size == 1:
        return
    tensors = dict(strided_tensors(module.named_buffers()))
    values = {name: plain_values(tensor) for name, tensor in tensors.items()}
    shapes = {name: [str(value.dtype), *value.shape] for name, value in values.items()}
    of_ranks = communicator.all_gather_object(shapes)
    for rank, theirs in enumerate(of_ranks):
        for name in sorted({*theirs, *of_ranks[0]}):
            if theirs.get(name) != of_ranks[0].get(name):
                raise ShardingError(
                    f"the buffer {name!r} is {_described(theirs, name)} on rank {rank} and "
                    f"{_described(of_ranks[0], name)} on rank 0",
                    hint="build the same model on every rank",
                    value=name,
                )
    for name, value in values.items():
        flat = accelerator.wrap(value)
        communicator.broadcast(flat, 0, label="initial buffers")
        set_plain_values(tensors[name], flat.raw.view(value.shape))


def _described(shapes: dict[str, list[str | int]], name: str) -> str:
    if name not in shapes:
        return "missing"
    dtype, *shape = shapes[name]
    return f"{dtype} of shape {tuple(shape)}"
