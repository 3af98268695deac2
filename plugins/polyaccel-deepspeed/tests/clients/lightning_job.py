"""Lightning with its DeepSpeed strategies: the Trainer's and Fabric's, on the CPUs that they refuse.

`lightning_job.py KIND STAGE OUT`; KIND is `trainer` or `fabric`, and stage -1 is the same job without DeepSpeed, on one
process, whose batch is that of two ranks. `trainer-refused` and `fabric-refused` use the strategy as it is. Rank 0
writes what came out to OUT/result.json.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS, MICRO_BATCH, STEPS = 2, 4, 6


class StrategyOnCPU(DeepSpeedStrategy):
    """`DeepSpeedStrategy` without its two questions: whether the accelerator is a CUDA GPU, and which one."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class FabricStrategyOnCPU(FabricStrategy):
    """The same for Fabric."""

    def setup_environment(self) -> None:
        super(FabricStrategy, self).setup_environment()

    def _setup_distributed(self) -> None:
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(7, 200), torch.nn.Tanh(), torch.nn.Linear(200, 5))


def batches(is_plain: bool) -> DataLoader[Any]:
    data = torch.randn(STEPS * RANKS * MICRO_BATCH, 7, generator=torch.Generator().manual_seed(5))
    if is_plain:
        return DataLoader(TensorDataset(data), batch_size=MICRO_BATCH * RANKS)
    own = DistributedSampler(range(len(data)), RANKS, int(os.environ["RANK"]), shuffle=False)  # type: ignore[arg-type]
    return DataLoader(TensorDataset(data), batch_size=MICRO_BATCH, sampler=own)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs - 1.0).square().mean()


class Module(lightning.LightningModule):
    """A model that is built where stage 3 wants it built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = build()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = loss_of(self.layers(batch[0]))
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.losses.append(float(mean))
        self.log("loss", mean)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def trained(stage: int, out: Path, strategy: Any) -> dict[str, Any]:
    """Six steps of the Trainer; then the last three again, from the checkpoint of the third."""
    is_plain = stage < 0

    def trainer_of(folder: Path) -> lightning.Trainer:
        keeper = ModelCheckpoint(folder, filename="{step}", monitor="loss", save_top_k=-1, every_n_train_steps=3)
        return lightning.Trainer(
            accelerator="cpu", devices=1 if is_plain else RANKS, strategy="auto" if is_plain else strategy(),
            max_epochs=1, gradient_clip_val=0.5, callbacks=[keeper], logger=False, enable_progress_bar=False,
            use_distributed_sampler=False,
        )  # fmt: skip

    first = Module()
    trainer_of(out / "whole").fit(first, batches(is_plain))
    second = Module()
    trainer_of(out / "rest").fit(second, batches(is_plain), ckpt_path=out / "whole" / "step=3.ckpt")
    found: dict[str, Any] = {"losses": first.losses, "resumed": second.losses}
    if is_plain:
        saved = torch.load(out / "whole" / "step=6.ckpt", weights_only=False)
        found["norms"] = [float(value.norm()) for name, value in sorted(saved["state_dict"].items())]
    elif first.global_rank == 0:
        whole = convert_zero_checkpoint_to_fp32_state_dict(str(out / "whole" / "step=6.ckpt"), str(out / "whole.ckpt"))
        found["norms"] = [float(value.norm()) for name, value in sorted(whole["state_dict"].items())]
        found["score"] = float(whole["callbacks"][next(iter(whole["callbacks"]))]["best_model_score"])
    return found


def by_fabric(stage: int, out: Path, strategy: Any) -> dict[str, Any]:
    """The same six steps by hand, with a checkpoint that is loaded again after the third."""
    is_plain = stage < 0
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1 if is_plain else RANKS, strategy="auto" if is_plain else strategy()
    )
    fabric.launch()
    with fabric.init_module():
        layers = build()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer = fabric.setup(layers, optimizer)
    loader = fabric.setup_dataloaders(batches(is_plain), use_distributed_sampler=False)
    losses: list[float] = []
    state = {"model": model, "optimizer": optimizer, "step": 0}

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        fabric.backward(loss)
        if is_plain:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach().clone(), reduce_op="mean")))

    every = [batch for (batch,) in loader]
    for batch in every[:3]:
        step(batch)
    state["step"] = 3
    fabric.save(out / "state", state)
    for batch in every[3:]:
        step(batch)
    state["step"] = 0
    fabric.load(out / "state", state)
    for batch in every[3:]:
        step(batch)
    assert state["step"] == 3
    return {"losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["trainer", "fabric", "trainer-refused", "fabric-refused"])
    parser.add_argument("stage", type=int)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    offload = {"offload_optimizer": True, "offload_parameters": True} if given.stage == 3 else {}
    options: dict[str, Any] = {"stage": given.stage, **offload}
    if given.kind == "fabric":
        options = {"config": {**FabricStrategy(**options).config, "gradient_clipping": 0.5}}
    kinds = {
        "trainer": (trained, StrategyOnCPU),
        "trainer-refused": (trained, DeepSpeedStrategy),
        "fabric": (by_fabric, FabricStrategyOnCPU),
        "fabric-refused": (by_fabric, FabricStrategy),
    }
    job, strategy = kinds[given.kind]
    found = job(given.stage, given.out, lambda: strategy(**options))
    if given.stage < 0 or torch.distributed.get_rank() == 0:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "result.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
