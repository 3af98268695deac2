"""Folders of runs with made-up figures, written by the classes that write real ones: all that a page can show."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyaccel.observability.metrics import Alarm, CallFigures, ExpertFigures, JsonlMonitor, StepMetrics
from polyaccel.observability.run_log import LOG_FILE, METRICS_FILE, RANKS_FOLDER, RUN_FILE, TRACE_FILE
from polyaccel.observability.traces.chrome import ClockOffset, Span, write_trace
from polyaccel.pipeline.render import estimated_picture
from polyaccel.pipeline.select import select_schedule

STARTED_S = 1_790_000_000.0
CONFIG = {
    "train_batch_size": 64,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.0004}},
}
HELD = {
    "parameters": 5 << 29,
    "gradients": 5 << 27,
    "gradient buckets in flight": 3 << 26,
    "staging of offloaded states": 1 << 27,
    "master weights (host)": 5 << 28,
    "optimizer states (host)": 5 << 29,
}
"""Bytes by purpose of a rank, of 1.3 billion parameters on four."""


class SampleRun:
    """A run of `ranks` ranks in `folder`, of which `slow` needs longer than the others; `add` takes further steps."""

    def __init__(self, folder: Path, *, ranks: int = 4, slow: int = 2, lr: float = 4e-4, seed: int = 1) -> None:
        self.folder = folder
        self.step = 0
        self._lr, self._slow, self._random = lr, slow, random.Random(seed)
        self._scale = 2.0**14
        folder.mkdir(parents=True)
        about = {"mesh": {"data": ranks}, "packages": {"polyaccel": "0.1.0"}, "plugins": {"accelerator": "cuda"}}
        about |= {"config": CONFIG, "ranks": ranks, "started": "2026-09-21T13:33:20+00:00"}
        (folder / RUN_FILE).write_text(json.dumps(about), encoding="utf-8")
        self._files = [
            JsonlMonitor(METRICS_FILE if not rank else f"{RANKS_FOLDER}/{rank}.jsonl") for rank in range(ranks)
        ]
        for file in self._files:
            file.open(folder, {})
        self.log("info", "the run has begun", state="running")

    def add(self, steps: int) -> None:
        """Take so many steps more."""
        for _ in range(steps):
            self.step += 1
            for rank, metrics in enumerate(self._metrics()):
                self._files[rank].write(metrics)
            if self.step % 20 == 0:
                self._files[0].write_events([("validation loss", 1.02 * self._loss(), self.step)])

    def log(self, level: str, text: str, *, rank: int = 0, **more: Any) -> None:
        """Append a line to the log of a rank."""
        path = self.folder / RANKS_FOLDER / f"{rank}.{LOG_FILE}" if rank else self.folder / LOG_FILE
        path.parent.mkdir(exist_ok=True)
        line = {"time": STARTED_S + 0.25 * self.step, "level": level, "text": text, **more}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def alarm(self, kind: str, sentence: str, *ranks: int) -> None:
        """Say what is wrong."""
        self._files[0].write_alarm(Alarm(kind=kind, step=self.step, sentence=sentence, value=1.0, ranks=ranks))
        self.log("warning", sentence)

    def end(self) -> None:
        """Close the files, after all that comes at the end: pictures, a trace, the last line of the log."""
        (self.folder / "pipeline.svg").write_text(
            estimated_picture(select_schedule("1f1b", 4, 8, None)), encoding="utf-8"
        )
        ranks = range(len(self._files))
        offsets = [ClockOffset(0.0, 1e-6) for _ in ranks]
        write_trace(self.folder / TRACE_FILE, ranks, [[*self._spans(rank)] for rank in ranks], offsets)
        for rank in ranks:
            self.log("info", "the run has ended", rank=rank, state="ended")
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _loss(self) -> float:
        return 2.1 + 8.2 * math.exp(-self.step * self._lr * 60)

    def _metrics(self) -> Iterator[StepMetrics]:
        noise = self._random.gauss
        own_s = [0.21 + noise(0, 0.006) + (0.035 if rank == self._slow else 0.0) for rank in range(len(self._files))]
        step_s = max(own_s) + 0.03
        overflows = self.step in (40, 41)
        self._scale = self._scale / 2 if overflows else self._scale * (2 if self.step % 100 == 0 else 1)
        norm = math.inf if overflows else abs(1.4 * math.exp(-self.step / 90) + 0.5 + noise(0, 0.12))
        warm = min(1.0, self.step / 30)
        for rank, seconds in enumerate(own_s):
            waited_s = step_s - seconds
            phases = {"data": 0.004, "forward": 0.33 * seconds, "backward": 0.52 * seconds, "update": 0.15 * seconds}
            first, third = (tuple(round(abs(2048 + noise(0, spread))) for _ in range(8)) for spread in (150, 330))
            yield StepMetrics(
                step=self.step,
                loss=math.nan if overflows else self._loss() + noise(0, 0.09),
                lr=(self._lr * warm * (0.5 + 0.5 * math.cos(self.step / 130)),),
                grad_norm=norm,
                grad_norm_clipped=min(norm, 1.0) if math.isfinite(norm) else math.nan,
                loss_scale=self._scale,
                skipped=overflows,
                samples=64 * self.step,
                step_time_s=step_s,
                samples_per_s=64 / step_s,
                tokens_per_s=64 * 1024 / step_s,
                tflops=38.2 / step_s / 4,
                model_flops_utilisation=0.38 * 0.25 / step_s,
                peak_memory_nbytes=round((9.1 + 0.4 * (rank == 0)) * 2**30 * min(1, 0.9 + self.step / 50)),
                memory_nbytes=HELD | {"in use": round((7.2 + noise(0, 0.05)) * 2**30 * min(1, 0.9 + self.step / 50))},
                planned_nbytes=HELD if self.step == 1 else {},
                traffic_numel=14_600_000,
                phase_s=phases | {"reduce": waited_s - 0.006, "publish": 0.001, "other": 0.001},
                experts={"layers.1.mlp": _experts(first, 0.0), "layers.3.mlp": _experts(third, 0.002)},
                collectives={
                    "reduce_scatter": CallFigures(calls=6, sent_nbytes=43_500_000, waited_s=0.7 * waited_s),
                    "all_gather": CallFigures(calls=6, sent_nbytes=43_500_000, waited_s=0.25 * waited_s),
                    "all_reduce": CallFigures(calls=2, sent_nbytes=48, waited_s=0.05 * waited_s),
                },
            )

    def _spans(self, rank: int) -> Iterator[Span]:
        """Two traced steps."""
        slower = 0.035 if rank == self._slow else 0.0
        for number in range(2):
            begin_s = STARTED_S + 0.28 * number
            arrives_s = begin_s + 0.2 + slower + 0.002 * rank
            meets_s = begin_s + 0.241
            yield Span("step", f"step {10 + number}", begin_s, begin_s + 0.28, {"step": 10 + number})
            yield Span("phase", "forward", begin_s, begin_s + 0.08)
            yield Span("phase", "backward", begin_s + 0.08, arrives_s)
            yield Span("phase", "reduce", arrives_s, meets_s)
            more = {"group": [0, 1, 2, 3], "number": number, "waited_s": meets_s - arrives_s, "bucket": 0, "label": ""}
            yield Span("collective", "reduce_scatter", arrives_s, meets_s, {**more, "numel": 1, "dtype": "float32"})
            yield Span("phase", "update", meets_s, begin_s + 0.27)
            moved = {"tier": "cpu", "nbytes": 5 << 27, "waited_s": 0.004}
            yield Span("tier", "cpu: read group 0", meets_s + 0.001, meets_s + 0.009, moved)


def _experts(tokens: tuple[int, ...], dropped: float) -> ExpertFigures:
    balance = max(tokens) * len(tokens) / sum(tokens)
    return ExpertFigures(
        tokens=tokens, dropped_share=dropped, balance=balance, exchanged_nbytes=33_000_000, exchange_s=0.011
    )


def write_sample(folder: Path, steps: int = 240, **options: Any) -> SampleRun:
    """A run that has ended, with an overflow, an alarm, a warning and a trace."""
    run = SampleRun(folder, **options)
    run.add(steps // 2)
    run.log("warning", "the loader is slow", rank=1)
    run.alarm("straggler", "all wait for rank 2, 13 % of each step: look for other processes on its host", 2)
    run.add(steps - steps // 2)
    run.end()
    return run
