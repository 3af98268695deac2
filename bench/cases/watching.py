"""Cost of monitors, times, traces, profiles and alerts, all together or one at a time.

All variants have an engine in each process, and take turns of a few steps on the same batches. *more* is the median of
a turn over the turn of the first variant in the same round, minus one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from bench.measure import interleave
from bench.runner import Option, Settings, Start, begin, launch, parse, table
from bench.sizes import SHAPES

_WARMUP = 4
_STEP_LIMIT_S, _SETUP_LIMIT_S = 30.0, 300.0
_TENSORBOARD = {"tensorboard": {"enabled": True}} if find_spec("tensorboard") else {}
_PARTS: dict[str, dict[str, Any]] = {
    "monitors": {"csv_monitor": {"enabled": True}, **_TENSORBOARD},
    "breakdowns": {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 10},
    "throughput": {"timers": {"throughput": {"enabled": True}}},
    "alerts": {"alerts": {"enabled": True}},
    "comms_logger": {"comms_logger": {"enabled": True}},
}
"""By the names of variants; `everything` is all of them, and a trace and a profile before the first turn."""
_ONCE = {"trace": {"steps": [2, 3]}, "flops_profiler": {"enabled": True, "profile_step": 2, "detailed": False}}
VARIANTS = ("nothing", *_PARTS, "everything")


def main(argv: Sequence[str]) -> int:
    """Print one table."""
    options = {
        "size": Option("29m", "model", SHAPES),
        "stage": Option(2, "ZeRO stage", range(4)),
        "ranks": Option(2, "of one thread each"),
        "micro_batch": Option(4, "sequences"),
        "turns": Option(24, "of each variant"),
        "steps": Option(4, "of a turn"),
        "impl": Option(("nothing", "everything"), f"variants among {', '.join(VARIANTS)}", VARIANTS),
    }
    args: argparse.Namespace = parse("watching", __doc__ or "", options, argv)
    begin()
    limit_s = _SETUP_LIMIT_S + _STEP_LIMIT_S * len(args.impl) * (args.turns * args.steps + 10)
    ranks = launch("watching", "all", vars(args), Start(args.ranks), limit_s)
    rows, base = [], args.impl[0]
    for name in args.impl:
        wall, cpu = (of_turns(ranks, name, which) for which in (0, 1))
        more = [more_than(ranks, name, base, which) for which in (1, 0)]
        times = f"{1e3 * median(cpu):.1f}", _quartiles(cpu, 1e3), *more[0], f"{1e3 * median(wall):.1f}", *more[1]
        rows.append((name, *times))
    columns = ("variant", "CPU ms a step", "quartiles", "more", "quartiles", "ms a step", "more", "quartiles")
    title = f"{args.turns} turns of {args.steps} steps, {args.size}, stage {args.stage}, {args.ranks} ranks"
    table(title, columns, rows)
    return 0


def of_turns(ranks: list[Any], variant: str, which: int) -> list[float]:
    """Return wall (0) or CPU (1) seconds of each turn, as means over ranks."""
    return [sum(turn[which] for turn in turns) / len(turns) for turns in zip(*(r[variant] for r in ranks), strict=True)]


def more_than(ranks: list[Any], variant: str, base: str, which: int) -> tuple[str, str]:
    """Return the median share by which turns are longer than those of `base`, and its quartiles."""
    if variant == base:
        return "-", "-"
    pairs = zip(of_turns(ranks, variant, which), of_turns(ranks, base, which), strict=True)
    shares = [own / other - 1 for own, other in pairs]
    return f"{100 * median(shares):+.2f} %", _quartiles(shares, 100)


def _quartiles(values: list[float], factor: float) -> str:
    if len(values) < 2:
        return "-"
    low, _, high = quantiles(values, n=4)
    return f"{factor * low:.1f} to {factor * high:.1f}"


def config_of(variant: str, stage: int, micro_batch: int, folder: str) -> dict[str, Any]:
    """Return the config of a variant."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "log_level": "warning",
    }
    if variant == "nothing":
        return config
    parts = (*_PARTS.values(), _ONCE) if variant == "everything" else (_PARTS[variant],)
    for part in parts:
        config |= part
    return config | {"run_dir": f"{folder}/{variant}"}


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train all engines in turns; return (wall, CPU) seconds of a step by variant and turn."""
    import polyaccel
    from bench.training import Gpt, draw_batch, load_corpus
    from polyaccel.comm.default import default_communicator
    from polyaccel.comm.flight_recorder.record import RecordingCommunicator

    polyaccel.init_distributed()
    communicator, corpus = default_communicator(), load_corpus()
    assert isinstance(communicator, RecordingCommunicator)
    at: dict[str, int] = dict.fromkeys(s["impl"], 0)
    engines: dict[str, Any] = {}
    logs: dict[str, Any] = {}

    def turn(name: str, steps: int) -> tuple[float, float]:
        communicator.log = logs[name]
        communicator.barrier()
        used, began, engine = process_time(), perf_counter(), engines[name]
        for _ in range(steps):
            engine.backward(engine(*draw_batch(corpus, at[name], communicator.rank, s["micro_batch"])))
            engine.step()
            at[name] += 1
        engine.monitor.flush()  # the threads that write are part of a turn
        return (perf_counter() - began) / steps, (process_time() - used) / steps

    with TemporaryDirectory(prefix="polyaccel-watching-") as own_folder:
        folder = communicator.all_gather_object(own_folder)[0]
        for name in s["impl"]:
            config = config_of(name, s["stage"], s["micro_batch"], folder)
            engines[name] = polyaccel.initialize(model=Gpt(s["size"]), config=config)[0]
            logs[name], communicator.log = communicator.log, None  # of latencies, where the variant has one
        for name in s["impl"]:
            turn(name, _WARMUP)
        taken = interleave({name: partial(turn, name, s["steps"]) for name in s["impl"]}, s["turns"], warmup=0)
        for engine in engines.values():
            engine.destroy()
        communicator.barrier()
    return taken
