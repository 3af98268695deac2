"""Regions whose inputs wait in host memory give the numbers of plain ones, at every stage, and do leave the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from parity_models import batch, drawn_from, make_config, on_threads
from torch import Tensor, nn

import polyaccel
from polyaccel import checkpointing
from polyaccel.accelerators.base import Capabilities, NullEvent, NullStream
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.accelerators.named_random import named_random_states
from polyaccel.engine.policies.modules import RecomputePolicy
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.activation_checkpointing import inputs
from polyaccel.torch.activation_checkpointing.regions import RecomputedRegions, configured
from polyaccel.torch.api import activations

VOCAB, WIDTH = 17, 12
OFFLOAD = {"activation_checkpointing": {"cpu_checkpointing": True}}


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, hidden: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
        return hidden + self.drop(self.narrow(torch.tanh(self.wide(hidden)))) * mask * scale


class Stack(nn.Module):
    """RecomputedRegions with a computed input, a mask and a parameter as arguments, and one region inside another."""

    def __init__(self, checkpoint: Any = checkpointing.checkpoint) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Region() for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.checkpoint = checkpoint

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        mask = (tokens % 3 > 0).to(hidden.dtype)[:, None]
        for block in self.blocks[:-1]:
            hidden = self.checkpoint(block, hidden, mask, self.scale)
        hidden = self.checkpoint(self._outer, hidden, mask)
        return nn.functional.cross_entropy(self.head(hidden).float(), targets)

    def _outer(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.checkpoint(self.blocks[-1], hidden, mask, self.scale))


def stack() -> Stack:
    with drawn_from(0):
        return Stack()


def plain_stack() -> Stack:
    with drawn_from(0):
        return Stack(lambda function, *args: function(*args))


def run(world: int, stage: int, build: Any = stack, **changes: Any) -> list[Any]:
    """Losses, norms and master weights of two steps, on every rank."""
    zero = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 20}
    config = make_config(stage, accumulation=2, zero=zero, **changes)

    def train(communicator: Any, model: nn.Module) -> Any:
        engine, *_ = polyaccel.initialize(model=model, config=deepcopy(config))
        figures: list[Any] = []
        for step in range(2):
            for micro in range(2):
                torch.manual_seed(10 * step + micro)
                loss = engine(*batch(step, micro, communicator.rank))
                engine.backward(loss)
                engine.step()
                figures.append(loss.item())
            figures.append(engine.get_global_grad_norm())
        return figures, [place.master.raw.tolist() for place in engine.zero.params]

    return on_threads(world, train, build)


@pytest.fixture
def device_apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The CPU stands for a device with memory of its own. Returns the numbers of elements that are copied to the
    host."""
    monkeypatch.setattr(inputs, "is_in_host_memory", lambda accelerator: False)
    numels = []
    copy = inputs.HostCopies.copy

    def counted(self: Any, source: Tensor, memory: Tensor) -> None:
        numels.append(source.numel())
        copy(self, source, memory)

    monkeypatch.setattr(inputs.HostCopies, "copy", counted)
    return numels


@pytest.fixture(autouse=True)
def forget_configuration() -> Iterator[None]:
    yield
    checkpointing.reset()


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_offload_changes_no_bit(stage, precision, device_apart):
    wanted = run(1, stage, **precision)  # one rank: threads share one stream of random numbers
    assert device_apart == []
    found = run(1, stage, **OFFLOAD, **precision)
    assert device_apart == [4 * WIDTH] * 4 * 4  # micro-batches, regions that are not inside others
    assert found == wanted


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_on_several_ranks_too(stage, device_apart, monkeypatch):
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, value: value)
    wanted = run(2, stage, build=plain_stack)
    found = run(2, stage, **OFFLOAD)
    assert len(device_apart) == 2 * 4 * 4
    assert found == wanted


@pytest.mark.parametrize("stage", [0, 3])
def test_in_host_memory_nothing_moves_and_the_numbers_are_the_same(stage):
    assert run(1, stage, **OFFLOAD) == run(1, stage)
    assert not inputs.InputStore(RecomputePolicy(offload=True), CpuAccelerator(), None).moves


