"""A tensor whose value is recorded but not computed: it looks like any other, and logs the operations on it.

It answers shape, strides, dtype and device as the real tensor would; inside, a meta tensor follows its geometry. What
asks for values (`item`, `nonzero`, an operation together with real data) is answered from a replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves, tree_map

from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.functions import (
    EQUAL_IN_SHAPE,
    LIKE,
    OVERWRITING,
    as_fill,
    default_generator,
    taking_generator,
    target_device,
    written_by,
)
from polyaccel.torch.deferred_init.log import (
    SMALL_NUMEL,
    Constant,
    FakeStorage,
    LoggedCall,
    StridedView,
    allocate,
    replay,
    return_holes,
)
from polyaccel.torch.deferred_init.mapped import joins_files

_aten = torch.ops.aten
_OWN = ("_memory", "_meta", "_is_param")
_READS = (Tensor.numpy, Tensor.__array__)
_NEEDS_MEMORY = (Tensor.data_ptr, Tensor.__reduce_ex__, Tensor.share_memory_)


class DeferredTensor(Tensor):
    """A strided tensor in `FakeStorage` that is not allocated."""

    _memory: FakeStorage
    _meta: Tensor

    @staticmethod
    def __new__(cls, meta: Tensor, memory: FakeStorage) -> DeferredTensor:
        self: DeferredTensor = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=memory.device,
        )
        self._memory, self._meta = memory, meta
        return self

    @property
    def place(self) -> StridedView:
        return _place(self._meta, self._memory)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {}, constructing=False)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NEEDS_MEMORY:
            raise PolyaccelError(
                f"Tensor.{func.__name__} needs memory, and this tensor of shape {tuple(args[0].shape)} was made inside "
                "zero.Init and has none yet",
                hint="use polyaccel.torch.deferred_init.values.value_of(tensor), or do it after polyaccel.initialize",
                value=func.__name__,
            )
        if func in _READS:
            value = replay(args[0].place).requires_grad_(args[0].requires_grad)
            array = func(value, *args[1:], **(kwargs or {}))
            array.setflags(write=False)  # what is written there would be lost
            return array
        if func == Tensor.tolist:
            return replay(args[0].place).tolist()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            return set_data(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredTensor:
        with torch.no_grad():
            twin: DeferredTensor = run(_aten.clone.default, (self.detach(),), {}, constructing=True)
        twin.requires_grad_(self.requires_grad)
        twin.__dict__.update({name: deepcopy(value, memo) for name, value in own_attributes(self).items()})
        if hasattr(self, "_is_param"):
            twin._is_param = True
        memo[id(self)] = twin
        return twin

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes that users attached to the tensor."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN}


def put(target: DeferredTensor, real: Tensor) -> None:
    """Make `target` a tensor with `real`'s memory, for all its holders; attributes stay."""
    _require_no_hooks(target)
    attributes, is_param = own_attributes(target), hasattr(target, "_is_param")
    other = torch.nn.Parameter(real, target.requires_grad) if is_param else real.view_as(real)
    swap(target, other)
    target.__dict__.update(attributes)


def _require_no_hooks(target: Tensor) -> None:
    if target._backward_hooks or target._post_accumulate_grad_hooks:
        raise PolyaccelError(
            f"a parameter of shape {tuple(target.shape)} made inside zero.Init has hooks already, which would be lost",
            hint="register the hooks after polyaccel.initialize",
            value=tuple(target.shape),
        )


