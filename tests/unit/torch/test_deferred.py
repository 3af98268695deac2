"""Models built inside zero.Init hold, bit for bit, what the same program builds outside."""

from __future__ import annotations

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from polyaccel import zero
from polyaccel.errors import ConfigError, PolyaccelError
from polyaccel.torch.deferred_init.log import SMALL_NUMEL, FakeStorage
from polyaccel.torch.deferred_init.values import is_deferred, prepare, value_of


def layers() -> nn.Module:
    return nn.ModuleList(
        [
            nn.Linear(64, 65),
            nn.Conv2d(16, 32, 3),
            nn.BatchNorm2d(2000),
            nn.Embedding(100, 40, padding_idx=3),
            nn.LSTM(40, 40, 2),
            nn.MultiheadAttention(64, 4),
        ]
    )


def copied_layers() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3)


def initialised_again() -> nn.Module:
    module = nn.ModuleList(
        [nn.Linear(64, 65), nn.Linear(50, 50), nn.Linear(60, 60), nn.Conv2d(40, 40, 3), nn.Linear(70, 70)]
    )
    nn.init.orthogonal_(module[0].weight)
    nn.init.trunc_normal_(module[0].weight[:30])
    nn.init.sparse_(module[1].weight, 0.1)
    nn.init.eye_(module[2].weight)
    nn.init.dirac_(module[3].weight)
    nn.init.xavier_normal_(module[4].weight)
    return module


def parametrized() -> nn.Module:
    return nn.ModuleList(
        [
            parametrizations.spectral_norm(nn.Linear(40, 41)),
            parametrizations.weight_norm(nn.Linear(40, 41)),
            parametrizations.orthogonal(nn.Linear(40, 40)),
        ]
    )


class Written(nn.Module):
    """Parameters made and changed by hand in every way that we have met."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(5)
        self.drawn = nn.Parameter(torch.randn(40, 40))
        self.drawn.data.copy_(self.drawn.data)
        self.alike = nn.Parameter(torch.rand_like(self.drawn))
        self.with_own_generator = nn.Parameter(torch.rand(50, 50, generator=own))
        self.with_own_generator.data.normal_(generator=own)
        self.whole = nn.Parameter(torch.randint(0, 9, (3000,)).float() + torch.randperm(3000))
        self.coins = nn.Parameter(torch.bernoulli(torch.full((2000,), 0.3)))
        self.chosen = nn.Parameter(torch.multinomial(torch.ones(3000), 1500).float())
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(2000)))

        self.turned = nn.Parameter(self.drawn.t().contiguous())
        self.turned.data[3:5].copy_(torch.ones(40))
        self.turned.data[:, 7] = 2
        self.turned.data[torch.arange(40) == 4] = 5
        self.turned.data[self.turned.data > 1] = 0
        before = torch.arange(5000.0)
        self.before = nn.Parameter(before.clone())
        before[:10] = -1
        self.after = nn.Parameter(before)
        self.pair = nn.Parameter(torch.stack([self.drawn.data, self.turned.data]))
        first, _ = self.pair.data.chunk(2)
        first.zero_()
        self.given = nn.Parameter(torch.zeros(5000))
        self.given.data.copy_(torch.tensor([1.0] * 5000))
        if self.drawn.max().item() > 0.2:
            self.drawn.data.mul_(0.5)
        self.small = nn.Parameter(torch.ones(3))
        self.small.data.mul_(self.drawn.detach().sum())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]

        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())
        self.tables = [torch.ones(2000) / 2, {"inner": torch.rand(40, 40)}]


class Applied(nn.Sequential):
    """Initialises itself, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 41), nn.Sequential(nn.Linear(41, 42)))
        self.apply(small_normal)


BUILDERS = [layers, copied_layers, initialised_again, parametrized, Written, Applied]


def small_normal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        module.bias.data.zero_()


AFTERWARDS = {
    "nothing": lambda model: model,
    "half": nn.Module.half,
    "initialised": lambda model: model.apply(small_normal),
    "deepcopy": copy.deepcopy,
}


def both(build, afterwards=lambda model: model):
    """The model built outside and inside zero.Init from the same seed."""
    models, states = [], []
    for enabled in (False, True):
        torch.manual_seed(3)
        with zero.Init(enabled=enabled):
            model = build()
        models.append(afterwards(model))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    return models


def assert_same_tensor(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.stride(), found.device) == (wanted.dtype, wanted.stride(), wanted.device)
    assert torch.equal(found, wanted)


