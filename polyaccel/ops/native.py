"""The compiled ops on host memory: one pass over a slice for every optimizer, for all element types.

`pip install` compiles csrc/ where it finds CMake and a C++ compiler, and installs without where it does not. Nothing is
compiled later. csrc/kernels/kernels.h declares the functions, and its version has to be `ABI_VERSION`.

The kernels are in csrc/kernels. This module finds and loads `libpolyaccel_cpu`, and puts arguments together. They agree
bitwise with `polyaccel.ops.numpy` on every instruction set and for any number of threads ([Note: One rounding per
operation] in csrc/kernels/updates.h). Calls that they do not cover, above all updates in float64, go to the fallback
table.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DType, ReduceOp
from polyaccel.errors import ConfigError, InvariantError, Problem, ShardingError
from polyaccel.ops.base import (
    DEQUANTIZE,
    QUANTIZE,
    REDUCE,
    SCALE,
    SQUARE_SUMS,
    Formula,
    KernelTable,
    StochasticRounding,
    by_op,
    code_bits,
)
from polyaccel.ops.fused import COMPUTED_IN_FLOAT32, FusedKernels
from polyaccel.ops.rounding import halves

ABI_VERSION = 10
VARIABLE = "POLYACCEL_NATIVE"
"""Environment variable: "off", or the instruction set to use instead of this processor's best one."""

_ISAS = ("avx512", "avx2", "portable", "neon")
_FILE = Path("lib", "libpolyaccel_cpu.dylib" if sys.platform == "darwin" else "libpolyaccel_cpu.so")
_HINT = "install CMake and a C++ compiler (GCC or Clang), then polyaccel again"


class CArray(ctypes.Structure):
    """`pa_array`: the address of the first element, and the code of the element type."""

    _fields_ = (("data", c_void_p), ("type", c_int32))


class CRounding(ctypes.Structure):
    """`pa_rounding`: the halves of the key, the lower first, and the index of the first element."""

    _fields_ = (("key", c_uint32 * 2), ("start", c_uint64))


class CUpdateShape(ctypes.Structure):
    """`pa_shape`: an update's name (None: the update does not exist), and how much it takes."""

    _fields_ = (("name", c_char_p), ("arrays", c_int32), ("constants", c_int32))


_SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "pa_choose_isa": (c_char_p,),
    "pa_update_shape": (c_int32,),
    "pa_update": (
        *(c_int32, c_int64, POINTER(CArray), c_int32, CArray, POINTER(c_double), c_int32),
        *(POINTER(CRounding), c_int32),
    ),
    "pa_combine": (c_int32, c_int64, c_int32, c_void_p, c_void_p, c_int32),
    "pa_square_sums": (c_void_p, c_int64, POINTER(c_int64), POINTER(CArray), POINTER(c_int64), c_int32),
    "pa_quantize": (c_int32, c_int64, c_int64, CArray, c_void_p, c_void_p, c_int32),
    "pa_dequantize": (c_int32, c_int64, c_int64, CArray, c_void_p, c_void_p, c_int32),
    "pa_products_scratch": (c_int64, c_void_p, c_int32),
    "pa_products": (c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "pa_symmetric_scratch": (c_int64, c_int64, c_int32),
    "pa_symmetric_product": (c_void_p, c_void_p, c_int32),
    "pa_linear_rows": (c_void_p, c_int32),
    "pa_grouped_rows": (c_void_p, c_int32),
    "pa_steps": (c_int64, c_void_p, c_int64, c_void_p, c_int32),
    "pa_attend": (c_void_p, c_void_p, c_int32),
}


@dataclass(frozen=True)
class Native:
    """The loaded library and its path, or None and the reason why it is not used."""

    library: ctypes.CDLL | None
    reason: str

    @property
    def isa(self) -> str:
        """The instruction set in use; empty without a library."""
        return self.library.pa_isa().decode() if self.library else ""

    def update_kinds(self) -> dict[str, int]:
        """The codes of `pa_update`, by the names of csrc/kernels/updates.h."""
        kinds: dict[str, int] = {}
        while self.library is not None and (found := self.library.pa_update_shape(len(kinds)).name) is not None:
            kinds[found.decode()] = len(kinds)
        return kinds

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the library, without the GIL. Raises InvariantError when it refuses its arguments."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise InvariantError(f"{name} refused its arguments with code {code}", value=arguments)


