"""Stop on Ctrl-C or SIGTERM at the end of a step, on all ranks together, with a checkpoint.

polyaccel run --ranks 2 examples/by_feature/stop.py
"""

import sys

import torch
from torch.utils.data import TensorDataset

import polyaccel

CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}

torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

engine, _, loader, _ = polyaccel.initialize(model=torch.nn.Linear(16, 1), training_data=data, config=CONFIG)
stop, stopped_by = polyaccel.StopRequest(), 0
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)
    engine.step()
    stopped_by = stop.agreed()
    if stopped_by:
        engine.save_checkpoint("runs/by_feature_stop")
        break
engine.destroy()
sys.exit(128 + stopped_by if stopped_by else 0)
