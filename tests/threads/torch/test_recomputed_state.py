"""State of blocks that are recomputed: buffers, attributes and random generators are as without, in every way."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from parity_models import make_config
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import polyaccel
from polyaccel import checkpointing
from polyaccel.torch.activation_checkpointing import state
from polyaccel.torch.activation_checkpointing.plans import ModulePlans
from polyaccel.torch.pipeline.module import PipelineModule
from polyaccel.torch.tiled import tiled_map, tiled_sum

WIDTH = 8
MODULE_GENERATOR = np.random.default_rng(3)
MODULE_CALLS = 0
MODULE_MEAN = torch.zeros(WIDTH)
RUNS: list[int] = []
"""Of a region's function, whose own variables are restored."""


class Pair(NamedTuple):
    mean: Tensor
    inner: tuple[Tensor, int]


def count_call() -> int:
    """Binds a variable of this Python module, for methods that do not themselves."""
    global MODULE_CALLS
    MODULE_CALLS += 1
    return MODULE_CALLS


class Inner(nn.Module):
    """A part with a buffer of its own, which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.steps += 1
        return hidden / (1 + self.steps)


class StatefulBlock(nn.Module):
    """A block that has every kind of state and uses one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.last = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "spectral norm":
            self.last = spectral_norm(self.last)
        self.norm, self.inner = nn.BatchNorm1d(WIDTH, momentum=None), Inner()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(200, 200))
        self.view = self.mean[:4]
        self.plain = torch.zeros(WIDTH)
        self.calls, self.share, self.seen = 0, 0.5, {"calls": 0, "sums": [1.0]}
        self.queue, self.names, self.counts = deque([1.0], maxlen=3), {"a"}, Counter(a=1)
        self.array, self.helper = np.zeros(2), SimpleNamespace(calls=0)
        self.longer = [0.5] * 2000
        self.pair, self.table = Pair(torch.zeros(WIDTH), (torch.zeros(2), 1)), np.zeros(1 << 18)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.python_generator = random.Random(1)
        self.numpy_generator, self.legacy_generator = np.random.default_rng(1), np.random.RandomState(1)
        self.generators = {"drop": [np.random.default_rng(2)]}

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.last(torch.tanh(getattr(self, "_" + self.kind.replace(" ", "_"))(self.first(hidden))))

    def _spectral_norm(self, hidden: Tensor) -> Tensor:
        return hidden

    def _batch_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def _part(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden)

    def _in_place(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.3)
        return hidden - self.mean

    def _by_data(self, hidden: Tensor) -> Tensor:
        self.mean.data.mul_(0.7).add_(hidden.detach().mean(0), alpha=0.3)
        return hidden * (1 + self.mean)

    def _rebound(self, hidden: Tensor) -> Tensor:
        self.mean = 0.7 * self.mean + 0.3 * hidden.detach().mean(0)
        return hidden * (1 + self.mean)

    def _large_buffer(self, hidden: Tensor) -> Tensor:
        self.large.data[:WIDTH, :WIDTH].add_(hidden.detach().T @ hidden.detach())
        return hidden * self.large[:WIDTH, 0].sigmoid()

    def _view(self, hidden: Tensor) -> Tensor:
        self.view.add_(hidden.detach().mean(0)[:4])
        return hidden * (1 + self.mean)

    def _tensor_attribute(self, hidden: Tensor) -> Tensor:
        before, self.plain = self.plain, hidden.detach().mean(0)
        return hidden - before

    def _number(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        self.share = self.share * 0.9
        return hidden * self.share / self.calls

    def _containers(self, hidden: Tensor) -> Tensor:
        self.seen["calls"] += 1
        self.seen["sums"].append(float(self.seen["calls"]))
        self.queue.append(self.seen["sums"][-1])
        self.names.add(str(len(self.names)))
        self.counts["a"] += 1
        self.array += 1
        self.helper.calls += 1
        self.longer.append(0.5)
        sizes = len(self.names) + self.counts["a"] + float(self.array.sum()) + self.helper.calls + len(self.longer)
        return hidden * sum(self.queue) / sizes

    def _tuple_and_large_array(self, hidden: Tensor) -> Tensor:
        self.pair.mean.lerp_(hidden.detach().mean(0).float(), 0.3)
        self.pair.inner[0].add_(1)
        self.table[:: 1 << 10] += 1
        return hidden * (1 + self.pair.mean) / (1 + self.pair.inner[0][0]) + float(self.table[0])

    def _module_variables(self, hidden: Tensor) -> Tensor:
        MODULE_MEAN.add_(1)
        return hidden * count_call() / MODULE_MEAN[0].item()

    def _made_late(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = random.random()
        self.late += 1
        return hidden * self.late

    def _python_random(self, hidden: Tensor) -> Tensor:
        return hidden * random.random() + random.gauss(0, 1)

    def _numpy_random(self, hidden: Tensor) -> Tensor:
        return hidden * float(np.random.rand()) + float(np.random.randn())

    def _own_generators(self, hidden: Tensor) -> Tensor:
        drawn = self.python_generator.random() + self.numpy_generator.random() + self.legacy_generator.rand()
        drawn += self.generators["drop"][0].random() + MODULE_GENERATOR.random()
        return hidden * drawn + torch.randn(WIDTH, generator=self.torch_generator).to(hidden.dtype)


KINDS = [name[1:].replace("_", " ") for name in vars(StatefulBlock) if name[:1] == "_" and name[:2] != "__"]


class StatefulNet(nn.Module):
    def __init__(self, kind: str, *, repeats: bool = True) -> None:
        super().__init__()
        self.repeats = repeats
        self.blocks, self.head = nn.ModuleList(StatefulBlock(kind) for _ in range(2)), nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]) if self.repeats else self.blocks:  # the first one twice
            hidden = block(hidden)
        return self.head(hidden)


