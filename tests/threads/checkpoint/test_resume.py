"""Save here, go on there: a resumed run is the uninterrupted one, at any world size and stage."""

from __future__ import annotations

import os

import pytest
import torch
from pairwise import FULL, VARIABLE, combinations
from parity_models import (
    SMALL_BUCKET,
    VOCAB,
    assert_bitwise,
    assert_close,
    grouped,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    relative_distance,
    snapshot,
)
from stage_cases import stages
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

import polyaccel
from polyaccel.checkpoint import open_checkpoint
from polyaccel.errors import CheckpointError

BEFORE, AFTER = 3, 2
SAMPLES = 48
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}}


def dataset():
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(*(torch.randint(0, VOCAB, (SAMPLES,), generator=generator) for _ in range(2)))


def config_for(stage, world, **changes):
    """Twelve samples a step at every world size, a warmup, and buckets that are cut in many places."""
    config = make_config(stage, zero={"reduce_bucket_size": SMALL_BUCKET}, gradient_clipping=1.0, **changes)
    config["train_micro_batch_size_per_gpu"] = 12 // world
    return {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.05}}, **config}


def engine_for(model, config, **arguments):
    if "optimizer" not in arguments:
        arguments["model_parameters"] = grouped(model)
    engine, *_ = polyaccel.initialize(model=model, training_data=dataset(), config=config, **arguments)
    return engine


def mean_over_ranks(communicator, loss):
    return sum(communicator.all_gather_object(loss.item())) / communicator.world_size


def go(communicator, engine, steps):
    """Losses over all ranks and learning rates of `steps` steps on the engine's own data."""
    return [(mean_over_ranks(communicator, engine.train_batch()), engine.get_lr()) for _ in range(steps)]


def uninterrupted(communicator, model, folder, config, arguments=dict):
    """Train, save in the middle, train on."""
    engine = engine_for(model, config, **arguments())
    go(communicator, engine, BEFORE)
    assert engine.save_checkpoint(folder, client_state={"epoch": 1, "best": (0.5, "x")})
    return go(communicator, engine, AFTER), snapshot(engine.module), facts(engine)


def resumed(communicator, model, folder, config, arguments=dict):
    """A new engine around another model of the kind, loaded, and trained on."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    engine = engine_for(model, config, **arguments())
    path, client_state = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step{BEFORE}"
    assert client_state == {"epoch": 1, "best": (0.5, "x")}
    assert (engine.global_steps, engine.global_samples) == (BEFORE, 12 * BEFORE)
    return go(communicator, engine, AFTER), snapshot(engine.module), facts(engine)


def facts(engine):
    return engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_loss_scale(), engine.get_lr()


def compare(folder, first, second, *, exact, arguments=dict, build=parity_model, **changes):
    """Run at (world, stage) `first`, resume at `second`."""
    here, there = (config_for(stage, world, **changes) for world, stage in (first, second))
    if arguments is not dict:
        del here["optimizer"], there["optimizer"]
    losses, params, told = on_threads(first[0], uninterrupted, build, folder, here, arguments)[0]
    results = on_threads(second[0], resumed, build, folder, there, arguments)
    for found_losses, found_params, found_told in results:
        assert found_told == told
        if exact:
            assert found_losses == losses
            assert_bitwise(found_params, params)
        else:
            for (loss, rates), (wanted, wanted_rates) in zip(found_losses, losses, strict=True):
                assert loss == pytest.approx(wanted, rel=1e-5)
                assert rates == wanted_rates
            assert_close(found_params, params, 5e-6)


PRECISIONS = [pytest.param({}, id="fp32"), pytest.param(BF16, id="bf16"), pytest.param(FP16, id="fp16")]


@combinations(stage=[0, 1, 2], world=[1, 2, 3], precision=PRECISIONS)
def test_resuming_at_the_same_size_is_exact(tmp_path, world, stage, precision):
    compare(str(tmp_path), (world, stage), (world, stage), exact=True, **precision)


@pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 2), (2, 0)])
def test_resuming_at_another_stage_is_exact(tmp_path, here, there):
    compare(str(tmp_path), (2, here), (2, there), exact=True)


def in_turn(kinds, ways):
    """Each kind with one of the ways, in turn; with each where all combinations are asked for."""
    rows = [(kind, ways[number % len(ways)]) for number, kind in enumerate(kinds)]
    if os.environ.get(VARIABLE) == FULL:
        rows = [(kind, way) for kind in kinds for way in ways]
    return pytest.mark.parametrize(("kind", "ways"), rows, ids=str)


PAIRS = [((3, 2), (2, 1)), ((1, 0), (3, 2)), ((2, 2), (1, 2)), ((2, 1), (3, 0)), ((3, 0), (1, 1))]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_resuming_at_another_size_and_stage(tmp_path, first, second):
    compare(str(tmp_path), first, second, exact=False)


@in_turn(["SGD", "Adagrad", "Lion", "Lamb"], PAIRS[:2])
def test_states_of_every_native_optimizer_go_along(tmp_path, kind, ways):
    first, second = ways
    params = {"momentum": 0.9} if kind == "SGD" else {}
    compare(str(tmp_path), first, second, exact=False, optimizer={"type": kind, "params": {"lr": 1e-3, **params}})


CLIENTS = {
    "Adam, amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


class Several(nn.Module):
    """The parity model, and a large parameter that nobody uses: whole shards have no optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parity_model()
        self.idle = nn.Parameter(torch.ones(7 * SMALL_BUCKET))

    def forward(self, *inputs):
        return self.inner(*inputs)


