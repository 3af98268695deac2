"""fp16 with its loss scale, bf16 and autocast: what is skipped, what is scaled, and that all ranks agree on it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from parity_models import (
    SMALL,
    assert_bitwise,
    assert_close,
    batch,
    drawn_from,
    grouped_engine,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    relative_distance,
    snapshot,
    train_on_threads,
    train_plainly,
)
from stage_cases import stages
from torch import nn

import polyaccel
from polyaccel.errors import LossScaleError, PolyaccelError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.engine.autocast import ForwardAutocast

STEPS = 3


def fp16(**settings):
    return {"fp16": {"enabled": True, **settings}}


def masters(engine):
    """The parameters in full precision, from a single rank's master weights."""
    return {
        piece.fqn: shard.master.view(piece.shard_offset, piece.length).raw.clone()
        for shard in engine.zero.shards
        for piece in shard.slices
    }


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scale", [{"loss_scale": 128.0}, {"initial_scale_power": 8}], ids=["static", "dynamic"])
@pytest.mark.parametrize("world", [1, 3])
def test_fp16_follows_a_reference_with_float32_masters(world, scale, accumulation, stage):
    config = make_config(stage, accumulation=accumulation, gradient_clipping=0.5, zero=SMALL, **fp16(**scale))
    run = train_on_threads(world, config, STEPS)
    plain = train_plainly(world, STEPS, accumulation=accumulation, clip=0.5, param_dtype=torch.float16)
    assert run.params["wide.weight"].dtype is torch.float16
    assert relative_distance(run.params, plain.params, snapshot(parity_model())) < 0.02
    assert run.norms == pytest.approx(plain.norms, rel=5e-3)
    assert run.losses == pytest.approx(plain.losses, rel=5e-3)


@pytest.mark.parametrize("precision", [fp16(loss_scale=8.0), {"bf16": {"enabled": True}}], ids=["fp16", "bf16"])
def test_master_weights_begin_with_the_original_values(precision):
    def begin(communicator, module):
        original = snapshot(module)
        engine = grouped_engine(module, make_config(1, **precision))
        found = masters(engine)
        assert found.keys() == {name for name in original if name != "frozen"}
        assert_bitwise(found, {name: original[name].flatten() for name in found})
        dtype = next(module.parameters()).dtype
        assert dtype.itemsize == 2
        assert_bitwise(snapshot(module), {name: value.to(dtype) for name, value in original.items()})

    on_threads(1, begin, parity_model)


def test_a_static_scale_changes_nothing_but_underflow():
    """A power of two rounds nothing, so two scales give the same bits where neither overflows nor underflows."""
    runs = [
        train_on_threads(2, make_config(2, zero=SMALL, communication_data_type="fp32", **fp16(loss_scale=scale)), 1)
        for scale in (2.0**10, 2.0**11)
    ]
    assert runs[0].norms == pytest.approx(runs[1].norms, rel=1e-4)
    assert relative_distance(runs[0].params, runs[1].params, snapshot(parity_model())) < 1e-2


@stages
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage, culprit):
    """Agreed before anybody branches; nothing moves but the loss scale and the counters."""

    def overflow(communicator, module):
        dynamic = fp16(initial_scale_power=8, hysteresis=1, loss_scale_window=2)
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}}
        engine = grouped_engine(module, make_config(stage, zero=SMALL, scheduler=scheduler, **dynamic))
        scales, applied = [], []
        for step in range(8):
            bad = step in (1, 2) and communicator.rank == culprit
            before = snapshot(engine.module)
            rate = engine.get_lr()
            loss = parity_loss(engine, step, 0, communicator.rank)
            engine.backward(loss * float("inf") if bad else loss)
            engine.step()
            scales.append(engine.get_loss_scale())
            applied.append(engine.was_step_applied())
            assert engine.metrics.skipped != applied[-1]
            if not applied[-1]:
                assert_bitwise(snapshot(engine.module), before)
                assert engine.get_lr() == rate
        assert (engine.global_steps, engine.skipped_steps, engine.micro_steps) == (8, 2, 8)
        return applied, scales, engine.get_lr(), snapshot(engine.module)

    ranks = on_threads(2, overflow, parity_model)
    applied, scales, rates, params = ranks[0]
    assert applied == [True, False, False, True, True, True, True, True]
    assert scales == [256.0, 128.0, 64.0, 64.0, 64.0, 128.0, 128.0, 256.0]
    assert ranks[1][:3] == (applied, scales, rates)
    assert_bitwise(ranks[1][3], params)


