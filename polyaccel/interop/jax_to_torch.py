"""A function of JAX as a module of torch, its parameters those of any other module.

[Note: Recomputed JAX backward]
The operation saves its inputs, by autograd's own means, and its backward pass computes the rest again. So autograd
notices an input that was changed in between; activation checkpointing and `save_on_cpu` work; and of a sharded
parameter no memory is saved, which other parameters use by the time of the backward pass. Residuals that JAX would keep
are views of the very inputs, unseen by torch: an update between forward and backward would give wrong gradients in
silence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from torch.utils.dlpack import from_dlpack

from polyaccel.errors import PolyaccelError
from polyaccel.interop.dlpack_torch_jax import Handover, is_differentiable
from polyaccel.jax.program.function import require_no_parameter
from polyaccel.jax.pytree import as_array, named_leaves
from polyaccel.jax.views import CopyCount, address_of
from polyaccel.torch.sharding.leaf_modules import set_z3_leaf_module

ArrayFn = Callable[..., Any]
"""Arrays to a pytree of arrays."""


Check = Callable[[ClosedJaxpr, Sequence[jax.Array]], None]
"""Raises if a program must not run on these arrays."""
_programs_lock = Lock()
_TENSOR = "tensor"  # what stands for a tensor among constants, which are pairs


def as_torch(fn: Callable[..., Any], params: Any) -> JaxModule:
    """Make a function of JAX a torch module, which calls `fn(params, *args, **kwargs)` on tensors.

    Gradients of any order, `torch.utils.checkpoint`, threads, and every stage of ZeRO work. The backward pass runs the
    function again (see [Note: Recomputed JAX backward]). `torch.compile` leaves it as it is
    and compiles the model around it. Transforms of `torch.func` are refused.

    Args:
        fn: Function of JAX. It uses its first argument, and does not close over parameters.
        params: Pytree of arrays, which are copied. Floating leaves become trained parameters and others buffers, named
            by their path: `params["blocks"][0]["w"]` is "blocks.0.w".

    Returns:
        Module whose arguments are pytrees of tensors; other leaves (numbers, strings, None) and all shapes are
        constants of its compiled programs. Layers of one function share their programs. Results are the function's,
        with tensors for arrays, on the device of the arguments.

    Raises:
        ShardingError: Leaves are not arrays, or their names clash. A call raises it for a function that closed over
            parameters.

    Example:
        ```python
        layer = polyaccel.jax.as_torch(fn, params)
        outputs = layer(inputs)
        ```
    """
    return JaxModule(fn, params)


class JaxModule(nn.Module):
    """The torch module that `as_torch` makes.

    Args:
        fn: Function of JAX.
        params: Pytree of arrays.
    """

    def __init__(self, fn: Callable[..., Any], params: Any) -> None:
        super().__init__()
        leaves, structure = named_leaves(params)
        for fqn, leaf in leaves.items():
            _register(self, fqn, from_dlpack(as_array(leaf)).clone())
        self._call = _Call(fn, structure, tuple(leaves))
        self._call.know(leaves)
        # The modules that hold its parameters are never called themselves, so all are gathered around this one.
        set_z3_leaf_module(self, True)

    @property
    def copies(self) -> CopyCount:
        """Count arrays passed so far, copied and not; prints as "zero-copy 76/76"."""
        return self._call.handover.count()

    @torch.compiler.disable(reason="a function of JAX is compiled by JAX")  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        Args:
            *args: Pytrees of tensors. Any other leaf is a constant of the compiled program.
            **kwargs: As `args`, by name.

        Returns:
            The function's result, with tensors for arrays, on the device of the arguments.

        Raises:
            PolyaccelError: JAX cannot take an argument, or the call is inside a transform of `torch.func`.
        """
        if torch._C._are_functorch_transforms_active():
            raise PolyaccelError(
                "a function of JAX cannot run inside vmap, grad or another transform of torch.func",
                hint="use jax.vmap and the like in the function itself, and torch.autograd for gradients",
            )
        named = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        return self._call(named, args, kwargs)

    def extra_repr(self) -> str:
        return getattr(self._call.fn, "__name__", type(self._call.fn).__name__)


