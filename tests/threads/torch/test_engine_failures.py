"""What must be an error is one, says the hint, hangs nobody, and leaves an engine that goes on."""

from __future__ import annotations

import pytest
import torch
from parity_models import (
    SMALL,
    assert_close,
    batch,
    drawn_from,
    engine_for,
    make_config,
    on_threads,
    parity_loss,
    parity_model,
    snapshot,
    train_plainly,
)
from stage_cases import both_backwards, stages
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError, InvariantError, PolyaccelError, ShardingError


class Explosion(Exception):
    pass


class Explosive(torch.autograd.Function):
    """Identity whose backward raises while `armed`."""

    armed = frozenset[str]()

    @staticmethod
    def forward(ctx, values, name):
        ctx.name = name
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.name in Explosive.armed:
            raise Explosion(ctx.name)
        return gradient, None


class Model(nn.Module):
    """Linear layers; what lies between them can fail in backward, once the last one's gradient has been handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 1)

    def forward(self, values, name=""):
        hidden = self.middle(torch.tanh(self.first(values)))
        return self.last(Explosive.apply(hidden, name)).square().mean()


def model() -> Model:
    with drawn_from(3):
        return Model()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.fixture
def armed(monkeypatch):
    monkeypatch.setattr(Explosive, "armed", frozenset({"every rank", "rank 1"}))


@stages
@both_backwards
def test_a_backward_that_fails_on_one_rank_raises_there_and_ends_the_others(armed, stage, own_backward):
    def explode(communicator, module, config):
        engine = engine_for(module, config)
        loss = engine(inputs(0, communicator.rank), f"rank {communicator.rank}")
        engine.backward(loss) if own_backward else loss.backward()
        engine.step()

    with pytest.raises(Explosion) as caught:
        on_threads(3, explode, model, make_config(stage, zero=SMALL))
    assert "rank 1" in str(caught.value)
    assert caught.value.rank == 1


@stages
@both_backwards
def test_a_backward_that_fails_on_every_rank_can_be_forgotten(armed, stage, own_backward):
    """The failed pass leaves nothing behind: neither gradients nor the belief that a pass is under way."""

    def explode(communicator, module, config):
        engine = engine_for(module, config)
        for step in range(3):
            for name in ("every rank", ""):
                loss = engine(inputs(step, communicator.rank), name)
                with pytest.raises(Explosion) if name else torch.enable_grad():
                    engine.backward(loss) if own_backward else loss.backward()
                if name:
                    engine.zero_grad()
                    assert not engine.zero.reducer.in_backward
            engine.step()
        return snapshot(engine.module)

    plain = train_plainly(
        2,
        3,
        build=model,
        loss_fn=lambda module, step, micro, rank: module(inputs(step, rank)),
        groups=lambda module: module.parameters(),
        make_optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0),
    )
    for params in on_threads(2, explode, model, make_config(stage, zero=SMALL)):
        assert_close(params, plain.params)


@stages
@both_backwards
@pytest.mark.parametrize("then", ["step", "engine.backward", "loss.backward"])
def test_incomplete_gradients_are_not_used(armed, stage, own_backward, then):
    """After a failed pass that nobody forgot, a step is an error: half of the gradients would be missing."""

    def explode(communicator, module, config):
        engine = engine_for(module, config)
        loss = engine(inputs(0, communicator.rank), "every rank")
        with pytest.raises(Explosion):
            engine.backward(loss) if own_backward else loss.backward()
        if then != "step":
            loss = engine(inputs(1, communicator.rank))
            engine.backward(loss) if then == "engine.backward" else loss.backward()
        with pytest.raises(PolyaccelError) as caught:
            engine.step()
        assert "engine.zero_grad()" in str(caught.value)
        assert engine.global_steps == 0

    on_threads(2, explode, model, make_config(stage, zero=SMALL))


def test_a_forward_that_fails_on_one_rank_ends_the_others():
    def explode(communicator, module):
        engine = engine_for(module, make_config(2))
        values = inputs(0, communicator.rank)
        engine.backward(engine(values if communicator.rank else values[:, :4]))
        engine.step()

    with pytest.raises(RuntimeError) as caught:
        on_threads(2, explode, model)
    assert caught.value.rank == 0


def alone(fn, config, **arguments):
    """Run `fn(engine)` on one rank with the parity model."""
    on_threads(1, lambda communicator, module: fn(engine_for(module, config, **arguments)), parity_model)


def test_unfreezing_what_is_in_no_group_is_an_error_at_the_step():
    def unfreeze(communicator, module):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        engine = polyaccel.initialize(model=module, model_parameters=trained, config=make_config(1))[0]
        module.frozen.requires_grad_(True)
        engine.backward(parity_loss(engine, 0, 0, 0))
        engine.step()

    with pytest.raises(ShardingError) as caught:
        on_threads(1, unfreeze, parity_model)
    assert caught.value.value == "frozen"


class Adapted(nn.Module):
    """A layer with something added to it, which starts at zero."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.extra = nn.Parameter(torch.zeros(base.out_features))

    def forward(self, values):
        return self.base(values) + self.extra


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_what_is_added_to_an_engines_module_is_an_error_at_the_step_and_trained_by_the_next_engine(stage):
    def add(communicator, module):
        engine = engine_for(module, make_config(stage, zero=SMALL))
        module.wide = Adapted(module.wide)
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        with pytest.raises(ShardingError) as caught:
            engine.step()
        assert caught.value.value == "wide.extra"
        assert "engine.destroy()" in str(caught.value)
        engine.destroy()
        engine = engine_for(module, make_config(stage, zero=SMALL))
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        assert engine.module_state_dict()["wide.extra"].count_nonzero() == 33

    on_threads(2, add, parity_model)