@stages
def test_a_skipped_step_leaves_no_trace_in_the_update(stage):
    """Training with an overflow in between equals training without that batch."""

    def train(communicator, module, skips):
        engine = grouped_engine(module, make_config(stage, zero=SMALL, **fp16(loss_scale=64.0)))
        for step in range(STEPS):
            if skips and step == 1:
                engine.backward(parity_loss(engine, 99, 0, communicator.rank) * float("nan"))
                engine.step()
                assert not engine.was_step_applied()
            engine.backward(parity_loss(engine, step, 0, communicator.rank))
            engine.step()
        return snapshot(engine.module)

    results = [on_threads(2, train, parity_model, skips)[0] for skips in (True, False)]
    assert_bitwise(*results)


class Spoiled(nn.Module):
    """`middle` gets a gradient that is not finite, the layers around it a finite one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, values):
        hidden = self.first(values)
        spoiled = self.middle(hidden.detach())
        spoiled.register_hook(lambda gradient: gradient * float("inf"))
        return (self.last(hidden).sum() + spoiled.sum()).float()


def spoiled() -> Spoiled:
    with drawn_from(5):
        return Spoiled()


@stages
def test_the_error_at_the_minimum_scale_names_the_parameter(stage):
    def overflow(communicator, module):
        dynamic = fp16(initial_scale_power=2, hysteresis=2, min_loss_scale=2.0)
        engine, *_ = polyaccel.initialize(model=module, config=make_config(stage, zero=SMALL, **dynamic))
        values = torch.ones(2, 4, dtype=torch.float16)
        for expected in (4.0, 2.0):
            engine.backward(engine(values))
            engine.step()
            assert engine.get_loss_scale() == expected
        engine.backward(engine(values))
        with pytest.raises(LossScaleError) as e:
            engine.step()
        assert e.value.value == "middle.bias"
        assert "bf16" in e.value.hint
        return True

    assert on_threads(2, overflow, spoiled) == [True, True]


@stages
def test_a_static_scale_skips_and_stays(stage):
    def overflow(communicator, module):
        engine, *_ = polyaccel.initialize(model=module, config=make_config(stage, **fp16(loss_scale=16.0)))
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4, dtype=torch.float16)))
            engine.step()
        assert (engine.get_loss_scale(), engine.skipped_steps) == (16.0, 3)

    on_threads(2, overflow, spoiled)


@pytest.mark.parametrize("check", [True, False])
def test_bf16_skips_gradients_that_are_not_finite_unless_told_not_to(check):
    def overflow(communicator, module):
        bf16 = {"bf16": {"enabled": True, "check_grad_overflow": check}}
        engine, *_ = polyaccel.initialize(model=module, config=make_config(2, **bf16))
        engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)))
        engine.step()
        assert engine.was_step_applied() is not check
        assert module.first.weight.isfinite().all()
        assert module.middle.weight.isfinite().all() == check

    on_threads(2, overflow, spoiled)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_plain_float32_lets_what_is_not_finite_through_as_torch_does(clip):
    def overflow(communicator, module):
        engine, *_ = polyaccel.initialize(model=module, config=make_config(1, gradient_clipping=clip))
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
        assert engine.was_step_applied()
        assert not module.middle.weight.isfinite().any()

    on_threads(2, overflow, spoiled)


@stages
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_scaled_by_hand_equals_the_engine_s(stage, accumulation):
    def user_grad_edits(communicator, module, config):
        engine = grouped_engine(module, config)
        for step in range(STEPS):
            for micro in range(accumulation):
                engine.scale(parity_loss(engine, step, micro, communicator.rank)).backward()
                engine.step()
        return snapshot(engine.module)

    config = make_config(stage, accumulation=accumulation, zero=SMALL, **fp16(loss_scale=64.0))
    ours = train_on_threads(2, config, STEPS).params
    for theirs in on_threads(2, user_grad_edits, parity_model, config):
        if accumulation == 1:
            assert_bitwise(theirs, ours)
        else:
            assert relative_distance(theirs, ours, snapshot(parity_model())) < 0.02


def test_backward_on_an_unscaled_fp16_loss_is_an_error():
    def unscaled(communicator, module):
        engine = grouped_engine(module, make_config(2, **fp16(loss_scale=64.0)))
        with pytest.raises(PolyaccelError) as caught:
            parity_loss(engine, 0, 0, 0).backward()
        assert caught.value.value == 1
        assert "engine.backward(loss)" in str(caught.value)
        engine.zero_grad()
        engine.backward(parity_loss(engine, 0, 0, 0))
        engine.step()
        engine.scale(parity_loss(engine, 0, 0, 0)).backward()
        engine.step()
        with pytest.raises(PolyaccelError) as caught:  # one scaled loss does not vouch for the next
            parity_loss(engine, 0, 0, 0).backward()
        assert caught.value.value == 1

    on_threads(1, unscaled, parity_model)


def test_fp16_casts_float_inputs_when_asked_to():
    def cast(communicator, module):
        engine, *_ = polyaccel.initialize(model=module, config=make_config(0, **fp16(loss_scale=1.0, auto_cast=True)))
        assert engine(torch.ones(2, 4)).isfinite()

    on_threads(1, cast, spoiled)


@stages
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast_computes_in_16_bits_and_keeps_float32_parameters(stage, dtype):
    seen = []

    class Observed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = parity_model()
            self.inner.wide.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))

        def forward(self, *inputs):
            return self.inner(*inputs)

    def train(communicator, module):
        autocast = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        static = {"fp16": {"loss_scale": 64.0}} if dtype == "float16" else {}
        engine = grouped_engine(module, make_config(stage, zero=SMALL, **autocast, **static))
        assert engine.get_loss_scale() == (64.0 if dtype == "float16" else 1.0)
        for step in range(STEPS):
            engine.backward(parity_loss(engine, step, 0, communicator.rank))
            engine.step()
        return snapshot(engine.module.inner)

    def plain_loss(module, step, micro, rank):
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            return module(*batch(step, micro, rank))

    ours = on_threads(2, train, Observed)
    assert set(seen) == {getattr(torch, dtype)}
    assert ours[0]["wide.weight"].dtype is torch.float32
    plain = train_plainly(2, STEPS, loss_fn=plain_loss)
    assert_bitwise(ours[1], ours[0])
    assert relative_distance(ours[0], plain.params, snapshot(parity_model())) < 0.02


@pytest.mark.parametrize("region", ["each forward", "all steps"])
@stages
def test_an_autocast_around_the_call_is_in_force_as_in_plain_torch(stage, region, caplog):
    """Also where one region spans updates: torch's cache of cast weights must not outlive them."""

    def outer():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    def train(communicator, module):
        engine = grouped_engine(module, make_config(stage, zero=SMALL))
        each, whole = (outer, nullcontext) if region == "each forward" else (nullcontext, outer)
        losses = []
        with whole():
            for step in range(STEPS):
                with each():
                    loss = parity_loss(engine, step, 0, communicator.rank)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        return snapshot(engine.module), losses

    def plain_loss(module, step, micro, rank):
        with outer():
            return module(*batch(step, micro, rank))

    (ours, losses), (others, _) = on_threads(2, train, parity_model)
    plain = train_plainly(2, STEPS, loss_fn=plain_loss)
    assert_bitwise(others, ours)
    assert relative_distance(ours, plain.params, snapshot(parity_model())) < 0.02
    assert losses[0] == plain_loss(parity_model(), 0, 0, 0).item() != parity_loss(parity_model(), 0, 0, 0).item()
    assert (
        len([line for line in caplog.records if line.name == "polyaccel.torch.engine.autocast"]) == 2
    )  # one an engine


