"""What a script does to parameters between steps counts as in plain torch, or is refused before the next update.

The statements are in `parameter_statements`: first those that count, then those that are refused, with the errors. The
reference is the same script in one plain process, which sees the batches of all ranks. Here each rank has memory of its
own; tests/procs/torch/test_ownership_processes.py has the memory that ranks share.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import combinations
from parameter_statements import HONOURED, REFUSED, assert_honoured, config_for, in_turn, train_with
from parity_models import grouped_engine, on_threads, parity_loss, parity_model
from torch import nn

import polyaccel
from polyaccel.errors import ShardingError

IN_TURN = [pytest.param(script, id=name) for name, script in in_turn(HONOURED, 4)]


@combinations(
    script=IN_TURN, stage=[0, 1, 2, 3], kind=["fp32", "bf16", "offload", "nvme"], world=[2, 3], accumulation=[1, 2]
)
def test_what_a_script_writes_counts(script, stage, kind, world, accumulation, tmp_path):
    config = config_for(stage, kind, accumulation, tmp_path)
    assert_honoured(on_threads(world, train_with, parity_model, config, script), kind, accumulation, script)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("statement", REFUSED)
def test_what_cannot_count_is_refused_by_name(statement, stage):
    def work(communicator, model):
        engine = grouped_engine(model, config_for(stage, "fp32"))
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        statement(model)
        engine.step()

    with pytest.raises(ShardingError) as caught:
        on_threads(2, work, parity_model)
    assert all(part in str(caught.value) for part in REFUSED[statement])


class Reads(nn.Module):
    """Reads a parameter past autograd in its forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values):
        return self.layer(values).sum() + self.layer.weight.data.sum() + self.layer.bias.detach().sum()


def test_parameters_of_an_engine_compile_and_make_parameters():
    def work(communicator, model):
        engine, *_ = polyaccel.initialize(model=model, config=config_for(1, "fp32"))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(1, 4)), engine(torch.ones(1, 4)))
        weight = model.layer.weight
        second = nn.Parameter(weight)
        assert second.data_ptr() == weight.data_ptr()
        assert second.requires_grad
        (2.0 * second).sum().backward()
        assert second.grad.sum() == 32.0
        assert not isinstance(weight.detach(), nn.Parameter)

    on_threads(1, work, Reads)


def test_two_parameters_in_one_memory_are_refused_at_the_start():
    def work(communicator, model):
        model.twice.bias.data = model.narrow.bias.data
        polyaccel.initialize(model=model, config=config_for(0, "fp32"))

    with pytest.raises(ShardingError) as caught:
        on_threads(1, work, parity_model)
    assert caught.value.value == ("narrow.bias", "twice.bias")


@pytest.mark.parametrize("kind", ["fp32", "bf16", "nvme"])
def test_what_was_written_is_saved_and_what_is_loaded_replaces_it(kind, tmp_path):
    """A save between steps has what a script wrote, and a load takes the place of what it wrote later."""

    def work(communicator, model):
        config = config_for(2, kind, folder=tmp_path / "states")
        engine = grouped_engine(model, config)
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        model.wide.weight.data.fill_(0.25)
        engine.save_checkpoint(str(tmp_path / "saved"))
        for parameter in model.parameters():
            parameter.data.fill_(0.75)
        engine.load_checkpoint(str(tmp_path / "saved"))
        engine.step()  # without gradients: nothing changes, and nothing of 0.75 is left
        masters = polyaccel.utils.safe_get_full_fp32_param(model.wide.weight)
        assert masters.unique().tolist() == [0.25]
        assert not any((parameter == 0.75).any() for parameter in model.parameters())
        engine.destroy()

    on_threads(2, work, parity_model)


def test_sixteen_bits_among_others_have_master_weights_without_a_section():
    """Parameters of several types train as under a precision section, each with what its own type needs."""

    def work(communicator, model):
        model.twice.to(torch.bfloat16)
        model.twice.forward = lambda values: nn.Linear.forward(model.twice, values.bfloat16()).float()
        engine = grouped_engine(model, config_for(2, "fp32"))
        for step in range(3):
            engine.backward(parity_loss(engine, step, 0, communicator.rank))
            engine.step()
        assert model.twice.weight.dtype is torch.bfloat16
        assert model.wide.weight.dtype is torch.float32
        master = polyaccel.utils.safe_get_full_fp32_param(model.twice.weight)
        assert torch.equal(master.bfloat16(), model.twice.weight)
        assert not torch.equal(master, model.twice.weight.float())
        del model.twice.forward

    on_threads(2, work, parity_model)
