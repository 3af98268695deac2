"""Models that nobody wrote for a pipeline train over its stages as on one rank: Hugging Face's, and one of our own."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch
from block_models import WithLoss, gates, pairs
from hf_models import SIZES, VOCABULARY, tiny
from parity_models import drawn_from
from pipeline_models import MICRO_BATCHES, Figures, assert_same, pipeline_config
from torch import nn
from transformers import (
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    default_data_collator,
)

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.deferred_init.values import is_deferred
from polyaccel.torch.experts import Mixture

LAYERS = 4
SHARED = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


@cache
def original(kind: str) -> Any:
    return tiny(kind, dtype=torch.float32, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": LAYERS})


def sentences(step: int, micro: int) -> dict[str, torch.Tensor]:
    """Two sentences, the second with padding; the next micro-batch has others of another length."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    length = 5 + (step + micro) % 3
    words = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(words)
    mask[1, 3:] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def config_of(stages: int, **changes: Any) -> dict[str, Any]:
    settings = {"pipeline": {"stages": stages}, "train_micro_batch_size_per_gpu": 2, **changes}
    return pipeline_config(1, **settings)


def trained_over(
    stages: int, model: nn.Module, *, make: Any = sentences, steps: int = 3, ranks: int | None = None, **changes: Any
) -> Figures:
    """What each of `ranks` (None: one a stage) comes to, which is the same. One stage has an ordinary engine."""

    def run(communicator: Any) -> Figures:
        engine, *_ = polyaccel.initialize(model=deepcopy(model), config=config_of(stages, **changes))
        found = Figures(losses={0: []})
        for step in range(steps):
            batches = [make(step, micro) for micro in range(MICRO_BATCHES)]
            found.losses[0].append(float(engine.train_batch(iter(batches))))
            found.norms.append(engine.get_global_grad_norm())
        batches = [make(9, micro) for micro in range(MICRO_BATCHES)]
        shares = [batches] if stages > 1 else [[one] for one in batches]
        evaluated = [engine.eval_batch(iter(each)) for each in shares]
        found.losses[1] = [float(torch.stack(evaluated).mean())]
        found.values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    first, *others = run_threads(ranks or stages, run)
    for other in others:
        assert_same(other, first)
    return first


@cache
def plainly(kind: str) -> Figures:
    """What an ordinary engine makes of the model."""
    return trained_over(1, original(kind))


def assert_close(found: Figures, expected: Figures) -> None:
    """As it is where two stages sum the gradients of tied weights apart."""
    assert found.losses.keys() == expected.losses.keys()
    for place, losses in expected.losses.items():
        assert found.losses[place] == pytest.approx(losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("kind", "stages"), [("llama", 2), ("llama", 3), ("mixtral", 2)])
def test_stages_of_an_unrewritten_model_train_as_one_rank_does(kind, stages):
    assert_same(trained_over(stages, original(kind)), plainly(kind))


def special(kind: str) -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 4}
    if kind == "rwkv":  # scales the weights of all blocks when it begins to train and to evaluate
        own = {"rescale_every": 1, "context_length": 32, "use_cache": False}
        made: Any = RwkvForCausalLM(RwkvConfig(**sizes, **own))
    elif kind == "recurrent gemma":  # begins the states of all blocks in every forward pass
        made = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**sizes, lru_width=32, attention_window_size=5))
    else:  # reads the weights of its positions without a gradient, and gives them to all blocks
        dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
        made = RoFormerForCausalLM(RoFormerConfig(**sizes, **dropout, is_decoder=True))
    with drawn_from(5), torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "norm" not in name:
                parameter.normal_(std=0.1)
    return made


@pytest.mark.parametrize("pipeline", [{}, {"schedule": "interleaved"}], ids=["", "interleaved"])
@pytest.mark.parametrize("kind", ["rwkv", "recurrent gemma", "roformer"])
def test_models_that_look_into_blocks_of_other_stages_train_as_on_one(kind, pipeline):
    model = special(kind)
    before = deepcopy(model.state_dict())
    assert_close(trained_over(2, model, pipeline={"stages": 2, **pipeline}), trained_over(1, model))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_stages_have_several_chunks(schedule):
    pipeline = {"stages": 2, "schedule": schedule}
    assert_same(trained_over(2, original("llama"), pipeline=pipeline), plainly("llama"))


