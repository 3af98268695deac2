"""The config's Muon: the paper's formula in float64, stages, ranks, accumulation, checkpoints by name, refusals."""

from __future__ import annotations

from threading import Lock

import pytest
import torch
from own_optimizers import Lars
from torch import nn

import polyaccel
from polyaccel.errors import ConfigError, ShardingError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.muon.newton_schulz import add_orthogonalized, orthogonalize
from polyaccel.utils import safe_get_full_optimizer_state

STEPS = 4
PARAMS = {"lr": 0.05, "adam_lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "betas": [0.8, 0.9]}


class Model(nn.Module):
    """Odd matrices, a convolution, vectors, an embedding that is tied to the head, and a frozen matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.mix = nn.ModuleList(nn.Linear(a, b) for a, b in ((6, 13), (13, 7), (7, 6)))
        self.norm = nn.LayerNorm(6)
        self.fixed = nn.Linear(6, 6, bias=False)
        self.fixed.weight.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.conv(x.unsqueeze(1)).mean(1)
        for layer in self.mix:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(self.fixed(self.norm(x))).flatten(0, 1), tokens.flatten())


def tokens(step, rank):
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))


_BUILDING = Lock()


def built(build):
    """The same model on all ranks, which are threads with one generator."""
    with _BUILDING:
        torch.manual_seed(0)
        return build()


def engine_at(stage, micro_batches=1, params=PARAMS, build=Model, optimizer=None, **sections):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 120, "stage3_param_persistence_threshold": 10},
    }
    return polyaccel.initialize(model=built(build), optimizer=optimizer, config=config | sections)[0]


def weights_of(engine):
    return {name: value.detach().clone() for name, value in engine.module_state_dict().items()}


def step(engine, at, rank, micro_batches=1):
    for micro in range(micro_batches):
        engine.backward(engine(tokens(at * micro_batches + micro, rank)))
        engine.step()


def trained(world, stage, micro_batches=1):
    def go(communicator):
        engine = engine_at(stage, micro_batches)
        for at in range(STEPS):
            step(engine, at, communicator.rank, micro_batches)
        found = weights_of(engine)
        engine.destroy()
        return found

    return run_threads(world, go)


def by_singular_values(matrix, steps):
    """The formula without a product of matrices: singular values go through the polynomial."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (matrix.double().norm() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def in_float64(world, micro_batches):
    """The paper's update of every matrix in float64, and torch's AdamW."""
    model = built(Model).double()
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    matrices = {name: one for name, one in named.items() if one.dim() > 1 and "embed" not in name}
    rest = [one for name, one in named.items() if name not in matrices]
    adam = torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1)
    momenta = {name: torch.zeros_like(one) for name, one in matrices.items()}
    for at in range(STEPS):
        model.zero_grad()
        for micro in range(micro_batches):
            for rank in range(world):
                (model(tokens(at * micro_batches + micro, rank)) / (world * micro_batches)).backward()
        adam.step()
        for name, one in matrices.items():
            momenta[name] = 0.9 * momenta[name] + 0.1 * one.grad
            wanted = 0.1 * one.grad + 0.9 * momenta[name]
            update = by_singular_values(wanted.flatten(1), 5).reshape(one.shape)
            scale = max(1.0, one.shape[-2] / one.shape[-1]) ** 0.5
            with torch.no_grad():
                one.copy_(one * (1 - 0.05 * 0.1) - 0.05 * scale * update)
    return model.state_dict()


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (1, 5), (6, 6), (3, 5, 2)], ids=str)
def test_orthogonalisation_moves_singular_values_by_the_polynomial(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, rough = orthogonalize(matrix, 5, torch.float64), orthogonalize(matrix.float(), 5, torch.float32)
    for one, coarse, whole in zip(
        found.reshape(-1, *shape[-2:]), rough.reshape(-1, *shape[-2:]), matrix.reshape(-1, *shape[-2:]), strict=True
    ):
        torch.testing.assert_close(one, by_singular_values(whole, 5), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(coarse.double(), one, rtol=0.0, atol=1e-4)
        assert 0.6 < torch.linalg.svdvals(one).min() <= torch.linalg.svdvals(one).max() < 1.3


@pytest.mark.parametrize("shape", [(70, 130), (130, 70), (90, 90)], ids=str)
def test_what_is_added_in_place_is_the_orthogonal_factor(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    for size in (1.0, 1e-30, 1e-6, 1e20):
        target = torch.ones(shape)
        is_added = add_orthogonalized(target, size * matrix, -0.5, 5)
        assert is_added == (shape != (90, 90) and size < 1e9)
        if is_added:
            wanted = 1 - 0.5 * by_singular_values(size * matrix, 5)
            assert (target.double() - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize(
    ("world", "stage", "micro_batches"), [(1, 0, 1), (2, 0, 2), (2, 1, 1), (3, 2, 2), (1, 3, 2), (3, 3, 1)]
)
def test_training_follows_the_paper_s_formula_in_float64(world, stage, micro_batches):
    wanted = in_float64(world, micro_batches)
    for found in trained(world, stage, micro_batches):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name].double(), value, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_has_the_bits_of_stage_0(stage):
    wanted = trained(2, 0)[0]
    for found in trained(2, stage):
        assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()


@pytest.mark.parametrize(("first", "second"), [((2, 2), (3, 1)), ((1, 0), (2, 3)), ((3, 3), (2, 0))], ids=str)
def test_momentum_goes_along_by_name(tmp_path, first, second):
    def begin(communicator):
        engine = engine_at(first[1])
        for at in range(STEPS):
            step(engine, at, 0)
            if at == 1:
                engine.save_checkpoint(str(tmp_path))
        found = weights_of(engine)
        engine.destroy()
        return found

    def resume(communicator):
        engine = engine_at(second[1])
        engine.load_checkpoint(str(tmp_path))
        momentum = safe_get_full_optimizer_state(engine.module.mix[0].weight, "momentum_buffer")
        assert momentum.shape == (13, 6)
        assert momentum.abs().sum() > 0
        for at in range(2, STEPS):
            step(engine, at, 0)
        found = weights_of(engine)
        engine.destroy()
        return found

    wanted = run_threads(first[0], begin)[0]
    for found in run_threads(second[0], resume):
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=5e-5)


def test_attributes_and_groups_say_what_gets_muon():
    def go(_):
        model = Model()
        model.mix[0].weight.use_muon = False
        groups = [
            {"params": [model.mix[0].weight, model.mix[1].weight], "weight_decay": 0.0},
            {"params": [model.mix[2].weight], "use_muon": False, "lr": 0.5},
            {"params": [model.norm.weight, model.norm.bias]},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "muon", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 2},
        }
        engine, optimizer, *_ = polyaccel.initialize(model=model, model_parameters=groups, config=config)
        found = [
            (each["use_muon"], len(each["params"]), each["lr"], each["weight_decay"]) for each in optimizer.param_groups
        ]
        step(engine, 0, 0)
        engine.destroy()
        return found

    assert run_threads(1, go)[0] == [
        (True, 1, 0.1, 0.0),
        (False, 1, 0.1, 0.0),
        (False, 1, 0.5, 0.0),
        (False, 2, 0.1, 0.0),
    ]


def test_a_vector_of_muon_s_is_refused():
    def build():
        model = nn.Linear(3, 2)
        model.bias.use_muon = True
        return model

    def go(_):
        with pytest.raises(ConfigError) as caught:
            engine_at(1, build=build)
        assert caught.value.problems[0].key == "optimizer.type"

    run_threads(1, go)


@pytest.mark.parametrize(
    "value", [{"per_head_muon": True}, {"ns_steps": 0}, {"betas": [0.9, 1.0]}, {"muon_params": {}}]
)
def test_settings_that_do_not_exist_are_refused(value):
    def go(_):
        with pytest.raises(ConfigError):
            engine_at(1, params=value)

    run_threads(1, go)


@pytest.mark.parametrize(("stage", "optimizer"), [(0, Lars), (2, Lars)])
def test_matrices_that_tensor_ranks_cut_are_refused(stage, optimizer):
    """At stage 0 too: a rank has a block of them."""
    transformers = pytest.importorskip("transformers")

    def go(_):
        shape = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
        config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **shape)
        with pytest.raises(ShardingError) as caught:
            engine_at(
                stage,
                build=lambda: transformers.LlamaForCausalLM(config),
                optimizer=lambda groups: optimizer(groups, lr=0.1),
                tensor_parallel={"autotp_size": 2},
                zero_allow_untested_optimizer=True,
            )
        assert caught.value.hint

    run_threads(2, go)
