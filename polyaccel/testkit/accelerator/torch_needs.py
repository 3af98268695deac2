"""What torch must support on a device so that modules train on it: each need as a value with a test.

An accelerator with a `torch_device_type` is held to them. A device of PrivateUse1 fulfils most by registering its
operators, its hooks (`at::PrivateUse1HooksInterface`) and a device module (`torch._register_device_module`).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn

from polyaccel.accelerators.base import Accelerator
from polyaccel.accelerators.torch_device import TorchAccelerator, require_torch_memory, torch_device_of

_MODULE = (
    *("device_count", "current_device", "set_device", "synchronize", "Stream", "Event", "stream", "current_stream"),
    *("get_rng_state", "set_rng_state", "memory_allocated", "max_memory_allocated", "memory_reserved"),
    *("reset_peak_memory_stats", "mem_get_info"),
)
_HOOKS = "NotImplementedError: You should register `PrivateUse1HooksInterface` ... and implement"


@dataclass(frozen=True, slots=True)
class TorchNeed:
    """Something that torch must be able to do on a device.

    Attributes:
        name: What torch does.
        used_for: What the engine uses it for.
        without: Error or effect without it.
        tried: Does it, and raises whatever its absence raises. SkipTest: the accelerator does not claim it.
    """

    name: str
    used_for: str
    without: str
    tried: Callable[[Accelerator], None]

    def check(self, accelerator: Accelerator) -> None:
        """Try it on a device.

        Args:
            accelerator: The device.

        Raises:
            AssertionError: The device does not meet the need. The message has the reason and the use.
            SkipTest: The accelerator does not claim it.
        """
        if accelerator.torch_device_type is None:
            raise SkipTest("torch does not have the device")
        try:
            self.tried(accelerator)
        except SkipTest:
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise AssertionError(
                f"torch cannot do this on {accelerator.torch_device_type!r}: {self.name}, which is used for "
                f"{self.used_for}; {type(error).__name__}: {reason}"
            ) from error


def _device_module(accelerator: Accelerator) -> None:
    module = torch.get_device_module(torch_device_of(accelerator).type)
    if isinstance(accelerator, TorchAccelerator):
        # What it lacks, a method of the accelerator may do otherwise.
        for name in ("device_count", "current_device", "set_device", "synchronize"):
            getattr(module, name)


def _copies(accelerator: Accelerator) -> None:
    device = torch_device_of(accelerator)
    host = torch.arange(-4, 5, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        there = torch.empty(9, dtype=dtype, device=device).copy_(host.to(dtype))
        _equal(there.cpu(), host.to(dtype))
    _equal(torch.zeros(9, device=device).copy_(torch.ones(9, device=device)).cpu(), torch.ones(9))
    _equal(host.to(device).to(torch.bfloat16).to(torch.float32).cpu(), host)


def _buffers(accelerator: Accelerator) -> None:
    require_torch_memory(accelerator)
    there = torch.ones(3, device=torch_device_of(accelerator))
    accelerator.wrap(there).fill(2)
    _equal(there.cpu(), torch.full((3,), 2.0))


def _views(accelerator: Accelerator) -> None:
    there = torch.arange(24, dtype=torch.float32).to(torch_device_of(accelerator))
    _equal(there.narrow(0, 4, 12).view(3, 4).t().cpu(), torch.arange(4.0, 16.0).view(3, 4).t())
    assert there.view(torch.uint8).numel() == 96
    there.narrow(0, 4, 2).fill_(7)
    _equal(torch.split(there, 6)[0].cpu(), torch.tensor([0.0, 1, 2, 3, 7, 7]))
    assert there.narrow(0, 4, 2).data_ptr() == there.data_ptr() + 16


def _parameters(accelerator: Accelerator) -> None:
    device = torch_device_of(accelerator)
    layer = nn.Linear(3, 2).to(device)
    flat = torch.arange(6.0).to(device)
    layer.weight.data = flat.view(2, 3)
    flat.fill_(1)
    _equal(layer.weight.detach().cpu(), torch.ones(2, 3))


def _storages(accelerator: Accelerator) -> None:
    there = torch.ones(64, device=torch_device_of(accelerator))
    storage = there.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(256)
    there.fill_(3)
    _equal(torch.empty(0, dtype=torch.uint8, device=there.device).set_(storage).view(torch.float32).cpu(), there.cpu())


def _autograd(accelerator: Accelerator) -> None:
    layer = nn.Linear(3, 2).to(torch_device_of(accelerator))
    arrived: list[Tensor] = []
    weight: Any = layer.weight
    weight.register_post_accumulate_grad_hook(arrived.append)
    loss = layer(torch.ones(4, 3).to(torch_device_of(accelerator))).square().mean()
    torch.autograd.backward(loss)
    assert arrived
    assert arrived[0] is layer.weight
    grad = layer.weight.grad
    assert grad is not None
    assert grad.device.type == layer.weight.device.type


def _arithmetic(accelerator: Accelerator) -> None:
    there = torch.tensor([4.0, 9.0, -1.0]).to(torch_device_of(accelerator))
    out = torch.empty_like(there)
    _equal(torch.mul(there, 2.0, out=out).cpu(), torch.tensor([8.0, 18.0, -2.0]))
    _equal(torch.sqrt(torch.abs(there, out=out), out=out).cpu(), torch.tensor([2.0, 3.0, 1.0]))
    _equal(torch.maximum(there, out, out=out).cpu(), torch.tensor([4.0, 9.0, 1.0]))
    _equal(torch.minimum(there, out, out=out).cpu(), torch.tensor([4.0, 9.0, -1.0]))
    _equal(torch.sign(there, out=out).add_(1).mul_(3).div_(2).cpu(), torch.tensor([3.0, 3.0, 0.0]))
    _equal(torch.where(there > 0, there, torch.nan).isnan().cpu(), torch.tensor([False, False, True]))


def _sums(accelerator: Accelerator) -> None:
    there = torch.tensor([3.0, float("inf"), 4.0]).to(torch_device_of(accelerator))
    assert not bool(there.sum().isfinite())
    total = torch.zeros(2, device=there.device)
    total[1].add_(there[::2].mul(there[::2]).sum())
    assert float(total[1].item()) == 25.0
    assert float(torch.stack([there[0], there[2]]).mean().item()) == 3.5


def _codes(accelerator: Accelerator) -> None:
    there = torch.tensor([-3.4, 2.6, float("nan"), 9.0]).to(torch_device_of(accelerator))
    codes = there.round_().nan_to_num_(0.0).clamp_(-7, 7).to(torch.int8)
    _equal(codes.cpu(), torch.tensor([-3, 3, 0, 7], dtype=torch.int8))
    pairs = (codes.view(torch.uint8) & 15).view(-1, 2)
    _equal((pairs[:, 0] | pairs[:, 1] << 4).cpu(), torch.tensor([0x3D, 0x70], dtype=torch.uint8))


def _generator(accelerator: Accelerator) -> None:
    device = torch_device_of(accelerator)
    before = accelerator.rng_state()
    try:
        accelerator.manual_seed(7)
        first = torch.nn.functional.dropout(torch.ones(64).to(device), 0.5).cpu()
        accelerator.manual_seed(7)
        _equal(torch.nn.functional.dropout(torch.ones(64).to(device), 0.5).cpu(), first)
    finally:
        accelerator.set_rng_state(before)


def _pinned(accelerator: Accelerator) -> None:
    if not accelerator.capabilities().host_pinning:
        raise SkipTest("does not claim host_pinning")
    assert torch.zeros(8, pin_memory=True).is_pinned()


def _streams(accelerator: Accelerator) -> None:
    if not accelerator.capabilities().streams:
        raise SkipTest("does not claim streams")
    there = torch.ones(8, device=torch_device_of(accelerator))
    stream: Any = accelerator.new_stream()
    there.record_stream(stream.raw)
    accelerator.synchronize()


def _autocast(accelerator: Accelerator) -> None:
    device = torch_device_of(accelerator)
    layer = nn.Linear(3, 2).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(torch.ones(1, 3).to(device)).dtype is torch.bfloat16


def _pickles(accelerator: Accelerator) -> None:
    stream = io.BytesIO()
    torch.save({"state": torch.arange(3.0).to(torch_device_of(accelerator))}, stream)
    found = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)["state"]
    _equal(found.cpu(), torch.arange(3.0))


def _equal(found: Tensor, expected: Tensor) -> None:
    if not torch.equal(found, expected):
        raise AssertionError(f"expected {expected.tolist()}, got {found.tolist()}")


NEEDS = (
    TorchNeed(
        "a device module, `torch.NAME`",
        f"`TorchAccelerator`, which calls {', '.join(_MODULE)}; override the method that calls one that it lacks",
        "RuntimeError: Invalid device string, or AttributeError: module 'torch' has no attribute NAME",
        _device_module,
    ),
    TorchNeed(
        "allocations, and copies from and to the host and between element types",
        "everything",
        "NotImplementedError: Could not run 'aten::empty.memory_format' (`aten::_copy_from`) with arguments from the "
        "'PrivateUse1' backend",
        _copies,
    ),
    TorchNeed(
        "buffers over tensors: `raw` of what `allocate` gives is one, and `wrap` takes one",
        "parameters and gradients, which are views of buffers",
        "PluginContractError: torch cannot see the memory of accelerator 'NAME'; or accelerator 'NAME' cannot wrap a "
        "torch.Tensor",
        _buffers,
    ),
    TorchNeed(
        "views (`narrow`, `view`, `split`, `t`, also as bytes) at their addresses",
        "buckets, of which parameters, gradients and slices are views",
        "NotImplementedError: Could not run 'aten::view' (`aten::as_strided`, `aten::_reshape_alias`)",
        _views,
    ),
    TorchNeed(
        "parameters: `module.to(device)`, and `parameter.data = view`",
        "parameters, which the engine puts into its buckets",
        "RuntimeError: Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible "
        "tensor type",
        _parameters,
    ),
    TorchNeed(
        "storages that are resized, also to nothing, and `set_`",
        "sharded parameters, which keep their shape without memory (stage 3), and `offload_states`",
        f"{_HOOKS} `resizePrivateUse1Bytes`; or 'aten::set_.source_Storage_storage_offset'",
        _storages,
    ),
    TorchNeed(
        "autograd with hooks on parameters",
        "gradients, which go into buckets as they arrive",
        "an error of the backward pass, or gradients that never arrive; a device guard "
        "(`C10_REGISTER_GUARD_IMPL`) is missing",
        _autograd,
    ),
    TorchNeed(
        "arithmetic into given memory: `mul`, `sqrt`, `abs`, `maximum`, `minimum`, `sign`, `where`, `add_`, `div_`",
        "optimizers and reductions, unless the accelerator's own kernels replace torch's",
        "NotImplementedError: Could not run 'aten::mul.out'; `at::native::cpu_fallback` serves what the device lacks",
        _arithmetic,
    ),
    TorchNeed(
        "`sum`, `mean`, `stack`, `isfinite`, `item`",
        "the norm, overflow and the loss",
        "NotImplementedError: Could not run 'aten::sum.IntList_out', 'aten::_local_scalar_dense'",
        _sums,
    ),
    TorchNeed(
        "rounding, clamping and bits of 8-bit integers",
        "quantised traffic (`zero_quantized_gradients`, `zero_quantized_weights`)",
        "NotImplementedError: Could not run 'aten::round.out', 'aten::bitwise_and.Tensor_out'",
        _codes,
    ),
    TorchNeed(
        "a generator for each device, from which `dropout` draws",
        "seeds, and random states in checkpoints",
        f"{_HOOKS} `getDefaultGenerator`; or a resumed run with other dropout",
        _generator,
    ),
    TorchNeed(
        "pinned host memory, where `host_pinning` is claimed",
        "offloaded states, whose copies overlap with the update",
        f"{_HOOKS} `getPinnedMemoryAllocator`",
        _pinned,
    ),
    TorchNeed(
        "`record_stream`, where `streams` is claimed",
        "activations that are moved to the host",
        "NotImplementedError: Could not run 'aten::record_stream'",
        _streams,
    ),
    TorchNeed(
        "`torch.autocast`",
        "`torch_autocast` of the config",
        "RuntimeError: User specified an unsupported autocast device_type; or layers that compute in float32",
        _autocast,
    ),
    TorchNeed(
        "`torch.save` and `torch.load`",
        "states that a torch optimizer or a module keeps by itself, in checkpoints",
        "AttributeError of `torch.storage.UntypedStorage`: call "
        "`torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)`",
        _pickles,
    ),
)
"""Every need, those first without which nothing works."""
