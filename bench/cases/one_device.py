"""Step time, memory and host synchronisations of a GPT on one device, next to plain torch and FSDP2.

`python -m bench one-device --size 350m` trains every variant in this process, one after another, in bf16:

- `torch`: autocast, float32 weights, fused AdamW; `compiled`: the same under `torch.compile`;
- `fsdp2`: `fully_shard` of each block with bf16 parameters and float32 reductions;
- `pa0` to `pa3`: polyaccel at each stage with `bf16.enabled`; `-host`: AdamW on the host; `-compiled`: `compile()`;
- `fsdp2-host`: FSDP2 with its `CPUOffloadPolicy`.

MFU counts 6 operations a parameter and token, and those of attention, over `--peak` TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.training import Block

SIZES = {"2m": (2, 128, 4), "350m": (24, 1024, 16), "1.3b": (24, 2048, 16), "7b": (32, 4096, 32)}
"""Layers, width and heads by name."""
VOCABULARY = 50304
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
VARIANTS = (
    "torch",
    "compiled",
    "fsdp2",
    "pa0",
    "pa1",
    "pa2",
    "pa3",
    "pa2-host",
    "fsdp2-host",
    "pa0-compiled",
    "pa2-compiled",
)


class LargeGpt(nn.Module):
    """GPT of a size of `SIZES` over 50,304 tokens, with the same weights in every variant."""

    def __init__(self, size: str, length: int) -> None:
        super().__init__()
        layers, width, heads = SIZES[size]
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats a token. `tokens` and `targets` are int64, (batch, length)."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))


@dataclass
class Built:
    """A variant in training: `step` runs forward, backward and update, and returns the loss on the device."""

    step: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None]


def build_model(size: str, length: int, device: torch.device) -> LargeGpt:
    """Return the model, drawn on the device."""
    torch.manual_seed(1234)
    with device:
        return LargeGpt(size, length)


def plain(args: argparse.Namespace, device: torch.device, *, compiled: bool) -> Built:
    """Return plain torch with autocast."""
    model = build_model(args.size, args.length, device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    called: Any = torch.compile(model) if compiled else model

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss: Tensor = called(tokens, targets)
        update(loss, model, optimizer)
        return loss

    return Built(step, torch.compiler.reset)


def update(loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run backward, clip and update as plain torch does."""
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def fsdp2(args: argparse.Namespace, device: torch.device, *, offload: bool) -> Built:
    """Return FSDP2 on one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    model = build_model(args.size, args.length, device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=place)
    fully_shard(model, mp_policy=policy, offload_policy=place)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        update(loss, model, optimizer)
        return loss

    return Built(step, lambda: None)


def engine(args: argparse.Namespace, device: torch.device, stage: int, kind: str) -> Built:
    """Return polyaccel at a stage."""
    import polyaccel

    zero: dict[str, Any] = {"stage": stage}
    if kind == "host":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    found, *_ = polyaccel.initialize(model=build_model(args.size, args.length, device), config=config)
    if kind == "compiled":
        found.compile()

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = found(tokens, targets)
        found.backward(loss)
        found.step()
        return loss

    return Built(step, found.destroy)


def build(args: argparse.Namespace, variant: str, device: torch.device) -> Built:
    """Return the variant of this name."""
    if variant in ("torch", "compiled"):
        return plain(args, device, compiled=variant == "compiled")
    if variant.startswith("fsdp2"):
        return fsdp2(args, device, offload=variant.endswith("host"))
    return engine(args, device, int(variant[2]), variant.partition("-")[2])


@contextmanager
def synchronisations(device: torch.device) -> Iterator[Counter[str]]:
    """Count what makes the host wait for the device, by the line of Python that asks for it."""
    found: Counter[str] = Counter()
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if "synchroniz" in str(each.message):
            found[f"{each.filename.rpartition('site-packages/')[2]}:{each.lineno}"] += 1


def train(args: argparse.Namespace, variant: str, device: torch.device) -> dict[str, Any]:
    """Return the figures of one variant."""
    module: Any = torch.get_device_module(device)
    draws = torch.Generator().manual_seed(5)
    shape = (args.micro_batch, args.length + 1)
    batches = [torch.randint(0, VOCABULARY, shape, generator=draws).to(device) for _ in range(4)]
    if device.type != "cpu":
        module.reset_peak_memory_stats()
    before = module.memory_allocated() if device.type != "cpu" else 0
    built = build(args, variant, device)
    held = module.memory_allocated() - before if device.type != "cpu" else 0
    losses, times = [], []
    for number in range(args.warmup):
        losses.append(built.step(batches[number % 4][:, :-1], batches[number % 4][:, 1:]).item())
    allocations = module.memory_stats().get("num_device_alloc", 0) if device.type == "cuda" else 0
    for _ in range(args.rounds):
        begin, end = (module.Event(enable_timing=True) for _ in range(2)) if device.type != "cpu" else (None, None)
        if begin is not None:
            begin.record()
        for number in range(args.steps):
            loss = built.step(batches[number % 4][:, :-1], batches[number % 4][:, 1:])
        if begin is not None and end is not None:
            end.record()
            module.synchronize()
            times.append(begin.elapsed_time(end) / args.steps / 1e3)
        losses.append(loss.item())
    allocations = (module.memory_stats().get("num_device_alloc", 0) if device.type == "cuda" else 0) - allocations
    peak = module.max_memory_allocated() if device.type != "cpu" else 0
    with synchronisations(device) as waits:
        built.step(batches[0][:, :-1], batches[0][:, 1:])
    if args.trace and device.type == "cuda":
        profile(args, variant, built, batches[0])
    built.close()
    return {
        "step_s": median(times) if times else 0.0,
        "spread_s": max(times) - min(times) if times else 0.0,
        "peak_gib": peak / 2**30,
        "held_gib": held / 2**30,
        "allocations": allocations,
        "syncs": sum(waits.values()),
        "sync_lines": waits.most_common(12),
        "losses": losses,
    }


def profile(args: argparse.Namespace, variant: str, built: Built, batch: Tensor) -> None:
    """Write the kernels and calls of two steps to `--trace`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            built.step(batch[:, :-1], batch[:, 1:])
        torch.cuda.synchronize()
    averages = found.key_averages()
    with open(args.trace, "a") as file:
        file.write(f"==== {args.size} {variant}, two steps\n")
        file.write(averages.table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=70))
        file.write(averages.table(sort_by="self_cpu_time_total", row_limit=16, max_name_column_width=60))


