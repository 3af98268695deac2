"""Save a checkpoint, and continue from it: on another number of ranks too.

polyaccel run --ranks 2 examples/resume/train.py
polyaccel run --ranks 1 examples/resume/train.py
"""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

import polyaccel

FOLDER = "runs/resume"
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2},
}

torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

engine, _, loader, _ = polyaccel.initialize(model=torch.nn.Linear(16, 1), training_data=data, config=CONFIG)
if Path(FOLDER).exists():
    engine.load_checkpoint(FOLDER)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(FOLDER)
if engine.communicator.rank == 0:
    print(f"saved step {engine.global_steps}: loss {loss.item():.4f}")
engine.destroy()