@cache
def native() -> Native:
    """Load the compiled library once. Raises ConfigError for an unusable `POLYACCEL_NATIVE`."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return Native(None, f"{VARIABLE}=off")
    path = _find()
    if path is None:
        return Native(None, f"csrc/ was not compiled when polyaccel was installed; {_HINT}")
    try:
        library = ctypes.CDLL(str(path))
        version = library.pa_abi_version()
    except (OSError, AttributeError) as error:
        return Native(None, f"{path} cannot be loaded ({error}); {_HINT}")
    if version != ABI_VERSION:
        return Native(None, f"{path} is of another version ({version}, not {ABI_VERSION}); install polyaccel again")
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.pa_isa.restype = c_char_p
    library.pa_products_scratch.restype = c_int64
    library.pa_symmetric_scratch.restype = c_int64
    library.pa_update_shape.restype = CUpdateShape
    if wanted and library.pa_choose_isa(wanted.encode()):
        expected = f"one of off, {', '.join(_ISAS)}, as far as this processor has it"
        raise ConfigError([Problem(VARIABLE, wanted, expected, "unset it")], source="environment")
    return Native(library, str(path))


def describe_native() -> str:
    """One line for reports: the instruction set and the library's path, or the reason why there is none."""
    found = native()
    return f"csrc {found.isa} ({found.reason})" if found.library else f"none: {found.reason}"


def host_threads() -> int:
    """Return how many threads a kernel may use where no framework sets it: `OMP_NUM_THREADS`, or the usable cores."""
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if stated.isdigit() and int(stated):
        return int(stated)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _find() -> Path | None:
    """Next to this package; or, when its sources are used where they lie, where pip put what it compiled."""
    local = Path(__file__).parents[1] / _FILE
    if local.exists():
        return local
    try:
        installed = Path(str(metadata.distribution("polyaccel").locate_file(Path("polyaccel", _FILE))))
    except metadata.PackageNotFoundError:
        return None
    return installed if installed.exists() else None


