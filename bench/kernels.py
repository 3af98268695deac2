"""The host's kernels beside torch's fused AdamW, DeepSpeed's CPUAdam where that is installed, and what memory allows.

All in one sitting, in another order each round. GB/s count each byte that an operation has to read or write once, and
*of stream* is their share of what the better of `copy` and `triad` moved in the same sitting; an update in place beats
those where a store first reads the line that it fills, for an update has read it anyway. *speed* is that over the best
peer with the same element types, by medians.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

import torch

from bench.machine import describe_machine
from bench.steps.sitting import positive
from bench.table import make_console, make_table
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.core.types import DType, ReduceOp
from polyaccel.ops.base import (
    CAST,
    DEQUANTIZE,
    QUANTIZE,
    REDUCE,
    SQUARE_SUMS,
    UPDATE,
    KernelTable,
    Rule,
    StochasticRounding,
)
from polyaccel.ops.native import describe_native
from polyaccel.ops.optimizers import OPTIMIZERS, apply_direction

_ADAMW = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
_STEP = 3
_BLOCK_NUMEL = 256
Case = tuple[int, Callable[[], object]]
"""Bytes that must move for an element, and what moves them."""
STREAMS = ("copy", "triad")
PEERS = {
    "AdamW": ("torch fused AdamW", "DeepSpeed CPUAdam"),
    "AdamW, bf16 weights and gradients": ("DeepSpeed CPUAdam, bf16 weights and gradients",),
    "AdamW, all bf16": ("torch fused AdamW, all bf16", "DeepSpeed CPUAdam, all bf16"),
}
"""What each of our cases is compared with."""


def main(argv: Sequence[str]) -> int:
    """`python -m bench kernels`."""
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument("--millions", type=positive, default=16, help="elements of a buffer (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=11, help="of all cases (default: %(default)s)")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the figures as a JSON line")
    args = parser.parse_args(argv)
    console, machine = make_console(), describe_machine()
    console.print(str(machine))
    console.print(f"kernels: {describe_native()}")
    cases = make_cases(args.millions * 10**6)
    figures = {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds = measure(cases, args.rounds)
        figures[threads] = seconds
        title = f"{args.millions} M elements, {threads} thread{'s' if threads > 1 else ''}, {args.rounds} rounds"
        columns = ("kernel", "B/element", "median ms", "GB/s", "best GB/s", "of stream", "speed")
        table = make_table(title, columns)
        rates = {name: cases[name][0] * args.millions * 1e-3 / median(spent) for name, spent in seconds.items()}
        stream = max(rates[name] for name in STREAMS)
        for name, (nbytes, _) in cases.items():
            best = nbytes * args.millions * 1e-3 / min(seconds[name])
            peers = [median(seconds[peer]) for peer in PEERS.get(name, ()) if peer in seconds]
            speed = f"{min(peers) / median(seconds[name]):.2f}" if peers else ""
            spent = f"{1e3 * median(seconds[name]):.2f}"
            table.add_row(
                name, str(nbytes), spent, f"{rates[name]:.1f}", f"{best:.1f}", f"{rates[name] / stream:.2f}", speed
            )
        console.print(table)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps({"kernel_s": figures, "millions": args.millions, "machine": str(machine)}) + "\n")
    return 0


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order, random = list(cases), Random(0)
    for number in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            run = cases[name][1]
            began = perf_counter()
            run()
            if number:
                seconds[name].append(perf_counter() - began)
    return seconds


def make_cases(numel: int) -> dict[str, Case]:
    cpu = CpuAccelerator("torch")
    generator = torch.Generator().manual_seed(0)

    def filled(dtype: DType) -> torch.Tensor:
        tensor: torch.Tensor = cpu.allocate(numel, dtype).raw
        return tensor.copy_(torch.rand(numel, generator=generator))

    wide = [filled(DType.FLOAT32) for _ in range(4)]
    narrow = [filled(DType.BFLOAT16) for _ in range(4)]
    spare = filled(DType.FLOAT32)
    cases: dict[str, Case] = {
        "copy": (8, lambda: spare.copy_(wide[1])),
        "triad": (12, lambda: torch.add(wide[1], wide[2], alpha=3.0, out=spare)),
        "torch fused AdamW": (28, partial(_torchs_adamw, *wide)),
        "torch fused AdamW, all bf16": (14, partial(_torchs_adamw, *narrow)),
    }
    if find_spec("deepspeed"):
        update = _deepspeeds_adamw()
        cases["DeepSpeed CPUAdam"] = (28, partial(update, *wide))
        cases["DeepSpeed CPUAdam, bf16 weights and gradients"] = (22, partial(update, *narrow[:2], *wide[2:]))
        cases["DeepSpeed CPUAdam, all bf16"] = (14, partial(update, *narrow))
    return {**cases, **_ours(cpu, cpu.kernels(), wide, narrow, spare)}


def _torchs_adamw(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    torch._fused_adamw_(
        *([p], [g], [m], [v], [], [torch.tensor(float(_STEP))]),
        lr=3e-4,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def _deepspeeds_adamw() -> Callable[..., object]:
    """Its kernel, compiled at the first use on a machine (minutes)."""
    library = import_module("deepspeed.ops.op_builder").CPUAdamBuilder().load()
    settings = (3e-4, 0.9, 0.95, 1e-8, 0.01, True)
    library.create_adam(0, *settings, False)
    update: Callable[..., object] = partial(library.adam_update, 0, _STEP, *settings)
    return update


def _ours(
    cpu: CpuAccelerator,
    table: KernelTable,
    wide: list[torch.Tensor],
    narrow: list[torch.Tensor],
    spare: torch.Tensor,
) -> dict[str, Case]:
    (p, g, m, v), (p16, g16, m16, v16), to = map(cpu.wrap, wide), map(cpu.wrap, narrow), cpu.wrap(spare)
    numel = p.numel
    sums, codes = cpu.allocate(1, DType.FLOAT64), cpu.allocate(numel, DType.INT8)
    scales = cpu.allocate(-(-numel // _BLOCK_NUMEL), DType.FLOAT32)
    four_bits = cpu.allocate(-(-numel // 2), DType.UINT8)
    sgd = _rule("SGD", momentum=0.9, lr=1e-3, weight_decay=0.01)
    adagrad, lion = _rule("Adagrad", lr=1e-3), _rule("Lion", lr=1e-4, betas=(0.9, 0.99), weight_decay=0.01)
    adamw, lamb = _rule("AdamW", **_ADAMW), _rule("Lamb", **_ADAMW)
    chance = StochasticRounding(key=1)
    return {
        "AdamW": (28, lambda: table[UPDATE](adamw, p, g, (m, v), None, 1.0)),
        "AdamW, bf16 weights and gradients": (22, lambda: table[UPDATE](adamw, p16, g16, (m, v), None, 1.0)),
        "AdamW, all bf16": (14, lambda: table[UPDATE](adamw, p16, g16, (m16, v16), None, 1.0)),
        "AdamW, bf16 gradient and out": (28, lambda: table[UPDATE](adamw, p, g16, (m, v), p16, 0.5)),
        "the same, rounded stochastically": (28, lambda: table[UPDATE](adamw, p, g16, (m, v), p16, 0.5, chance)),
        "SGD with momentum": (20, lambda: table[UPDATE](sgd, p, g, (m,))),
        "Adagrad": (20, lambda: table[UPDATE](adagrad, p, g, (v,))),
        "Lion": (20, lambda: table[UPDATE](lion, p, g, (m,))),
        "LAMB, direction": (28, lambda: table[UPDATE](lamb, p, g, (m, v, to))),
        "LAMB, apply": (12, lambda: table[UPDATE](apply_direction(1e-3), p, to, ())),
        "sum of squares": (4, lambda: table[SQUARE_SUMS](sums, [(0, g)])),
        "cast fp32 to bf16": (6, lambda: table[CAST](g, p16)),
        "cast bf16 to fp32": (6, lambda: table[CAST](g16, to)),
        "cast to bf16 stochastically": (6, lambda: table[CAST](g, p16, chance)),
        "sum into fp32": (12, lambda: table[REDUCE](m, g, ReduceOp.SUM)),
        "sum bf16 into fp32": (10, lambda: table[REDUCE](m, g16, ReduceOp.SUM)),
        f"int8 blocks of {_BLOCK_NUMEL}": (5, lambda: table[QUANTIZE](g, codes, scales, _BLOCK_NUMEL)),
        "int8 back": (5, lambda: table[DEQUANTIZE](to, codes, scales, _BLOCK_NUMEL)),
        f"4-bit blocks of {_BLOCK_NUMEL}": (5, lambda: table[QUANTIZE](g, four_bits, scales, _BLOCK_NUMEL)),
    }


def _rule(name: str, **group: object) -> Rule:
    return OPTIMIZERS[name].rule(group, _STEP)
