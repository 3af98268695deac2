"""Engines around models that were built inside zero.Init or on the meta device, at every stage."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from parity_models import ParityModel, Run, assert_bitwise, batch, grouped, make_config, on_threads, snapshot
from torch import nn

import polyaccel
from polyaccel import zero
from polyaccel.comm.base import Communicator
from polyaccel.errors import PolyaccelError, ShardingError
from polyaccel.torch.deferred_init.values import is_deferred, value_of

WORLD = 2
STEPS = 2
BUCKET = {"reduce_bucket_size": 3000}


class Larger(ParityModel):
    """The awkward model, with parameters that are worth deferring: used, tied, frozen, and in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 200)
        self.middle = nn.Linear(200, 200)
        self.again = nn.Linear(200, 200, bias=False)
        self.again.weight = self.middle.weight
        self.down = nn.Linear(200, 6)
        self.large_frozen = nn.Parameter(torch.rand(40, 40), requires_grad=False)
        self.rough = nn.Parameter(torch.randn(2000, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.rand(2000).round())

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        more = self.down(torch.tanh(self.again(torch.tanh(self.middle(self.up(self.embed(tokens))))))).mean()
        return super().forward(tokens, targets) + more + (self.rough * self.mask).float().mean()


def build(seed: int, *, deferred: bool) -> Larger:
    with torch.random.fork_rng(), zero.Init(enabled=deferred):
        torch.manual_seed(seed)
        return Larger()


def learn(communicator: Communicator, model: nn.Module, config, client: bool) -> Run:
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2) if client else None
    parameters = None if client else grouped(model)
    engine, *_ = polyaccel.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
    assert not any(is_deferred(tensor) for tensor in (*model.parameters(), *model.buffers()))
    run = Run({})
    for step in range(STEPS):
        loss = engine(*batch(step, 0, communicator.rank))
        engine.backward(loss)
        engine.step()
        run.losses.append(loss.item())
        run.norms.append(engine.get_global_grad_norm())
    masters = {name: engine.zero.params.locate(name)[0].own.raw.clone() for name in engine.adapter.names.values()}
    run.params = masters if config["zero_optimization"]["stage"] == 3 else snapshot(engine.module)
    engine.destroy()
    return run


@pytest.mark.parametrize(
    ("stage", "precision", "client"),
    [*((stage, "fp32", False) for stage in range(4)), (0, "bf16", False), (3, "bf16", False), (1, "fp32", True)],
)
def test_training_is_that_of_a_model_built_in_memory(stage, precision, client):
    config = make_config(stage, zero=BUCKET, **({"bf16": {"enabled": True}} if precision == "bf16" else {}))
    if client:
        del config["optimizer"]
    runs = []
    for deferred in (False, True):
        model = build(0, deferred=deferred)
        assert is_deferred(model.middle.weight) is deferred
        # Each rank from a seed of its own would do as well: rank 0's values are broadcast.
        ranks = on_threads(WORLD, learn, lambda model=model: deepcopy(model), deepcopy(config), client)
        runs.append(ranks[0])
    assert_bitwise(runs[1].params, runs[0].params)
    assert runs[1].losses == runs[0].losses
    assert runs[1].norms == runs[0].norms


class Resettable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(50, 60), nn.BatchNorm1d(60), nn.Linear(60, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).square().mean()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(50, 60)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs).square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_on_the_meta_device_trains_from_the_values_of_reset_parameters(stage):
    def parameters(communicator: Communicator, model: nn.Module):
        if communicator.rank == 0:
            torch.manual_seed(5)  # only this rank's values count; no other rank draws from the shared generator
        config = make_config(stage, zero={"reduce_bucket_size": 100})
        engine, *_ = polyaccel.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(4, 50)))
        engine.step()
        assert model.layers[1].running_mean.abs().sum() > 0
        return [place.own.raw.clone() for place in engine.zero.params]

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Resettable()

    def in_memory() -> nn.Module:
        torch.manual_seed(5)
        model = Resettable()
        torch.manual_seed(5)
        for layer in model.layers:
            layer.reset_parameters()
        return model

    with torch.random.fork_rng():
        wanted = on_threads(1, parameters, in_memory)[0]
        found = on_threads(1, parameters, on_meta)[0]
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_initialize_inside_the_context_is_as_after_it(dtype):
    """As DeepSpeed has it: the context is suspended meanwhile. A model that is built after it is deferred again."""

    def start(communicator: Communicator, _: nn.Module) -> None:
        found = []
        for inside in (False, True):
            torch.manual_seed(communicator.rank)
            with zero.Init(dtype=dtype):
                model = Wide()
                if inside:
                    engine, *_ = polyaccel.initialize(model=model, config=make_config(3))
                    later = Wide()
                    with pytest.raises(PolyaccelError):
                        engine(torch.ones(4, 50))
            if not inside:
                engine, *_ = polyaccel.initialize(model=model, config=make_config(3))
                with zero.Init(dtype=dtype):
                    later = Wide()
            assert is_deferred(later.layer.weight)
            assert not is_deferred(model.layer.weight)
            engine.backward(engine(torch.ones(4, 50, dtype=dtype)))
            engine.step()
            found.append([place.own.raw.clone() for place in engine.zero.params])
            found[-1] += [value_of(one) for one in later.parameters()]
        assert all(map(torch.equal, *found))

    on_threads(1, start, lambda: nn.Linear(4, 4))  # ranks as threads share one random generator


@pytest.mark.parametrize("override", [True, False])
def test_module_apply_sees_whole_parameters_before_initialize_and_never_empty_ones_after(override):
    """`override_module_apply` is about a patch of DeepSpeed's that is not needed: nothing is sharded inside Init."""
    config = make_config(3, zero={"stage3_param_persistence_threshold": 0, "override_module_apply": override})

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.numel() == 2500
            module.weight.data.fill_(0.5)

    def build_inside() -> nn.Module:
        with zero.Init(config=config):
            model = nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50))
            return model.apply(fill)

    def work(communicator: Communicator, model: nn.Module) -> None:
        engine, *_ = polyaccel.initialize(model=model, config=config)
        seen: list[nn.Module] = []
        gathered = engine.zero.params.gathered.peak_numel
        engine.module.apply(seen.append)
        assert len(seen) == 4
        assert engine.zero.params.gathered.peak_numel == gathered
        with pytest.raises(ShardingError) as caught:
            engine.module.apply(lambda part: part.weight.data.zero_() if isinstance(part, nn.Linear) else None)
        assert caught.value.value == "0.weight"
        assert "GatheredParameters" in str(caught.value)
        with zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            assert all(bool((layer.weight == 0.5).all()) for layer in (model[0], model[2]))
            engine.module.apply(lambda part: part.weight.data.fill_(0.25) if isinstance(part, nn.Linear) else None)
        assert all(
            bool((value == 0.25).all()) for name, value in engine.module_state_dict().items() if "weight" in name
        )

    on_threads(WORLD, work, build_inside)