def seed() -> None:
    global MODULE_CALLS
    MODULE_CALLS = 0
    MODULE_MEAN.zero_()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    MODULE_GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state


def attributes(model: nn.Module) -> Any:
    """All that the blocks hold, and the global generators."""
    found = []
    for block in (part for part in model.modules() if isinstance(part, StatefulBlock)):
        found.append(sorted(block.names))
        names = ("calls", "share", "seen", "queue", "counts", "helper", "longer", "late", "plain", "view")
        found.append([str(getattr(block, name, None)) for name in names] + block.array.tolist())
        drawn = block.python_generator.random(), block.numpy_generator.random(), block.legacy_generator.rand()
        found.append([*drawn, torch.rand(1, generator=block.torch_generator).item()])
        found.append([str(block.pair), float(block.table.sum())])
    found.append([MODULE_CALLS, MODULE_MEAN.tolist()])
    return found, random.random(), np.random.rand(), torch.rand(1).item(), MODULE_GENERATOR.random()


def trained(kind: str, stage: int, way: dict[str, Any], *, repeats: bool = True, **changes: Any) -> Any:
    """Losses, norms, buffers and all other state after 3 steps of 2 micro-batches; the second step's passes come
    before its backwards, and an evaluation stands between."""
    seed()
    config = make_config(stage, accumulation=2, optimizer={"type": "SGD", "params": {"lr": 0.05}}, **changes)
    engine, *_ = polyaccel.initialize(
        model=StatefulNet(kind, repeats=repeats), config=config | {"activation_checkpointing": way}
    )
    dtype, figures = next(engine.parameters()).dtype, []
    for step in range(3):
        losses = []
        for _ in range(2):
            losses.append(engine(torch.randn(4, WIDTH, dtype=dtype)).float().square().mean())
            if step != 1:
                engine.backward(losses[-1])
                engine.step()
        if step == 1:
            with torch.no_grad():
                engine(torch.randn(4, WIDTH, dtype=dtype))
            for loss in losses:
                engine.backward(loss)
                engine.step()
        figures += [loss.item() for loss in losses] + [engine.metrics.grad_norm]
    buffers = {name: value.tolist() for name, value in engine.module.named_buffers()}
    held = attributes(engine.module)
    engine.destroy()
    return figures, buffers, held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_state_is_as_without_recomputing(kind: str, stage: int) -> None:
    assert trained(kind, stage, {"enabled": True}) == trained(kind, stage, {})


WAYS = {"reentrant": {"use_reentrant": True}, "keep": {"keep": ["matmul"]}}


@pytest.mark.parametrize("kind", ["batch norm", "by data", "containers", "own generators", "module variables"])
@pytest.mark.parametrize("way", WAYS)
def test_state_in_other_ways_to_recompute(kind: str, way: str) -> None:
    """A backward pass inside of one adds the gradients of a block that is used twice in another order."""
    found, wanted = (trained(kind, 0, each, repeats=way == "keep") for each in ({"enabled": True, **WAYS[way]}, {}))
    assert found == wanted


@pytest.mark.parametrize("kind", ["batch norm", "in place", "number", "own generators"])
@pytest.mark.parametrize("precision", [{"torch_autocast": {"enabled": True}}, {"bf16": {"enabled": True}}], ids=str)
def test_state_in_16_bits(kind: str, precision: dict[str, Any]) -> None:
    changes = precision | ({"data_types": {"buffer_dtype": "bf16"}} if "bf16" in precision else {})
    if kind == "in place" and "bf16" not in precision:
        pytest.skip("torch.lerp has no autocast")
    assert trained(kind, 0, {"enabled": True}, **changes) == trained(kind, 0, {}, **changes)


