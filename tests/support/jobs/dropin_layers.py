"""DeepSpeed's linear layers over two tensor ranks, trained by an engine, and means of several tensors at once.

Each rank prints its losses, those of the whole model in plain torch, and its parts of the means.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from copy import deepcopy

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.module_inject.layers import LinearAllreduce, LinearAllreduceWithReplicatedInput, LinearLayer
from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce, reduce_scatter_coalesced
from torch import Tensor, nn

STEPS = 3


class Model(nn.Module):
    """Seven features are cut over two ranks, and the last layers give and take whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.wide, self.out = nn.Linear(5, 3, bias=False), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the output."""
        hidden = self.norm(self.down(torch.nn.functional.gelu(self.up(x))))
        loss: Tensor = self.out(torch.tanh(self.wide(hidden))).square().mean()
        return loss


def losses_of(model: nn.Module, stage: int | None) -> list[float]:
    """Train on three batches, by plain torch or by an engine."""
    if stage is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(STEPS):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if stage is None:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train both, and print what came of it."""
    parser = ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=1)
    stage = parser.parse_args().stage
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    whole = Model()
    cut = deepcopy(whole)
    group = dist.new_group([0, 1])
    cut.up = LinearLayer(cut.up, group)
    cut.down = LinearAllreduce(cut.down, group)
    cut.wide = LinearLayer(cut.wide, group, gather_output=True)
    cut.out = LinearAllreduceWithReplicatedInput(cut.out, group)
    shapes = {name: list(each.shape) for name, each in cut.named_parameters()}
    plain, found = losses_of(whole, None), losses_of(cut, stage)
    rank = dist.get_rank()
    tensors = [rank * torch.arange(6.0), rank * torch.arange(6.0, 9.0).view(3, 1)]
    means = [one.tolist() for one in reduce_scatter_coalesced(tensors, group)]
    exact = [one.tolist() for one in all_to_all_quant_reduce(tensors, {})]
    answer = {"rank": rank, "plain": plain, "found": found, "shapes": shapes, "means": means, "exact": exact}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
