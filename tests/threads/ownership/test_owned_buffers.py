"""Buffers and parameters of unusual types and layouts: exchanged, saved and loaded to the bit, or refused by name."""

from __future__ import annotations

import pytest
import torch
from parity_models import make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import CheckpointError, ShardingError

BUFFERS = {
    "complex64": lambda seed: torch.full((3, 4), complex(seed, 2)),
    "conjugated": lambda seed: torch.full((3, 4), complex(seed, 2)).conj(),
    "complex128": lambda seed: torch.full((3,), complex(seed, 2), dtype=torch.complex128),
    "expanded": lambda seed: torch.full((4, 1), seed + 0.5).expand(4, 5),
    "transposed": lambda seed: torch.arange(12.0).view(3, 4).t() + seed,
    "channels_last": lambda seed: (torch.arange(16.0).view(1, 4, 2, 2) + seed).to(memory_format=torch.channels_last),
    "sparse": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse(),
    "sparse_csr": lambda seed: (torch.eye(4) * (seed + 1)).to_sparse_csr(),
    "uint16": lambda seed: torch.full((5,), 60000 + seed).to(torch.uint16),
    "uint64": lambda seed: torch.full((5,), seed).to(torch.uint64),
    "float8_e4m3fn": lambda seed: torch.full((5,), seed + 0.5).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda seed: torch.full((5,), seed + 0.5).to(torch.float8_e5m2),
    "empty": lambda seed: torch.zeros(0, 3),
    "scalar": lambda seed: torch.tensor(seed),
}
REFUSED = {
    "nested": lambda seed: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda seed: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


class Holder(nn.Module):
    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", buffer)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs).square().mean()


def holders(make):
    """A model for each rank in turn, with a buffer of its own."""
    seeds = iter(range(9))
    return lambda: Holder(make(next(seeds)))


def bits(tensor: Tensor) -> str:
    """What a tensor is and holds, to compare those that torch does not compare."""
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    wide = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    return f"{tensor.layout} {tensor.dtype} {wide.tolist()}"


def start(model, stage=2):
    return polyaccel.initialize(model=model, config=make_config(stage))[0]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_begins_as_rank_0s_and_comes_back_from_a_checkpoint(name, stage, tmp_path):
    def work(communicator, model):
        engine = start(model, stage)
        begun = bits(model.table)
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.save_16bit_model(str(tmp_path))
        fresh = Holder(BUFFERS[name](7))
        start(fresh, stage).load_checkpoint(str(tmp_path))
        return begun, bits(fresh.table)

    wanted = bits(BUFFERS[name](0))
    assert on_threads(2, work, holders(BUFFERS[name])) == [(wanted, wanted)] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_a_buffer_that_nobody_can_exchange_is_refused_by_name(name):
    def work(communicator, model):
        with pytest.raises(ShardingError) as caught:
            start(model)
        assert caught.value.value == "table"
        assert name in str(caught.value)

    on_threads(2, work, holders(REFUSED[name]))


def test_buffers_that_differ_between_ranks_are_told_before_any_is_exchanged():
    def work(communicator, model):
        with pytest.raises(ShardingError) as caught:
            start(model)
        assert caught.value.value == "table.indices"
        assert all(part in str(caught.value) for part in ("(2, 2)", "(2, 1)", "rank 1", "rank 0"))

    on_threads(2, work, holders(lambda seed: torch.diag(torch.tensor([1.0, float(seed)])).to_sparse()))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_complex_parameter_is_refused_by_name(stage):
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def work(communicator, model):
        with pytest.raises(ShardingError) as caught:
            start(model, stage)
        assert caught.value.value == "phase"
        assert all(part in str(caught.value) for part in ("torch.complex64", "view_as_complex"))

    on_threads(1, work, Complex)


class Scaled(nn.Module):
    """A part with a state beside its tensors, as quantisers and other libraries' layers have."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


STATES = {
    "a dict": {"scale": 0.5, "steps": [1, 2], "history": torch.arange(3.0)},
    "a tensor": torch.arange(3.0),
    "nothing": None,
}


@pytest.mark.parametrize("name", STATES)
def test_extra_states_come_back_from_a_checkpoint(name, tmp_path):
    def build(state=STATES[name]):
        model = Holder(torch.zeros(1))
        model.part = Scaled(state)
        return model

    def work(communicator, model):
        start(model).save_checkpoint(str(tmp_path))
        fresh = build("another")
        start(fresh).load_checkpoint(str(tmp_path))
        return str(fresh.part.state)

    assert on_threads(2, work, build) == [str(STATES[name])] * 2


def test_an_extra_state_that_no_checkpoint_can_hold_is_refused_by_name(tmp_path):
    class Own:
        pass

    def build():
        model = Holder(torch.zeros(1))
        model.part = Scaled(Own())
        return model

    def work(communicator, model):
        with pytest.raises(CheckpointError) as caught:
            start(model).save_checkpoint(str(tmp_path))
        assert caught.value.value == "part"
        assert "get_extra_state" in str(caught.value)

    on_threads(2, work, build)