def gradients(block: StatefulBlock, run: Any, *, twice: bool = False) -> Any:
    seed()
    x = torch.ones(4, WIDTH).mul(0.3).requires_grad_()
    loss = run(block, x).square().sum()
    if twice:
        loss.backward(retain_graph=True)
    loss.backward()
    found = [x.grad.tolist()] + [None if each.grad is None else each.grad.tolist() for each in block.parameters()]
    return found, {name: value.tolist() for name, value in block.named_buffers()}, attributes(block)


def region(block: StatefulBlock, x: Tensor) -> Tensor:
    return checkpointing.checkpoint(block, x)


def nested(block: StatefulBlock, x: Tensor) -> Tensor:
    def outer(hidden: Tensor) -> Tensor:
        return checkpointing.checkpoint(block, torch.sin(checkpointing.checkpoint(block.forward, hidden)))

    return checkpointing.checkpoint(outer, x)


def closure(block: StatefulBlock, x: Tensor) -> Tensor:
    for one in (block, block):
        x = checkpointing.checkpoint(lambda hidden: torch.sin(one(hidden)), x)  # noqa: B023 - as scripts do
    return x


def plainly(run: Any) -> Any:
    """`run` without regions."""

    def without(block: StatefulBlock, x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpointing, "checkpoint", lambda function, *args: function(*args))
            return run(block, x)

    return without