_WORTH_NBYTES = 4096
"""Shorter data is done before a call of the library has begun."""


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Return zlib's crc32 of `data` continuing `value`; long data without the interpreter's lock."""
    fast = _native_crc32() if len(data) >= _WORTH_NBYTES else None
    if fast is None:
        return zlib.crc32(data, value)
    memory = np.frombuffer(data, np.uint8)
    return fast(value, memory.ctypes.data, memory.nbytes)


@cache
def _native_crc32() -> Callable[[int, int, int], int] | None:
    library = native().library
    if library is None:
        return None
    library.pa_crc32_is_fast.restype = c_int32
    library.pa_crc32.restype, library.pa_crc32.argtypes = c_uint32, (c_uint32, c_void_p, c_int64)
    function: Callable[[int, int, int], int] = library.pa_crc32
    return function if library.pa_crc32_is_fast() else None


# The codes of csrc/kernels/kernels.h.
TYPES = {
    dtype: code
    for code, dtype in enumerate(
        (
            *(DType.FLOAT64, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
            *(DType.INT64, DType.INT32, DType.INT16, DType.INT8, DType.UINT8),
        )
    )
}
_COMBINE = {ReduceOp.SUM: "sum", ReduceOp.AVG: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min", ReduceOp.PROD: "prod"}

_SQUARED = COMPUTED_IN_FLOAT32 | {DType.FLOAT64}
_NOTHING = CArray(None, 0)


def native_kernels(fallback: KernelTable, threads: Callable[[], int]) -> KernelTable:
    """Return compiled kernels before `fallback`, or `fallback`; `threads()` is asked at each call."""
    found = native()
    if found.library is None:
        return fallback
    kernels = _NativeKernels(found, fallback, threads)
    return fallback.replaced(
        f"csrc {found.isa}",
        by_op(
            *(kernels.combine, kernels.scale, kernels.cast, kernels.square_sums, kernels.update),
            *(kernels.quantize, kernels.dequantize),
        ),
    )


def c_array(buffer: Buffer) -> CArray:
    return CArray(buffer.data_ptr(), TYPES[buffer.dtype])


def are_computed_in_float32(buffers: Sequence[Buffer | None]) -> bool:
    """Whether all buffers are float32, bfloat16 or float16 in host memory."""
    return all(b is None or (b.dtype in COMPUTED_IN_FLOAT32 and b.device.type == "cpu") for b in buffers)


class _NativeKernels(FusedKernels):
    """The kernels as methods; each has the signature of its op."""

    def __init__(self, library: Native, fallback: KernelTable, threads: Callable[[], int]) -> None:
        super().__init__(fallback)
        self._library = library
        self._threads = threads
        self._kinds = library.update_kinds()

    def _has(self, formula: Formula) -> bool:
        return formula.name in self._kinds

    def _fits(self, buffers: Sequence[Buffer | None]) -> bool:
        return are_computed_in_float32(buffers)

    def _sweep(
        self,
        name: str,
        arrays: Sequence[Buffer],
        out: Buffer | None,
        constants: Sequence[float],
        rounding: StochasticRounding | None,
    ) -> None:
        self._library.call(
            "pa_update",
            self._kinds[name],
            arrays[0].numel,
            (CArray * len(arrays))(*map(c_array, arrays)),
            len(arrays),
            _NOTHING if out is None else c_array(out),
            (c_double * len(constants))(*constants),
            len(constants),
            None if rounding is None else CRounding(halves(rounding.key), rounding.start),
            self._threads(),
        )

    def combine(self, target: Buffer, source: Buffer, op: ReduceOp) -> None:
        """See `ReduceFn`. `source` is rounded to `target`'s type first."""
        if are_computed_in_float32((target, source)):
            if source.numel != target.numel:
                raise ShardingError(f"{source!r} does not match {target!r}", value=source.numel)
            self._sweep(_COMBINE[op], (target, source), None, (), None)
            target.bump_version()
        elif target.dtype is source.dtype and target.dtype in TYPES and target.numel == source.numel:
            arguments = (TYPES[target.dtype], target.data_ptr(), source.data_ptr(), self._threads())
            self._library.call("pa_combine", self._kinds[_COMBINE[op]], target.numel, *arguments)
            target.bump_version()
        else:
            self._fallback[REDUCE](target, source, op)

    def scale(self, target: Buffer, factor: float) -> None:
        """See `ScaleFn`."""
        if are_computed_in_float32((target,)):
            self._sweep("scale", (target,), None, (factor,), None)
            target.bump_version()
        else:
            self._fallback[SCALE](target, factor)

    def square_sums(self, out: Buffer, pieces: Sequence[tuple[int, Buffer]]) -> None:
        """See `SquareSumsFn`. What a piece adds depends on its contents only."""
        if out.dtype is not DType.FLOAT64 or not all(piece.dtype in _SQUARED for _, piece in pieces):
            self._fallback[SQUARE_SUMS](out, pieces)
            return
        for index, piece in pieces:
            if not 0 <= index < out.numel:
                raise ShardingError(f"{out!r} has no place {index} for the sum of {piece!r}", value=index)
        count = len(pieces)
        indices = (c_int64 * count)(*(index for index, _ in pieces))
        arrays = (CArray * count)(*(c_array(piece) for _, piece in pieces))
        numels = (c_int64 * count)(*(piece.numel for _, piece in pieces))
        self._library.call("pa_square_sums", out.data_ptr(), count, indices, arrays, numels, self._threads())
        out.bump_version()

    def quantize(self, source: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `QuantizeFn`."""
        if not are_computed_in_float32((source,)):
            self._fallback[QUANTIZE](source, codes, scales, block_numel)
            return
        self._blocks("pa_quantize", source, codes, scales, block_numel)
        codes.bump_version()
        scales.bump_version()

    def dequantize(self, out: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        """See `DequantizeFn`."""
        if not are_computed_in_float32((out,)):
            self._fallback[DEQUANTIZE](out, codes, scales, block_numel)
            return
        self._blocks("pa_dequantize", out, codes, scales, block_numel)
        out.bump_version()

    def _blocks(self, name: str, values: Buffer, codes: Buffer, scales: Buffer, block_numel: int) -> None:
        bits = code_bits(values, codes, scales, block_numel)
        memory = (c_array(values), codes.data_ptr(), scales.data_ptr())
        self._library.call(name, bits, values.numel, block_numel, *memory, self._threads())