@in_turn(list(CLIENTS), [*PAIRS[:2], ((2, 1), (2, 2))])
def test_states_of_client_optimizers_go_along(tmp_path, kind, ways):
    make = CLIENTS[kind]
    compare(str(tmp_path), *ways, exact=False, build=Several, arguments=lambda: {"optimizer": make})


def adafactor():
    return {"optimizer": lambda groups: torch.optim.Adafactor(groups, lr=1e-2)}


def test_an_optimizer_of_whole_parameters_goes_along_to_another_size(tmp_path):
    compare(str(tmp_path), (2, 0), (1, 0), exact=False, arguments=adafactor)


class Total(torch.optim.Optimizer):
    """Of no known kind: it runs on whole parameters at stage 0 and on slices at the others."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["total"] = state.get("total", torch.zeros_like(parameter)) + parameter.grad
                    parameter.sub_(group["lr"] * torch.tanh(state["total"]))


@pytest.mark.parametrize(("first", "second"), [((2, 1), (3, 2)), ((2, 0), (1, 0))], ids=str)
def test_an_optimizer_of_the_user_s_own_goes_along(tmp_path, first, second):
    compare(
        str(tmp_path),
        first,
        second,
        exact=False,
        arguments=lambda: {"optimizer": Total},
        zero_allow_untested_optimizer=True,
    )


@pytest.mark.parametrize(("first", "second"), [(0, 2), (1, 0)])
def test_states_that_cannot_be_taken_over_are_an_error(tmp_path, first, second):
    """Whole states cannot be cut, nor the other way round; training on without them would be a silent restart."""
    with pytest.raises(CheckpointError) as caught:
        compare(
            str(tmp_path),
            (2, first),
            (2, second),
            exact=False,
            arguments=lambda: {"optimizer": Total},
            zero_allow_untested_optimizer=True,
        )
    assert caught.value.value == (0, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 0.7**step),
        lambda optimizer: MultiStepLR(optimizer, [2, 4], gamma=0.1),
    ],
    ids=["LambdaLR", "MultiStepLR"],
)
def test_a_client_schedule_goes_along(tmp_path, make):
    def arguments():
        return {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2), "lr_scheduler": make}

    compare(str(tmp_path), (2, 1), (3, 2), exact=False, arguments=arguments)


@stages
def test_going_back_in_the_same_engine(tmp_path, stage):
    """Loading an earlier state undoes what came after it: weights, moments, counters, position in the data."""

    def back(communicator, model, folder, make):
        config = config_for(stage, 2)
        arguments = {}
        if make is not None:
            del config["optimizer"]
            arguments = {"optimizer": make}
        engine = engine_for(model, config, **arguments)
        start = snapshot(engine.module)
        engine.save_checkpoint(folder, tag="start", save_latest=False)
        first = go(communicator, engine, BEFORE)
        engine.save_checkpoint(folder)
        second = go(communicator, engine, AFTER), snapshot(engine.module)
        engine.load_checkpoint(folder)
        third = go(communicator, engine, AFTER), snapshot(engine.module)
        engine.load_checkpoint(folder, tag="start")
        assert_bitwise(snapshot(engine.module), start)
        return first, second, third, go(communicator, engine, BEFORE)

    for make in (None, CLIENTS["Adagrad"], CLIENTS["NAdam"]):
        for first, (losses, params), (again, params_again), from_start in on_threads(
            2, back, parity_model, str(tmp_path / str(make)), make
        ):
            assert again == losses
            assert_bitwise(params_again, params)
            assert from_start == first


def test_the_loss_scale_goes_along(tmp_path):
    def overflow(communicator, model, folder, load):
        engine = engine_for(model, config_for(1, 2, **FP16))
        if load:
            engine.load_checkpoint(folder)
        else:
            engine.backward(parity_loss(engine, 0, 0, 0) * float("inf"))
            engine.step()
            engine.save_checkpoint(folder)
        return engine.get_loss_scale(), engine.skipped_steps, engine.global_steps

    for load in (False, True):
        assert on_threads(2, overflow, parity_model, str(tmp_path), load) == [(128.0, 1, 1)] * 2


class WithBuffers(nn.Module):
    """Buffers of several types and shapes around the parity model; one of them is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parity_model()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("history", torch.zeros(2, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, *inputs):
        self.count += 1
        self.history += 0.5
        self.scratch += 1
        return self.inner(*inputs)


def test_module_buffers_go_along(tmp_path):
    def run(communicator, model, load):
        engine = engine_for(model, config_for(2, communicator.world_size))
        if load:
            engine.load_checkpoint(str(tmp_path))
        else:
            go(communicator, engine, 2)
            engine.save_checkpoint(str(tmp_path))
        return model.count.item(), model.history.tolist(), model.scratch.tolist()

    assert on_threads(2, run, WithBuffers, False)[0] == (2, [[1.0] * 3] * 2, [2.0] * 2)
    assert on_threads(3, run, WithBuffers, True)[2] == (2, [[1.0] * 3] * 2, [0.0] * 2)


@pytest.mark.parametrize("exclude", [False, True])
def test_frozen_parameters_are_saved_unless_excluded(tmp_path, exclude):
    def run(communicator, model, load):
        with torch.no_grad():
            model.frozen.fill_(7.0 if load else 3.0)
        engine = engine_for(model, config_for(1, 2))
        if load:
            engine.load_checkpoint(str(tmp_path), load_module_strict=not exclude)
        else:
            engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=exclude)
        return engine.module.frozen.tolist()

    on_threads(2, run, parity_model, False)
    assert on_threads(2, run, parity_model, True) == [[7.0 if exclude else 3.0] * 6] * 2