def test_the_configs_autocast_comes_before_the_callers(caplog):
    def seen(communicator, module):
        autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
        engine, *_ = polyaccel.initialize(model=module, config=make_config(0, **autocast))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine(torch.ones(2, 4))
        before = len(caplog.records)
        with torch.autocast("cpu", dtype=torch.float16):
            return engine(torch.ones(2, 4)).dtype, len(caplog.records) - before

    assert on_threads(1, seen, lambda: nn.Linear(4, 4)) == [(torch.bfloat16, 1)]


def test_an_engine_may_end_the_callers_autocast(caplog):
    """As the drop-in's does on CUDA."""
    ended = ForwardAutocast("cpu", None)
    ended.keeps_outer = False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            with ended():
                assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype is torch.float32
    assert len(caplog.records) == 1


@stages
def test_a_float32_accumulator_keeps_what_bf16_would_lose(stage):
    """256 + 1 is 256 in bf16: micro-batches have to add up in float32, and do by default."""

    def accumulate(communicator, module, kind):
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        types = {} if kind is None else {"data_types": {"grad_accum_dtype": kind}}
        config = make_config(stage, accumulation=4, optimizer=sgd, bf16={"enabled": True}, **types)
        engine, *_ = polyaccel.initialize(model=module, config=config)
        for factor in (256.0, 1.0, 1.0, 1.0):
            engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * (4 * factor))
            engine.step()
        return engine.get_global_grad_norm()

    norms = {
        kind: on_threads(1, accumulate, lambda: nn.Linear(1, 1, bias=False), kind)[0] for kind in (None, "fp32", "bf16")
    }
    assert norms == {None: 259.0 if stage == 2 else 260.0, "fp32": 259.0 if stage == 2 else 260.0, "bf16": 256.0}