def made(kind: str) -> StatefulBlock:
    torch.manual_seed(1)
    return StatefulBlock(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", [region, nested, closure])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "graph kept"])
def test_regions_that_a_model_marks(kind: str, run: Any, twice: bool) -> None:
    found, wanted = gradients(made(kind), run, twice=twice), gradients(made(kind), plainly(run), twice=twice)
    assert found == wanted


@pytest.mark.parametrize("kind", ["number", "in place", "python random", "own generators"])
def test_an_error_in_the_second_run_leaves_the_state(kind: str) -> None:
    block = made(kind)
    RUNS.clear()

    def run(hidden: Tensor) -> Tensor:
        out = torch.cos(block(hidden))
        RUNS.append(1)
        if len(RUNS) == 2:
            raise ValueError("second")
        return torch.sin(out)

    seed()
    loss = checkpointing.checkpoint(run, torch.ones(4, WIDTH, requires_grad=True)).sum()
    with pytest.raises(ValueError) as caught:
        loss.backward()
    assert str(caught.value) == "second"
    found = attributes(block)
    block = made(kind)
    seed()
    block(torch.ones(4, WIDTH, requires_grad=True))
    assert found == attributes(block)


def test_a_variable_of_the_function_and_the_training_mode_are_those_of_the_first_run() -> None:
    calls, block = 0, nn.Dropout(0.5)

    def run(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.sin(block(hidden) * calls)

    x = torch.ones(50, requires_grad=True)
    out = checkpointing.checkpoint(run, x)
    block.eval()
    out.sum().backward()
    assert calls == 1
    assert not block.training
    assert torch.equal(x.grad == 0, out == 0)


def test_tiles_are_run_again_with_their_state() -> None:
    """A function of no module is run for a tile more, to find its parameters: that leaves no trace either."""

    def run(tiled: bool, sums: bool) -> Any:
        block, x = made("number"), torch.linspace(0, 1, 6 * WIDTH).view(1, 6, WIDTH).requires_grad_()
        if not tiled:
            parts = [block(x[:, at : at + 2]) for at in range(0, 6, 2)]
            loss = sum(part.sum() for part in parts) if sums else torch.cat(parts, 1).sum()
        elif sums:
            loss = tiled_sum(lambda tile: block(tile).sum(), x, tile_tokens=2)
        else:
            loss = tiled_map(lambda tile: block(tile), x, tile_tokens=2).sum()
        loss.backward()
        return block.calls, block.share, x.grad, block.first.weight.grad

    for sums in (False, True):
        found, wanted = run(True, sums), run(False, sums)
        assert found[:2] == wanted[:2]
        torch.testing.assert_close(found[2:], wanted[2:])


@pytest.mark.parametrize("function", ["own", "torch's", "a user's"])
@pytest.mark.parametrize("kind", ["batch norm", "number", "by data", "own generators", "python random"])
def test_intervals_of_a_pipeline(kind: str, function: str) -> None:
    def user(run: Any, *inputs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=False)

    given = {"own": checkpointing.checkpoint, "torch's": torch.utils.checkpoint.checkpoint, "a user's": user}

    def train(interval: int) -> Any:
        seed()
        layers = [nn.Linear(WIDTH, WIDTH), StatefulBlock(kind), StatefulBlock(kind), torch.tanh, nn.Linear(WIDTH, 1)]
        model = PipelineModule(
            layers,
            loss_fn=nn.functional.mse_loss,
            activation_checkpoint_interval=interval,
            activation_checkpoint_func=given[function],
        )
        engine, *_ = polyaccel.initialize(model=model, config=make_config(0, accumulation=2))
        figures = []
        for _ in range(3):
            batches = iter([(torch.randn(4, WIDTH), torch.randn(4, 1)) for _ in range(2)])
            figures.append((engine.train_batch(batches).item(), engine.metrics.grad_norm))
        buffers = {name: value.tolist() for name, value in model.named_buffers()}
        held = attributes(model)
        engine.destroy()
        return figures, buffers, held

    assert train(2) == train(0)


# What cannot be restored is named, once.


class Late(nn.Module):
    """Its large buffer changes from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("late", torch.zeros(200, 200))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.late += 1
        return torch.sin(self.linear(hidden) - self.late[0, 0])


class LateArray(nn.Module):
    """Its large array changes from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.late = nn.Linear(WIDTH, WIDTH), 0, np.zeros(1 << 18)

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.late += 1
        return torch.sin(self.linear(hidden) - float(self.late[0]))


class LateTuple(nn.Module):
    """A large tensor in a tuple changes from the third pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.late = nn.Linear(WIDTH, WIDTH), 0, (torch.zeros(200, 200), 1)

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.late[0].add_(1)
        return torch.sin(self.linear(hidden) - self.late[0][0, 0])


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([1.0, 2.0])

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sin(hidden * next(self.numbers))


class Codes(nn.Module):
    """A frozen parameter that follows the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.lerp_(hidden.detach().mean(0), 0.1)
        return torch.sin(hidden - self.codes)


NAMED = [(Late, "late"), (LateArray, "late"), (LateTuple, "late[0]"), (Counting, "numbers"), (Codes, "codes")]


@pytest.mark.parametrize(("build", "name"), NAMED)
def test_what_cannot_be_restored_is_named_once(build: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[Any] = []
    monkeypatch.setattr(state.log, "warning", lambda _, *args: named.append(args[:2]))
    block = build()
    for _ in range(5):
        x = torch.ones(2, WIDTH, requires_grad=True)
        checkpointing.checkpoint(block, x).sum().backward()
    assert named == [(name, build.__name__)]
    if build is Late:
        assert (block.calls, block.late.unique().tolist()) == (5, [3.0])


def test_a_block_without_state_is_copied_nothing_of() -> None:
    """Large buffers are compared in two passes and rest afterwards."""
    block = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH)
    block.register_buffer("mask", torch.zeros(300, 300))
    for at in range(4):
        found = state.RegionState((block,))
        assert [copy.shape for copy in found._copies] == ([(300, 300)] if at < 2 else [])
        found.end_first_run()
        assert found._copies == []


def bind_an_attribute(block: nn.Module) -> None:
    block.calls = 1


def rename_it(block: nn.Module) -> None:
    block.count = block.__dict__.pop("calls")


def replace_a_part(block: nn.Module) -> None:
    block.dropout = Inner()


def replace_a_buffer(block: nn.Module) -> None:
    block.dropout.steps = torch.ones(())


def replace_a_parameter(block: nn.Module) -> None:
    block.norm1.weight = nn.Parameter(torch.ones(WIDTH))


def test_what_is_known_of_a_block_is_used_until_something_changes() -> None:
    block, plans = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH), ModulePlans()
    changes = (bind_an_attribute, rename_it, replace_a_part, replace_a_buffer, replace_a_parameter)
    for change in changes:
        for _ in range(2):
            state.RegionState((block,), plans).end_first_run()
        known = plans.get(block)
        assert known is not None
        change(block)
        assert plans.get(block) is None
        found = state.RegionState((block,), plans)
        assert plans.get(block) not in (None, known)
        before = dict(block.__dict__)
        block.late, block.dropout.late = 1, 1
        found.end_first_run()
        with found.rerun():
            assert (dict(block.__dict__), hasattr(block.dropout, "late")) == (before, False)
        assert (block.late, block.dropout.late) == (1, 1)
        del block.late, block.dropout.late


def test_a_block_that_always_changes_has_no_plan() -> None:
    block, plans = nn.Linear(WIDTH, WIDTH), ModulePlans()
    for calls in range(1000, 1010):
        block.calls = calls
        found = state.RegionState((block,), plans)
        block.calls += 1
        found.end_first_run()
        with found.rerun():
            assert block.calls == calls
    assert plans.get(block) is None