@pytest.fixture(autouse=True)
def _own_random_state():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize("build", BUILDERS)
def test_values_and_the_random_stream_are_those_of_an_ordinary_build(build, afterwards):
    wanted, found = both(build, AFTERWARDS[afterwards])
    large = [p for p in found.parameters() if p.numel() > SMALL_NUMEL]
    assert large
    assert sum(is_deferred(p) for p in large) >= len(large) - 1  # torch.multinomial's result is real
    prepare(found)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in wanted.named_parameters()]
    for ours, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        assert_same_tensor(value_of(ours), theirs.detach())
        assert isinstance(ours, nn.Parameter)
        assert ours.requires_grad == theirs.requires_grad
    for ours, theirs in zip(found.buffers(), wanted.buffers(), strict=True):
        assert type(ours) is Tensor
        assert_same_tensor(ours, theirs)


def test_tensors_in_plain_attributes_become_real():
    wanted, found = both(Written)
    prepare(found)
    assert found.rates == wanted.rates
    assert type(found.tables[0]) is type(found.tables[1]["inner"]) is Tensor
    assert torch.equal(found.tables[1]["inner"], wanted.tables[1]["inner"])


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["randn", "ones", "clone", "view", "row", "normal_", "fill_", "mul_", "copy_", "add", "turn"]),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    max_size=25,
)


def play(steps) -> list[Tensor]:
    """A random program on a growing list of 40 x 40 tensors, many of them views of others."""
    pool = [torch.zeros(40, 40)]
    for name, first, second in steps:
        one, other = pool[first % len(pool)], pool[second % len(pool)]
        if name == "randn":
            pool.append(torch.randn(40, 40))
        elif name == "ones":
            pool.append(torch.ones(40, 40))
        elif name == "clone":
            pool.append(one.clone())
        elif name == "view":
            pool.append(one.detach())
        elif name == "turn":
            pool.append(one.t())
        elif name == "row":
            one[second % 40].uniform_()
        elif name == "normal_":
            one.normal_(second, 2.0)
        elif name == "fill_":
            one[:, : second % 40].fill_(first)
        elif name == "mul_":
            one.mul_(other.clone())
        elif name == "copy_":
            one.copy_(other.clone())
        else:
            pool.append(one + other)
    return pool


@settings(deadline=None, max_examples=60)
@given(_STEPS)
def test_any_program_of_views_and_changes_in_place_gives_the_same_bits(steps):
    torch.manual_seed(1)
    wanted = play(steps)
    torch.manual_seed(1)
    with zero.Init():
        found = play(steps)
    assert all(map(is_deferred, found))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(value_of(ours), theirs, rtol=0, atol=0, equal_nan=True)


def test_tied_parameters_stay_one_object_that_an_optimizer_holds():
    with zero.Init():
        embed, head = nn.Embedding(60, 40), nn.Linear(40, 60, bias=False)
        head.weight = embed.weight
    embed.weight.no_decay = True
    optimizer = torch.optim.SGD([embed.weight], lr=1.0)
    wanted = value_of(embed.weight)
    embed.weight.data = wanted.clone()
    assert head.weight is embed.weight is optimizer.param_groups[0]["params"][0]
    assert type(head.weight) is nn.Parameter
    assert head.weight.no_decay
    assert torch.equal(head.weight, wanted)


def test_nothing_of_the_log_lives_longer_than_the_deferred_tensors():
    gc.collect()
    before = sum(type(thing) is FakeStorage for thing in gc.get_objects())
    with zero.Init():
        model = copied_layers()
    assert sum(type(thing) is FakeStorage for thing in gc.get_objects()) > before
    for parameter in model.parameters():
        parameter.data = value_of(parameter)
    gc.collect()
    assert sum(type(thing) is FakeStorage for thing in gc.get_objects()) <= before


def test_values_are_answered_where_python_asks_for_them():
    with zero.Init():
        weight = nn.Linear(64, 64).weight
        total = weight.sum().item()
        assert bool((weight.abs() < 1).all())
        assert weight.tolist() == value_of(weight).tolist()
        assert len((weight > 0).nonzero()) == int((weight > 0).sum())
    assert total == float(value_of(weight).sum())
    assert "DeferredTensor" in repr(weight)


def test_an_unplaced_model_computes_on_real_data():
    wanted, found = both(layers)
    inputs = torch.rand(2, 64)
    assert torch.equal(found[0](inputs), wanted[0](inputs))


@pytest.mark.parametrize("use", [Tensor.data_ptr, copy.copy, lambda tensor: torch.save(tensor, "/dev/null")])
def test_what_needs_memory_says_so(use):
    with zero.Init():
        tensor = torch.ones(2000)
    with pytest.raises(PolyaccelError) as caught:
        use(tensor)
    assert "value_of" in str(caught.value)


