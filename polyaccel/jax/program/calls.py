"""Calls out of a running program: operations of XLA that run a function of this process on the program's buffers.

The trampoline is csrc/jax/ffi.cpp, compiled with the package. XLA calls it on its own thread, and it calls back into
Python. The function and its operands were fixed when the program was traced, under a number (`tag`) that the program
carries. A function that runs in a call may not use JAX, whose threads wait for it.
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char, c_float, c_int32, c_int64, c_void_p
from functools import cache, wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import jax
import numpy as np

from polyaccel.accelerators.base import Accelerator
from polyaccel.comm.base import Communicator
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType
from polyaccel.errors import ConfigError, InvariantError, Problem
from polyaccel.ops.native import native

P = ParamSpec("P")
R = TypeVar("R")


def engine_call(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a call of users so that `jax.transfer_guard` allows its transfers, and `jax.set_mesh` does not place the
    engine's arrays."""

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> R:
        with jax.set_mesh(None), jax.transfer_guard("allow"):
            return function(*args, **named)

    return call


def require_used_devices(communicator: Communicator) -> None:
    """Raise ConfigError where a host has devices of JAX that no rank computes on: views mode has one a rank.

    `jax.default_device` of the script says that one is meant. Collective.
    """
    is_chosen = jax.config.jax_default_device is not None
    own = (1 if is_chosen else jax.local_device_count(), communicator.host_topology.local_size)
    for devices, ranks in communicator.all_gather_object(own):
        if devices > ranks:
            expected = f"computes on one device a rank, and a host with {ranks} ranks has {devices} devices"
            hint = (
                'use "native", which trains on all of them; or start a rank for each; or mean one device, by '
                'jax.config.update("jax_default_device", jax.devices()[0])'
            )
            raise ConfigError([Problem("jax.execution", "views", expected, hint)], source="initialize")


_TARGET = "polyaccel_call"
_MESSAGE_NBYTES = 4096
"""`PA_JAX_MESSAGE_NBYTES` of csrc/jax/ffi.h."""

_Callback = ctypes.CFUNCTYPE(c_int32, c_int64, POINTER(c_void_p), POINTER(c_void_p), POINTER(c_char))
_numbers = count(1)
_tables: WeakValueDictionary[int, CallTable] = WeakValueDictionary()

Run = Callable[[Sequence[Buffer], Sequence[Buffer]], None]


class CallTable:
    """The calls of an engine's programs. They live as long as the table. Raises ConfigError without the trampoline.

    A program is started with `token` and hands it from call to call: a chain of tokens is a total order. Its value
    distinguishes the tables of engines, so that equal programs of two engines are compiled once.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        register_target()
        number = next(_numbers)
        self.token = np.float32(number)
        self.failure: BaseException | None = None
        """The error of the first call that failed since this was None."""
        self._accelerator = accelerator
        self._number = number
        self._calls: list[ProgramCall] = []
        _tables[number] = self

    def close(self) -> None:
        """Let every later call of a program fail."""
        _tables.pop(self._number, None)

    def new(self, run: Run) -> ProgramCall:
        """A call of `run(operands, results)`, on buffers over XLA's memory that are valid until it returns."""
        self._calls.append(ProgramCall(len(self._calls), run, self._accelerator))
        return self._calls[-1]

    def answer(self, tag: int, operands: Any, results: Any) -> str | None:
        """Run a call on buffers at these addresses. Returns why it failed, or None."""
        try:
            self._calls[tag].run(operands, results)
        except BaseException as error:
            self.failure = self.failure or error
            return "".join(traceback.format_exception_only(error)).strip()
        return None


class ProgramCall:
    """One call of a program, put there where it is called while the program is traced."""

    def __init__(self, tag: int, run: Run, accelerator: Accelerator) -> None:
        self._tag = tag
        self._run = run
        self._accelerator = accelerator
        self._operands: tuple[_Place, ...] = ()
        self._results: tuple[_Place, ...] = ()

    def __call__(
        self, token: Any, operands: Sequence[Any], results: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[Any, list[Any]]:
        """Return (token, results); `operands` may only order: `run` starts when all are computed."""
        self._operands = tuple(_place_of(operand) for operand in operands)
        self._results = tuple(_place_of(result) for result in results)
        call = jax.ffi.ffi_call(
            _TARGET, (jax.ShapeDtypeStruct(token.shape, token.dtype), *results), input_output_aliases={0: 0}
        )
        token, *found = call(token, *operands, tag=np.int64(self._tag))
        return token, found

    def run(self, operands: Any, results: Any) -> None:
        """Run on buffers at these addresses, the first of which are the token's."""
        self._run(
            [self._buffer(operands[at], place) for at, place in enumerate(self._operands, 1)],
            [self._buffer(results[at], place) for at, place in enumerate(self._results, 1)],
        )

    def _buffer(self, address: int | None, place: _Place) -> Buffer:
        numel, dtype = place
        if numel == 0 or address is None:
            return self._accelerator.allocate(0, dtype)
        memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
        return self._accelerator.from_host_memory(np.ctypeslib.as_array(memory), dtype)


_Place = tuple[int, DType]
"""Elements and type of a buffer."""


def _place_of(array: Any) -> _Place:
    return int(np.prod(array.shape, dtype=np.int64)), DType.parse(np.dtype(array.dtype).name)


def _answer(tag: int, operands: Any, results: Any, message: Any) -> int:
    table = _tables.get(int(c_float.from_address(operands[0]).value))
    failure = table.answer(tag, operands, results) if table is not None else "the engine of this program is gone"
    if failure is None:
        return 0
    encoded = failure.encode()[: _MESSAGE_NBYTES - 1]
    ctypes.memmove(message, encoded + b"\0", len(encoded) + 1)
    return 1


_callback = _Callback(_answer)


@cache
def register_target() -> None:
    """Register the trampoline with XLA, once. Raises ConfigError without it."""
    found = native()
    if found.library is None or not hasattr(found.library, "pa_jax_handler"):
        expected = f"JAX needs polyaccel's compiled library to gather parameters: {found.reason}"
        hint = "install a C++ compiler and CMake, then polyaccel again; or use stage 0 to 2"
        raise ConfigError([Problem("zero_optimization.stage", 3, expected, hint)])
    found.library.pa_jax_set_callback.argtypes = (_Callback,)
    found.library.pa_jax_set_callback.restype = None
    found.library.pa_jax_set_callback(_callback)
    handler = jax.ffi.pycapsule(found.library.pa_jax_handler)
    try:
        jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    except Exception as error:
        raise InvariantError(f"XLA does not take csrc/jax/ffi.cpp: {error}", value=jax.__version__) from error