def test_inputs_leave_the_device_until_backward(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)
    alive = []

    def grow(hidden: Tensor) -> Tensor:
        alive.append(weakref.ref(hidden.untyped_storage()))
        return torch.sin(hidden)

    weight = torch.randn(50, requires_grad=True)
    hidden = weight * 2
    for _ in range(3):
        hidden = checkpointing.checkpoint(grow, hidden)
    loss = hidden.sum()
    del hidden
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
    loss.backward()
    expected = weight.detach().clone().requires_grad_()
    torch.sin(torch.sin(torch.sin(expected * 2))).sum().backward()
    assert torch.equal(weight.grad, expected.grad)


def test_a_graph_can_be_walked_twice(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)
    weight = torch.randn(6, requires_grad=True)
    loss = checkpointing.checkpoint(torch.sin, checkpointing.checkpoint(torch.exp, weight * 2)).sum()
    loss.backward(retain_graph=True)
    once = weight.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once)
    assert len(device_apart) == 2


def test_changing_an_input_after_its_region_harms_nothing(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)
    weight = torch.randn(6, requires_grad=True)
    hidden = weight * 2
    loss = checkpointing.checkpoint(torch.sin, hidden).sum()
    hidden.detach().zero_()
    loss.backward()
    assert torch.equal(weight.grad, 2 * torch.cos(2 * weight.detach()))


def test_without_gradients_nothing_is_kept(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)
    weight = torch.randn(6, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(checkpointing.checkpoint(torch.sin, weight), torch.sin(weight))
    assert device_apart == []


def test_a_region_that_raises_leaves_no_hooks(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)

    def fail(hidden: Tensor) -> Tensor:
        raise RuntimeError("broken")

    weight = torch.randn(6, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        checkpointing.checkpoint(fail, weight * 2)
    assert str(caught.value) == "broken"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert len(device_apart) == 1


def test_what_is_not_moved_goes_to_the_hooks_in_force(device_apart):
    checkpointing.configure(checkpoint_in_cpu=True)
    weight, mask = torch.randn(6, requires_grad=True), torch.ones(6)
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor.data_ptr())
        return tensor

    hidden = weight * 2
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = checkpointing.checkpoint(torch.mul, hidden, mask)
    assert packed == [mask.data_ptr()]
    loss.sum().backward()
    assert unpacked == packed
    assert torch.equal(weight.grad, torch.full((6,), 2.0))


# Streams, on a device that only notes what is queued.


class NotedStream(NullStream):
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def record(self) -> NullEvent:
        self.notes.append(f"record {self.name}")
        return NullEvent()

    def wait(self, event: Any) -> None:
        self.notes.append(f"{self.name} waits")

    @contextmanager
    def use(self) -> Iterator[None]:
        self.notes.append(f"on {self.name}")
        yield


class NotedAccelerator(CpuAccelerator):
    torch_device_type = "noted"

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._current = NotedStream("compute", self.notes)

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=frozenset(), default_comm="local", streams=True)

    def new_stream(self) -> NotedStream:
        return NotedStream("copy", self.notes)

    def current_stream(self) -> NotedStream:
        return self._current


_NOTES: list[list[str]] = [[]]
"""Outside of regions: what a region changes in its closure is put back after its second run."""


def _note(name: str) -> None:
    _NOTES[0].append(name)


def test_copies_overlap_and_are_waited_for(monkeypatch):
    accelerator = NotedAccelerator()
    monkeypatch.setattr(activations, "get_accelerator", lambda: accelerator)
    checkpointing.configure(checkpoint_in_cpu=True)
    notes = _NOTES[0] = accelerator.notes

    def noted(name: str) -> Any:
        return lambda hidden: (_note(name), torch.sin(hidden))[1]

    there = ["record compute", "copy waits", "on copy", "record copy"]
    hidden = checkpointing.checkpoint(noted("first"), torch.ones(3, requires_grad=True) * 2)
    assert notes == [*there, "first", "record copy", "compute waits"]
    hidden = checkpointing.checkpoint(noted("second"), hidden)
    notes.clear()
    hidden.sum().backward()
    # The first region's input is on its way back while the second one is computed again.
    assert notes == [*there, "compute waits", *there, "second", "compute waits", "first"]


