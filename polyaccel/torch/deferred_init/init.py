"""`zero.Init`: build a model without its parameters in memory; each gets its value when the engine places it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from polyaccel.config import load_config
from polyaccel.config.load import Source
from polyaccel.errors import ConfigError, Problem
from polyaccel.torch.deferred_init.tensor import DeferredTensor, run, set_data

_INERT = {
    "data_parallel_group": (None, "the engine shards over all ranks"),
    "remote_device": (None, 'say in the config where parameters live: "zero_optimization": {"offload_param": ...}'),
    "pin_memory": (False, 'say it in the config: "zero_optimization": {"offload_param": {"pin_memory": true}}'),
    "mpu": (None, "all ranks are data-parallel"),
    "zero_param_parallel_group": (None, 'say it in the config: "zero_optimization": {"zero_hpz_partition_size": 8}'),
    "zero_quantized_weights": (False, 'say it in the config: "zero_optimization": {"zero_quantized_weights": true}'),
    "zero_quantized_nontrainable_weights": (
        False,
        'say it in the config: "zero_optimization": {"zero_quantized_nontrainable_weights": true}',
    ),
    "sequence_data_parallel_group": (None, "the engine shards over all ranks"),
    "param_swapper": (None, "the engine has its own tiers"),
}
"""Arguments of other engines that mean nothing here: the value that asks for nothing, and what to do instead."""


class Init(ExitStack):
    """Context that defers the initialisation of parameters: they get memory and values when the engine places them.

    DeepSpeed's name and arguments. Pass the model to `polyaccel.initialize`, which computes one bucket of parameters at
    a time. Values, and the state of the random generator afterwards, are those of the same program without `Init`; for
    that each random tensor is drawn twice, the first time into scratch memory of its size. Tied parameters stay tied.
    Tensors of up to 1024 elements, and what is read from elsewhere, are real from the start.

    Until `initialize`, deferred parameters may be initialised again, cast, copied and read as usual. What is computed
    from them after the block is real. Inside another `Init` only `dtype` has an effect.

    Args:
        module: A model that exists already, of which nothing is left to defer.
        config_dict_or_path: Config as in `initialize`; it is checked and not used otherwise.
        config: The same under DeepSpeed's older name.
        enabled: False makes the context do nothing.
        dtype: Default dtype inside. None under fp16 or bf16: the config decides the parameters' dtype, and master
            weights keep the full precision of the constructors.
        mem_efficient_linear: Accepted for DeepSpeed's scripts; it has no effect.
        **inert: DeepSpeed's other arguments, which must have their default values.

    Raises:
        ConfigError: The config is wrong, or an argument of `inert` has another value.
        TypeError: An argument is unknown.

    Example:
        ```python
        with polyaccel.zero.Init():
            model = Model()
        engine, *_ = polyaccel.initialize(model=model, config=config)
        ```
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        config_dict_or_path: Source | None = None,
        config: Source | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mem_efficient_linear: bool = True,
        **inert: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self._enabled, self._dtype = enabled, dtype
        _check_inert(inert)
        for source in (config_dict_or_path, config):
            if source is not None:
                load_config(source)

    def __enter__(self) -> Init:
        super().__enter__()
        if self._enabled:
            outside = torch.get_default_dtype()
            if self._dtype is not None:
                self.enter_context(_default_dtype(self._dtype))
            if not is_constructing():
                self.enter_context(Construction(outside))
        return self


class Construction(TorchDispatchMode):
    """While it is active, large new tensors of this thread are deferred."""

    def __init__(self, outside: torch.dtype | None = None) -> None:
        """`outside` is the default dtype outside of the block; None is the present one."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._assignments = _Assignments()
        self._outside = outside or torch.get_default_dtype()
        self._is_suspended = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler to tell it that it may not look into this class

    def __enter__(self) -> Construction:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._assignments.__enter__()  # type: ignore[no-untyped-call]
        self._around = getattr(_here, "construction", None)
        _here.construction = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        _here.construction = self._around
        self._assignments.__exit__(*exc_info)  # type: ignore[no-untyped-call]
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {}, constructing=not self._is_suspended)

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """Make real tensors of the default dtype of outside meanwhile."""
        self._is_suspended, _here.construction = True, None
        try:
            with _default_dtype(self._outside):
                yield
        finally:
            self._is_suspended, _here.construction = False, self


class _Assignments(TorchFunctionMode):
    """Intercept `real.data = deferred`, which bypasses `__torch_function__` and would leave a tensor without memory."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and isinstance(args[1], DeferredTensor):
            return set_data(*args)
        return func(*args, **(kwargs or {}))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_here = local()


def is_constructing() -> bool:
    """Whether this thread is inside zero.Init."""
    return getattr(_here, "construction", None) is not None


@contextmanager
def outside_construction() -> Iterator[None]:
    """Do the block as if it stood outside zero.Init, for callers that are inside: DeepSpeed's scripts may be."""
    construction: Construction | None = getattr(_here, "construction", None)
    with nullcontext() if construction is None else construction.suspend():
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_inert(given: Mapping[str, Any]) -> None:
    unknown = [name for name in given if name not in _INERT]
    if unknown:
        raise TypeError(f"zero.Init got unexpected arguments {', '.join(unknown)}")
    problems = [
        Problem(name, value, f"zero.Init takes only {_INERT[name][0]!r} here", _INERT[name][1])
        for name, value in given.items()
        if value != _INERT[name][0]
    ]
    if problems:
        raise ConfigError(problems, source="zero.Init")
