"""How many files a reader opens who follows one gradient from autograd's hook to its published parameter.

A file is counted when a function of it has the gradient in hand between the call of the hook and the return of the
update: when an argument (`self` included) or the result is a tensor or a `Buffer` in memory that the gradient has been
in, or holds one in its attributes or items. So a data class of one line counts, and so does a function that passes the
gradient on without a look. Where a function of a contract (memory, a collective, a kernel) gets a buffer with the
gradient, the other buffers that it gets count as the gradient's from there on: the bucket that it is copied into, the
slice that a reduction leaves, the master weights that an update writes. That can only make the walk longer.

The files of the engine are limited: `torch/`, `engine/` and `zero/`. What stands behind the three contracts that the
gradient crosses (an accelerator's memory, a communicator, a kernel table) is a plugin's own affair, built in or not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from parity_models import SMALL_BUCKET, make_config, on_threads
from torch import nn

import polyaccel
from polyaccel.accelerators.memory.torch import TorchBuffer
from polyaccel.torch.sharding.gradients import AUTOGRAD_S

PACKAGE = Path(polyaccel.__file__).parent
ENGINE = ("torch/", "engine/", "zero/")
AT_MOST = 12


class Walk:
    """A profiler of one thread that notes which functions of polyaccel have the gradient of `parameter` in hand."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._memory: set[int] = set()
        """Addresses of the storages that the gradient has been in; none before the hook."""
        self.functions: dict[str, set[str]] = {}
        """By file, relative to the package."""

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        """What `sys.setprofile` calls when a function begins and when it returns `result`."""
        if event not in ("call", "return") or not (file := self._file_of(frame)):
            return
        code = frame.f_code
        arguments = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        of_autograd = AUTOGRAD_S.__get__(self._parameter)
        is_hook = any(one is self._parameter for one in arguments) and of_autograd is not None
        if is_hook:
            self._memory.add(storage_of(of_autograd))
        if is_hook or any(self._has(one) for one in (*arguments, result)):
            self.functions.setdefault(file, set()).add(code.co_name)
            if not file.startswith(ENGINE):
                for one in arguments:
                    self._memory |= {storage_of(tensor) for tensor in tensors_in(one, depth=0)}

    def _file_of(self, frame: FrameType) -> str:
        """The file of the function that is called; "" outside of polyaccel. Functions that `dataclass` made stand in
        the file of their class."""
        name = frame.f_code.co_filename
        if name == "<string>" and "self" in frame.f_locals:
            module = sys.modules.get(type(frame.f_locals["self"]).__module__)
            name = getattr(module, "__file__", None) or ""
        path = Path(name)
        return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""

    def _has(self, value: Any) -> bool:
        return any(storage_of(tensor) in self._memory for tensor in tensors_in(value, depth=2))


def tensors_in(value: Any, *, depth: int) -> Iterator[torch.Tensor]:
    """The tensors that `value` is, or holds in its items or attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, TorchBuffer):
        if (raw := getattr(value, "raw", None)) is not None:  # else it is being made
            yield raw
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth=depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth=depth - 1)
    elif depth == 2 and type(value).__module__.startswith("polyaccel"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        for item in (*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)):
            yield from tensors_in(item, depth=1)


def storage_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter would be gathered to be looked at
        return tensor.untyped_storage().data_ptr()


def small_module() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def follow(communicator: Any, model: nn.Module, stage: int, walks: dict[str, dict[str, set[str]]]) -> None:
    zero = {"reduce_bucket_size": SMALL_BUCKET} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    config = make_config(stage, zero=zero)
    engine, *_ = polyaccel.initialize(model=model, config=config)
    for step in range(3):  # the first two are for the order of gradients and gathers to be learned
        loss = engine(torch.ones(4, 6) * (communicator.rank + 1)).square().mean()
        parameter = next(iter(engine.module.parameters()))
        walk = Walk(parameter)
        previous = sys.getprofile()
        sys.setprofile(walk)
        try:
            engine.backward(loss)
            engine._apply_update(engine.optimizer.param_groups)
        finally:
            sys.setprofile(previous)
        engine.adapter.on_update()
        walks[f"{communicator.rank}.{step}"] = walk.functions
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_is_followed_through_few_files(stage: int) -> None:
    walks: dict[str, dict[str, set[str]]] = {}
    on_threads(2, follow, small_module, stage, walks)
    files: dict[str, set[str]] = {}
    for functions in walks.values():
        for file, names in functions.items():
            files.setdefault(file, set()).update(names)
    found = sorted(file for file in files if file.startswith(ENGINE))
    assert {"torch/sharding/backward.py", "zero/update/optimizer_step.py"} < set(found)  # both ends
    assert any(file.startswith("ops/") for file in files)
    assert len(found) <= AT_MOST, "\n".join(f"{file}: {', '.join(sorted(files[file]))}" for file in found)
