"""Weights from an engine to another process, and a plain copy of as many bytes.

Receivers load them into their own models, each in a process of one thread, and compare every digest. `transfer` is
over shared memory, `groups` over TCP and gloo. `copy` is a copy by torch of all parameters into memory that has been
touched, in the process of the engine.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from bench.measure import interleave, read_memory, reset_peak
from bench.runner import MIB, OUT, Option, begin, parse, rank_environment, record, say, table
from bench.sizes import SHAPES

LIMIT = 0.5
"""Least rate of a transfer, of that of a copy."""
_WARMUP = 1


def main(argv: Sequence[str]) -> int:
    """Return 1 if the limit is missed."""
    options = {
        "size": Option("126m", "model", SHAPES),
        "rounds": Option(7, "transfers"),
        "bucket_mib": Option(4, "MiB of a bucket"),
        "out": OUT,
    }
    args = parse("weights", __doc__ or "", options, argv)
    begin()
    import torch

    import polyaccel
    from bench.training import Gpt

    torch.set_num_threads(1)
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = polyaccel.initialize(model=Gpt(args.size), config=config)
    params = [parameter.detach() for parameter in engine.module.parameters()]
    copies = [torch.zeros_like(one) for one in params]
    peaks: list[int] = []
    cpu: dict[str, list[float]] = {"copy": [], "transfer": [], "groups": []}
    os.environ["POLYACCEL_JOB_SECRET"] = secrets.token_hex(32)
    with TemporaryDirectory(prefix="polyaccel-bench-") as folder, ExitStack() as stack:
        times = args.rounds + _WARMUP
        near = stack.enter_context(_receiver(args.size, f"unix:{folder}/socket", times))
        far = stack.enter_context(_receiver(args.size, "tcp://127.0.0.1:0", times))

        def copy() -> None:
            for target, one in zip(copies, params, strict=True):
                target.copy_(one)

        def measured(name: str, action: Callable[[], object]) -> Callable[[], float]:
            def measure() -> float:
                before = read_memory()["VmRSS"]
                reset_peak()
                began, spent = perf_counter(), process_time()
                action()
                took = perf_counter() - began
                cpu[name].append(process_time() - spent)
                if name != "copy":
                    peaks.append(read_memory()["VmHWM"] - before)
                return took

            return measure

        def send(address: str) -> None:
            engine.send_weights(address, bucket_nbytes=args.bucket_mib * MIB)

        ways: dict[str, Callable[[], object]] = {"copy": copy}
        ways |= {"transfer": lambda: send(near), "groups": lambda: send(far)}
        seconds = interleave({name: measured(name, way) for name, way in ways.items()}, args.rounds, _WARMUP)
    nbytes = sum(one.nbytes for one in params)
    rows = []
    for name, each in seconds.items():
        times = [f"{1e3 * value:.0f}" for value in (median(each), min(each), median(cpu[name]))]
        rows.append((name, *times, f"{nbytes / median(each) / 1e9:.2f}"))
    title = f"Weights of {args.size}, {nbytes / MIB:.0f} MiB, to another process"
    table(title, ("way", "ms", "min ms", "CPU ms here", "GB/s"), rows)
    ratio, over_groups = (
        median(first / second for first, second in zip(seconds["copy"], seconds[name], strict=True))
        for name in ("transfer", "groups")
    )
    say(f"of the copy's rate: {ratio:.2f}, {'within' if ratio >= LIMIT else 'MISSES'} the goal of {LIMIT:g}")
    say(f"over groups: {over_groups:.2f} of the copy's rate, by way of the loopback")
    say(f"more memory of the sender at most: {max(peaks) / MIB:.0f} MiB")
    record(args.out, "weights", seconds)
    return int(ratio < LIMIT)


@contextmanager
def _receiver(size: str, address: str, times: int) -> Iterator[str]:
    """Start a process that receives so many times, and return its address."""
    command = [sys.executable, "-m", "bench.cases.weights", size, address, str(times)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=rank_environment()) as process:
        assert process.stdout is not None  # it is a pipe
        yield process.stdout.readline().strip()


def receive(size: str, address: str, times: int) -> None:
    """Load weights into a model as often as they come."""
    import torch

    from bench.training import Gpt
    from polyaccel.torch.weight_transfer import WeightReceiver

    torch.set_num_threads(1)
    model = Gpt(size)
    with WeightReceiver(address) as receiver:
        print(receiver.address, flush=True)
        for _ in range(times):
            receiver.receive().load_into(model)


if __name__ == "__main__":
    receive(sys.argv[1], sys.argv[2], int(sys.argv[3]))
