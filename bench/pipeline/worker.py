"""What every rank does: `bench.pipeline.worker VARIANT SIZE MICRO_BATCHES STEPS RESULT` under `polyaccel run`.

The benchmarks' GPT over two stages, AdamW, float32, one sample a micro-batch. A variant is a schedule of polyaccel's
(`+onednn` behind its name: with oneDNN's products of matrices), `torch` (torch.distributed.pipelining, 1F1B) or `data`
(DistributedDataParallel, each rank with half of the micro-batches and no pipeline). The last rank writes seconds of
steps and losses as JSON, and of ours how long each task took; each rank beside it the seconds of processor of its
steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import polyaccel
from bench.pipeline.layers import (
    DECAY,
    HALVES,
    LR,
    RANKS,
    WARMUP,
    first_part,
    layers_of,
    loss_of,
    micro_batch,
    partition_of,
)
from bench.steps.model import Corpus, load_corpus
from polyaccel import comm
from polyaccel.comm.default import default_communicator
from polyaccel.torch.pipeline import PipelineModule


def main(argv: list[str]) -> None:
    variant, size, micro_batches, steps, result = argv[0], argv[1], int(argv[2]), int(argv[3]), Path(argv[4])
    torch.set_num_threads(1)
    layers = layers_of(size.removesuffix(HALVES), halves=size.endswith(HALVES))
    corpus = load_corpus()
    run = {"torch": by_torch, "data": by_data}.get(variant, by_polyaccel)
    figures = run(variant, layers, corpus, micro_batches, WARMUP + steps)
    rank = int(os.environ["RANK"])
    cpu = figures.pop("cpu")[WARMUP:]
    Path(f"{result}.{rank}").write_text(json.dumps(cpu))
    if rank == RANKS - 1:
        figures["seconds"] = figures["seconds"][WARMUP:]
        result.write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def by_polyaccel(
    variant: str, layers: list[nn.Module], corpus: Corpus, micro_batches: int, steps: int
) -> dict[str, Any]:
    schedule, _, products = variant.partition("+")
    if products == "onednn":
        os.environ["POLYACCEL_MATRIX_KERNELS"] = "on"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "pipeline": {"schedule": schedule},
    }
    comm.init_distributed(config=config)
    model = PipelineModule(layers, RANKS, loss_fn=loss_of, schedule=schedule, partition_method=partition_of(layers))
    engine: Any
    engine, *_ = polyaccel.initialize(model=model, config=config)
    seconds, cpu, losses, updates = [], [], [], []
    tasks: dict[str, list[float]] = {}
    for step in range(steps):
        batches = [micro_batch(corpus, step, number) for number in range(micro_batches)]
        comm.barrier()
        began, cpu_began = perf_counter(), process_time()
        loss = engine.train_batch(iter(batches))
        seconds.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        losses.append(float(loss))
        if step >= WARMUP:
            updates.append(began + seconds[-1] - engine.task_times[-1].ended_s)
            for task, task_began, task_ended in engine.task_times:
                tasks.setdefault(f"{task.op.name} {task.chunk}", []).append(task_ended - task_began)
    ours = {name: float(np.median(each)) for name, each in tasks.items()}
    everybodys = default_communicator().all_gather_object((ours, float(np.median(updates))))
    engine.destroy()
    return {
        "seconds": seconds,
        "cpu": cpu,
        "losses": losses,
        "tasks": {name: each for told, _ in everybodys for name, each in told.items()},
        "update": max(update for _, update in everybodys),
        "placement": list(model.placement),
    }


def by_torch(variant: str, layers: list[nn.Module], corpus: Corpus, micro_batches: int, steps: int) -> dict[str, Any]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    half = first_part(layers)
    part = nn.Sequential(*(layers[:half] if rank == 0 else layers[half:]))
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LR, foreach=False)
    seconds, cpu, losses = [], [], []
    for step in range(steps):
        pairs = [micro_batch(corpus, step, number) for number in range(micro_batches)]
        inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
        found: list[Tensor] = []
        dist.barrier()
        began, cpu_began = perf_counter(), process_time()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=found)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()  # as a loss that all ranks have
        seconds.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        losses.append(float(torch.stack(found).detach().mean()) if found else 0.0)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def by_data(variant: str, layers: list[nn.Module], corpus: Corpus, micro_batches: int, steps: int) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    own = range(rank, micro_batches, RANKS)
    seconds, cpu, losses = [], [], []
    for step in range(steps):
        batches = [micro_batch(corpus, step, number) for number in own]
        dist.barrier()
        began, cpu_began = perf_counter(), process_time()
        total = torch.zeros(())
        for number, (inputs, targets) in enumerate(batches):
            if number + 1 < len(batches):
                with model.no_sync():
                    loss = loss_of(model(inputs), targets) / len(batches)
                    torch.autograd.backward(loss)
            else:
                loss = loss_of(model(inputs), targets) / len(batches)
                torch.autograd.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        seconds.append(perf_counter() - began)
        cpu.append(process_time() - cpu_began)
        losses.append(float(total) / RANKS)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


if __name__ == "__main__":
    main(sys.argv[1:])