def test_float32_is_untouched_by_any_of_this():
    def scale(communicator, module):
        engine = grouped_engine(module, make_config(1))
        assert engine.get_loss_scale() == 1.0
        assert_close({"loss": engine.scale(torch.tensor(3.0))}, {"loss": torch.tensor(3.0)}, 0.0)

    on_threads(1, scale, parity_model)


class MovingAverage(nn.Module):
    """Writes a float buffer from a weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4, 4))

    def forward(self, value):
        with torch.no_grad():
            self.average.lerp_(self.layer.weight, 0.1)
        return self.layer(value)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (MovingAverage, "average"),
        (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), "parametrizations.weight.0._u"),
        (lambda: nn.Sequential(MovingAverage()), "0.average"),
    ],
)
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_buffer_that_stayed_in_float32_is_named(build, name, kind):
    def work(communicator):
        optimizer = {"type": "SGD", "params": {"lr": 0.1}}
        precision = {"enabled": True} if kind == "bf16" else {"enabled": True, "loss_scale": 16.0}  # nothing overflows
        config = {"train_batch_size": 2, kind: precision, "optimizer": optimizer}
        value = torch.ones(2, 4, dtype=torch.bfloat16 if kind == "bf16" else torch.float16)
        engine, *_ = polyaccel.initialize(model=build(), config=config)
        with pytest.raises(PolyaccelError) as refused:
            engine(value)
        engine.destroy()
        cured, *_ = polyaccel.initialize(model=build(), config=config | {"data_types": {"buffer_dtype": kind}})
        cured.backward(cured(value).float().mean())
        cured.step()
        return refused.value.value, cured.was_step_applied()

    assert run_threads(1, work) == [(name, True)]