def test_an_adapter_goes_on_from_its_own_base_alone(tmp_path):
    """What is frozen is left out, and told by checksums that no number of ranks has a part in."""

    def save(communicator, model):
        engine = engine_for(model, config_for(3, 3))
        go(communicator, engine, BEFORE)
        engine.save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
        return snapshot(engine.module)

    def load(communicator, model, change):
        with torch.no_grad():
            model.frozen.view(-1)[5] += change
            model.wide.weight.add_(1.0)
        engine = engine_for(model, config_for(1, 2))
        engine.load_checkpoint(str(tmp_path))
        loaded = snapshot(engine.module)
        go(communicator, engine, 1)
        return loaded

    saved = on_threads(3, save, parity_model)[0]
    assert "frozen" not in {entry.fqn for entry in open_checkpoint(tmp_path).tensors()}
    found = on_threads(2, load, parity_model, 0.0)[0]
    assert_bitwise(found, saved)
    with pytest.raises(CheckpointError) as caught:
        on_threads(2, load, parity_model, 1e-3)
    assert caught.value.value == (0, 1)
    assert all(part in str(caught.value) for part in ("'global_step3'", "frozen (float32:"))


def test_precision_may_change_on_the_way(tmp_path):
    """Masters are saved in float32, so a bf16 run goes on in float32 without loss, and the other way round."""
    losses = on_threads(2, uninterrupted, parity_model, str(tmp_path), config_for(2, 2, **BF16))[0]
    found = on_threads(2, resumed, parity_model, str(tmp_path), config_for(1, 2))[0]
    assert [loss for loss, _ in found[0]] == pytest.approx([loss for loss, _ in losses[0]], rel=0.02)
    assert found[1]["wide.weight"].dtype is torch.float32
    assert relative_distance(found[1], losses[1], snapshot(parity_model())) < 0.05


@pytest.mark.parametrize("only", ["load_module_only", "load_optimizer_states"])
def test_weights_alone(tmp_path, only):
    def save(communicator, model):
        engine = engine_for(model, config_for(2, 2))
        go(communicator, engine, BEFORE)
        engine.save_checkpoint(str(tmp_path))
        return snapshot(engine.module)

    def load(communicator, model):
        engine = engine_for(model, config_for(1, 2))
        engine.load_checkpoint(str(tmp_path), **{only: only == "load_module_only"})
        assert engine.global_steps == (0 if only == "load_module_only" else BEFORE)
        assert all(state.raw.abs().max() == 0 for shard in engine.zero.shards for state in shard.states.values())
        return snapshot(engine.module)

    params = on_threads(2, save, parity_model)[0]
    assert_bitwise(on_threads(2, load, parity_model)[1], params)
