"""A parameter while it is sharded: it has everything but its values.

[Note: Access to sharded parameters]
A sharded parameter keeps its shape, type and device; its storage is empty. Its class is `ShardedParameter` for that
time, so that an operation on it comes here first. Inside a forward or backward pass the parameter is gathered on
demand, which every rank does in the same way. Outside, one rank alone might ask, and a collective would hang; so it is
an error that names the hint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polyaccel.errors import ShardingError
from polyaccel.torch.graph_breaks import outside_graphs
from polyaccel.torch.sharding.gradients import ShowsGradient, install_grad_property
from polyaccel.torch.sharding.ownership import ParamRecord, bind, record_of

NEEDS_NO_VALUES = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in (
                "dim", "ndimension", "size", "numel", "nelement", "stride", "element_size", "is_floating_point",
                "is_complex", "is_contiguous", "storage_offset", "get_device", "register_hook", "requires_grad_",
                "register_post_accumulate_grad_hook", "__hash__", "__len__", "is_inference", "is_signed",
                "is_same_size", "is_conj", "is_neg", "dim_order",
            )
            if hasattr(Tensor, name)
        ),
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "is_cpu",
                "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "is_mps", "is_xpu",
                "itemsize", "nbytes", "names", "name", "output_nr", "retains_grad", "is_sparse_csr", "is_mtia",
                "is_xla", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
            )
            if hasattr(Tensor, name)
        ),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)  # fmt: skip


class ShardedParameter(ShowsGradient, nn.Parameter):
    """The class of a parameter while it is sharded. See [Note: Access to sharded parameters]."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in NEEDS_NO_VALUES:
            sharded = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ShardedParameter]
            if sharded:
                owner = _home(sharded[0]).owner
                if owner is not None and (answer := owner.sharding.handle_state_dict_op(func, *args)) is not None:
                    return answer
                _unshard(sharded, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = tuple(self.shape), self.dtype, self.device
        return f"Parameter {_home(self).fqn!r} (sharded, shape={shape}, dtype={dtype}, device={device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _not_here(self, "copy.deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_here(self, "pickle")


class EngineHook:
    """`function` as a hook of an engine on the user's module, outside of compiled graphs. A copy of the module shares
    it, so `function` must look at which module calls it; pickling the module raises ShardingError."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = outside_graphs(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineHook:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardingError(
            "a module whose parameters are sharded cannot be pickled",
            hint="save engine.module_state_dict() (GatheredParameters does for copies), or call engine.destroy() first",
        )


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks can be put on `module`: not on one that `torch.jit.script` has made, or a part of it."""
    jit = getattr(torch, "jit", None)  # deprecated: where torch has it no longer, no module is scripted
    scripted = getattr(jit, "RecursiveScriptModule", None)
    return scripted is None or not isinstance(module, scripted)


def _unshard(sharded: Sequence[nn.Parameter], what: Any) -> None:
    """Make parameters whole for `what`. Raises ShardingError where that is not safe."""
    owner = _home(sharded[0]).owner
    if owner is None or not owner.sharding.try_unshard(sharded):
        raise _not_here(sharded[0], what)


@cache
def _watch_transforms() -> None:
    """Unshard what `torch.func`'s transforms wrap: they do so in C++, where `__torch_function__` is not called."""
    from torch._functorch import eager_transforms, vmap

    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
        if (wrap := getattr(module, name, None)) is not None:
            setattr(module, name, _unsharding(wrap))


def _unsharding(wrap: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(wrap)
    def wrap_whole(tensor: Tensor, *args: Any) -> Tensor:
        if isinstance(tensor, ShardedParameter):
            _unshard([tensor], "a transform of torch.func")
        return wrap(tensor, *args)

    return wrap_whole


def hide(parameter: nn.Parameter, home: ParamRecord, dtype: torch.dtype, device: torch.device) -> None:
    """Hide `parameter`'s values of `home`; operations on it ask its adapter."""
    if type(parameter) is ShardedParameter:
        return
    _watch_transforms()
    if home.placeholder is None:
        home.placeholder = torch.empty(parameter.shape, dtype=dtype, device=device)
        home.placeholder.untyped_storage().resize_(0)
        bind(parameter, home.placeholder)  # which makes a parameter of one that was made inside zero.Init
        install_grad_property(parameter)
        home.kind = type(parameter)
    bind(parameter, home.placeholder)
    parameter.__class__ = ShardedParameter
    home.is_whole = False


def show(parameter: nn.Parameter, home: ParamRecord, values: Tensor) -> None:
    """Give `parameter`, whose home is `home`, its values: `values`, flat."""
    if type(parameter) is ShardedParameter:
        parameter.__class__ = home.kind  # type: ignore[assignment]
        home.version, home.is_handed_out = parameter._version, False
        home.is_whole = True
    bind(parameter, values.view(parameter.shape))


def require_unsharded(module: nn.Module) -> None:
    """Raise ShardingError if an engine holds parameters of `module` sharded."""
    for fqn, parameter in module.named_parameters():
        if type(parameter) is ShardedParameter:
            raise ShardingError(
                f"parameter {fqn!r} is sharded by another engine", hint="call destroy() on that engine first", value=fqn
            )


_ORPHANED = ("is lost: its engine is gone", "keep the engine, or call engine.destroy() before dropping it")


def _home(parameter: nn.Parameter) -> ParamRecord:
    home = record_of(parameter)
    assert home is not None  # only parameters of an engine are ever hidden
    return home


def _not_here(parameter: nn.Parameter, what: Any) -> ShardingError:
    name = getattr(what, "__name__", str(what))
    if name in ("__get__", "__set__"):  # of an attribute
        name = what.__self__.__name__
    home = _home(parameter)
    owner = home.owner
    where, hint = owner.unsharded_access_hint if owner is not None else _ORPHANED
    return ShardingError(f"{name} needs the values of parameter {home.fqn!r}, which {where}", hint=hint, value=home.fqn)
