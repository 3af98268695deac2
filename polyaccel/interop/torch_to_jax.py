"""A module of torch as a function of JAX.

[Note: Impure modules]
JAX needs a function whose result depends on its arguments alone. So before a form of arguments is compiled, the module
runs once on zeros: its results' shapes are learnt, and a module that draws random numbers or changes a buffer (batch
norm in training) is refused. Whether it trains or evaluates is a constant of the program like the shapes.

[Note: Serialized module calls]
A module computes with the parameters that are in it, so JAX's are put there for the time of a call, its backward
included, which may run parts of the module again (`torch.utils.checkpoint`). JAX calls from many threads, within one
program too, so every call holds the module and its children for itself.

[Note: Purity of JAX functions]
JAX may call a pure function as often as it likes, and the backward pass here runs it again. Hence a function that
changes its inputs is refused here, and one that depends on anything but its inputs is refused by
`torch_to_jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack

from polyaccel.errors import PolyaccelError
from polyaccel.interop.dlpack_torch_jax import Handover, narrow
from polyaccel.jax.views import CopyCount
from polyaccel.torch.sharding.sharded import require_unsharded

_SEEDING = Lock()  # torch's generator is one for all threads
TensorFn = Callable[..., Sequence[Tensor]]
"""A function of an ExitStack and tensors. Contexts that it enters there last until its results' gradients are
computed."""
_turns_lock = Lock()
_ARRAY = "array"  # what stands for an array among constants, which are pairs


def as_jax(module: nn.Module) -> TorchFunction:
    """Make a torch module a function of JAX: `fn(params, *args, rng=None, **kwargs)`.

    It works under `jit`, `grad` of any order and `vmap` (one call an element), and from any thread. The backward pass
    runs the module again. Each callback costs about 0.2 ms, and results are copied once. While a program runs, the
    module holds the program's parameters.

    Args:
        module: Module on the CPU. Buffers, and parameters that need no gradient, are constants of the function.

    Returns:
        Function of JAX, whose `params` are copies of the module's trained parameters by full name.

    Raises:
        ShardingError: An engine holds the module sharded.
        PolyaccelError: The module is not on the CPU.

    Example:
        ```python
        fn = polyaccel.torch.as_jax(module)
        outputs = jax.jit(fn)(fn.params, inputs)
        ```
    """
    return TorchFunction(module)


class TorchFunction:
    """The function of JAX that `as_jax` makes.

    Args:
        module: Module on the CPU.
    """

    def __init__(self, module: nn.Module) -> None:
        require_unsharded(module)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device.type != "cpu":
                raise PolyaccelError(
                    f"{name!r} is on {tensor.device}, and JAX calls torch on the CPU",
                    hint="call module.cpu() first",
                    value=str(tensor.device),
                )
        self.module = module
        self._handover = Handover()
        self._names = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
        self._operations: dict[Hashable, tuple[HostOperation, Any]] = {}

    @property
    def params(self) -> dict[str, jax.Array]:
        """Copies of the module's trained parameters as they are now, by full name."""
        with _held(self.module):
            named = dict(self.module.named_parameters())
        return {name: jnp.array(self._handover.to_jax(named[name]), copy=True) for name in self._names}

    @property
    def copies(self) -> CopyCount:
        """Number of arrays that went to torch and tensors that came back so far, copied and not."""
        return self._handover.count()

    def __call__(self, params: Any, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """Run the module.

        Args:
            params: Arrays by full name, as in `params`.
            *args: Pytrees of arrays. Any other leaf is a constant of the compiled program.
            rng: Random key, which decides the numbers of a module that draws some; such a module needs it.
            **kwargs: As `args`, by name.

        Returns:
            The module's result, with arrays for tensors.

        Raises:
            PolyaccelError: Parameters have other names, or the module cannot be a function of JAX. See
            [Note: Impure modules].
        """
        if set(params) != set(self._names):
            odd = sorted(set(params) ^ set(self._names))
            raise PolyaccelError(
                f"parameters {odd} are missing or unknown", hint="pass a pytree like fn.params", value=odd
            )
        leaves, form = jax.tree.flatten((args, kwargs))
        constants = tuple(_ARRAY if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        arrays = [jnp.asarray(one) for one in (*(params[name] for name in self._names), *filter(_is_array, leaves))]
        if rng is not None:
            arrays.append(jax.random.bits(rng, (), jnp.uint32))
        arguments = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        described = tuple((one.shape, one.dtype) for one in arguments)
        key = (form, constants, described, rng is not None, self._modes())
        if key not in self._operations:
            self._operations[key] = self._compile(form, constants, arguments, rng is not None)
        operation, structure = self._operations[key]
        return jax.tree.unflatten(structure, operation(*arrays))

    def _modes(self) -> tuple[bool, ...]:
        return tuple(part.training for part in self.module.modules())

    def _compile(
        self, form: Any, constants: Sequence[Any], arguments: Sequence[jax.ShapeDtypeStruct], is_seeded: bool
    ) -> tuple[HostOperation, Any]:
        """The operation for one form of arguments, and the tree structure of its results."""
        modes = self._modes()
        plainly = self._function(form, constants)

        def run(until: ExitStack, *tensors: Tensor) -> list[Tensor]:
            if self._modes() != modes:
                raise PolyaccelError(
                    "module.train() or module.eval() was called after its function was compiled",
                    hint="compile a function for each: call jax.jit on it again",
                )
            buffers = dict(self.module.named_buffers())
            versions = [buffer._version for buffer in buffers.values()]
            params, seed = (tensors[:-1], int(tensors[-1])) if is_seeded else (tensors, None)
            result = plainly(until, buffers, params, seed)
            _require_unchanged(buffers, versions)
            return jax.tree.leaves(result)  # type: ignore[no-any-return]

        zeros = [torch.zeros(argument.shape, dtype=getattr(torch, argument.dtype.name)) for argument in arguments]
        # Layers of JAX in the module run on the zeros now, though this be a call in a program that is being traced.
        with jax.ensure_compile_time_eval(), torch.no_grad(), _Draws(is_refused=not is_seeded), ExitStack() as until:
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            versions = [buffer._version for buffer in buffers.values()]
            result = plainly(until, buffers, zeros[:-1], 0) if is_seeded else plainly(until, buffers, zeros, None)
            _require_unchanged(buffers, versions)
            require_unwritten(zeros)
        leaves, structure = jax.tree.flatten(result)
        odd = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        if odd:
            raise PolyaccelError(f"the module returned a {odd[0]}", hint="return tensors only", value=odd[0])
        results = [describe(narrow(leaf)) for leaf in leaves]
        return HostOperation(run, arguments, results, self._handover), structure

    def _function(
        self, form: Any, constants: Sequence[Any]
    ) -> Callable[[ExitStack, dict[str, Tensor], Sequence[Tensor], int | None], Any]:
        """Return the module as a function of buffers, tensors and a seed, bound until the stack is left."""

        def function(until: ExitStack, buffers: dict[str, Tensor], tensors: Sequence[Tensor], seed: int | None) -> Any:
            params = dict(zip(self._names, tensors, strict=False))
            remaining = iter(tensors[len(self._names) :])
            leaves = [next(remaining) if constant is _ARRAY else constant[1] for constant in constants]
            args, kwargs = jax.tree.unflatten(form, leaves)
            until.enter_context(_with_tensors(self.module, {**params, **buffers}))
            if seed is None:
                return self.module(*args, **kwargs)
            with _SEEDING, torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return self.module(*args, **kwargs)

        return function


_turns: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


@contextmanager
def _held(module: nn.Module) -> Iterator[None]:
    """Keep other threads from calling `module` or a part of it. See [Note: Serialized module calls]."""
    with _turns_lock:
        turns = [_turns.setdefault(part, RLock()) for part in sorted(module.modules(), key=id)]  # one order for all
    with ExitStack() as held:
        for turn in turns:
            held.enter_context(turn)
        yield


@contextmanager
def _with_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """`module`, held, with other parameters and buffers."""
    with _held(module), _reparametrize_module(module, dict(tensors), tie_weights=True):
        yield


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _require_unchanged(buffers: dict[str, Tensor], versions: Sequence[int]) -> None:
    """Raise PolyaccelError if a buffer's version is not the given one any more."""
    for (name, buffer), version in zip(buffers.items(), versions, strict=True):
        if buffer._version != version:
            raise PolyaccelError(
                f"the module changes its buffer {name!r}, and JAX may run it any number of times",
                hint="call module.eval() before the function is compiled",
                value=name,
            )


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for operations that draw random numbers."""

    def __init__(self, is_refused: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_refused = is_refused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_refused and torch.Tag.nondeterministic_seeded in func.tags:
            raise PolyaccelError(
                f"the module draws random numbers ({func}), and its backward would draw others",
                hint="pass rng=, a random key, or call module.eval() first",
                value=str(func),
            )
        return func(*args, **(kwargs or {}))


class HostOperation:
    """`run`, tensors on the CPU to tensors, on arrays; `arguments` and `results` are the shapes and types of both."""

    def __init__(
        self,
        run: TensorFn,
        arguments: Sequence[jax.ShapeDtypeStruct],
        results: Sequence[jax.ShapeDtypeStruct],
        handover: Handover,
    ) -> None:
        self._run = run
        self._arguments = tuple(arguments)
        self._results = tuple(results)
        self._handover = handover
        self._function = jax.custom_vjp(self._call_host)
        self._function.defvjp(self._save, self._pull)

    def __call__(self, *arrays: Any) -> Any:
        """The tuple of results."""
        return self._function(*arrays)

    def _call_host(self, *arrays: Any) -> Any:
        return jax.pure_callback(self._on_host, self._results, *arrays, vmap_method="sequential")

    def _save(self, *arrays: Any) -> Any:
        return self._function(*arrays), arrays

    def _pull(self, arrays: Any, cotangents: Any) -> Any:
        # For complex numbers torch's gradient is the conjugate of JAX's; real ones are left as they are.
        given = (jnp.conj(one) for one, result in zip(cotangents, self._results, strict=True) if _is_inexact(result))
        found = iter(self._gradient(*arrays, *given))
        return tuple(
            jnp.conj(next(found)) if _is_inexact(one) else np.zeros(one.shape, jax.dtypes.float0)
            for one in self._arguments
        )

    @cached_property
    def _gradient(self) -> HostOperation:
        """(arguments, gradients of the inexact results) to the gradients of the inexact arguments."""
        given = [result for result in self._results if _is_inexact(result)]
        wanted = [argument for argument in self._arguments if _is_inexact(argument)]
        return HostOperation(self._run_gradient, [*self._arguments, *given], wanted, self._handover)

    def _run_gradient(self, until: ExitStack, *tensors: Tensor) -> Sequence[Tensor]:
        count = len(self._arguments)
        is_differentiated = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [
                one.detach().requires_grad_() if _is_inexact(argument) and not one.requires_grad else one
                for one, argument in zip(tensors[:count], self._arguments, strict=True)
            ]
            wanted = [one for one, argument in zip(inputs, self._arguments, strict=True) if _is_inexact(argument)]
            results = zip(self._run(until, *inputs), self._results, strict=True)
            inexact = [result for result, expected in results if _is_inexact(expected)]
            pairs = [pair for pair in zip(inexact, tensors[count:], strict=True) if pair[0].requires_grad]
            if not pairs:
                return [torch.zeros_like(one) for one in wanted]
            return torch.autograd.grad(
                [result for result, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                create_graph=is_differentiated,
                allow_unused=True,
                materialize_grads=True,
            )

    def _on_host(self, *arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
        tensors = [from_dlpack(array) for array in arrays]
        for array, tensor in zip(arrays, tensors, strict=True):
            self._handover.note(tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr())
        with torch.no_grad(), ExitStack() as until:
            results = self._run(until, *tensors)
        require_unwritten(tensors)
        return tuple(
            self._to_host(narrow(result.detach()), expected)
            for result, expected in zip(results, self._results, strict=True)
        )

    def _to_host(self, tensor: Tensor, expected: jax.ShapeDtypeStruct) -> np.ndarray[Any, Any]:
        """`tensor` as numpy, which JAX copies from. Raises PolyaccelError where it is not what was `expected`."""
        if describe(tensor) != expected:
            raise PolyaccelError(
                f"the module returned {tensor.dtype} {tuple(tensor.shape)} where {expected.dtype} {expected.shape} was "
                "compiled",
                hint="let shapes and types of results depend on those of the inputs only",
                value=tuple(tensor.shape),
            )
        self._handover.note(False)
        plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw = plain.view(torch.uint8).numpy()  # numpy has no name for some of torch's types, but JAX's dtypes do
        return raw.view(expected.dtype).reshape(expected.shape)  # type: ignore[no-any-return]


def require_unwritten(tensors: Sequence[Tensor]) -> None:
    """Raise PolyaccelError if any of `tensors`, new ones before the module ran, was changed in place."""
    if any(tensor._version for tensor in tensors):
        raise PolyaccelError(
            "the module changed an input or a parameter in place, which is the memory of JAX",
            hint="use the operation that gives a new tensor, for example relu for relu_",
        )


def describe(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """Shape and type of `tensor` in JAX's words."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


def _is_inexact(described: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(described.dtype, jnp.inexact))
