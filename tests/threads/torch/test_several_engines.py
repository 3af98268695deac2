"""Several engines in one process: one loss through two and three of them, and parameters that change their engine."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import polyaccel
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads

STAGES = [0, 1, 2, 3]
WAYS = ["first", "last", "loss"]


def drawn(model, seed):
    generator = torch.Generator().manual_seed(seed)  # ranks are threads, which share torch's own
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    return model


def layer(seed, out=4):
    return drawn(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out)), seed)


def inputs(step, rank, count=3):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, 4, generator=generator)


def make_config(stage, steps=1, lr=0.25, **more):
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": steps}
    config["optimizer"] = {"type": "SGD", "params": {"lr": lr}}
    return config | {"zero_optimization": {"stage": stage}} | more


def engine_of(model, config):
    return polyaccel.initialize(model=model, config=config)[0]


def run(module, value):
    """The module's output for inputs in the type of its parameters."""
    return module(value.to(next(module.parameters()).dtype))


def chained(modules, value):
    for module in modules:
        value = run(module, value)
    return value.float().pow(2).mean()


def plainly(models, steps, micro_steps, world):
    """The models after plain torch's training on all ranks' samples, each with its accumulation steps."""
    models = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.25) for model in models]
    for step in range(micro_steps):
        losses = [chained(models, inputs(step, rank)) for rank in range(world)]
        (sum(losses) / world).backward()
        for model, optimizer, each in zip(models, optimizers, steps, strict=True):
            if (step + 1) % each == 0:
                for parameter in model.parameters():
                    parameter.grad /= each
                optimizer.step()
                optimizer.zero_grad()
    return [values(model) for model in models]


def values(model):
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def through_engines(models, configs, micro_steps, way, rank):
    models = copy.deepcopy(models)
    engines = [engine_of(model, config) for model, config in zip(models, configs, strict=True)]
    for step in range(micro_steps):
        loss = chained(engines, inputs(step, rank))
        {"first": engines[0].backward, "last": engines[-1].backward, "loss": torch.Tensor.backward}[way](loss)
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.destroy()
    return [values(model) for model in models]


ACCUMULATIONS = [(2, 2), (2, 4), (3, 1), (1, 2, 4)]
CASES = [
    (stage, way, ACCUMULATIONS[(stage + at + by) % 4], (stage + at + 2 * by) % 3 + 1)
    for by in range(2)
    for stage in STAGES
    for at, way in enumerate(WAYS)
]


@pytest.mark.parametrize(("stage", "way", "steps", "world"), CASES)
def test_one_loss_through_several_engines_trains_as_plain_torch(stage, way, steps, world):
    models = [layer(seed) for seed in range(len(steps))]
    expected = plainly(models, steps, 4, world)

    def rank(communicator):
        configs = [make_config(stage, each) for each in steps]
        return through_engines(models, configs, 4, way, communicator.rank)

    for found in run_threads(world, rank):
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_engines_of_different_stages_and_types_share_a_loss(way):
    models = [layer(seed) for seed in range(3)]
    expected = plainly(models, (2, 1, 2), 4, 2)

    def rank(communicator):
        configs = [make_config(3, 2), make_config(1, 1), make_config(2, 2, bf16={"enabled": True})]
        return through_engines(models, configs, 4, way, communicator.rank)

    for found in run_threads(2, rank):
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=2e-2, atol=2e-2)


FP16 = [
    ({"loss_scale": 128.0}, {"loss_scale": 128.0}),
    ({"loss_scale": 1024.0}, {"loss_scale": 16.0}),
    ({"initial_scale_power": 4}, {"initial_scale_power": 9}),
    ({"loss_scale": 64.0}, None),
]


FP16_WAYS = ["first", "last", "scale of first", "scale of last", "scale of both"]


@pytest.mark.parametrize(
    ("scales", "way", "stage"),
    [(scales, way, (at + by) % 4) for at, scales in enumerate(FP16) for by, way in enumerate(FP16_WAYS)],
)
def test_every_engine_of_fp16_gets_its_own_scale(scales, way, stage):
    models, steps = [layer(0), layer(1)], (2, 1)
    expected = plainly(models, steps, 4, 2)

    def rank(communicator):
        configs = []
        for each, scale in zip(steps, scales, strict=True):
            fp16 = {} if scale is None else {"fp16": {"enabled": True} | scale}
            configs.append(make_config(stage, each, **fp16))
        own = copy.deepcopy(models)
        first, last = (engine_of(model, config) for model, config in zip(own, configs, strict=True))
        for step in range(4):
            loss = chained((first, last), inputs(step, communicator.rank))
            if way == "scale of both":
                first.scale(last.scale(loss)).backward()
            elif way.startswith("scale"):
                (first if way.endswith("first") else last).scale(loss).backward()
            else:
                (first if way == "first" else last).backward(loss)
            first.step()
            last.step()
        skipped = first.skipped_steps, last.skipped_steps
        first.destroy()
        last.destroy()
        return skipped, [values(model) for model in own]

    for skipped, found in run_threads(2, rank):
        assert skipped == (0, 0)
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=1e-2, atol=1e-2)


