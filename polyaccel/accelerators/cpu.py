"""The host processor: torch tensors where torch is installed, numpy arrays where it is not.

Everything runs at once, in order: streams are null streams. "Device memory" is this process's resident memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from polyaccel.accelerators.base import Accelerator, Capabilities, MemoryStats, NullStream, Probe, Stream
from polyaccel.accelerators.memory import host
from polyaccel.accelerators.memory.host import HostArrays
from polyaccel.core.buffer import Buffer
from polyaccel.core.types import DeviceId, DType
from polyaccel.errors import PluginContractError, ShardingError
from polyaccel.ops.base import KernelTable
from polyaccel.ops.matmul_autotune import MatrixChoice
from polyaccel.ops.native import host_threads, native_kernels


@cache
def _kernels(memory: HostArrays, native: bool) -> KernelTable:
    if memory == "torch":
        import torch

        from polyaccel.ops.torch.kernels import torch_kernels

        table, threads = torch_kernels(), torch.get_num_threads
    else:
        from polyaccel.ops.numpy import numpy_kernels

        table, threads = numpy_kernels(), host_threads
    return native_kernels(table, threads) if native else table


@cache
def _wrap(memory: HostArrays) -> Callable[[Any], Buffer]:
    """The function that makes a buffer of an array. Looked up once, because every gradient passes through it."""
    if memory == "torch":
        from polyaccel.accelerators.memory.torch import wrap_torch

        return wrap_torch
    from polyaccel.accelerators.memory.numpy import wrap_numpy

    return wrap_numpy


class CpuAccelerator(Accelerator):
    """The host.

    `memory` names the library whose arrays buffers are made of: by default torch where it is installed, else numpy.
    With `native` off the compiled kernels are not used even where they are installed.
    """

    name: ClassVar[str] = "cpu"
    torch_device_type: ClassVar[str | None] = "cpu"
    exported_variables: ClassVar[tuple[str, ...]] = ("OMP_", "MKL_", "KMP_", "GOMP_")

    def __init__(self, memory: HostArrays | None = None, *, native: bool = True) -> None:
        if memory not in (None, "torch", "numpy"):
            raise PluginContractError(
                f"cpu memory {memory!r} is unknown", hint='use "torch", "numpy" or None', value=memory
            )
        self.memory: HostArrays = memory or ("torch" if find_spec("torch") else "numpy")
        self._native = native

    @classmethod
    def probe(cls) -> Probe:
        return Probe(usable=True, reason="the host processor is always there", priority=0)

    def capabilities(self) -> Capabilities:
        dtypes = set(DType)
        if self.memory == "numpy" and not find_spec("ml_dtypes"):
            dtypes.remove(DType.BFLOAT16)
        return Capabilities(
            dtypes=frozenset(dtypes),
            default_comm="gloo" if self.memory == "torch" else "local",
            notes=(f"buffers are {'torch tensors' if self.memory == 'torch' else 'numpy arrays'}",),
        )

    def kernels(self) -> KernelTable:
        return _kernels(self.memory, self._native)

    def matrix_kernels(self, choice: MatrixChoice) -> KernelTable:
        """Return torch's oneDNN products, faster than its MKL for float32 on some processors; experts' by csrc."""
        if choice == "off" or self.memory != "torch":
            return KernelTable(self.name, {})
        from polyaccel.ops.torch.grouped import with_grouped_kernels
        from polyaccel.ops.torch.linear import faster_kernels, onednn_kernels

        return with_grouped_kernels(onednn_kernels() if choice == "on" else faster_kernels())

    def decode_kernels(self) -> KernelTable:
        if self.memory != "torch" or not self._native:
            return KernelTable(self.name, {})
        from polyaccel.ops.torch.decode import decode_kernels

        return decode_kernels()

    def allocate(self, numel: int, dtype: DType, *, pinned: bool = False) -> Buffer:
        if self.memory == "torch":
            import torch

            from polyaccel.accelerators.memory.torch import allocate_torch

            return allocate_torch(numel, dtype, torch.device("cpu"))
        from polyaccel.accelerators.memory.numpy import allocate_numpy

        return allocate_numpy(numel, dtype)

    def wrap(self, array: Any) -> Buffer:
        return _wrap(self.memory)(array)

    def import_array(self, array: Any) -> Buffer:
        if self.memory == "torch":
            from polyaccel.accelerators.memory.torch import import_torch

            return import_torch(array)
        from polyaccel.accelerators.memory.numpy import import_numpy

        return import_numpy(array)

    def from_host_memory(self, memory: Any, dtype: DType) -> Buffer:
        if self.memory == "torch":
            from polyaccel.accelerators.memory.torch import torch_over

            return torch_over(memory, dtype)
        from polyaccel.accelerators.memory.numpy import numpy_over

        return numpy_over(memory, dtype)

    def device_count(self) -> int:
        return 1

    def current_device(self) -> DeviceId:
        return DeviceId("cpu")

    def set_device(self, index: int) -> None:
        """Does nothing: launchers call this with the local rank, and every rank shares the one host."""

    def synchronize(self) -> None:
        return None

    def memory_stats(self) -> MemoryStats:
        return host.memory_stats()

    def reset_peak_memory(self) -> None:
        host.reset_peak()

    def manual_seed(self, seed: int) -> None:
        if self.memory == "torch":
            import torch

            torch.manual_seed(seed)
        else:
            np.random.seed(seed % 2**32)

    def rng_state(self) -> bytes:
        """torch's CPU generator, or numpy's global one."""
        if self.memory == "torch":
            import torch

            return torch.get_rng_state().numpy().tobytes()
        state = np.random.get_state(legacy=False)
        assert isinstance(state, dict)  # what legacy=False promises
        inner = state["state"]
        return json.dumps({**state, "state": {**inner, "key": inner["key"].tolist()}}).encode()

    def set_rng_state(self, state: bytes) -> None:
        """Raises ShardingError for a state that another kind of memory saved."""
        try:
            if self.memory == "torch":
                import torch

                torch.set_rng_state(torch.from_numpy(np.frombuffer(bytearray(state), dtype=np.uint8)))
            else:
                saved = json.loads(state)
                np.random.set_state({**saved, "state": {**saved["state"], "key": np.array(saved["state"]["key"])}})
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise ShardingError(
                f"{len(state)} bytes are not a random state of the cpu accelerator with {self.memory} memory: {error}",
                hint="restore a state with the accelerator that saved it",
                value=len(state),
            ) from error

    def new_stream(self) -> Stream:
        return NullStream()

    def current_stream(self) -> Stream:
        return NullStream()
