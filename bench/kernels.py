"""The host's kernels beside torch's fused AdamW and what memory allows, in one interleaved sitting.

GB/s count each byte that an operation has to read or write once. `copy` and `triad` are the limits; an update in place
beats them where a store first reads the line that it fills, for an update has read it anyway.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from bench.machine import describe_machine
from bench.sitting import positive
from bench.table import make_console, make_table
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.ops.base import (
    ADAGRAD,
    ADAM,
    COMBINE,
    LION,
    QUANTIZE,
    SGD,
    SQUARE_SUMS,
    AdagradHyper,
    AdamHyper,
    KernelTable,
    LionHyper,
    SgdHyper,
)
from polyaccel.ops.native_library import describe_native
from polyaccel.types import DType, ReduceOp

_ADAM = AdamHyper(lr=3e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, step=3)
_BLOCK_NUMEL = 256
Case = tuple[int, Callable[[], object]]
"""Bytes that must move for an element, and what moves them."""


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
        table = make_table(title, ("kernel", "B/element", "median ms", "GB/s", "best GB/s"))
        for name, (nbytes, _) in cases.items():
            total = nbytes * args.millions * 1e-3  # GB
            middle, best = median(seconds[name]), min(seconds[name])
            row = (name, str(nbytes), f"{1e3 * middle:.2f}", f"{total / middle:.1f}", f"{total / best:.1f}")
            table.add_row(*row)
        console.print(table)
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps({"kernel_s": figures, "millions": args.millions, "machine": str(machine)}) + "\n")
    return 0


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (_, run) in cases.items():
            began = perf_counter()
            run()
            if number:
                seconds[name].append(perf_counter() - began)
    return seconds


def make_cases(numel: int) -> dict[str, Case]:
    cpu = CpuAccelerator("torch")
    generator = torch.Generator().manual_seed(0)
    master, grad, average, square, spare = (torch.rand(numel, generator=generator) for _ in range(5))
    step = torch.tensor(float(_ADAM.step))

    def fused() -> None:
        torch._fused_adamw_(
            *([master], [grad], [average], [square], [], [step]),
            lr=_ADAM.lr,
            beta1=_ADAM.beta1,
            beta2=_ADAM.beta2,
            weight_decay=_ADAM.weight_decay,
            eps=_ADAM.eps,
            amsgrad=False,
            maximize=False,
        )

    return {
        "copy": (8, lambda: spare.copy_(grad)),
        "triad": (12, lambda: torch.add(grad, average, alpha=3.0, out=spare)),
        "torch fused AdamW": (28, fused),
        **_ours(cpu, cpu.kernels(), [master, grad, average, square]),
    }


def _ours(cpu: CpuAccelerator, table: KernelTable, tensors: list[torch.Tensor]) -> dict[str, Case]:
    p, g, m, v = map(cpu.wrap, tensors)
    numel = p.numel
    g16, out16 = cpu.wrap(tensors[1].bfloat16()), cpu.allocate(numel, DType.BFLOAT16)
    sums, codes = cpu.allocate(1, DType.FLOAT64), cpu.allocate(numel, DType.INT8)
    scales = cpu.allocate(-(-numel // _BLOCK_NUMEL), DType.FLOAT32)
    sgd = SgdHyper(lr=1e-3, momentum=0.9, dampening=0.0, weight_decay=0.01, nesterov=False, first=False)
    adagrad = AdagradHyper(lr=1e-3, eps=1e-10, weight_decay=0.0, lr_decay=0.0, step=3)
    lion = LionHyper(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.01)
    return {
        "AdamW": (28, lambda: table[ADAM](p, g, m, v, None, _ADAM, 1.0)),
        "AdamW, gradient scale": (28, lambda: table[ADAM](p, g, m, v, None, _ADAM, 0.5)),
        "AdamW, bf16 gradient and out": (28, lambda: table[ADAM](p, g16, m, v, out16, _ADAM, 0.5)),
        "SGD with momentum": (20, lambda: table[SGD](p, g, m, None, sgd, 1.0)),
        "Adagrad": (20, lambda: table[ADAGRAD](p, g, v, None, adagrad, 1.0)),
        "Lion": (20, lambda: table[LION](p, g, m, None, lion, 1.0)),
        "sum of squares": (4, lambda: table[SQUARE_SUMS](sums, [(0, g)])),
        "sum into fp32": (12, lambda: table[COMBINE](m, g, ReduceOp.SUM)),
        "sum bf16 into fp32": (10, lambda: table[COMBINE](m, g16, ReduceOp.SUM)),
        f"int8 blocks of {_BLOCK_NUMEL}": (5, lambda: table[QUANTIZE](g, codes, scales, _BLOCK_NUMEL)),
    }
