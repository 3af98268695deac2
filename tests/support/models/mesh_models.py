"""The parity model with two layers cut over the ranks along the mesh axis `tensor`, unevenly, and its training."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from parity_models import Config, ParityModel, Run, grouped_engine, parity_loss, parity_model, snapshot
from torch import Tensor, nn

from polyaccel.accelerators.memory.torch import wrap_torch
from polyaccel.comm.base import Communicator
from polyaccel.core.block import Block
from polyaccel.core.mesh import Mesh, MeshAxis
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.sharding.tensor_shard import TensorShard


class _Copied(torch.autograd.Function):
    """The identity, whose gradient is added over the ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Communicator) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        summed = gradient.clone().contiguous()
        ctx.ranks.all_reduce(wrap_torch(summed))
        return summed, None


class _Added(torch.autograd.Function):
    """The sum over the ranks, whose gradient each has."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Communicator) -> Tensor:
        summed = value.clone().contiguous()
        ranks.all_reduce(wrap_torch(summed))
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class CutParityModel(ParityModel):
    """`wide` has some of the hidden units on each rank of `ranks`, and `narrow` what they are multiplied with."""

    def cut(self, ranks: Communicator) -> CutParityModel:
        self.ranks = ranks
        low, high = bounds(ranks.rank, ranks.world_size)
        units = Block.whole((33, 6)).cut(0, (low, high - low))
        self.wide.parallel_cuts = {
            "weight": TensorShard(units),
            "bias": TensorShard(Block.whole((33,)).cut(0, (low, high - low))),
        }
        self.narrow.parallel_cuts = {"weight": TensorShard(Block.whole((6, 33)).cut(1, (low, high - low)))}
        with torch.no_grad():
            self.wide.weight.data = self.wide.weight[low:high].clone()
            self.wide.bias.data = self.wide.bias[low:high].clone()
            self.narrow.weight.data = self.narrow.weight[:, low:high].clone()
        return self

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.frozen
        part = torch.tanh(self.wide(_Copied.apply(hidden, self.ranks)))
        added = _Added.apply(nn.functional.linear(part, self.narrow.weight), self.ranks) + self.narrow.bias
        hidden = hidden + added * self.scale
        hidden = hidden + torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)


def bounds(rank: int, ranks: int) -> tuple[int, int]:
    """The hidden units of a rank."""
    return 33 * rank // ranks, 33 * (rank + 1) // ranks


def cut_parity_models(count: int) -> list[CutParityModel]:
    """Models with the values of `parity_model`, which ranks that are threads cut: they have one generator of random
    numbers, so models are built before the threads are."""
    models = [CutParityModel() for _ in range(count)]
    for model in models:
        model.load_state_dict(parity_model().state_dict())
    return models


def mesh_config(config: Config, tensor: int) -> Config:
    """`config` with `tensor` ranks that share the model."""
    return {**deepcopy(config), "mesh": {"tensor": tensor}}


def join(communicator: Communicator, tensor: int, model: CutParityModel) -> tuple[CutParityModel, int]:
    """This rank's part of the model, which is whole, and which batches are its own."""
    mesh = Mesh((MeshAxis("data", communicator.world_size // tensor), MeshAxis("tensor", tensor)))
    mine = [communicator.split(ranks) for ranks in mesh.groups(("tensor",))]
    ranks = next(group for group in mine if group is not None)
    return model.cut(ranks), mesh.coordinates(communicator.rank)["data"]


def train_cut(
    communicator: Communicator, tensor: int, config: Config, steps: int, whole: CutParityModel | None = None
) -> Run:
    """The run of this rank, one of `tensor` that share a model: `whole`, or one that is built here."""
    model, place = join(communicator, tensor, whole or cut_parity_models(1)[0])
    engine = grouped_engine(model, mesh_config(config, tensor))
    run = Run({})
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            loss = parity_loss(engine, step, micro, place)
            engine.backward(loss)
            engine.step()
            run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
    engine.destroy()
    run.params = snapshot(model)
    return run


def train_on_a_mesh(data: int, tensor: int, config: Config, steps: int) -> list[Run]:
    """The runs of all ranks, which are threads."""
    models = cut_parity_models(data * tensor)
    return run_threads(
        data * tensor,
        lambda communicator: train_cut(communicator, tensor, config, steps, models[communicator.rank]),
    )