@pytest.mark.parametrize(("kind", "stages"), [("gpt2", 2), ("gpt2", 3), ("bert", 2)])
def test_words_of_the_first_stage_and_the_last_are_one_parameter(kind, stages):
    assert_close(trained_over(stages, original(kind)), plainly(kind))


def test_weights_that_are_transposed_may_wait():
    """GPT-2's layers are no `torch.nn.Linear`."""
    found = trained_over(2, original("gpt2"), pipeline={"stages": 2, "schedule": "zb-h1"})
    assert_close(found, plainly("gpt2"))


def test_blocks_are_recomputed_on_every_stage():
    recomputed = trained_over(3, original("llama"), activation_checkpointing={"enabled": True})
    assert_same(recomputed, plainly("llama"))


class RepeatedDropout(nn.Module):
    """Dropout whose masks follow from how often the module was called, as no generator of several ranks is."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.calls = seed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.calls)
        return x * (torch.rand(x.shape, generator=generator) > 0.1) / 0.9


def test_dropout_is_in_every_stage():
    model = deepcopy(original("llama"))
    seeds = count()
    for layer in model.model.layers:
        layer.mlp = nn.Sequential(layer.mlp, RepeatedDropout(next(seeds)))
    one = trained_over(1, model)
    assert_same(trained_over(2, model), one)
    assert one.losses != plainly("llama").losses


@pytest.mark.parametrize("after", [1, 3])
def test_a_checkpoint_of_two_stages_goes_on_with_others(after, tmp_path):
    model = original("gpt2")

    def run(stages: int, steps: range) -> tuple[list[float], dict[str, torch.Tensor]]:
        def rank(communicator: Any) -> Any:
            engine, *_ = polyaccel.initialize(model=deepcopy(model), config=config_of(stages))
            if steps[0]:
                engine.load_checkpoint(str(tmp_path))
            losses = [
                float(engine.train_batch(iter([sentences(step, micro) for micro in range(MICRO_BATCHES)])))
                for step in steps
            ]
            engine.save_checkpoint(str(tmp_path))
            values = {name: value.clone() for name, value in engine.module_state_dict().items()}
            engine.destroy()
            return losses, values

        return run_threads(stages, rank)[0]

    run(2, range(2))
    losses, values = run(after, range(2, 3))
    whole = plainly("gpt2")
    assert losses == pytest.approx(whole.losses[0][2:], rel=1e-6)
    assert values.keys() == whole.values.keys()
    for name, value in whole.values.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=3e-6)


def test_the_whole_model_has_its_own_names(tmp_path):
    model = original("gpt2")

    def run(communicator: Any) -> bool:
        engine, *_ = polyaccel.initialize(model=deepcopy(model), config=config_of(2))
        state = engine.module_state_dict()
        engine.load_module_state_dict({name: value + 1 for name, value in state.items()})
        assert engine.save_16bit_model(str(tmp_path), "pytorch_model.bin")
        engine.destroy()
        return True

    assert run_threads(2, run) == [True, True]
    state = model.state_dict()
    written = torch.load(tmp_path / "pytorch_model.bin")
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], value + 1) for name, value in state.items())


def test_a_model_of_ones_own_is_cut_by_its_list_of_blocks():
    one = trained_over(1, WithLoss(gates()), make=pairs)
    one.values = {name.removeprefix("model."): value for name, value in one.values.items()}
    assert_close(trained_over(3, gates(), make=pairs), one)


@pytest.mark.parametrize("frozen", ["gates.0", "gates.3", "gates"])
def test_parts_may_be_frozen(frozen):
    model = deepcopy(gates())
    model.get_submodule(frozen).requires_grad_(False)
    one = trained_over(1, WithLoss(model), make=pairs)
    one.values = {name.removeprefix("model."): value for name, value in one.values.items()}
    assert_close(trained_over(3, model, make=pairs), one)


@pytest.mark.parametrize("stage", [0, 2])
def test_states_of_stages_rest_in_host_memory(stage):
    zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if stage else {})}
    found = trained_over(2, original("llama"), zero_optimization=zero)
    assert_same(found, plainly("llama"))


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("llama", {"tensor_parallel": {"autotp_size": 2}}),
        ("gpt2", {"tensor_parallel": {"autotp_size": 2}}),
        ("llama", {"sequence_parallel_size": 2}),
        ("gpt2", {"zero_optimization": {"stage": 3, "reduce_bucket_size": 64}}),
        ("mixtral", {**SHARED, "zero_optimization": {"stage": 3, "reduce_bucket_size": 64}}),
    ],
    ids=["tensor", "tensor-tied", "sequence", "stage3", "experts"],
)
def test_ranks_share_what_a_stage_has(kind, beside):
    shared = trained_over(2, original(kind), ranks=4, **beside)
    assert_close(shared, trained_over(1, original(kind), ranks=2, **beside))
    assert shared.losses[0] == pytest.approx(plainly(kind).losses[0], rel=1e-6)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_experts_are_shared_within_stages(schedule):
    pipeline = {"stages": 2, "schedule": schedule}
    shared = trained_over(2, original("mixtral"), ranks=4, **SHARED, pipeline=pipeline)
    assert_close(shared, trained_over(1, original("mixtral"), ranks=2, **SHARED))


class Adding(nn.Module):
    """A layer of experts, whose output is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Mixture(6, lambda: nn.Linear(6, 6), 3, gate="sigmoid", bias_rate=0.01, balance_weight=0.0)

    def forward(self, x):
        return x + self.mixture(x).output


