"""Steps of two pipeline stages, the makespan of their table, torch's pipelines, DeepSpeed's and data parallelism.

The benchmarks' GPT, AdamW, fp32, one sample a micro-batch. A variant is a schedule of polyaccel (`+onednn`: with
oneDNN's matrix products), `torch` (torch.distributed.pipelining, 1F1B), `data` (DDP, each rank with half of the
micro-batches) or `deepspeed` (PipelineEngine). The makespan is that of the table with each task at its median, plus
the slowest stage's update.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from bench.measure import measured
from bench.runner import (
    DEEPSPEED,
    Case,
    Column,
    Found,
    Option,
    Runs,
    Settings,
    Start,
    deepspeed_start,
    losses_off,
    ms,
    speed,
)

_WARMUP, _RANKS = 2, 2
_ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
_HALVES = "-halves"
"""Behind a size: blocks are two layers each."""
_SCHEDULES = ("1f1b", "gpipe", "zb-h1", "zb-h1+onednn", "zb-v")


def variants(args: argparse.Namespace) -> Mapping[str, Start | str]:
    """Return the launch of each variant."""
    ours: dict[str, Start | str] = dict.fromkeys((*_SCHEDULES, "torch", "data"), Start())
    ours["zb-h1+onednn"] = Start(environ={"POLYACCEL_MATRIX_KERNELS": "on"})
    return ours | {"deepspeed": deepspeed_start(args)}


def columns(s: Settings) -> Mapping[str, Column]:
    """Return the columns; CPU is the mean over ranks."""

    def of_promise(show: Callable[[float, float, float], str]) -> Column:
        def cell(own: Runs, found: Found) -> str:
            promises = [promise(own.variant, s["micro_batches"], ranks[-1]) for ranks in own.rounds.values()]
            known = [each for each in promises if each is not None]
            if not known:
                return "-"
            makespan, bubble = (median(each) for each in zip(*known, strict=True))
            return show(median(own.means("seconds")), makespan, bubble)

        return cell

    return {
        "step ms": ms(),
        "min ms": ms(best=True),
        "CPU ms": ms("cpu"),
        "makespan ms": of_promise(lambda step, makespan, bubble: f"{1e3 * makespan:.1f}"),
        "step over it": of_promise(lambda step, makespan, bubble: f"{100 * (step / makespan - 1):+.1f} %"),
        "bubble": of_promise(lambda step, makespan, bubble: f"{100 * bubble:.1f} %"),
        "x 1f1b": speed("1f1b"),
        "loss off by": lambda own, found: f"{losses_off(own, next(iter(found.values()))):.1e}",
    }


def promise(variant: str, micro_batches: int, figures: Any) -> tuple[float, float] | None:
    """Return the makespan of a step by its table, and the share of it in which stages wait. None of a peer."""
    if "tasks" not in figures:
        return None
    from polyaccel.pipeline.schedules import make_table
    from polyaccel.pipeline.table import PipelineOp
    from polyaccel.pipeline.timing import OpTimes, simulate

    table = make_table(variant.partition("+")[0], _RANKS, micro_batches)
    tasks: dict[str, float] = figures["tasks"]

    def times(op: PipelineOp) -> tuple[float, ...]:
        return tuple(tasks.get(f"{op.name} {chunk}", 0.0) for chunk in range(table.chunks))

    whole, parts = times(PipelineOp.BACKWARD), times(PipelineOp.BACKWARD_INPUT)
    # Tables with both kinds get one sum: that of the two parts, which differs from the whole by little.
    first = tuple(part or whole_of for part, whole_of in zip(parts, whole, strict=True))
    timing = simulate(table, OpTimes(times(PipelineOp.FORWARD), first, times(PipelineOp.BACKWARD_WEIGHT)))
    return timing.makespan + figures["update"], timing.bubble_share


def work(variant: str, s: Settings) -> dict[str, Any]:
    """Train the model; return the figures of `measured`, and of polyaccel the seconds of each task."""
    from bench.training import draw_batch, load_corpus

    layers, corpus, count = layers_of(s["size"]), load_corpus(), s["micro_batches"]

    def batches(step: int) -> list[Any]:
        return [draw_batch(corpus, step, number, 1) for number in range(count)]

    build = {"torch": by_torch, "data": by_data, "deepspeed": by_deepspeed}.get(variant, partial(by_polyaccel, variant))
    step, barrier, after = build(layers, count)
    drawn = [batches(number) for number in range(_WARMUP + s["steps"])]
    figures = measured(lambda number: step(number, drawn[number]), s["steps"], _WARMUP, barrier)
    return {**figures, **after()}


Built = tuple[Callable[[int, list[Any]], float], Callable[[], object], Callable[[], dict[str, Any]]]
"""The step, the barrier before it, and what a variant adds to the figures."""


def layers_of(size: str) -> list[Any]:
    """Return the GPT as a list of layers."""
    from torch import Tensor, nn

    from bench.training import Block, Gpt

    class Layer(nn.Module):
        """Part of the GPT: the modules whose parameters it has, and its function."""

        def __init__(self, function: Callable[[Tensor], Tensor], owner: nn.Module, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, getattr(owner, name))
            self._function = function

        def forward(self, hidden: Tensor) -> Tensor:
            return self._function(hidden)

    class Half(Layer):
        """Half of a block."""

    gpt = Gpt(size.removesuffix(_HALVES))
    blocks: list[Any] = list(gpt.blocks)
    if size.endswith(_HALVES):
        blocks = []
        for block in gpt.blocks:
            assert isinstance(block, Block)
            blocks.append(Half(block.attend, block, "attention_norm", "qkv", "attention_out"))
            blocks.append(Half(block.feed, block, "mlp_norm", "mlp_in", "mlp_out"))
    norm, head = gpt.norm, gpt.head
    last = Layer(lambda hidden: head(norm(hidden)), gpt, "norm", "head")
    return [Layer(gpt.embed, gpt, "tokens", "positions"), *blocks, last]


def partition_of(layers: Sequence[Any]) -> str:
    """Return how PipelineModules deal these layers: blocks or halves evenly."""
    return f"type:{'half' if any(type(layer).__name__ == 'Half' for layer in layers) else 'block'}"


def by_polyaccel(variant: str, layers: list[Any], count: int) -> Built:
    """Build our engine with a schedule."""
    import polyaccel
    from bench.training import loss_of
    from polyaccel import comm
    from polyaccel.comm.default import default_communicator
    from polyaccel.torch.pipeline import PipelineModule

    schedule = variant.partition("+")[0]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": _ADAMW},
        "pipeline": {"schedule": schedule},
    }
    comm.init_distributed(config=config)
    model = PipelineModule(layers, _RANKS, loss_fn=loss_of, schedule=schedule, partition_method=partition_of(layers))
    engine: Any = polyaccel.initialize(model=model, config=config)[0]
    tasks: dict[str, list[float]] = {}

    def step(number: int, batches: list[Any]) -> float:
        loss = engine.train_batch(iter(batches))
        if number >= _WARMUP:
            for task, began, ended in engine.task_times:
                tasks.setdefault(f"{task.op.name} {task.chunk}", []).append(ended - began)
            tasks.setdefault("update", []).append(perf_counter() - engine.task_times[-1].ended_s)
        return float(loss)

    def after() -> dict[str, Any]:
        own = {name: median(each) for name, each in tasks.items()}
        every: Any = default_communicator().all_gather_object(own)
        engine.destroy()
        of_all = {name: each for ours in every for name, each in ours.items()}
        return {"tasks": of_all, "update": max(ours["update"] for ours in every)}

    return step, comm.barrier, after


def by_torch(layers: list[Any], count: int) -> Built:
    """Build torch.distributed.pipelining's 1F1B; the first stage has one more block where their number is odd."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from bench.training import loss_of

    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), (len(layers) - 1) // 2 + 1
    part = torch.nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    schedule = Schedule1F1B(PipelineStage(part, rank, _RANKS, torch.device("cpu")), count, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), foreach=False, **_ADAMW)

    def step(number: int, batches: list[Any]) -> float:
        inputs, targets = (torch.cat(each) for each in zip(*batches, strict=True))
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(loss)  # so that all ranks have it, as with an engine
        return float(loss)

    return step, dist.barrier, dict