def swap(one: Tensor, other: Tensor) -> None:
    """Exchange two tensors; unlike torch.utils.swap_tensors, weak references may exist (nn.LSTM)."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def set_data(target: Tensor, source: Tensor) -> None:
    """`target.data = source`, where one of them at least is deferred."""
    if not isinstance(target, DeferredTensor):
        assert isinstance(source, DeferredTensor)  # the callers' condition
        if isinstance(target, UninitializedParameter | UninitializedBuffer):  # its module sets its class next
            with torch._C.DisableTorchFunction():
                target.data = replay(source.place)
        else:
            make_deferred(target, source)
    elif not isinstance(source, DeferredTensor):
        put(target, source)
    else:
        with torch._C.DisableTorchFunctionSubclass():
            target.data = source
        target._memory, target._meta = source._memory, source._meta


def make_deferred(target: Tensor, source: DeferredTensor) -> None:
    """Make the object `target` a tensor (a parameter if it was one) in the memory of `source`. Attributes stay."""
    _require_no_hooks(target)
    attributes = dict(vars(target))
    deferred = source.detach()
    other = torch.nn.Parameter(deferred, target.requires_grad) if isinstance(target, torch.nn.Parameter) else deferred
    swap(target, other)
    target.__dict__.update(attributes)


def run(function: OpOverload, args: tuple[Any, ...], named: dict[str, Any], *, constructing: bool) -> Any:
    """Log the call, or make it on real tensors where only values can answer.

    `constructing` is whether new tensors are to be deferred, and real ones constants: so it is inside zero.Init.
    Outside, what is computed is real, for torch hides `real.data = deferred` there; only a whole tensor that is cast or
    copied stays deferred.
    """
    tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    if not any(isinstance(tensor, DeferredTensor) for tensor in tensors):
        is_factory = not tensors or function.overloadpacket in LIKE
        is_new = constructing and (
            (is_factory and _makes_large(function, args, named)) or joins_files(function, tensors)
        )
        if not is_new:
            return function(*args, **named)
    written = written_by(function, args, named)
    if function is _aten.set_.source_Tensor:
        set_data(*args)
        return args[0]
    changes_real = any(not isinstance(tensor, DeferredTensor) for tensor in written)
    meets_real_data = not written and any(not isinstance(tensor, DeferredTensor) for tensor in tensors)
    if changes_real or (meets_real_data and not constructing):
        return _run_really(function, args, named)
    return _log(function, args, named, written, constructing=constructing)


def _log(
    function: OpOverload,
    args: tuple[Any, ...],
    named: dict[str, Any],
    written: list[DeferredTensor],
    *,
    constructing: bool,
) -> Any:
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    seeded = taking_generator(function) if is_random else function
    fill = as_fill(function, args)
    if fill is not None and not constructing and not _copies_whole(fill):
        return _run_really(function, args, named)
    if seeded is None and fill is None:
        return _run_really(function, args, named)
    if torch.Tag.inplace_view in function.tags:
        raise _not_deferrable(function)
    device = target_device(args, named)
    try:
        # A draw checks its arguments itself, and the first one on meta would load torch's compiler.
        outputs = written[0]._meta if is_random and written else _on_meta(function, args, named)
    except (NotImplementedError, RuntimeError) as error:
        if not written:
            return _run_really(function, args, named)  # values are needed; a mistake of the caller raises again
        if not isinstance(error, NotImplementedError):
            raise
        outputs = written[0]._meta
    if device.type == "meta":
        return outputs
    flat = tree_leaves(outputs)
    if not written and not all(isinstance(output, Tensor) and output.layout is torch.strided for output in flat):
        return _run_really(function, args, named)

    if fill is not None:
        filled = DeferredTensor(outputs, FakeStorage(device, outputs.untyped_storage().nbytes()))
        generator = {"generator": named["generator"]} if "generator" in named else {}
        if fill:
            operation, *values = fill
            run(operation, (filled, *values), generator, constructing=True)
        return filled
    assert seeded is not None  # only a fill may be random without

    inputs = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, DeferredTensor)]
    memories = {_storage_id(tensor._meta): tensor._memory for tensor in inputs}
    made: list[StridedView | None] = []
    for output in flat:
        is_new = isinstance(output, Tensor) and _storage_id(output) not in memories
        memory = FakeStorage(device, output.untyped_storage().nbytes()) if is_new else None
        made.append(None if memory is None else _place(output, memory))
        if memory is not None:
            memories[_storage_id(output)] = memory
    if any(made) and not constructing:
        return _run_really(function, args, named)
    if written or any(made):
        if any(made) and any(argument.name == "dtype" for argument in function._schema.arguments):
            named = {**named, "dtype": flat[0].dtype}  # the default may be another one at the replay
        _append(seeded, args, named, tuple(made), written, device if is_random else None)
    same = {id(tensor._meta): tensor for tensor in inputs}

    def wrap(output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        return same.get(id(output)) if id(output) in same else DeferredTensor(output, memories[_storage_id(output)])

    return tree_map(wrap, outputs)


def _copies_whole(fill: tuple[Any, ...]) -> bool:
    """Whether the fill is a copy of all that the source's memory holds."""
    return fill[:1] == (_aten.copy_.default,) and isinstance(fill[1], DeferredTensor) and _fills_memory(fill[1])


