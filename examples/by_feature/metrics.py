"""Write metrics and a page of the run: polyaccel watch runs/by_feature

polyaccel run --ranks 2 examples/by_feature/metrics.py
"""

import torch
from torch.utils.data import TensorDataset

import polyaccel

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "run_dir": "runs/by_feature",
    "zero_optimization": {"stage": 1},
}

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

engine, _, loader, _ = polyaccel.initialize(model=model, training_data=data, config=CONFIG)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)
    engine.step()
if engine.communicator.rank == 0:
    print(f"step {engine.global_steps}: loss {loss.item():.4f}")
engine.destroy()
