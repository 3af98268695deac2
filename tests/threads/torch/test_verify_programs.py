"""Shadow runs of programs with several engines, pipelines of layers, ranks that differ, and loops of one's own."""

from __future__ import annotations

import copy
import threading
from itertools import pairwise

import pytest
import torch
from planted_change import plant
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import polyaccel
from polyaccel.comm.default import default_communicator
from polyaccel.torch.api.fragments import safe_get_full_grad, safe_set_full_grad
from polyaccel.torch.pipeline.module import LayerSpec, PipelineModule, TiedLayerSpec
from polyaccel.torch.rewrites.engine import ActivationCheckpointing
from polyaccel.torch.rewrites.stages import PipelineLayers
from polyaccel.torch.verify.forward_pass import ForwardOrder
from polyaccel.torch.verify.shadow import OtherOrder, WithoutDropout
from polyaccel.verify.prove import prove, threads_run

_LOCK = threading.Lock()
"""Ranks that are threads share torch's generator while they make weights."""
WORDS = 11


def config(steps=1, **more):
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": steps}
    return sizes | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}} | more


def mlp(*widths):
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(widths[-1], widths[-1]))


def made(*models):
    """Each of (model, config) as an engine, with weights that all ranks and runs have."""
    with _LOCK:
        torch.manual_seed(0)
        built = [(make(), own) for make, own in models]
    return [polyaccel.initialize(model=model, config=own)[0] for model, own in built]


def own_draw():
    return torch.Generator().manual_seed(7 + default_communicator().rank)


def gan():
    recomputed = {"activation_checkpointing": {"enabled": True, "blocks": ["Sequential"]}}
    generator, judge = made(
        (lambda: mlp(4, 8, 8), config(zero_optimization={"stage": 2})), (lambda: mlp(8, 8, 1), config(**recomputed))
    )
    draw, loss_of = own_draw(), functional.binary_cross_entropy_with_logits
    for _ in range(3):
        fake = generator(torch.randn(4, 4, generator=draw))
        real, ones, zeros = torch.randn(4, 8, generator=draw), torch.ones(4, 1), torch.zeros(4, 1)
        judge.backward(loss_of(judge(real), ones) + loss_of(judge(fake.detach()), zeros))
        judge.step()
        judge.module.requires_grad_(False)
        generator.backward(loss_of(judge(fake), ones))
        generator.step()
        judge.module.requires_grad_(True)


def one_loss_of_two_with_a_teacher():
    given = {"train_micro_batch_size_per_gpu": 4}
    teacher, encoder, decoder = made(
        (lambda: mlp(8, 8).requires_grad_(False), given),
        (lambda: mlp(8, 4), config(2, zero_optimization={"stage": 3})),
        (lambda: mlp(4, 8), config(4)),
    )
    draw = own_draw()
    for turn in range(12):
        x = torch.randn(4, 8, generator=draw)
        with torch.no_grad():
            target = teacher(x)
        loss = functional.mse_loss(decoder(encoder(x)), target)
        loss.backward() if turn % 2 else encoder.backward(loss)
        encoder.step()
        decoder.step()


def a_loop_of_its_own():
    """Clipping by hand, an average of weights, `no_sync`, validation, and a resume in the middle."""
    (engine,) = made((lambda: mlp(8, 8), config(2, zero_optimization={"stage": 1})))
    average = copy.deepcopy(engine.module).requires_grad_(False)
    draw = own_draw()
    for turn in range(8):
        x = torch.randn(4, 8, generator=draw)
        if turn % 2:
            engine(x).square().mean().backward()
            nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
            bias = engine.module[1].bias
            safe_set_full_grad(bias, safe_get_full_grad(bias) * 0.5)
        else:
            with engine.no_sync():
                engine.backward(engine(x).square().mean())
        engine.step()
        if engine.is_gradient_accumulation_boundary():
            continue
        with torch.no_grad():
            for one, other in zip(average.parameters(), engine.module.parameters(), strict=True):
                one.lerp_(other, 0.1)
            engine.eval()
            engine(x)
            engine.train()


def ranks_that_differ():
    """Batches of unlike lengths, and a parameter that one rank does not use."""
    (engine,) = made((lambda: mlp(8, 8), config(2, zero_optimization={"stage": 2})))
    rank, draw = default_communicator().rank, own_draw()
    for _ in range(6):
        x = torch.randn(1 + 3 * rank, 8, generator=draw)
        loss = engine(x).square().sum() if rank else engine.module[0](x).square().sum()
        engine.backward(loss)
        engine.step()