class _Call:
    """`fn` with parameters of the given tree structure and names, and the count of tensors and arrays that it takes and
    gives."""

    def __init__(self, fn: Callable[..., Any], structure: Any, names: tuple[str, ...]) -> None:
        self.fn = fn
        self.handover = Handover()
        self._structure = structure
        self._names = names
        self._programs = _shared_programs(fn, structure, names)

    def know(self, originals: Mapping[str, Any]) -> None:
        """Refuse programs that closed over `originals`, of which parameters are copies."""
        self._programs.know(originals)

    def __reduce__(self) -> Any:  # a copy counts for itself
        return _Call, (self.fn, self._structure, self._names)

    def __call__(self, named: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        params = [_present(named[name]) for name in self._names]
        leaves, form = jax.tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(_TENSOR if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        odd = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (Tensor, Hashable))})
        if odd:
            raise PolyaccelError(f"a {odd[0]} was passed to a function of JAX", hint="pass tensors", value=odd)
        return self._programs.operation(form, constants)(self.handover, *params, *tensors)


class _Programs:
    """The operations of `fn` with parameters of one tree structure and names, one for each form of arguments."""

    def __init__(self, fn: Callable[..., Any], structure: Any, names: tuple[str, ...]) -> None:
        self._fn = fn
        self._structure = structure
        self._names = names
        self._originals: list[tuple[str, ref[Any]]] = []
        self._operations: dict[Hashable, JaxOperation] = {}

    def know(self, originals: Mapping[str, Any]) -> None:
        arrays = {fqn: leaf for fqn, leaf in originals.items() if isinstance(leaf, (jax.Array, np.ndarray))}
        self._originals += [(fqn, ref(array)) for fqn, array in arrays.items()]

    def operation(self, form: Any, constants: tuple[Any, ...]) -> JaxOperation:
        """The operation for arguments of tree structure `form`, whose leaves are `constants`, or tensors."""
        found = self._operations.get((form, constants))
        if found is None:
            found = JaxOperation(self._function(form, constants), self._require_own_params)
            found = self._operations.setdefault((form, constants), found)  # another thread may have been here first
        return found

    def _require_own_params(self, program: ClosedJaxpr, arrays: Sequence[jax.Array]) -> None:
        """Raise ShardingError for a program that closed over parameters, or over the arrays that they are copies of."""
        present = zip(self._names, arrays[: len(self._names)], strict=True)
        known = [*present, *((fqn, original()) for fqn, original in self._originals)]
        owners = {address_of(array): fqn for fqn, array in known}
        owners.pop(None, None)
        require_no_parameter(program, lambda constant: owners.get(address_of(constant)))

    def _function(self, form: Any, constants: tuple[Any, ...]) -> Callable[..., Any]:
        """`fn` of arrays only: the leaves of the parameters, then those of the arguments."""
        count = self._structure.num_leaves

        def function(*arrays: Any) -> Any:
            params = jax.tree.unflatten(self._structure, arrays[:count])
            remaining = iter(arrays[count:])
            args, kwargs = jax.tree.unflatten(
                form, [next(remaining) if constant is _TENSOR else constant[1] for constant in constants]
            )
            return self._fn(params, *args, **kwargs)

        return function


_programs: WeakValueDictionary[Hashable, _Programs] = WeakValueDictionary()


def _shared_programs(fn: Callable[..., Any], structure: Any, names: tuple[str, ...]) -> _Programs:
    """The same for all layers of one function, so that a model of a hundred blocks compiles one."""
    try:
        key: Hashable = (hash(fn), fn, structure)
    except TypeError:  # what cannot be hashed; its id is taken as long as its programs live
        key = (id(fn), structure)
    with _programs_lock:
        found = _programs.get(key)
        if found is None:
            found = _programs[key] = _Programs(fn, structure, names)
        return found


def _present(tensor: Tensor) -> Tensor:
    """`tensor` with its values here: one that is sharded or still arriving is brought by any operation on it."""
    if has_torch_function_unary(tensor):
        tensor.detach()
    return tensor


