"""Ray: python recipes/ray_train.py --workers 2 --storage /shared/ray

The GPT of examples/gpt in a TorchTrainer. Ray starts the workers, on this machine or on a cluster's, and sets the
variables that polyaccel reads; checkpoints of all ranks are reported to Ray, which keeps them in its storage and gives
the newest one back when it starts the workers again. The storage is a folder that all workers see.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt"


def train(settings: dict[str, Any]) -> None:
    """What every worker does. `fail_at`: the first start ends there, to show that the next one continues."""
    sys.path.insert(0, settings["example"])
    import torch
    from model import SHAPES, VOCABULARY, Gpt

    import polyaccel

    polyaccel.init_distributed()
    rank, ranks = polyaccel.comm.get_rank(), polyaccel.comm.get_world_size()
    torch.manual_seed(0)
    shape = SHAPES[settings["size"]]
    config = {
        "train_batch_size": settings["batch"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": settings["stage"]},
        "checkpoint": {"keep_last": 1},
    }
    engine, *_ = polyaccel.initialize(model=Gpt(shape), config=config)
    staged = Path(settings["staging"])
    kept = ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            engine.load_checkpoint(folder)
    began_at, own = engine.global_steps, settings["batch"] // ranks
    for step in range(began_at, settings["steps"]):
        if kept is None and step == settings["fail_at"]:
            raise RuntimeError(f"rank {rank} fails at step {step}, as it was told")
        draw = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (settings["batch"], shape.context), generator=draw)[rank * own :][:own]
        loss = engine(batch, batch)
        engine.backward(loss)
        engine.step()
        metrics = {"step": step, "loss": loss.item(), "ranks": ranks, "began_at": began_at}
        if (step + 1) % settings["save_every"] == 0:
            engine.save_checkpoint(str(staged))  # every rank writes its part
            engine.wait_for_checkpoint()  # Ray keeps what the first one reports now
            checkpoint = Checkpoint.from_directory(str(staged)) if rank == 0 else None
            ray.train.report(metrics, checkpoint=checkpoint)
            polyaccel.comm.barrier()
        else:
            ray.train.report(metrics)
    engine.destroy()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all workers see")
    parser.add_argument("--size", default="tiny", help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, help="steps (default: %(default)s)")
    parser.add_argument("--fail-at", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    storage = args.storage.resolve()
    storage.mkdir(parents=True, exist_ok=True)
    settings = {
        "example": str(EXAMPLE),
        "staging": mkdtemp(dir=storage),
        "size": args.size,
        "steps": args.steps,
        "save_every": args.save_every,
        "fail_at": args.fail_at,
        "batch": 4 * args.workers,
        "stage": 2,
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(
            name="gpt",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"finished: {result.metrics}, {result.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