@stages
def test_freezing_leaves_the_parameter_alone(stage):
    def freeze(communicator, module):
        engine = engine_for(module, make_config(stage, zero=SMALL))
        engine.module.scale.requires_grad_(False)
        before = snapshot(engine.module)
        engine.backward(parity_loss(engine, 0, 0, communicator.rank))
        engine.step()
        after = snapshot(engine.module)
        assert torch.equal(after["scale"], before["scale"])
        assert not torch.equal(after["wide.weight"], before["wide.weight"])

    on_threads(2, freeze, parity_model)


def test_a_step_inside_no_sync_is_an_error():
    def step(engine):
        with engine.no_sync():
            engine.step()

    with pytest.raises(PolyaccelError) as caught:
        alone(step, make_config(2))
    assert "no_sync" in str(caught.value)


def test_nested_no_sync_is_an_error():
    def nest(engine):
        with engine.no_sync(), engine.no_sync():
            pass

    with pytest.raises(InvariantError) as caught:
        alone(nest, make_config(2))
    assert "no_sync" in str(caught.value)


@pytest.mark.parametrize(("loss", "named"), [(torch.ones(2, 3), "(2, 3)"), (1.5, "float")], ids=["matrix", "float"])
def test_a_loss_that_is_no_scalar_is_an_error(loss, named):
    with pytest.raises(PolyaccelError) as caught:
        alone(lambda engine: engine.backward(loss), make_config(0))
    assert named in str(caught.value)


@pytest.mark.parametrize("call", ["backward", "step"])
def test_an_engine_without_an_optimizer_says_so(call):
    config = make_config(1)
    del config["optimizer"]

    def use(engine):
        loss = engine(*batch(0, 0, 0))
        engine.backward(loss) if call == "backward" else engine.step()

    with pytest.raises(PolyaccelError) as caught:
        alone(use, config)
    assert '"optimizer"' in str(caught.value)


def test_train_batch_without_data_is_an_error():
    with pytest.raises(PolyaccelError) as caught:
        alone(lambda engine: engine.train_batch(), make_config(0))
    assert all(part in str(caught.value) for part in ("data_iter", "training_data"))


def test_a_module_without_a_loss_is_an_error_of_train_batch():
    def train(communicator, module):
        engine_for(module, make_config(0)).train_batch(iter([{"input": torch.ones(1, 2)}]))

    class Silent(nn.Linear):
        def forward(self, input):  # noqa: A002 - the name that Linear gives it
            return {"logits": super().forward(input)}

    with pytest.raises(PolyaccelError) as caught:
        on_threads(1, train, lambda: Silent(2, 1))
    assert caught.value.value == "dict"


STRANGER = nn.Parameter(torch.ones(3, 2))


@pytest.mark.parametrize(
    ("groups", "value"),
    [
        (lambda module: [*module.parameters(), STRANGER], (3, 2)),
        (
            lambda module: [{"params": [module.scale]}, {"params": [module.scale]}],
            "scale",
        ),
    ],
    ids=["stranger", "twice"],
)
def test_parameters_that_cannot_be_grouped(groups, value: object):
    with pytest.raises(ShardingError) as caught:
        on_threads(
            1,
            lambda communicator, module: engine_for(module, make_config(1), model_parameters=groups(module)),
            parity_model,
        )
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "args.deepspeed_config"),
        ({"config": {}, "config_params": {}}, '"config, config_params"'),
    ],
    ids=["none", "two"],
)
def test_exactly_one_config(arguments, named: str):
    with pytest.raises(ConfigError) as caught:
        on_threads(1, lambda communicator, module: polyaccel.initialize(model=module, **arguments), parity_model)
    assert named in str(caught.value)
    assert [problem.key for problem in caught.value.problems] == ["config"]


def test_initialize_without_a_model():
    with pytest.raises(PolyaccelError) as caught:
        polyaccel.initialize(config=make_config(0))
    assert "torch.nn.Module" in str(caught.value)


def test_a_group_that_comes_too_late_is_refused():
    def work(communicator, model):
        engine, *_ = polyaccel.initialize(model=model, config=make_config(1))
        with pytest.raises(ShardingError) as caught:
            engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
        assert "polyaccel.initialize" in str(caught.value)
        assert len(engine.optimizer.param_groups) == 1

    on_threads(1, work, parity_model)
