"""`Untouched`: a user's module as it was before its first rewrite, without the values of its parameters."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from polyaccel.config import Config
from polyaccel.errors import PolyaccelError
from polyaccel.torch.random_copy import HOOKS
from polyaccel.torch.sharding.tensor_shard import cuts_of
from polyaccel.torch.verify.recording import attributes_of

_PACKAGES = ("polyaccel", "torch", "transformers")


class NotProvenError(PolyaccelError):
    """Nothing can be proven of a training. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Untouched:
    """A copy of a module: float32 parameters on the meta device, and own buffers and attributes."""

    module: nn.Module
    digest: str
    """A digest of classes, names, shapes, numbers among attributes, config, ranks and versions."""

    @staticmethod
    def from_model(model: nn.Module, config: Config, world_size: int) -> Untouched:
        """Copy `model`, which does not change. Raises NotProvenError where a copy would not be all of it."""
        require_copyable(model)
        try:
            memo = copies_without_values(model)
            return Untouched(copy.deepcopy(model, memo), digest_of(model, config, world_size))
        except Exception as error:  # of a class of the user's
            raise NotProvenError(f"the model cannot be copied: {type(error).__name__}: {line_of(error)}") from error

    def with_values(self, values: Mapping[str, Tensor], like: nn.Module, stage: int | None = None) -> nn.Module:
        """Return a copy with `values` by name, in the training mode that the modules of `like` are in.

        A model that the engine cuts is the same on each `stage`.
        """
        copied: nn.Module = copy.deepcopy(self.module, values_for(self.module, values))
        modes = {plain_name(name): one.training for name, one in like.named_modules()}
        for name, one in copied.named_modules():
            one.training = modes.get(name, one.training)
        return copied


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the parts that compiled modules add."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def copies_without_values(model: nn.Module) -> dict[int, Any]:
    """Return a memo by which `copy.deepcopy` leaves out the values of parameters, and compiled modules are as they were
    before. `model` has to live as long as it."""
    memo: dict[int, Any] = {id(parameter): _without_values(parameter) for parameter in model.parameters()}
    for buffer in model.buffers():
        if buffer.dtype in (torch.bfloat16, torch.float16):
            memo[id(buffer)] = buffer.detach().float()
    for module in reversed(list(model.modules())):
        if (inner := module._modules.get("_orig_mod")) is not None:
            memo[id(module)] = copy.deepcopy(inner, memo)
    return memo


def values_for(untouched: nn.Module, values: Mapping[str, Tensor]) -> dict[int, Any]:
    """Return a memo by which copies of `untouched` have `values` by name."""
    memo: dict[int, Any] = {}
    for name, parameter in untouched.named_parameters():
        value = values[name].to(parameter.dtype, copy=True).view(parameter.shape)
        made = memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        vars(made).update(vars(parameter))
    return memo


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    dtype = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    made = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=parameter.requires_grad)
    plain = {name: value for name, value in vars(parameter).items() if isinstance(value, (bool, int, float, str))}
    vars(made).update(plain)
    return made


def require_copyable(model: nn.Module) -> None:
    """Raise NotProvenError for what a copy would lack, or share with the model."""
    if cuts_of(model):
        raise NotProvenError("a rank has only its blocks of the parameters, because the model has cut itself")
    for name, module in model.named_modules():
        where = f"{name or 'the model'} ({type(module).__name__})"
        if "_orig_mod" in module._modules:
            continue  # the copy has the module that was compiled
        if not all(_is_copied(hook) for hooks in HOOKS for hook in (getattr(module, hooks) or {}).values()):
            raise NotProvenError(f"{where} has hooks, which a copy would share")
        if not _is_copied(vars(module).get("forward")):
            raise NotProvenError(f"{where} has a forward among its attributes, which a copy would share")
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise NotProvenError(f"{name} has hooks, which a copy would share")


def _is_copied(function: Any) -> bool:
    """Whether a copy of a module gets a copy of `function` that refers to nothing of the module."""
    if isinstance(function, partial):
        return _is_copied(function.func)  # whose arguments are copied
    if isinstance(function, MethodType):
        return isinstance(function.__self__, nn.Module)
    return not isinstance(function, FunctionType) or function.__closure__ is None


def digest_of(model: nn.Module, config: Config, world_size: int) -> str:
    """Return a digest of what a proof of `model` depends on."""
    digest = hashlib.sha256()
    for line in (*_facts(model), config.model_dump_json(), str(world_size)):
        digest.update(line.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _facts(model: nn.Module) -> Iterator[str]:
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            yield f"{package} {version(package)}"
    for name in sorted({type(one).__module__ for one in model.modules()}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and name.partition(".")[0] not in _PACKAGES:
            with suppress(OSError):
                yield hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for name, one in model.named_modules():
        yield f"{name} {type(one).__module__}.{type(one).__qualname__} {one.training} {one.extra_repr()}"
    for name, number in attributes_of(model):
        yield f"{name} {number}"
    for name, parameter in model.named_parameters():
        yield f"{name} {tuple(parameter.shape)} {parameter.requires_grad}"
    for name, buffer in model.named_buffers():
        yield f"{name} {tuple(buffer.shape)} {buffer.dtype}"
    yield str(getattr(model, "config", ""))


def line_of(error: BaseException) -> str:
    """Return the first line of an error."""
    return str(error).partition("\n")[0][:160]