def test_an_overflow_of_one_engine_is_that_engine_s():
    """The first one's gradients overflow, the last one's do not."""

    def rank(communicator):
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        first, last = (engine_of(layer(seed), make_config(1, fp16=fp16)) for seed in (0, 1))
        found = []
        for step in range(3):
            value = run(first, inputs(step, communicator.rank))
            last_loss = last(value).float().pow(2).mean()
            blown = (value.float() * (1e6 if step == 1 else 0.0)).sum() * float(step == 1)
            first.backward(last_loss + blown)
            first.step()
            last.step()
            found.append((first.was_step_applied(), last.was_step_applied()))
        return found, first.get_loss_scale(), last.get_loss_scale()

    for found in run_threads(2, rank):
        assert found == ([(True, True), (False, True), (True, True)], 128.0, 256.0)


def test_a_scale_that_has_shrunk_does_not_overflow_by_another_engine_s():
    """A pass has the smaller scale of the two, also where the engine of the larger one runs it."""

    def rank(communicator):
        small = engine_of(layer(0), make_config(1, lr=1e-5, fp16={"enabled": True, "initial_scale_power": 2}))
        large = engine_of(layer(1), make_config(1, lr=1e-5, fp16={"enabled": True, "initial_scale_power": 12}))
        for step in range(4):
            value = run(small, inputs(step, communicator.rank))
            large.backward(large(value).float().pow(2).mean() + value.float().sum() * 200.0)
            small.step()
            large.step()
        return small.skipped_steps, large.skipped_steps, small.get_loss_scale()

    assert run_threads(1, rank) == [(0, 0, 4.0)]


def test_an_unscaled_loss_is_refused_and_the_next_pass_is_right():
    def rank(communicator):
        model = layer(0)
        plain, scaled = engine_of(layer(1), make_config(0)), engine_of(model, make_config(0, fp16={"enabled": True}))
        before = values(model)
        with pytest.raises(PolyaccelError) as refused:
            chained((scaled, plain), inputs(0, 0)).backward()
        for engine in (plain, scaled):
            engine.zero_grad()
        plain.backward(chained((scaled, plain), inputs(0, 0)))
        plain.step()
        scaled.step()
        return refused.value.value, scaled.was_step_applied(), bool((values(model) != before).any())

    assert run_threads(1, rank) == [(2, True, True)]


def test_a_loss_of_which_a_part_was_scaled_is_refused():
    def rank(communicator):
        fp16 = {"enabled": True, "loss_scale": 8.0}
        first, last = (engine_of(layer(seed), make_config(0, fp16=fp16)) for seed in (0, 1))
        value = run(first, inputs(0, 0))
        part = last.scale(last(value).float().mean())
        with pytest.raises(PolyaccelError) as refused:
            first.scale(part + value.float().mean())
        return refused.value.value

    assert run_threads(1, rank) == [8.0]


def test_scaled_losses_that_are_added_up_share_one_scale():
    models = [layer(0), layer(1)]

    def plain():
        first, last = copy.deepcopy(models)
        (first(inputs(0, 0)).mean() + last(inputs(1, 0)).mean()).backward()
        return [torch.cat([one.grad.flatten() for one in model.parameters()]) for model in (first, last)]

    def rank(communicator):
        own = copy.deepcopy(models)
        scales = (8.0, 512.0)
        configs = [make_config(0, lr=1.0, fp16={"enabled": True, "loss_scale": scale}) for scale in scales]
        first, last = (engine_of(model, config) for model, config in zip(own, configs, strict=True))
        losses = run(first, inputs(0, 0)).float().mean(), run(last, inputs(1, 0)).float().mean()
        (first.scale(losses[0]) + last.scale(losses[1])).backward()
        before = [values(model) for model in own]
        first.step()
        last.step()
        return [old - values(model) for old, model in zip(before, own, strict=True)]

    for each, right in zip(run_threads(1, rank)[0], plain(), strict=True):
        torch.testing.assert_close(each, right, rtol=1e-2, atol=2e-3)


