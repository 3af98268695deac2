"""Compressed layers over the stages of a pipeline: the losses, norms, masks and weights of one rank."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, tiny
from parity_models import drawn_from
from pipeline_models import MICRO_BATCHES, pipeline_config
from torch import Tensor, nn

import polyaccel
from polyaccel.errors import ConfigError
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline.module import PipelineModule

Section = dict[str, Any]


def technique(params: Section, modules: list[str], related: list[str] | None = None, **shared: Any) -> Section:
    group = {"params": params, "modules": modules} | ({} if related is None else {"related_modules": [related]})
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 1, **shared},
        "different_groups": {"a": group},
    }


def few_bits(modules: list[str]) -> Section:
    return {
        "weight_quantization": technique({"start_bits": 4, "target_bits": 4}, modules),
        "activation_quantization": technique({"bits": 8}, modules, range_calibration="static"),
    }


def rows(module: str, related: str, method: str) -> Section:
    return {"row_pruning": technique({"dense_ratio": 0.5}, [module], [related], method=method)}


SECTIONS: dict[str, tuple[str, Section]] = {
    "rows": ("llama", {**few_bits([r"layers\.", "lm_head"]), **rows("up_proj", "(down|gate)_proj", "topk")}),
    "sparse": ("llama", {"sparse_pruning": technique({"dense_ratio": 0.5}, [r"layers\."], method="l1")}),
    "tied": (
        "gpt2",
        {
            "weight_quantization": technique({"start_bits": 8, "target_bits": 8}, ["wte", "lm_head", r"h\."]),
            **rows("c_fc", r"mlp\.c_proj", "l1"),
        },
    ),
}


def words(step: int, micro: int) -> dict[str, Tensor]:
    found = torch.randint(3, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(100 * step + micro))
    return {"input_ids": found, "labels": found}


def original(kind: str) -> nn.Module:
    return tiny(kind, dtype=torch.float32, **{"n_layer" if kind == "gpt2" else "num_hidden_layers": 4})


def trained_over(stages: int, model: nn.Module, section: Section, make: Any = words, **keys: Any) -> Any:
    """The losses, norms and whole state that every rank comes to."""

    def run(communicator: Any) -> Any:
        settings = {"pipeline": {"stages": stages}, "train_micro_batch_size_per_gpu": 2, **keys}
        config = pipeline_config(1, compression_training=section, **settings)
        engine, *_ = polyaccel.initialize(model=deepcopy(model), config=config)
        losses, norms = [], []
        for step in range(3):
            losses.append(float(engine.train_batch(iter([make(step, micro) for micro in range(MICRO_BATCHES)]))))
            norms.append(engine.get_global_grad_norm())
        state = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return losses, norms, state

    return run_threads(stages, run)[0]


def assert_same(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        torch.testing.assert_close(found[2][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "keys"), [("rows", {"activation_checkpointing": {"enabled": True}}), ("sparse", {}), ("tied", {})]
)
def test_stages_train_compressed_layers_as_one_rank_does(name: str, keys: Section) -> None:
    kind, section = SECTIONS[name]
    model = original(kind)
    assert_same(trained_over(2, model, section, **keys), trained_over(1, model, section))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(x)))  # type: ignore[no-any-return]


def mean_square(out: Tensor, wanted: Tensor) -> Tensor:
    return (out - wanted).square().mean()


def chain() -> nn.Module:
    with drawn_from(0):
        model: Any = nn.Sequential(*(Pair() for _ in range(4)))
    model.loss_fn = mean_square
    return model  # type: ignore[no-any-return]


def vectors(step: int, micro: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + micro))
    return x, x.flip(1)


def test_a_list_of_layers_is_pruned_over_stages() -> None:
    section = {**few_bits(["wide", "narrow"]), **rows("wide", "narrow", "topk")}
    found = trained_over(2, chain(), section, vectors)
    whole = PipelineModule(list(chain().children()), 1, loss_fn=mean_square)
    wanted = trained_over(1, whole, section, vectors)
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)


SNIP = {
    "sparse_pruning": {
        "shared_parameters": {
            "enabled": True,
            "method": "snip_momentum",
            "schedule_offset": 0,
            "schedule_offset_end": 2,
            "schedule_offset_stride": 1,
            "dense_ratio": 0.5,
            "block_pattern": "1x1",
        },
        "different_groups": {},
    }
}


@pytest.mark.parametrize(
    ("section", "key"),
    [(SNIP, "method"), (rows(r"^0\.wide", r"3\.narrow", "l1"), "related_modules")],
)
def test_what_stages_would_exchange_is_refused(section: Section, key: str) -> None:
    model = chain()

    def run(communicator: Any) -> bool:
        config = pipeline_config(1, compression_training=section, pipeline={"stages": 2})
        with pytest.raises(ConfigError) as caught:
            polyaccel.initialize(model=deepcopy(model), config=config)
        return any(problem.key.endswith(key) for problem in caught.value.problems)

    assert run_threads(2, run) == [True, True]