def flops(size: str, length: int) -> float:
    """Return the operations of a token in forward and backward."""
    layers, width, _ = SIZES[size]
    weights = 12 * layers * width**2 + VOCABULARY * width
    return float(6 * weights + 6 * layers * width * length)


def update_rates(device: torch.device, numel: int = 1 << 28) -> dict[str, float]:
    """Return GB/s of a copy, of torch's fused AdamW and of this device's kernel, over float32 weights and states."""
    from polyaccel.accelerators.detect import get_accelerator
    from polyaccel.core.types import DType
    from polyaccel.ops.base import UPDATE
    from polyaccel.ops.optimizers import OPTIMIZERS

    events: Any = torch.cuda.Event

    def rate(nbytes: int, call: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(12):
            begin, end = (events(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return nbytes / median(times[3:]) / 1e9

    source, target = torch.randn(numel, device=device), torch.empty(numel, device=device)
    found = {"copy": rate(8 * numel, lambda: target.copy_(source))}
    weights = nn.Parameter(source)
    weights.grad = torch.randn(numel, device=device)
    optimizer = torch.optim.AdamW([weights], fused=True, **ADAMW)
    found["torch_fused"] = rate(28 * numel, optimizer.step)
    del optimizer
    accelerator = get_accelerator()
    kernels = accelerator.kernels()
    rule = OPTIMIZERS["AdamW"].rule({**ADAMW}, 3)
    buffers = [accelerator.allocate(numel, DType.FLOAT32) for _ in range(4)]
    out = accelerator.allocate(numel, DType.BFLOAT16)
    kernel = kernels[UPDATE]
    for buffer in buffers[:2]:
        buffer.raw.normal_()
    found["polyaccel"] = rate(28 * numel, lambda: kernel(rule, buffers[0], buffers[1], buffers[2:]))
    found["polyaccel_and_bf16"] = rate(30 * numel, lambda: kernel(rule, buffers[0], buffers[1], buffers[2:], out))
    return found


def main(argv: list[str]) -> int:
    """Train every variant, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m bench one-device", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=VARIANTS[:7], choices=VARIANTS)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s of the device in bf16 (default: an H100's)")
    parser.add_argument("--rates", action="store_true", help="measure AdamW's kernels too")
    parser.add_argument("--trace", help="file for profiles of two steps of each variant")
    args = parser.parse_args(argv)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29533")
    from polyaccel.accelerators.detect import get_accelerator
    from polyaccel.accelerators.torch_device import torch_device_of

    device = torch_device_of(get_accelerator())
    if args.rates:
        try:
            print("rates", json.dumps(update_rates(device)), flush=True)
        except Exception:
            traceback.print_exc()
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
    tokens = args.micro_batch * args.length
    for variant in args.variants:
        try:
            found = train(args, variant, device)
        except Exception:
            print(f"{args.size} {variant} FAILED\n{traceback.format_exc()}", flush=True)
            found = None
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device).empty_cache()
        if found is None:
            continue
        step = found["step_s"] or float("inf")
        mfu = flops(args.size, args.length) * tokens / step / args.peak / 1e12
        print(
            f"{args.size} {variant:12} step {1e3 * step:8.2f} ms +-{1e3 * found['spread_s']:.2f} "
            f"{tokens / step:9.0f} tok/s MFU {100 * mfu:5.1f} % peak {found['peak_gib']:6.2f} GiB "
            f"held {found['held_gib']:6.2f} allocations {found['allocations']} syncs {found['syncs']} losses "
            + " ".join(f"{loss:.5f}" for loss in found["losses"]),
            flush=True,
        )
        if found["sync_lines"]:
            print("    syncs:", json.dumps(found["sync_lines"]), flush=True)
    return 0
