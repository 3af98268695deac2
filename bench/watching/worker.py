"""One rank of `python -m bench watching`: worker.py ARGUMENTS RESULT, with arguments as JSON.

An engine for each variant, all in this process on the same ranks; they take turns of a few steps on the same batches,
and each round begins with another one. So whatever the machine does beside reaches all of them alike.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

import polyaccel
from bench.steps.cases import SHAPES
from bench.steps.model import Corpus, Gpt, draw_batch, load_corpus
from polyaccel.comm.default import default_communicator
from polyaccel.comm.flight_recorder.record import RecordingCommunicator

WARMUP = 4
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


def main(argv: list[str]) -> None:
    given, result = json.loads(argv[0]), Path(argv[1])
    polyaccel.init_distributed()
    communicator = default_communicator()
    told = measure(communicator, **given)
    everybody = communicator.all_gather_object(told)
    if communicator.rank == 0:
        result.write_text(json.dumps(everybody))


def config_of(variant: str, stage: int, micro_batch: int, folder: str) -> dict[str, Any]:
    """The config of a variant."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "log_level": "warning",
    }
    if variant == "nothing":
        return config
    config["run_dir"] = f"{folder}/{variant}"
    if variant == "everything":
        for part in (*_PARTS.values(), _ONCE):
            config |= part
        return config
    return config | _PARTS[variant]


def measure(
    communicator: Any, variants: list[str], size: str, stage: int, micro_batch: int, turns: int, steps: int
) -> dict[str, Any]:
    """CPU seconds of this process and seconds of the clock of a step, by variant, one for each turn."""
    corpus = load_corpus()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu_s: dict[str, list[float]] = {name: [] for name in variants}
    with TemporaryDirectory(prefix="polyaccel-watching-") as folder:
        folder = communicator.all_gather_object(folder)[0]
        engines, logs = {}, {}
        for name in variants:
            engines[name] = polyaccel.initialize(
                model=Gpt(SHAPES[size]), config=config_of(name, stage, micro_batch, folder)
            )[0]
            logs[name] = take_log(communicator)
        at = 0
        for name, engine in engines.items():
            use_log(communicator, logs[name])
            train(engine, corpus, at, WARMUP, communicator.rank, micro_batch)
        at += WARMUP
        for turn in range(turns):
            order = variants[turn % len(variants) :] + variants[: turn % len(variants)]
            for name in order:
                use_log(communicator, logs[name])
                communicator.barrier()
                used, began = _used_s(), perf_counter()
                train(engines[name], corpus, at, steps, communicator.rank, micro_batch)
                flush(engines[name].monitor)
                seconds[name].append((perf_counter() - began) / steps)
                cpu_s[name].append((_used_s() - used) / steps)
            at += steps
        for engine in engines.values():
            engine.destroy()
        communicator.barrier()
    return {"seconds": seconds, "cpu_s": cpu_s}


def flush(monitor: Any) -> None:
    """Wait for the threads that write, whose work is part of a turn."""
    monitor.flush()


def take_log(communicator: Any) -> Any:
    """The log of latencies that a variant has switched on; the others have none."""
    assert isinstance(communicator, RecordingCommunicator)
    log, communicator.log = communicator.log, None
    return log


def use_log(communicator: Any, log: Any) -> None:
    communicator.log = log


def train(engine: Any, corpus: Corpus, first: int, steps: int, rank: int, micro_batch: int) -> None:
    for step in range(first, first + steps):
        tokens, targets = draw_batch(corpus, step, rank, micro_batch)
        engine.backward(engine(tokens, targets))
        engine.step()


def _used_s() -> float:
    used = getrusage(RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):
        main(sys.argv[1:])