def _register(root: nn.Module, fqn: str, value: Tensor) -> None:
    """Make `value` a parameter or buffer of `root` under a name with dots; modules in between are made."""
    *path, name = fqn.split(".")
    module = root
    try:
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if value.is_floating_point() or value.is_complex():
            module.register_parameter(name, nn.Parameter(value))
        else:
            module.register_buffer(name, value)
    except KeyError as error:
        raise PolyaccelError(
            f"a module of torch cannot have a parameter {fqn!r}: {error.args[0]}",
            hint="use another key for it in params",
            value=fqn,
        ) from None


class JaxOperation:
    """`fn`, arrays to a pytree of arrays, on tensors. Its gradient is an operation of this kind too.

    `check` is called before the first computation with arrays of new shapes; the gradients' programs hold no other
    constants.
    """

    def __init__(self, fn: ArrayFn, check: Check | None = None) -> None:
        self._fn = fn
        self._compiled = jax.jit(fn)
        self._check = check
        self._checked: set[Any] = set()
        self._gradients: dict[Any, JaxOperation] = {}

    def __call__(self, handover: Handover, *tensors: Tensor) -> Any:
        """The result, a pytree of tensors; `handover` counts tensors and arrays, those of the backward pass too."""
        structures: list[Any] = []
        results = _Apply.apply(self, handover, structures, *tensors)  # type: ignore[no-untyped-call]
        return jax.tree.unflatten(structures[0], results)

    def compute(self, handover: Handover, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The results, without a graph, and their tree structure."""
        arrays = [handover.to_jax(tensor) for tensor in tensors]
        self._require_checked(arrays)
        leaves, structure = jax.tree.flatten(jax.block_until_ready(self._compiled(*arrays)))
        return handover.to_torch(leaves, arrays), structure

    def _require_checked(self, arrays: Sequence[jax.Array]) -> None:
        if self._check is None:
            return
        signature = tuple((array.shape, array.dtype) for array in arrays)
        if signature not in self._checked:
            self._check(self._compiled.trace(*arrays).jaxpr, arrays)
            self._checked.add(signature)

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> JaxOperation:
        """(inputs, gradients of the `given` results) to a tuple of the gradients of the `wanted` inputs."""
        found = self._gradients.get((wanted, given))
        if found is None:
            found = JaxOperation(_gradient_of(self._fn, wanted, given))
            found = self._gradients.setdefault((wanted, given), found)  # another thread may have been here first
        return found


def _gradient_of(fn: ArrayFn, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> ArrayFn:
    def gradient(*arguments: Any) -> Any:
        inputs, cotangents = arguments[: len(wanted)], arguments[len(wanted) :]

        def of_wanted(*chosen: Any) -> tuple[Any, ...]:
            remaining = iter(chosen)
            every = [next(remaining) if is_wanted else one for one, is_wanted in zip(inputs, wanted, strict=True)]
            results = jax.tree.leaves(fn(*every))
            return tuple(result for result, is_given in zip(results, given, strict=True) if is_given)

        _, pull = jax.vjp(of_wanted, *(one for one, is_wanted in zip(inputs, wanted, strict=True) if is_wanted))
        # For complex numbers torch's gradient is the conjugate of JAX's; real ones are left as they are.
        return tuple(jnp.conj(found) for found in pull(tuple(jnp.conj(one) for one in cotangents)))

    return gradient


class _Apply(torch.autograd.Function):
    """See [Note: Recomputed JAX backward]."""

    @staticmethod
    def forward(
        ctx: Any, operation: JaxOperation, handover: Handover, structures: list[Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        results, structure = operation.compute(handover, tensors)
        structures.append(structure)
        ctx.operation, ctx.handover = operation, handover
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(result for result in results if not is_differentiable(result)))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        given = tuple(gradient is not None for gradient in gradients)
        if not any(given):
            return (None,) * (len(wanted) + 3)
        operation = ctx.operation.gradient(wanted, given)
        given_gradients = (one for one in gradients if one is not None)
        found = iter(operation(ctx.handover, *ctx.saved_tensors, *given_gradients))
        return None, None, None, *(next(found) if is_wanted else None for is_wanted in wanted)