def _append(
    function: OpOverload,
    args: tuple[Any, ...],
    named: dict[str, Any],
    made: tuple[StridedView | None, ...],
    written: list[DeferredTensor],
    random_device: torch.device | None,
) -> None:
    """Log the call with the memory it makes and writes to; a random one draws, so that the generator moves on."""
    state = None
    if random_device is not None:
        named = dict(named)
        generator = named.pop("generator", None) or default_generator(random_device)
        state = (random_device, generator.get_state())
        scratch = {id(tensor): _scratch(tensor) for tensor in written}
        really = tree_map(lambda leaf: scratch[id(leaf)] if id(leaf) in scratch else _as_real(leaf), (args, named))
        function(*really[0], **really[1], generator=generator)
        if made:
            return_holes()
    logged_args, logged_named = tree_map(_as_logged, (args, named))
    overwritten = None
    if function.overloadpacket in OVERWRITING and _fills_memory(written[0]):
        others = [leaf.memory for leaf in tree_leaves((logged_args[1:], logged_named)) if isinstance(leaf, StridedView)]
        overwritten = None if written[0]._memory in others else written[0]._memory
    operation = LoggedCall(function, logged_args, logged_named, made, overwritten, state)
    for memory in {*(place.memory for place in made if place), *(tensor._memory for tensor in written)}:
        memory.history.append(operation)


def _scratch(tensor: DeferredTensor) -> Tensor:
    """Memory in the shape of `tensor`, for values that are never read."""
    nbytes = tensor._meta.untyped_storage().nbytes()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(allocate(nbytes, tensor.device), 0, tensor.shape, tensor.stride())


def _run_really(function: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    if any(isinstance(tensor, DeferredTensor) for tensor in written_by(function, args, named)):
        raise _not_deferrable(function)
    really_args, really_named = tree_map(_as_real, (args, named))
    return function(*really_args, **really_named)


def _makes_large(function: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether the factory makes a tensor that is worth deferring, and not on the meta device."""
    if not any(argument.name == "device" for argument in function._schema.arguments):
        return False
    if target_device(args, named).type == "meta":
        return False
    try:
        output = _on_meta(function, args, named)
    except (NotImplementedError, RuntimeError):
        return False  # the real call raises what is wrong
    return isinstance(output, Tensor) and output.layout is torch.strided and output.numel() > SMALL_NUMEL


def _on_meta(function: OpOverload, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The result of the call on the meta device: shapes and types without values."""
    meta_args, meta_named = tree_map(_as_meta, (args, dict(named)))
    if any(argument.name == "device" for argument in function._schema.arguments):
        meta_named["device"] = torch.device("meta")
    if function.overloadpacket in EQUAL_IN_SHAPE:
        function = EQUAL_IN_SHAPE[function.overloadpacket]
        meta_named.pop("generator", None)
    return function(*meta_args, **meta_named)


def _as_meta(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf._meta
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _as_real(leaf: Any) -> Any:
    return replay(leaf.place) if isinstance(leaf, DeferredTensor) else leaf


def _as_logged(leaf: Any) -> Any:
    if isinstance(leaf, DeferredTensor):
        return leaf.place
    return Constant.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf


def _fills_memory(tensor: DeferredTensor) -> bool:
    return tensor._meta.is_contiguous() and tensor._meta.nbytes == tensor._memory.nbytes


def _place(meta: Tensor, memory: FakeStorage) -> StridedView:
    """Where the tensor lies in `memory` that `meta` shows the geometry of."""
    return StridedView(memory, tuple(meta.shape), meta.stride(), int(meta.storage_offset()), meta.dtype)


def _storage_id(meta: Tensor) -> int:
    return int(meta.untyped_storage()._cdata)


def _not_deferrable(function: OpOverload) -> PolyaccelError:
    return PolyaccelError(
        f"{function} cannot be deferred, and it changes a tensor that was made inside zero.Init",
        hint="build the module that calls it outside zero.Init, or under zero.Init(enabled=False)",
        value=str(function),
    )
