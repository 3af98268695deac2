"""What scripts do to parameters between steps: statements, and trainings with them under the engine and in plain
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from parity_models import (
    SMALL_BUCKET,
    Params,
    ParityModel,
    assert_bitwise,
    assert_close,
    grouped,
    grouped_engine,
    make_config,
    parity_loss,
    parity_model,
    relative_distance,
    snapshot,
)
from torch import nn

from polyaccel.comm.base import Communicator
from polyaccel.zero import GatheredParameters

Statement = Callable[[ParityModel], None]
Script = Sequence[Sequence[Statement]]
"""The statements after each step."""


# What scripts write.


def in_place(model: ParityModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def through_data(model: ParityModel) -> None:
    model.wide.weight.data.mul_(0.5)
    model.scale.data += 0.25


def through_detach(model: ParityModel) -> None:
    model.narrow.weight.detach().mul_(0.5)


def through_a_view(model: ParityModel) -> None:
    with torch.no_grad():
        model.wide.weight[3:5].fill_(0.125)


def through_numpy(model: ParityModel) -> None:
    model.twice.weight.detach().view(torch.uint8).numpy()[2] = 0  # as bytes: numpy has no bfloat16
    model.frozen.detach().view(torch.uint8).numpy()[:4] = 0


def a_new_tensor_as_data(model: ParityModel) -> None:
    model.wide.weight.data = model.wide.weight.detach() * 0.5
    model.frozen.data = torch.linspace(-1.0, 1.0, 6, dtype=model.frozen.dtype)


def data_of_other_strides(model: ParityModel) -> None:
    model.wide.weight.data = (model.wide.weight.detach() * 0.5).t().contiguous().t()
    model.twice.weight.data = model.twice.weight.data.t()


def from_a_vector(model: ParityModel) -> None:
    with torch.no_grad():
        values = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(values, model.parameters())


def load_all(model: ParityModel) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def load_a_part(model: ParityModel) -> None:
    model.load_state_dict({"wide.weight": torch.full((33, 6), 0.01)}, strict=False)
    model.narrow.load_state_dict({"weight": torch.linspace(-1, 1, 198).view(6, 33), "bias": torch.linspace(0, 1, 6)})


def write_to_a_state_dict(model: ParityModel) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.mul_(0.5)


def exchange_with_an_average(model: ParityModel) -> None:
    """A moving average takes the parameters' place for a while; then they come back."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(torch.ones_like(parameter) * 0.1)
    with torch.no_grad():
        model(torch.arange(4), torch.arange(4))
    for parameter, value in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(value)
    model.wide.weight.data.lerp_(torch.zeros_like(model.wide.weight), 0.25)


def clip_weights(model: ParityModel) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def bound_norms(model: ParityModel) -> None:
    with torch.no_grad():
        torch.renorm(model.embed.weight, 2, 0, 1.0, out=model.embed.weight)


def reinitialise_a_layer(model: ParityModel) -> None:
    torch.nn.init.constant_(model.wide.weight, 0.05)
    torch.nn.init.zeros_(model.wide.bias)


def merge_an_adapter(model: ParityModel) -> None:
    """As LoRA's merge does, `weight.data += delta`, and its safe variant."""
    delta = torch.full((6, 2), 0.1) @ torch.full((2, 6), 0.1)
    model.twice.weight.data += delta
    merged = model.twice.weight.data.clone()
    merged -= 0.5 * delta
    model.twice.weight.data = merged


def an_optimizer_of_their_own(model: ParityModel) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.75)  # type: ignore[call-overload]


HONOURED: list[Statement] = [
    in_place,
    through_data,
    through_detach,
    through_a_view,
    through_numpy,
    a_new_tensor_as_data,
    from_a_vector,
    load_all,
    load_a_part,
    write_to_a_state_dict,
    exchange_with_an_average,
    clip_weights,
    bound_norms,
    reinitialise_a_layer,
    merge_an_adapter,
    an_optimizer_of_their_own,
    data_of_other_strides,
]


# Statements that cannot count, and what the error says.


def another_type(model: ParityModel) -> None:
    model.double()


def another_shape(model: ParityModel) -> None:
    model.scale.data = torch.ones(2)


