"""A constructor computes inside zero.Init what it computes outside, whatever layout a device gives the result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from polyaccel import zero
from polyaccel.errors import PolyaccelError
from polyaccel.torch.deferred_init.values import is_deferred, prepare, value_of

RANK = 4


def square() -> Tensor:
    return torch.randn(40, 40)


def images() -> Tensor:
    return torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)


COMPUTED = {
    "linalg.svd": lambda: torch.linalg.svd(torch.randn(60, 40), full_matrices=False)[2],
    "svd_lowrank": lambda: torch.svd_lowrank(torch.randn(60, 40), q=30)[2],
    "pca_lowrank": lambda: torch.pca_lowrank(torch.randn(60, 40), q=30)[0],
    "linalg.eig": lambda: torch.view_as_real(torch.linalg.eig(square())[1]).contiguous(),
    "linalg.qr": lambda: torch.linalg.qr(square())[0],
    "linalg.inv": lambda: torch.linalg.inv(square()),
    "linalg.pinv": lambda: torch.linalg.pinv(torch.randn(60, 40)),
    "linalg.cholesky": lambda: torch.linalg.cholesky(square() @ square().T * 0 + 3 * torch.eye(40)),
    "fft.rfft2": lambda: torch.view_as_real(torch.fft.rfft2(torch.randn(16, 32, 8), dim=(0, 1))).contiguous(),
    "fft.irfft": lambda: torch.fft.irfft(torch.fft.rfft(torch.randn(64, 32), dim=0), dim=0),
    "channels-last convolution": lambda: nn.functional.conv2d(images(), torch.randn(20, 16, 3, 3)),
    "channels-last pixel_shuffle": lambda: nn.functional.pixel_shuffle(images(), 2),
    "channels-last channel_shuffle": lambda: nn.functional.channel_shuffle(images(), 4),
    "floor_divide of a turned matrix": lambda: square().t().floor_divide(square()),
    "xlogy of a turned matrix": lambda: torch.xlogy(square().t(), square().abs()),
}
"""Results that CPUs lay out otherwise than the meta device says, and neighbours of theirs."""


class OneParameter(nn.Module):
    def __init__(self, compute) -> None:
        super().__init__()
        self.weight = nn.Parameter(compute())
        with torch.no_grad():
            self.weight[:1].fill_(3)


class LowRank(nn.Module):
    """An adapter that begins as the principal part of a layer, as PEFT's PiSSA and OLoRA make it."""

    def __init__(self, decompose, features: int) -> None:
        super().__init__()
        self.base = nn.Linear(features, features)
        self.down, self.up = nn.Linear(features, RANK, bias=False), nn.Linear(RANK, features, bias=False)
        down, up = decompose(self.base.weight.data)
        self.down.weight.data, self.up.weight.data = down.contiguous(), up.contiguous()
        self.base.weight.data = self.base.weight.data - up @ down


def pissa(weight: Tensor) -> tuple[Tensor, Tensor]:
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    root = torch.diag(values[:RANK].sqrt())
    return root @ right[:RANK], left[:, :RANK] @ root


def olora(weight: Tensor) -> tuple[Tensor, Tensor]:
    orthogonal, upper = torch.linalg.qr(weight)
    return upper[:RANK], orthogonal[:, :RANK]


class Lazy(nn.Sequential):
    """Layers that learn their input's size from a first forward, inside the constructor."""

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(60), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
        self(torch.randn(2, 50))


class Assigned(nn.Module):
    """`.data =` between parameters that exist already and values that do not, either way round, and shared."""

    def __init__(self) -> None:
        super().__init__()
        large = torch.randn(60, 60)
        self.part, self.grown, self.shrunk = (nn.Parameter(torch.zeros(size, 4)) for size in (4, 4, 400))
        self.part.data = large[:4, :4]
        self.grown.data = torch.randn(60, 60)
        self.shrunk.data = torch.ones(3) * 2
        self.part.data.mul_(2)
        self.large = nn.Parameter(large.clone())


BUILDS = {
    **{name: lambda compute=compute: OneParameter(compute) for name, compute in COMPUTED.items()},
    "PiSSA, all small": lambda: LowRank(pissa, 32),
    "PiSSA, deferred": lambda: LowRank(pissa, 300),
    "OLoRA": lambda: LowRank(olora, 40),
    "lazy modules": Lazy,
    "parameter.data = value": Assigned,
}


def built(build, *, inside: bool) -> nn.Module:
    with torch.random.fork_rng(), zero.Init(enabled=inside):
        torch.manual_seed(7)
        return build()


def assert_equal_parameters(found: nn.Module, wanted: nn.Module) -> None:
    prepare(found)
    theirs = dict(wanted.named_parameters())
    for name, ours in found.named_parameters():
        value = value_of(ours)
        assert value.shape == theirs[name].shape, name
        torch.testing.assert_close(value, theirs[name].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUILDS)
def test_a_constructor_computes_inside_what_it_computes_outside(name):
    assert_equal_parameters(built(BUILDS[name], inside=True), built(BUILDS[name], inside=False))


@pytest.mark.parametrize("decompose", [pissa, olora])
def test_adapters_that_are_added_after_the_block(decompose):
    """There torch shows nobody `real.data = deferred`, so what is computed from deferred values is real."""

    def adapt(model: nn.Module) -> nn.Module:
        adapter = nn.Linear(64, RANK, bias=False)
        down, up = decompose(model.weight.data)
        adapter.weight.data = down
        assert not is_deferred(adapter.weight)
        model.weight.data = model.weight.data - up @ down
        model.adapter = adapter
        return model

    found, wanted = (adapt(built(lambda: nn.Linear(64, 64), inside=inside)) for inside in (True, False))
    assert_equal_parameters(found, wanted)


def test_casts_and_copies_after_the_block_stay_deferred():
    model = built(lambda: nn.Linear(64, 64), inside=True)
    assert is_deferred(model.half().weight)
    assert is_deferred(model.weight.clone())
    assert not is_deferred(model.weight[:4].clone())
    assert not is_deferred(model.weight * 2)


def test_hooks_of_a_parameter_that_is_given_deferred_values_are_not_lost():
    with zero.Init():
        parameter = nn.Parameter(torch.zeros(3))
        parameter.register_hook(lambda gradient: None)
        with pytest.raises(PolyaccelError) as caught:
            parameter.data = torch.randn(60, 60)
        assert caught.value.value == (3,)


def test_an_operation_whose_shape_the_meta_device_gets_wrong_is_refused():
    model = built(lambda: OneParameter(lambda: torch.cumsum(torch.randn(60, 60), 0)), inside=True)
    (call,) = {call for call in model.weight.place.memory.history if "cumsum" in str(call.function)}
    call.made = (replace(call.made[0], shape=(60, 61)),)
    with pytest.raises(PolyaccelError) as caught:
        value_of(model.weight)
    assert caught.value.value == "aten.cumsum.default"
    assert all(part in str(caught.value) for part in ("torch.float32", "enabled=False"))
