"""Train a byte-level GPT on the source text of Python's standard library.

    polyaccel run --nproc 2 examples/gpt/train.py
    polyaccel run --nproc 2 examples/gpt/train.py --resume

Also runs under torchrun, mpirun and srun, and alone: `python examples/gpt/train.py`. All there is to see afterwards is
in runs/NAME. Ctrl-C, or SIGTERM, stops it at the end of a step, with a checkpoint; a second one at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, open_corpus, validation_share
from model import SHAPES, Gpt, generate
from progress import Progress, open_progress
from report import write_report
from run_dir import RunFolder
from settings import Settings, add_arguments, begin_run
from stopping import StopWish, say_interrupted
from torch import Tensor
from windows import Windows

import polyaccel
from polyaccel import PolyaccelError, TorchEngine, comm
from polyaccel.observability.metrics import JsonlMonitor, StepMetrics

_PROMPT = b"def "
_SAMPLE_NBYTES = 400
_TAG = "last"


def main() -> int:
    args = parse_arguments()
    try:
        polyaccel.init_distributed()
        code = train(args)
    except PolyaccelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return say_interrupted()
    comm.destroy_process_group()
    return code


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--name", help="of the run (default: gpt, or gpt-2, gpt-3, ...)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are (default: runs)")
    parser.add_argument("--resume", action="store_true", help="go on with the run --name, or else with the latest one")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N, ready for --resume")
    parser.add_argument("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps between validations")
    return parser.parse_args()


def train(args: argparse.Namespace) -> int:
    """The whole run, or as much of it as there is time for. Returns the exit code. Collective."""
    folder, settings = begin_run(args, from_rank_0, is_first=comm.get_rank() == 0)
    corpus = agreed_corpus()
    shape = SHAPES[settings.size]
    torch.manual_seed(settings.seed)
    model = Gpt(shape)
    numel = model.numel
    engine, *_ = polyaccel.initialize(
        model=model, training_data=Windows(corpus.training, shape.context), config=settings.config
    )
    if args.resume:
        _, state = engine.load_checkpoint(str(folder.checkpoint))
        if state["corpus"] != corpus.digest:
            hint = "resume with the Python that the run was started with"
            raise PolyaccelError("the library is not the one that the run was trained on", hint=hint)
    validation = ValidationSet(Windows(corpus.validation, shape.context), engine, settings.eval_windows)

    rank = engine.communicator.rank
    last = min(settings.steps, args.until or settings.steps)
    monitor = JsonlMonitor()
    if rank == 0:
        monitor.open(folder.path, {})
        folder.resolved_config.write_text(engine.config.to_json(), encoding="utf-8")
        folder.corpus.write_text(json.dumps({"digest": corpus.digest, **corpus.files}, indent=1), encoding="utf-8")
    with open_progress(total=settings.steps, done=engine.global_steps, rank=rank) as progress:
        world = engine.communicator.world_size
        ranks = f"{world} rank{'s' * (world != 1)} on {engine.accelerator.name}"
        progress.say(
            f"{folder.path}: {settings.size} GPT, {numel / 1e6:.1f} M parameters, {settings.precision}, "
            f"ZeRO-{engine.zero_optimization_stage()}, {ranks}"
        )
        if not args.resume:
            validation.evaluate(engine, monitor, progress)
        saved_at, stopped_by = engine.global_steps, 0
        wish = StopWish()
        wish.listen()
        while engine.global_steps < last and not stopped_by:
            metrics, stopped_by = train_step(engine, shape.context, wish)
            progress.step(metrics)
            if rank == 0:
                monitor.write(metrics)
            if metrics.step % args.eval_every == 0 or metrics.step == last:
                validation.evaluate(engine, monitor, progress)
            if metrics.step % args.save_every == 0 or metrics.step == last or stopped_by:
                engine.save_checkpoint(str(folder.checkpoint), _TAG, {"corpus": corpus.digest})
                saved_at = metrics.step
        saved = f"checkpoint of step {saved_at}: {folder.checkpoint}"
        if stopped_by:
            name = signal.Signals(stopped_by).name
            progress.say(
                f"stopped by {name} at step {saved_at} of {settings.steps}; {saved}; "
                f"go on with --resume --name {folder.path.name}"
            )
        else:
            progress.say(saved)
            if engine.global_steps < settings.steps:
                progress.say(f"stopped at step {last} of {settings.steps}; --resume goes on")
            finish(engine, folder, settings, numel, progress)
    monitor.close()
    engine.destroy()
    return 128 + stopped_by if stopped_by else 0


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    told = [value]
    comm.broadcast_object_list(told)
    return told[0]


def agreed_corpus() -> Corpus:
    """The corpus of this host. Raises PolyaccelError when other ranks have another."""
    corpus = open_corpus()
    digests: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(digests, corpus.digest)
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        hint = "use the same version of Python on every host"
        raise PolyaccelError(f"ranks {others} have another standard library than rank 0", hint=hint, value=others)
    return corpus


def train_step(engine: TorchEngine, context: int, wish: StopWish) -> tuple[StepMetrics, int]:
    """One optimizer step; its metrics with the loss of all ranks, and the signal that stops the run, 0 for none: all
    ranks agree on it."""
    loss = engine.train_batch()
    # The wish travels with the loss: a collective of its own would cost each step one.
    figures = torch.stack([loss.float(), torch.tensor(float(wish.signum), device=loss.device)])
    comm.all_reduce(figures, op=comm.ReduceOp.AVG)
    metrics = engine.metrics
    assert metrics is not None  # after an optimizer step
    assert metrics.samples_per_s is not None
    metrics = replace(metrics, loss=float(figures[0]), tokens_per_s=metrics.samples_per_s * context)
    return metrics, agreed_wish(wish) if figures[1] > 0 else 0


def agreed_wish(wish: StopWish) -> int:
    """The signal that stops the run, where some rank has had one. Collective."""
    wishes: list[Any] = [0] * comm.get_world_size()
    comm.all_gather_object(wishes, wish.signum)
    chosen: int = max(wishes)
    return chosen


class ValidationSet:
    """This rank's part of the validation windows, in micro-batches."""

    def __init__(self, windows: Windows, engine: TorchEngine, count: int) -> None:
        ranks = engine.communicator
        share = validation_share(windows, count=count, rank=ranks.rank, world_size=ranks.world_size)
        size = engine.train_micro_batch_size_per_gpu()
        self._windows = windows
        self._batches = [share[begin : begin + size] for begin in range(0, len(share), size)]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in self._batches:
            tokens, targets = zip(*(self._windows[index] for index in indices), strict=True)
            yield torch.stack(tokens), torch.stack(targets)

    def evaluate(self, engine: TorchEngine, monitor: JsonlMonitor, progress: Progress) -> float:
        """The mean loss over all ranks' windows, also shown and written down. Collective."""
        batches = iter(self)
        total = torch.zeros(1, dtype=torch.float64)
        for indices in self._batches:
            total += float(engine.eval_batch(batches)) * len(indices)
        total /= sum(map(len, self._batches))
        mean = total.to(engine.device, torch.float32)
        comm.all_reduce(mean, op=comm.ReduceOp.AVG)
        loss = float(mean)
        if engine.communicator.rank == 0:
            monitor.write_events([("validation_loss", loss, engine.global_steps)])
        progress.say(f"step {engine.global_steps}: validation loss {loss:.4f}")
        return loss


