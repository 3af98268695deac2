"""Accumulate gradients over four micro-batches for each optimizer step.

polyaccel run --ranks 2 examples/by_feature/gradient_accumulation.py
"""

import torch
from torch.utils.data import TensorDataset

import polyaccel

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}

torch.manual_seed(0)
inputs = torch.randn(64, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))

engine, _, loader, _ = polyaccel.initialize(model=torch.nn.Linear(16, 1), training_data=data, config=CONFIG)
for x, y in loader:
    loss = torch.nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
    engine.backward(loss)  # adds to the gradients
    engine.step()  # updates behind every fourth micro-batch
if engine.communicator.rank == 0:
    print(f"{engine.micro_steps} micro-batches, {engine.global_steps} optimizer steps")
engine.destroy()