RIGHT = {
    "a GAN": (gan, 2),
    "one loss of two engines, with a teacher": (one_loss_of_two_with_a_teacher, 2),
    "a loop of its own": (a_loop_of_its_own, 2),
    "ranks that differ": (ranks_that_differ, 2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_proven(name):
    program, ranks = RIGHT[name]
    proof = prove(threads_run(ranks, program))
    assert proof.is_proven, [str(one) for one in proof.findings]
    assert not proof.is_weak
    assert proof.acted["zero_optimization"]


def test_only_the_wrong_one_of_two_engines_is_named(monkeypatch):
    def double(model):
        model[0][0].weight.register_hook(lambda gradient: 2 * gradient)

    plant(monkeypatch, ActivationCheckpointing, double)
    proof = prove(threads_run(2, gan))
    assert (proof.findings[0].engine, proof.findings[0].parameter) == (1, "0.0.weight")
    assert proof.blamed == ("activation_checkpointing",)


class Turned(nn.Module):
    """Modules that are called in another order than they are made, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.unused = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.last(self.first(x)) * self.scale


def test_the_forward_order_is_that_of_calls():
    module = Turned()
    order = ForwardOrder(module)
    module(torch.randn(3, 4))
    names = [name.partition(".")[0] for name in order.take()]
    assert list(dict.fromkeys(names)) == ["first", "last", "scale", "unused"]


PRODUCTS = {
    "linear": (functional.linear, (5, 7, 300), (9, 300)),
    "matmul": (torch.matmul, (5, 7, 300), (5, 300, 4)),
    "conv2d": (functional.conv2d, (2, 60, 6, 6), (4, 60, 3, 3)),
    "causal attention": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k.sin(), is_causal=True),
        *((2, 3, 40, 16),) * 2,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_another_order_is_the_same_but_for_rounding(name):
    function, *shapes = PRODUCTS[name]
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(shape, generator=draw).requires_grad_() for shape in shapes)
    wanted = function(one, other)
    with OtherOrder():
        found = function(one, other)
    weights = torch.randn(wanted.shape, generator=draw)
    of_wanted = torch.autograd.grad(wanted, (one, other), weights)
    of_found = torch.autograd.grad(found, (one, other), weights)
    for a, b in zip((found, *of_found), (wanted, *of_wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found, wanted)


def test_modes_stay_active_where_blocks_are_computed_again():
    x, weight = torch.randn(3, 8), torch.randn(8, 8, requires_grad=True)
    computed = []

    def block(one):
        computed.append(functional.dropout(functional.linear(one, weight), 0.5))
        return computed[-1].sin()

    with WithoutDropout(), OtherOrder():
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(computed) == 2
    assert torch.equal(*computed)
    assert (computed[0] != 0).all()


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 8) * 0.3)

    def forward(self, words):
        return functional.embedding(words, self.weight)


class Shift(nn.Module):
    """A layer with a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen += 1
        return torch.tanh(x + self.shift)


def pipeline(optimizer=None):
    """A pipeline of specs, with words that the first and the last layer share; ranks between them have no data."""

    def run():
        with _LOCK:
            torch.manual_seed(default_communicator().rank)
            layers = [
                TiedLayerSpec("words", Words),
                LayerSpec(nn.Linear, 8, 8),
                LayerSpec(Shift),
                LayerSpec(nn.Linear, 8, 8),
                LayerSpec(nn.LayerNorm, 8),
                TiedLayerSpec("words", Words, forward_fn=lambda module, x: x @ module.weight.T),
            ]
            loss_of = lambda x, y: functional.cross_entropy(x.mT, y)  # noqa: E731
            model = PipelineModule(layers, num_stages=3, loss_fn=loss_of, partition_method="uniform")
        own = config(2, gradient_clipping=0.5)
        if optimizer is not None:
            del own["optimizer"]
        client = None if optimizer is None else optimizer(model.parameters())
        engine, *_ = polyaccel.initialize(model=model, optimizer=client, config=own)
        draw = torch.Generator().manual_seed(1)
        has_data = engine.is_first_stage() or engine.is_last_stage()
        for _ in range(3):
            words = torch.randint(0, WORDS, (2, 4, 5), generator=draw)
            engine.train_batch(iter([(one, one.flip(1)) for one in words]) if has_data else None)

    return run


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adamax], ids=["config", "script"])
def test_a_pipeline_of_layers_is_compared_with_all_of_them_on_one_rank(optimizer):
    proof = prove(threads_run(3, pipeline(optimizer)))
    assert proof.is_proven, [str(one) for one in proof.findings]
    assert proof.acted["pipeline"]


def test_a_wrong_stage_of_a_pipeline_of_layers_is_named(monkeypatch):
    def double(model):
        if model.num_stages > 1 and model.stage == 1:
            model.get_parameter("2.shift").register_hook(lambda gradient: 2 * gradient)

    plant(monkeypatch, PipelineLayers, double)
    proof = prove(threads_run(3, pipeline()))
    assert proof.findings[0].parameter == "2.shift"
    assert proof.blamed == ("pipeline",)