def finish(engine: TorchEngine, folder: RunFolder, settings: Settings, numel: int, progress: Progress) -> None:
    """Write the sample, the summary and the report. Collective."""
    engine.eval()
    # Every rank generates the same text, so that it also works when parameters are sharded.
    drawn = generate(engine, SHAPES[settings.size], _PROMPT, _SAMPLE_NBYTES, seed=settings.seed, device=engine.device)
    text = readable(_PROMPT + bytes(drawn))
    figures: list[Any] = [None] * engine.communicator.world_size
    traffic = engine.metrics.traffic_numel if engine.metrics else None
    comm.all_gather_object(figures, (engine.accelerator.max_memory_allocated(), traffic))
    if engine.communicator.rank != 0:
        return
    folder.sample.write_text(text, encoding="utf-8")
    summary = {
        "accelerator": engine.accelerator.name,
        "comm": engine.communicator.backend,
        "world_size": engine.communicator.world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "parameters": numel,
        "size": settings.size,
        "precision": settings.precision,
        "peak_memory_nbytes": [peak for peak, _ in figures],
        "traffic_numel": [sent for _, sent in figures],
    }
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_report(folder)
    progress.say(f"--- sample ---\n{text}\n--------------\nreport: {folder.report}")


def readable(generated: bytes) -> str:
    """Text that a terminal may be shown: an early model also writes control characters."""
    text = generated.decode("utf-8", errors="replace").replace("\0", "\n")
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


if __name__ == "__main__":
    sys.exit(main())
