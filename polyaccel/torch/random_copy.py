"""Copies of modules with random parameters in host memory, on which rewrites are tried before a user's module changes.

[Note: Copies with random parameters]
A copy needs the shapes of its original and no values, so parameters may be deferred, on the meta device, cut or on
another device. Equal shapes give equal values on every rank. A copy has no hooks, which could change a script's state,
and draws from no default generator. Begin with `random_copy`; this module imports no rewrite.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"),
)


def random_copy(
    module: nn.Module, *, thin: bool = False, shapes: Mapping[nn.Parameter, tuple[int, ...]] = MappingProxyType({})
) -> nn.Module:
    """Return an evaluating float32 copy of `module` with random parameters.

    Args:
        module: It does not change.
        thin: Whether each matrix is made of one short vector, as in a copy of a large model.
        shapes: Other shapes of some parameters.

    Raises:
        Exception: Whatever a copy of this module raises.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        is_float = parameter.is_floating_point()
        own = _values(shapes.get(parameter, tuple(parameter.shape)), generator, thin=thin)
        memo[id(parameter)] = nn.Parameter(own if is_float else own.to(parameter.dtype), requires_grad=is_float)
    for buffer in module.buffers():
        memo[id(buffer)] = _buffer(buffer)
    for fake in _fake_attributes(module):
        memo.setdefault(id(fake), _buffer(fake))
        memo[id(fake.fake_mode)] = fake.fake_mode
    for one in module.modules():
        memo |= {id(getattr(one, name)): OrderedDict() for name in HOOKS}
    made: nn.Module = copy.deepcopy(module, memo)
    for one in made.modules():
        if "forward" in vars(one):
            raise TypeError(f"{type(one).__name__} has a forward among its attributes")
    choose_plain_kernels(made)
    return made.eval()


def choose_plain_kernels(model: nn.Module) -> None:
    """Let a transformers model compute what a host in float32 and float64, and thin weights, can compute.

    Its modules get copies of their configs, which may be another model's too.
    """
    copies: dict[int, Any] = {}
    for one in model.modules():
        settings: Any = getattr(one, "config", None)
        is_flash = "flash" in str(getattr(settings, "_attn_implementation", ""))
        has_kinds = getattr(settings, "_experts_implementation", None) is not None
        if not (is_flash or has_kinds):
            continue
        if id(settings) not in copies:
            copies[id(settings)] = made = copy.copy(settings)
            if is_flash:
                made._attn_implementation = "sdpa"
            if has_kinds:
                made._experts_implementation = "eager"  # grouped products take neither float64 nor strides of 0
        one.config = copies[id(settings)]


@contextmanager
def unchanged_generators() -> Iterator[None]:
    """Compute with real tensors, even in a fake pass, then restore the generators of torch, Python and numpy."""
    with unset_fake_temporarily():
        python, host, arrays = random.getstate(), torch.get_rng_state(), np.random.get_state()
        try:
            yield
        finally:
            if not torch.equal(torch.get_rng_state(), host):
                torch.set_rng_state(host)
            random.setstate(python)
            np.random.set_state(arrays)


def _fake_attributes(module: nn.Module) -> Iterator[FakeTensor]:
    """Fake tensors among attributes of modules, and in their containers.

    `copy.deepcopy` of one copies its mode, and the mode's references to storages, which are then released twice: the
    memory of others is freed, and the process crashes later (torch 2.13).
    """
    seen: set[int] = set()
    queue: list[Any] = [vars(one) for one in module.modules()]
    while queue:
        value = queue.pop()
        if isinstance(value, FakeTensor):
            yield value
        elif isinstance(value, (dict, list, tuple, set)) and id(value) not in seen:
            seen.add(id(value))
            queue.extend(value.values() if isinstance(value, dict) else value)


def _values(shape: tuple[int, ...], generator: torch.Generator, *, thin: bool) -> Tensor:
    """Random values whose products with a vector are of its size; of vectors near 1, as norms have them."""
    if len(shape) < 2:
        return torch.rand(shape, generator=generator) + 0.5
    strides = [0] * (len(shape) - 2) + [1, 1]
    drawn = torch.randn((shape[-2] + shape[-1],) if thin else shape, generator=generator)
    drawn.mul_(float(torch.Size(shape[1:]).numel()) ** -0.5)
    return drawn.as_strided(shape, strides) if thin else drawn


def _buffer(buffer: Tensor) -> Tensor:
    if buffer.is_meta or isinstance(buffer, FakeTensor):
        return torch.full(buffer.shape, 1, dtype=buffer.dtype)
    own = buffer.detach().cpu().clone()
    return own.to(torch.float32) if own.is_floating_point() else own
