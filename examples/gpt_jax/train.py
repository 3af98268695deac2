"""Train the byte-level GPT of examples/gpt as a JAX function: the same config, corpus and files to look at.

    polyaccel run --nproc 2 examples/gpt_jax/train.py
    polyaccel run --nproc 2 examples/gpt_jax/train.py --resume

torch need not be installed. A checkpoint of either example is one of the other's. Ctrl-C, or SIGTERM, stops it at the
end of a step, with a checkpoint; a second one at once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from model import SHAPES, generate, initial_params, loss

import polyaccel
from polyaccel import PolyaccelError, comm
from polyaccel.comm.default import default_communicator
from polyaccel.observability.metrics import JsonlMonitor

sys.path.append(str(Path(__file__).resolve().parents[1] / "gpt"))  # what does not depend on the framework

from corpus import open_corpus, validation_share
from progress import open_progress
from report import write_report
from run_dir import RunFolder
from settings import Settings, add_arguments, begin_run
from stopping import StopWish, say_interrupted

if TYPE_CHECKING:
    from polyaccel.jax.engine import JaxEngine

_PROMPT = b"def "
_SAMPLE_NBYTES = 400
_TAG = "last"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--name", default=None, help="of the run")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where runs are (default: runs)")
    parser.add_argument("--resume", action="store_true", help="go on with the run --name, or else with the latest one")
    parser.add_argument("--until", type=int, metavar="N", help="stop after step N, ready for --resume")
    parser.add_argument("--save-every", type=int, default=200, metavar="N", help="steps between checkpoints")
    parser.add_argument("--eval-every", type=int, default=50, metavar="N", help="steps between validations")
    args = parser.parse_args()
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


class Windows:
    """The file's bytes in windows of `context`, side by side; batches are (tokens, targets), int32."""

    def __init__(self, file: Path, context: int) -> None:
        self._bytes: Any = np.memmap(file, dtype=np.uint8, mode="r")
        self._context = context

    def __len__(self) -> int:
        return int((len(self._bytes) - 1) // self._context)

    def batch(self, indices: Any) -> tuple[Any, Any]:
        begins = [int(index) * self._context for index in indices]
        rows = np.stack([self._bytes[begin : begin + self._context + 1] for begin in begins]).astype(np.int32)
        return rows[:, :-1], rows[:, 1:]

    def shuffled(self, samples: int, count: int, seed: int) -> Any:
        """The windows of the `count` samples after the first `samples`, in an order of its own for each epoch."""
        positions = np.arange(samples, samples + count)
        epochs, places = positions // len(self), positions % len(self)
        orders = {epoch: np.random.default_rng([seed, epoch]).permutation(len(self)) for epoch in set(epochs.tolist())}
        return [orders[int(epoch)][place] for epoch, place in zip(epochs, places, strict=True)]


def train(args: argparse.Namespace) -> int:
    """The whole run, or as much of it as there is time for. Returns the exit code. Collective."""
    ranks = default_communicator()
    ranks = default_communicator()
    folder, settings = begin_run(args, ranks.broadcast_object, is_first=ranks.rank == 0)
    corpus = open_corpus()
    shape = SHAPES[settings.size]
    engine = polyaccel.initialize(
        model=partial(loss, heads=shape.heads),
        params=initial_params(shape, settings.seed),
        config=settings.config,
        seed=settings.seed,
    )
    if args.resume:
        _, state = engine.load_checkpoint(str(folder.checkpoint))
        if state["corpus"] != corpus.digest:
            hint = "resume with the Python that the run was started with"
            raise PolyaccelError("the library is not the one that the run was trained on", hint=hint)
    windows, validation = Windows(corpus.training, shape.context), Windows(corpus.validation, shape.context)
    last = min(settings.steps, args.until or settings.steps)
    monitor = JsonlMonitor()
    if ranks.rank == 0:
        monitor.open(folder.path, {})
        folder.resolved_config.write_text(engine.config.to_json(), encoding="utf-8")
        folder.corpus.write_text(json.dumps({"digest": corpus.digest, **corpus.files}, indent=1), encoding="utf-8")
    each = engine.train_batch_size() // ranks.world_size
    with open_progress(total=settings.steps, done=engine.global_steps, rank=ranks.rank) as progress:
        size = f"{ranks.world_size} rank{'s' * (ranks.world_size != 1)}"
        progress.say(
            f"{folder.path}: {settings.size} GPT in JAX, {settings.precision}, "
            f"ZeRO-{engine.zero_optimization_stage()}, {size} on {engine.accelerator.name}, "
            f"parameters {engine.copies}"
        )
        stopped_by = 0
        wish = StopWish()
        wish.listen()
        while engine.global_steps < last and not stopped_by:
            indices = windows.shuffled(engine.global_samples, engine.train_batch_size(), settings.seed)
            began_s = time.perf_counter()
            loss_here = engine.train_batch(windows.batch(indices[ranks.rank * each : (ranks.rank + 1) * each]))
            assert engine.metrics is not None  # after an optimizer step
            losses, wishes = zip(*ranks.all_gather_object((float(loss_here), wish.signum)), strict=True)
            stopped_by = max(wishes)
            metrics = replace(
                engine.metrics,
                loss=float(np.mean(losses)),
                tokens_per_s=engine.train_batch_size() * shape.context / (time.perf_counter() - began_s),
            )
            progress.step(metrics)
            if ranks.rank == 0:
                monitor.write(metrics)
            if metrics.step % args.eval_every == 0 or metrics.step == last:
                value = evaluate(engine, validation, settings.eval_windows)
                progress.say(f"step {metrics.step}: validation loss {value:.4f}")
                if ranks.rank == 0:
                    monitor.write_events([("validation_loss", value, metrics.step)])
            if metrics.step % args.save_every == 0 or metrics.step == last or stopped_by:
                engine.save_checkpoint(str(folder.checkpoint), _TAG, {"corpus": corpus.digest})
        if stopped_by:
            progress.say(
                f"stopped by {signal.Signals(stopped_by).name} at step {engine.global_steps} of {settings.steps}; "
                f"checkpoint: {folder.checkpoint}; go on with --resume --name {folder.path.name}"
            )
        params = engine.params  # every rank asks: at stage 3 they are gathered
        if ranks.rank == 0 and not stopped_by:
            text = bytes(generate(params, shape, _PROMPT, _SAMPLE_NBYTES, seed=settings.seed))
            finish(engine, folder, settings, (_PROMPT + text).decode("utf-8", errors="replace"))
            progress.say(f"report: {folder.report}")
    monitor.close()
    engine.destroy()
    return 128 + stopped_by if stopped_by else 0


def evaluate(engine: JaxEngine, windows: Windows, count: int) -> float:
    """The mean loss over all ranks' validation windows. Collective."""
    ranks = engine.communicator
    share = validation_share(windows, count=count, rank=ranks.rank, world_size=ranks.world_size)
    size = engine.train_micro_batch_size_per_gpu()
    parts = [share[begin : begin + size] for begin in range(0, len(share), size)]
    total = sum(float(engine.eval_batch(windows.batch(part))) * len(part) for part in parts)
    return float(np.mean(ranks.all_gather_object(total / len(share))))


def finish(engine: JaxEngine, folder: RunFolder, settings: Settings, text: str) -> None:
    """Write the sample, the summary and the report."""
    folder.sample.write_text(text, encoding="utf-8")
    summary = {
        "accelerator": engine.accelerator.name,
        "comm": engine.communicator.backend,
        "world_size": engine.communicator.world_size,
        "zero_stage": engine.zero_optimization_stage(),
        "parameters": sum(param.numel for param in engine.zero.layout.params),
        "size": settings.size,
        "precision": settings.precision,
        "peak_memory_nbytes": [engine.accelerator.max_memory_allocated()],
        "traffic_numel": [engine.metrics.traffic_numel if engine.metrics else None],
    }
    folder.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_report(folder)


if __name__ == "__main__":
    sys.exit(main())