# What users say.


def test_configure_goes_before_the_config(device_apart):
    checkpointing.configure(checkpoint_in_cpu=False)
    assert checkpointing.is_configured()
    run(1, 0, **OFFLOAD)
    assert device_apart == []
    checkpointing.reset()
    assert not checkpointing.is_configured()
    run(1, 0, **OFFLOAD)
    assert device_apart


@pytest.mark.parametrize(
    ("arguments", "moves"),
    [
        ({}, False),
        ({"checkpoint_in_cpu": True}, True),
        ({"deepspeed_config": OFFLOAD}, True),
        ({"deepspeed_config": OFFLOAD, "checkpoint_in_cpu": False}, False),
        ({"partition_activations": False, "num_checkpoints": None, "profile": False}, False),
    ],
    ids=str,
)
def test_arguments_go_before_the_config_that_configure_gets(arguments, moves, device_apart):
    checkpointing.configure(**arguments)
    checkpointing.checkpoint(torch.sin, torch.ones(3, requires_grad=True) * 2)
    assert len(device_apart) == moves


@pytest.mark.parametrize(
    ("arguments", "key"),
    [({"mpu_": object()}, "mpu_"), ({"contiguous_checkpointing": True}, "num_checkpoints")],
    ids=["no groups", "no number"],
)
def test_what_configure_cannot_use_is_refused(arguments, key):
    with pytest.raises(ConfigError) as caught:
        checkpointing.configure(**arguments)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert not checkpointing.is_configured()


# The other ways in which inputs wait.


def through_regions(count: int = 3) -> tuple[Tensor, Tensor]:
    """The gradient of a row of regions, and the one of plain calls. The rows of the inputs are no rows of memory."""
    weight = torch.randn(5, 7, requires_grad=True)
    hidden, plain = (weight * 2).t(), (expected := weight.detach().clone().requires_grad_()) * 2
    plain = plain.t()
    for _ in range(count):
        hidden, plain = checkpointing.checkpoint(torch.sin, hidden), torch.sin(plain)
    hidden.square().sum().backward()
    plain.square().sum().backward()
    return weight.grad, expected.grad


def test_inputs_in_contiguous_memory_stand_side_by_side_and_are_used_again():
    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=3)
    taken: list[Tensor] = []
    (regions,) = configured()
    take = regions.store.places.shelf.take

    def noted(*args: Any, **named: Any) -> Any:
        found = take(*args, **named)
        taken.append(found[0])
        return found

    regions.store.places.shelf.take = noted
    for _ in range(2):
        found, wanted = through_regions()
        assert torch.equal(found, wanted)
        gc.collect()
    places = [memory.data_ptr() for memory in taken]
    assert sorted(places[:3]) == sorted(places[3:])
    assert len({memory.untyped_storage().data_ptr() for memory in taken}) == 1
    assert len(set(places[:3])) == 3