def test_an_array_has_the_values_and_takes_none():
    """TRL hashes a model that way before there is an engine."""
    with zero.Init():
        tensor = torch.arange(3000.0).mul(0.5)[1::2]
    wanted = torch.arange(3000.0).mul(0.5)[1::2]
    for array in (tensor.numpy(), np.asarray(tensor), tensor.detach().cpu().numpy()):
        assert np.array_equal(array, wanted.numpy())
        assert not array.flags.writeable
    with pytest.raises(RuntimeError):
        tensor.requires_grad_().numpy()


def test_changing_the_shape_in_place_is_refused():
    with zero.Init():
        tensor = torch.ones(2000)
        with pytest.raises(PolyaccelError) as caught:
            tensor.resize_(3000)
        assert caught.value.value == "aten.resize_.default"
        assert "zero.Init" in str(caught.value)


def test_hooks_that_would_be_lost_are_refused():
    with zero.Init():
        weight = nn.Linear(64, 64).weight
    weight.register_hook(lambda gradient: gradient)
    with pytest.raises(PolyaccelError) as caught:
        weight.data = value_of(weight)
    assert caught.value.value == (64, 64)


def test_a_source_that_changes_before_the_replay_is_noticed():
    source = torch.ones(5000)
    with zero.Init():
        kept = torch.zeros(5000)
        kept.copy_(source)
    source[0] = 7
    with pytest.raises(PolyaccelError) as caught:
        value_of(kept)
    assert caught.value.value == (5000,)


def test_leaving_by_an_exception_ends_it():
    with pytest.raises(ZeroDivisionError), zero.Init():
        raise ZeroDivisionError
    assert not is_deferred(torch.ones(2000))


def test_nested_contexts_and_a_ready_module():
    ready = nn.Linear(64, 64)
    assert zero.Init(module=ready).module is ready
    assert not is_deferred(ready.weight)
    with zero.Init():
        with zero.Init(dtype=torch.bfloat16):
            inner = nn.Linear(64, 64)
        outer = nn.Linear(64, 64)
    assert is_deferred(inner.weight)
    assert is_deferred(outer.weight)
    assert not is_deferred(nn.Linear(64, 64).weight)
    assert (inner.weight.dtype, outer.weight.dtype) == (torch.bfloat16, torch.float32)
    assert value_of(inner.weight).dtype is torch.bfloat16


def test_the_meta_device_stays_meta_inside():
    with zero.Init():
        assert torch.ones(2000, device="meta").is_meta
        assert torch.ones(2000).to("meta").is_meta


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"remote_device": "cpu"}, "remote_device"),
        ({"pin_memory": True}, "pin_memory"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"config_dict_or_path": {"zero_optimisation": {}}}, "zero_optimisation"),
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(arguments, key):
    with pytest.raises(ConfigError) as caught:
        zero.Init(**arguments)
    assert caught.value.problems[0].key == key


def test_inert_arguments_are_accepted_and_unknown_ones_are_not():
    zero.Init(remote_device=None, pin_memory=False, mpu=None, mem_efficient_linear=False)
    with pytest.raises(TypeError) as caught:
        zero.Init(remote_devise=None)
    assert "remote_devise" in str(caught.value)


def test_a_model_on_the_meta_device_gets_what_its_modules_reset_to():
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.MultiheadAttention(64, 2))
        model[2].weight = model[0].weight
        return model

    with torch.device("meta"):
        found = build()
    wanted = build()
    first = found[0].weight
    for model in (wanted, found):
        torch.manual_seed(7)
        if model is found:
            prepare(found)
        else:
            for module in (*wanted, wanted[3].out_proj):
                getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))()
    assert found[2].weight is found[0].weight is first
    for ours, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(value_of(ours), theirs)
    assert torch.equal(found[1].running_var, torch.ones(64))


def test_a_meta_tensor_that_nothing_fills_is_named():
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        model[0].scale = nn.Parameter(torch.ones(3))
    with pytest.raises(PolyaccelError) as caught:
        prepare(model)
    assert caught.value.value == "0.scale"
    assert "zero.Init" in str(caught.value)


def test_building_inside_costs_no_memory_and_no_warnings():
    """A hundred gigabytes of zeros: only what is never allocated can be built here."""
    with warnings.catch_warnings(), zero.Init():
        warnings.simplefilter("error")
        tensor = torch.zeros(25, 1024**3)
        tensor[3, 5:7] += 1.0
    assert is_deferred(tensor)
