"""A training by Lightning's Trainer or Fabric over polyaccel on two ranks: KIND, STAGE, ACCUMULATION, OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import accelerate_job as plain
import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class InOrder(DistributedSampler):  # type: ignore[type-arg]
    """Batches of both ranks side by side, as the reference takes them."""

    def __iter__(self) -> Any:
        size = plain.MICRO_BATCH
        starts = range(self.rank * size, len(self.dataset), size * self.num_replicas)  # type: ignore[arg-type]
        return (start + offset for start in starts for offset in range(size))


def loader(accumulation: int, rank: int, half: int | None = None) -> Any:
    samples = plain.samples(accumulation)
    data = TensorDataset(samples if half is None else samples.chunk(2)[half])
    return DataLoader(data, batch_size=plain.MICRO_BATCH, sampler=InOrder(data, plain.RANKS, rank, shuffle=False))


class Module(lightning.LightningModule):
    """The reference's model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain.build()
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = plain.loss_of(self.inner(batch[0]))
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("checked", plain.loss_of(self.inner(batch[0])), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = plain.made(self)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def by_trainer(stage: int, accumulation: int, folder: Path) -> dict[str, Any]:
    import polyaccel_trainers.lightning as ours
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}

    def fit(half: int, start: Path | None = None) -> tuple[Module, Any]:
        """An epoch of half the samples."""
        trainer = lightning.Trainer(
            strategy=ours.PolyaccelStrategy(config={"zero_optimization": zero}) if stage else "polyaccel_stage_0",
            plugins=[TorchElasticEnvironment()],
            accelerator="cpu",
            devices=plain.RANKS,
            max_epochs=half + 1,
            accumulate_grad_batches=accumulation,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            callbacks=[Saves()],
        )
        module = Module()
        trainer.fit(module, loader(accumulation, trainer.global_rank, half), ckpt_path=start)
        return module, trainer

    class Saves(lightning.Callback):
        """At the end, as ModelCheckpoint does."""

        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(folder / f"after-{trainer.current_epoch}")

    first, trainer = fit(0)
    second, trainer = fit(1, folder / "after-1")
    weights = {name: one.clone() for name, one in second.inner.state_dict().items()}
    checked = trainer.validate(Module(), loader(accumulation, trainer.global_rank), folder / "after-2", verbose=False)
    losses = [*first.losses, *second.losses]
    losses = [sum(losses[at : at + accumulation]) / accumulation for at in range(0, len(losses), accumulation)]
    return {"losses": losses, "weights": weights, "checked": checked[0]["checked"], "rank": trainer.global_rank}


def by_fabric(stage: int, accumulation: int, folder: Path) -> dict[str, Any]:
    import polyaccel_trainers.fabric  # noqa: F401 - registers the strategy

    fabric = lightning.Fabric(strategy=f"polyaccel_stage_{stage}", accelerator="cpu", devices=plain.RANKS)
    fabric.launch()

    def start() -> tuple[Any, Any, Any]:
        model = plain.build()
        optimizer, schedule = plain.made(model)
        return fabric.setup(model, optimizer, scheduler=schedule)

    def train(prepared: tuple[Any, Any, Any], batches: list[Any]) -> list[float]:
        model, optimizer, schedule = prepared
        losses = []
        for first in range(0, len(batches), accumulation):
            parts = []
            for (batch,) in batches[first : first + accumulation]:
                last = len(parts) == accumulation - 1
                with fabric.no_backward_sync(model, enabled=not last):
                    loss = plain.loss_of(model(batch))
                    fabric.backward(loss / accumulation)
                parts.append(fabric.all_reduce(loss.detach()).item())
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(sum(parts) / len(parts))
        return losses

    batches = list(loader(accumulation, fabric.global_rank))
    prepared = start()
    losses = train(prepared, batches[: 3 * accumulation])
    fabric.save(folder / "state", {"model": prepared[0], "optimizer": prepared[1], "schedule": prepared[2], "step": 3})
    losses += train(prepared, batches[3 * accumulation :])
    prepared = start()
    state = {"model": prepared[0], "optimizer": prepared[1], "schedule": prepared[2], "step": 0}
    fabric.load(folder / "state", state)
    assert state["step"] == 3
    again = train(prepared, batches[3 * accumulation :])
    weights = fabric.strategy.get_module_state_dict(prepared[0]._forward_module)
    return {"losses": losses, "again": again, "weights": weights, "rank": fabric.global_rank}


def main(kind: str, stage: str, accumulation: str, out: str) -> None:
    found = (by_fabric if kind == "fabric" else by_trainer)(int(stage), int(accumulation), Path(out))
    if found.pop("rank") == 0:
        torch.save(found.pop("weights"), Path(out, "weights.pt"))
        Path(out, "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