def by_data(layers: list[Any], count: int) -> Built:
    """Build DDP without a pipeline."""
    import torch
    import torch.distributed as dist

    from bench.training import loss_of

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **_ADAMW)

    def step(number: int, batches: list[Any]) -> float:
        own, total = batches[dist.get_rank() :: _RANKS], torch.zeros(())
        for index, (inputs, targets) in enumerate(own):
            model.require_backward_grad_sync = index + 1 == len(own)
            loss = loss_of(model(inputs), targets) / len(own)
            torch.autograd.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / _RANKS

    return step, dist.barrier, dict


def by_deepspeed(layers: list[Any], count: int) -> Built:
    """Build DeepSpeed's PipelineEngine. Its optimizer is torch's: its own is compiled at the first start."""
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import torch.distributed as dist
    from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found,import-untyped,unused-ignore]

    from bench.training import loss_of

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "AdamW", "params": {**_ADAMW, "torch_adam": True}},
        "gradient_clipping": 0.0,  # it clips to a norm of 1 where this is left out
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed("gloo")
    module = PipelineModule(layers, num_stages=_RANKS, loss_fn=loss_of, partition_method=partition_of(layers))
    trained = [one for one in module.parameters() if one.requires_grad]
    engine: Any = deepspeed.initialize(model=module, model_parameters=trained, config=config)[0]
    return lambda number, batches: float(engine.train_batch(iter(batches))), dist.barrier, dict


_OPTIONS = {
    "size": Option("29m", "model, for example 126m; 126m-halves makes two layers of each block"),
    "micro_batches": Option(8, "of a step"),
    "steps": Option(6, "measured in each launch"),
    "deepspeed": DEEPSPEED,
}
_TITLE = "{size}, {micro_batches} micro-batches, two stages"
CASES = {"pipeline": Case("pipeline", __doc__ or "", _OPTIONS, variants, columns, _TITLE)}