def test_a_stage_may_have_no_experts(tmp_path):
    """Written as layers, with other batches on each rank that shares experts; a checkpoint goes on to the bit."""

    def batches(step, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(2 * MICRO_BATCHES, 3, 6, generator=generator)
        return [(one, one.flip(-1)) for one in inputs.split(2)]

    torch.manual_seed(4)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), Adding(), nn.Linear(6, 6))

    def run(steps, *, load=False, save=False):
        def body(communicator):
            model = deepcopy(layers)
            model.loss_fn = nn.functional.mse_loss
            changes = {
                **SHARED,
                "pipeline": {"stages": 2, "partition": "uniform"},
                "train_micro_batch_size_per_gpu": 2,
            }
            engine, *_ = polyaccel.initialize(model=model, config=pipeline_config(1, **changes))
            if load:
                engine.load_checkpoint(str(tmp_path))
            found = []
            place = engine.mesh.group(("data",), communicator.rank).index(communicator.rank)
            for step in steps:
                found.append(float(engine.train_batch(iter(batches(step, place)))))
            if save:
                engine.save_checkpoint(str(tmp_path))
            values = {name: value.clone() for name, value in engine.module_state_dict().items()}
            engine.destroy()
            return found, values

        return run_threads(4, body)

    whole = run(range(6))
    run(range(3), save=True)
    rest = run(range(3, 6), load=True)
    for (found, values), (later, same) in zip(whole, rest, strict=True):
        assert later == found[3:]
        assert all(torch.equal(value, same[name]) for name, value in values.items())
        assert values["3.mixture.raised"].any()


def test_a_stage_computes_in_bfloat16():
    changes = {"bf16": {"enabled": True}}
    assert_same(trained_over(2, original("llama"), **changes), trained_over(1, original("llama"), **changes))


def test_dictionaries_come_from_training_data():
    samples = [{name: value[0] for name, value in sentences(0, 0).items()} for _ in range(16)]

    def run(communicator: Any) -> float:
        engine, *_ = polyaccel.initialize(
            model=deepcopy(original("llama")),
            config=config_of(2),
            training_data=samples,
            collate_fn=default_data_collator,
        )
        loss = float(engine.train_batch())
        engine.destroy()
        return loss

    first, second = run_threads(2, run)
    assert first == second > 0


def test_a_model_without_memory_is_cut():
    with polyaccel.zero.Init():
        models = [tiny("llama", dtype=torch.float32, num_hidden_layers=LAYERS, hidden_size=64) for _ in range(2)]
    expected = tiny("llama", dtype=torch.float32, num_hidden_layers=LAYERS, hidden_size=64).state_dict()

    def run(communicator: Any) -> bool:
        model = models[communicator.rank]
        assert any(is_deferred(parameter) for parameter in model.parameters())
        engine, *_ = polyaccel.initialize(model=model, config=config_of(2))
        found = engine.module_state_dict()
        engine.destroy()
        return all(torch.equal(found[name], value) for name, value in expected.items())

    assert run_threads(2, run) == [True, True]