def other_memory(model: ParityModel) -> None:
    with torch.no_grad():
        model.wide.weight.set_(torch.zeros(33, 6, dtype=model.wide.weight.dtype))  # type: ignore[call-overload]


def another_parameter(model: ParityModel) -> None:
    model.wide.weight = nn.Parameter(torch.zeros_like(model.wide.weight))


def load_by_assignment(model: ParityModel) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


REFUSED: dict[Statement, tuple[str, ...]] = {
    another_type: ("'embed.weight'", "float64"),
    another_shape: ("'scale'", "float32", "(2,)"),
    other_memory: ("'wide.weight'",),
    another_parameter: ("nn.Parameter", "'wide.weight'"),
    load_by_assignment: ("nn.Parameter", "load_state_dict(assign=True)"),
}


# Runs.


def config_for(stage: int, kind: str, accumulation: int = 1, folder: Path | None = None) -> dict[str, Any]:
    """`kind` is "fp32", "bf16", "offload", or "nvme" with files in `folder`."""
    zero: dict[str, Any] = {"reduce_bucket_size": SMALL_BUCKET}
    if kind == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    if kind == "nvme":
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": str(folder)}
    changes = {"bf16": {"enabled": True}} if kind == "bf16" else {}
    return make_config(stage, accumulation=accumulation, zero=zero, **changes)


def state(model: ParityModel, *statements: Statement, gathers: bool) -> None:
    """Run the statements: inside GatheredParameters where parameters are `sharded` else."""
    with GatheredParameters(model.parameters(), modifier_rank=0, enabled=gathers):
        for statement in statements:
            statement(model)


def train_with(communicator: Communicator, model: ParityModel, config: dict[str, Any], script: Script) -> Params:
    """Train for as many steps as `script` has entries: the statements after each step."""
    engine = grouped_engine(model, deepcopy(config))
    gathers = engine.zero.params.is_any_sharded
    for step, statements in enumerate(script):
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(parity_loss(engine, step, micro, communicator.rank))
            engine.step()
        state(model, *statements, gathers=gathers)
    engine.destroy()
    return snapshot(model)


def train_plainly_with(world: int, script: Script, accumulation: int, dtype: torch.dtype) -> Params:
    """The same in one process of plain torch: parameters in `dtype` beside master weights, which follow them."""
    masters, model = parity_model(), parity_model().to(dtype)
    optimizer = torch.optim.AdamW(grouped(masters), lr=1e-2)
    pairs = list(zip(model.parameters(), masters.parameters(), strict=True))
    for step, statements in enumerate(script):
        optimizer.zero_grad()
        for micro in range(accumulation):
            for rank in range(world):
                model.zero_grad()
                (parity_loss(model, step, micro, rank) / (accumulation * world)).backward()
                for parameter, master in pairs:
                    if parameter.grad is not None:
                        gradient = parameter.grad.to(master.dtype)
                        master.grad = gradient if master.grad is None else master.grad + gradient
        optimizer.step()
        with torch.no_grad():
            for parameter, master in pairs:
                parameter.copy_(master)
        state(model, *statements, gathers=False)
        with torch.no_grad():
            for parameter, master in pairs:
                master.copy_(torch.where(master.to(dtype) == parameter, master, parameter.to(master.dtype)))
    return snapshot(model)


def assert_honoured(runs: Sequence[Params], kind: str, accumulation: int, script: Script) -> None:
    """The ranks, which trained with `train_with`, ended with the same bits, and near to plain torch."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    plain = train_plainly_with(len(runs), script, accumulation, dtype)
    for run in runs:
        assert_bitwise(run, runs[0])
    if kind == "bf16":
        assert relative_distance(runs[0], plain, snapshot(parity_model())) < 0.03
    else:
        assert_close(runs[0], plain, 5e-6)


def in_turn(statements: Sequence[Statement], count: int) -> Iterator[tuple[str, Script]]:
    """Scripts with `count` of the statements each, one after each step but the first and the last, and their names."""
    for at in range(0, len(statements), count):
        some = statements[at : at + count]
        yield ", ".join(one.__name__ for one in some), [[], *([one] for one in some), []]