def test_without_the_division_no_engine_divides():
    models = [layer(0), layer(1)]
    expected = plainly(models, (2, 2), 2, 1)

    def rank(communicator):
        own = copy.deepcopy(models)
        first, last = (engine_of(model, make_config(2, 2)) for model in own)
        for step in range(2):
            first.backward(chained((first, last), inputs(step, 0)) / 2, scale_wrt_gas=False)
            first.step()
            last.step()
        return [values(model) for model in own]

    for each, right in zip(run_threads(1, rank)[0], expected, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_penalty_through_two_engines(stage):
    """As of a critic: gradients of one engine's output by its input are a part of the loss."""
    models = [layer(0), layer(1, out=1)]

    def loss_of(generator, critic, rank):
        fake = generator(inputs(0, rank))
        score = critic(fake)
        (slope,) = torch.autograd.grad(score.sum(), fake, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1.0).pow(2).mean()

    generator, critic = copy.deepcopy(models)
    (sum(loss_of(generator, critic, rank) for rank in range(2)) / 2).backward()
    expected = [
        torch.cat([(one - 0.25 * one.grad).detach().flatten() for one in model.parameters()])
        for model in (generator, critic)
    ]

    def rank(communicator):
        own = copy.deepcopy(models)
        engines = [engine_of(model, make_config(stage)) for model in own]
        engines[0].backward(loss_of(*engines, communicator.rank))
        for engine in engines:
            engine.step()
            engine.destroy()
        return [values(model) for model in own]

    for found in run_threads(2, rank):
        for each, right in zip(found, expected, strict=True):
            torch.testing.assert_close(each, right, rtol=1e-4, atol=1e-5)


# Parameters that go from one engine to another.


SECONDS = ["same", "whole after part", "part after whole", "two parts to whole"]


@pytest.mark.parametrize(
    ("stage", "case", "world", "is_dropped"),
    [
        (stage, case, (stage + at) % 3 + 1, bool((stage // 2 + at) % 2))
        for stage in STAGES
        for at, case in enumerate(SECONDS)
    ],
)
def test_a_second_engine_trains_as_after_destroy(stage, case, world, is_dropped):
    def moved(destroys, communicator):
        parts = layer(0), layer(1)
        whole = nn.Sequential(*parts)
        firsts = {"same": [whole], "whole after part": [parts[0]], "part after whole": [whole]}.get(case, list(parts))
        model = parts[0] if case == "part after whole" else whole
        engines = [engine_of(one, make_config(stage)) for one in firsts]
        for engine in engines:
            engine.backward(engine(inputs(0, communicator.rank)).pow(2).mean())
            engine.step()
            if destroys:
                engine.destroy()
        if is_dropped:
            del engine, engines
        second = engine_of(model, make_config(stage))
        for step in range(2):
            second.backward(second(inputs(step, communicator.rank)).pow(2).mean())
            second.step()
        assert second.get_global_grad_norm() > 0.0
        second.destroy()
        return values(whole)

    gc.collect()
    gc.disable()
    try:
        right, found = (run_threads(world, lambda one, d=destroys: moved(d, one)) for destroys in (True, False))
    finally:
        gc.enable()
    for each, expected in zip(found, right, strict=True):
        assert torch.equal(each, expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_handed_over_names_both(stage, tmp_path):
    def rank(communicator):
        model = layer(0)
        first = engine_of(model, make_config(stage))
        loss = first(inputs(0, 0)).mean()
        second = engine_of(model, make_config(stage))
        refused = []
        for call in (
            lambda: first.backward(loss),
            first.step,
            first.zero_grad,
            lambda: first.train_batch(iter([inputs(0, 0)])),
            lambda: first.save_checkpoint(str(tmp_path)),
            lambda: first.load_checkpoint(str(tmp_path)),
            lambda: first.save_16bit_model(str(tmp_path)),
            lambda: first.load_module_state_dict({}),
        ):
            with pytest.raises(ShardingError) as error:
                call()
            refused.append((error.value.value, "engine 1 (Sequential)" in str(error.value)))
        first.destroy()  # and again does nothing
        second.backward(second(inputs(0, 0)).mean())
        second.step()
        return refused, second.get_global_grad_norm() > 0

    for refused, trains in run_threads(2, rank):
        assert refused == [("engine 2 (Sequential)", True)] * 8
        assert trains


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_trunk_of_two_engines_is_refused_at_once(stage, is_frozen):
    def rank(communicator):
        trunk = layer(0).requires_grad_(not is_frozen)
        first = engine_of(nn.Sequential(trunk, layer(1)), make_config(stage))
        with pytest.raises(ShardingError) as refused:
            engine_of(nn.ModuleDict({"trunk": trunk, "head": layer(2)}), make_config(stage))
        first.backward(first(inputs(0, communicator.rank)).mean())  # and the first one goes on
        first.step()
        return refused.value.value, first.was_step_applied()

    for value, applied in run_threads(2, rank):
        assert value == ("engine 1 (Sequential)", "engine 2 (ModuleDict)")
        assert applied