def test_more_regions_than_were_stated_get_memory_of_their_own(caplog):
    checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=2)
    found, wanted = through_regions(4)
    assert torch.equal(found, wanted)
    assert ["number_checkpoints = 2" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("changes", [{}, {"contiguous_checkpointing": True, "num_checkpoints": 4}], ids=["", "shelf"])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_inputs_are_cut_over_the_ranks_that_share_a_model(world, offload, changes, monkeypatch):
    """35 elements, so that the last rank's part is filled up. What waits is a part; what comes back is whole."""
    monkeypatch.setattr(inputs, "is_in_host_memory", lambda accelerator: False)
    policy = RecomputePolicy(partition=True, offload=offload, number=4 if changes else None)

    def work(communicator: Any, seed: int) -> tuple[Tensor, Tensor, list[int]]:
        regions = RecomputedRegions(policy, communicator.accelerator, communicator)
        kept, keep = [], inputs.KeptInputs._keep

        class Noting(inputs.KeptInputs):
            def _keep(self, tensor: Tensor) -> Any:
                found = keep(self, tensor)
                kept.append(found.memory.numel())
                return found

        weight = torch.linspace(-1, 1, 35).view(5, 7).requires_grad_()
        hidden = (weight * 2).t()
        expected = weight.detach().clone().requires_grad_()
        plain = (expected * 2).t()
        region = regions.store.region
        regions.store.region = lambda values: _as(region(values), Noting)
        for _ in range(3):
            hidden, plain = regions.run(torch.sin, (hidden,), {}), torch.sin(plain)
        hidden.square().sum().backward()
        plain.square().sum().backward()
        return weight.grad, expected.grad, kept

    for found, wanted, kept in run_threads(world, work, 0):
        assert torch.equal(found, wanted)
        assert kept == [-(-35 // world)] * 3


def _as(region: Any, kind: type) -> Any:
    region.__class__ = kind
    return region


def test_configure_takes_the_ranks_of_an_mpu():
    def work(communicator: Any, seed: int) -> None:
        class Grid:
            def get_tensor_model_parallel_group(self) -> Any:
                return communicator

        checkpointing.configure(Grid(), partition_activations=True)

    run_threads(2, work, 0)
    (regions,) = configured()
    assert regions.store.places.ranks.world_size == 2


def test_without_ranks_that_share_a_model_nothing_is_cut():
    checkpointing.configure(partition_activations=True)
    assert not configured()[0].store.moves
    assert torch.equal(*through_regions())


# Random numbers by name, and arguments by name.


def test_named_random_numbers_come_out_alike_when_they_are_drawn_again():
    states = named_random_states()
    states.add("apart", 5)

    def noisy(hidden: Tensor, *, scale: float) -> Tensor:
        with states.use("apart"):
            hidden = nn.functional.dropout(hidden, 0.5)
        return nn.functional.dropout(hidden * scale, 0.5).square()

    def gradients(run: Any) -> tuple[Tensor, list[bytes], Tensor]:
        torch.manual_seed(3)
        states.restore(begin)
        weight = torch.linspace(1, 2, 40).requires_grad_()
        hidden = run(noisy, run(noisy, weight * 2, scale=1.5), scale=2.5)
        after = list(states.states().values())
        hidden.sum().backward()
        assert list(states.states().values()) == after
        return weight.grad, after, torch.rand(3)

    try:
        begin = states.states()
        found, wanted = gradients(checkpointing.checkpoint), gradients(lambda fn, *args, **named: fn(*args, **named))
    finally:
        states.clear()
    assert torch.equal(found[0], wanted[0])
    assert 0 < int((found[0] == 0).sum()) < 40
    assert found[1] == wanted[1]
    assert torch.equal(found[2], wanted[2])


def test_boundaries_are_synchronised_and_times_are_told(monkeypatch, caplog):
    accelerator = NotedAccelerator()
    monkeypatch.setattr(NotedAccelerator, "synchronize", lambda self: self.notes.append("wait"))
    monkeypatch.setattr(activations, "get_accelerator", lambda: accelerator)
    notes = _NOTES[0] = accelerator.notes

    def noted(hidden: Tensor) -> Tensor:
        _note("run")
        return torch.sin(hidden)

    checkpointing.configure(synchronize=True)
    checkpointing.checkpoint(noted, torch.ones(3, requires_grad=True) * 2).sum().backward()
    assert notes == ["wait", "run", "wait"] * 2
    checkpointing.configure(profile=True)
    caplog.set_level("INFO")
    for _ in range(2):
        checkpointing.checkpoint(noted, torch.ones(3, requires_grad=True) * 2).sum().backward()
    told = [record.getMessage() for record in caplog.records if "recomputations" in record.getMessage()]
    assert len(told) == 1
    assert "1 regions took" in told[0]
    assert "1 recomputations" in told[0]


def test_a_model_without_regions_is_told_once_that_nothing_is_offloaded(caplog):
    def train(communicator: Any, model: nn.Module) -> None:
        engine, *_ = polyaccel.initialize(model=model, config=make_config(0, **OFFLOAD))
        with torch.no_grad():
            engine(torch.ones(1, 3))
        assert not caplog.records
        for _ in range(2):
            engine(torch.ones(1, 3))

    on_threads(1, train, lambda: nn.Linear(3, 3))
    assert ["cpu_checkpointing" in record.getMessage() for record in caplog.records] == [True]
