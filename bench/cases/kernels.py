"""Kernels of the host, torch's fused AdamW, DeepSpeed's CPUAdam where it is installed, and the memory's bandwidth.

GB/s count each byte that an operation has to read or write once, and *of stream* is their share of what the better of
`copy` and `triad` moved in the same run. *speed* is over the best peer with the same element types, by medians.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median

import torch

from bench.measure import interleave, seconds_of
from bench.runner import OUT, Option, begin, parse, record, say, table
from bench.training import ADAMW
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import CAST, DEQUANTIZE, QUANTIZE, REDUCE, SQUARE_SUMS, UPDATE, Rule, StochasticRounding
from polyaccel.ops.native import describe_native
from polyaccel.ops.optimizers import OPTIMIZERS, apply_direction

_STEP = 3
_BLOCK_NUMEL = 256
Call = tuple[int, Callable[[], object]]
"""Bytes that must move for an element, and what moves them."""
PEERS = {
    "AdamW": ("torch fused AdamW", "DeepSpeed CPUAdam"),
    "AdamW, bf16 weights and gradients": ("DeepSpeed CPUAdam, bf16 weights and gradients",),
    "AdamW, all bf16": ("torch fused AdamW, all bf16", "DeepSpeed CPUAdam, all bf16"),
}
"""What each of our kernels is compared with."""


def main(argv: Sequence[str]) -> int:
    """Print a table of each number of threads."""
    options = {
        "millions": Option(16, "elements of a buffer"),
        "rounds": Option(11, "of all kernels"),
        "threads": Option((1, 2), "threads"),
        "out": OUT,
    }
    args = parse("kernels", __doc__ or "", options, argv)
    begin()
    say(f"kernels: {describe_native()}")
    numel = args.millions * 10**6
    calls = make_calls(numel)
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds = interleave({name: partial(seconds_of, run) for name, (_, run) in calls.items()}, args.rounds)
        rates = {name: calls[name][0] * numel * 1e-9 / median(spent) for name, spent in seconds.items()}
        stream, rows = max(rates["copy"], rates["triad"]), []
        for name, (nbytes, _) in calls.items():
            spent, best = median(seconds[name]), nbytes * numel * 1e-9 / min(seconds[name])
            peers = [median(seconds[peer]) for peer in PEERS.get(name, ()) if peer in seconds]
            figures = f"{1e3 * spent:.2f}", f"{rates[name]:.1f}", f"{best:.1f}", f"{rates[name] / stream:.2f}"
            rows.append((name, str(nbytes), *figures, f"{min(peers) / spent:.2f}" if peers else ""))
        columns = ("kernel", "B/element", "median ms", "GB/s", "best GB/s", "of stream", "speed")
        table(f"{args.millions} M elements, {threads} threads, {args.rounds} rounds", columns, rows)
        record(args.out, f"kernels, {threads} threads", seconds)
    return 0


def make_calls(numel: int) -> dict[str, Call]:
    """Return all kernels over buffers of `numel` elements."""
    cpu, generator = CpuAccelerator("torch"), torch.Generator().manual_seed(0)

    def filled(dtype: DType) -> torch.Tensor:
        tensor: torch.Tensor = cpu.allocate(numel, dtype).raw
        return tensor.copy_(torch.rand(numel, generator=generator))

    wide = [filled(DType.FLOAT32) for _ in range(4)]
    narrow = [filled(DType.BFLOAT16) for _ in range(4)]
    spare = filled(DType.FLOAT32)
    calls: dict[str, Call] = {
        "copy": (8, lambda: spare.copy_(wide[1])),
        "triad": (12, lambda: torch.add(wide[1], wide[2], alpha=3.0, out=spare)),
        "torch fused AdamW": (28, partial(_torchs_adamw, *wide)),
        "torch fused AdamW, all bf16": (14, partial(_torchs_adamw, *narrow)),
    }
    if find_spec("deepspeed"):
        update = _deepspeeds_adamw()
        calls["DeepSpeed CPUAdam"] = (28, partial(update, *wide))
        calls["DeepSpeed CPUAdam, bf16 weights and gradients"] = (22, partial(update, *narrow[:2], *wide[2:]))
        calls["DeepSpeed CPUAdam, all bf16"] = (14, partial(update, *narrow))
    return {**calls, **_ours(cpu, wide, narrow, spare)}


def _torchs_adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    lists: list[list[torch.Tensor]] = [[p], [g], [m], [v], [], [torch.tensor(float(_STEP))]]
    (beta1, beta2), rest = ADAMW["betas"], {name: ADAMW[name] for name in ("lr", "weight_decay", "eps")}
    torch._fused_adamw_(*lists, beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **rest)


def _deepspeeds_adamw() -> Callable[..., object]:
    """Return its kernel, which is compiled at the first use on a machine (minutes)."""
    library = import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()
    settings = (3e-4, 0.9, 0.95, 1e-8, 0.01, True)
    library.create_adam(0, *settings, False)
    update: Callable[..., object] = partial(library.adam_update, 0, _STEP, *settings)
    return update


def _ours(
    cpu: CpuAccelerator, wide: list[torch.Tensor], narrow: list[torch.Tensor], spare: torch.Tensor
) -> dict[str, Call]:
    kernels = cpu.kernels()
    update, cast, reduce, quantize = kernels[UPDATE], kernels[CAST], kernels[REDUCE], kernels[QUANTIZE]
    (p, g, m, v), (p16, g16, m16, v16), to = map(cpu.wrap, wide), map(cpu.wrap, narrow), cpu.wrap(spare)
    numel = p.numel
    sums, codes = cpu.allocate(1, DType.FLOAT64), cpu.allocate(numel, DType.INT8)
    scales = cpu.allocate(-(-numel // _BLOCK_NUMEL), DType.FLOAT32)
    four_bits = cpu.allocate(-(-numel // 2), DType.UINT8)
    sgd = _rule("SGD", momentum=0.9, lr=1e-3, weight_decay=0.01)
    adagrad, lion = _rule("Adagrad", lr=1e-3), _rule("Lion", lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01)
    adamw, lamb = _rule("AdamW", **ADAMW), _rule("Lamb", **ADAMW)
    chance = StochasticRounding(key=1)
    return {
        "AdamW": (28, lambda: update(adamw, p, g, (m, v), None, 1.0)),
        "AdamW, bf16 weights and gradients": (22, lambda: update(adamw, p16, g16, (m, v), None, 1.0)),
        "AdamW, all bf16": (14, lambda: update(adamw, p16, g16, (m16, v16), None, 1.0)),
        "AdamW, bf16 gradient and out": (28, lambda: update(adamw, p, g16, (m, v), p16, 0.5)),
        "the same, rounded stochastically": (28, lambda: update(adamw, p, g16, (m, v), p16, 0.5, chance)),
        "SGD with momentum": (20, lambda: update(sgd, p, g, (m,))),
        "Adagrad": (20, lambda: update(adagrad, p, g, (v,))),
        "Lion": (20, lambda: update(lion, p, g, (m,))),
        "LAMB, direction": (28, lambda: update(lamb, p, g, (m, v, to))),
        "LAMB, apply": (12, lambda: update(apply_direction(1e-3), p, to, ())),
        "sum of squares": (4, lambda: kernels[SQUARE_SUMS](sums, [(0, g)])),
        "cast fp32 to bf16": (6, lambda: cast(g, p16)),
        "cast bf16 to fp32": (6, lambda: cast(g16, to)),
        "cast to bf16 stochastically": (6, lambda: cast(g, p16, chance)),
        "sum into fp32": (12, lambda: reduce(m, g, ReduceOp.SUM)),
        "sum bf16 into fp32": (10, lambda: reduce(m, g16, ReduceOp.SUM)),
        f"int8 blocks of {_BLOCK_NUMEL}": (5, lambda: quantize(g, codes, scales, _BLOCK_NUMEL)),
        "int8 back": (5, lambda: kernels[DEQUANTIZE](to, codes, scales, _BLOCK_NUMEL)),
        f"4-bit blocks of {_BLOCK_NUMEL}": (5, lambda: quantize(g, four_bits, scales, _BLOCK_NUMEL)),
    }


def _rule(name: str, **group: object) -> Rule:
    return OPTIMIZERS[name].rule(group, _STEP)
