"""What the tests of pipelines share: layers, batches, and trainings over stages."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import polyaccel
from polyaccel.testkit.ranks.threads import run_threads
from polyaccel.torch.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

MICRO_BATCHES = 4
VOCABULARY = 11


with torch.random.fork_rng():  # here, for ranks that are threads have one generator
    torch.manual_seed(3)
    PLAIN = (
        nn.Linear(6, 33),
        nn.Tanh(),
        nn.Linear(33, 7),
        nn.GELU(),
        nn.LayerNorm(7),
        nn.Linear(7, 12),
        nn.Linear(12, 5),
    )
    WORDS, UP, DOWN = nn.Embedding(VOCABULARY, 6), nn.Linear(6, 9), nn.Linear(9, 6)


def plain_layers() -> list[nn.Module]:
    """Seven layers of odd sizes, the same every time."""
    return list(deepcopy(PLAIN))


def tied_layers() -> list[Any]:
    """Specs of a model that ends with the weights with which it begins."""

    def logits(module: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ module.weight.t()

    return [
        TiedLayerSpec("words", deepcopy, WORDS),
        LayerSpec(deepcopy, UP),
        nn.functional.gelu,
        LayerSpec(deepcopy, DOWN),
        LayerSpec(nn.LayerNorm, 6),
        TiedLayerSpec("words", deepcopy, WORDS, forward_fn=logits),
    ]


def micro_batch(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels for `plain_layers`, a function of where they stand."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)


def words(step: int, micro: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels for `tied_layers`."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return tuple(torch.randint(0, VOCABULARY, (5,), generator=generator) for _ in range(2))  # type: ignore[return-value]


def pipeline_config(stage: int, schedule: str = "1f1b", **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
        "pipeline": {"schedule": schedule},
        **changes,
    }


def plain_model(stages: int, **changes: Any) -> PipelineModule:
    return PipelineModule(plain_layers(), stages, loss_fn=nn.functional.mse_loss, partition_method="uniform", **changes)


def tied_model(stages: int) -> PipelineModule:
    return PipelineModule(tied_layers(), stages, loss_fn=nn.functional.cross_entropy, partition_method="uniform")


@dataclass
class Figures:
    """Of each data rank the losses, of all ranks the norms and the scales, and the whole model in the end."""

    losses: dict[int, list[float]] = field(default_factory=dict)
    norms: list[float | None] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def batches(step: int, rank: int, make: Any = micro_batch) -> Any:
    """The micro-batches of a step."""
    return iter([make(step, micro, rank) for micro in range(MICRO_BATCHES)])


def train(engine: Any, place: int, steps: range, make: Any = micro_batch) -> Figures:
    """Train on this rank; `place` is its place among those with batches of their own."""
    found = Figures()
    found.losses[place] = [float(engine.train_batch(batches(step, place, make))) for step in steps]
    return found


def trained(
    stages: int, data: int, config: dict[str, Any], *, model: Any = plain_model, make: Any = micro_batch, steps: int = 3
) -> Figures:
    """What ranks as threads come to: `stages` stages for each of `data` ranks with batches of their own."""

    def run(communicator: Any) -> Figures:
        place = communicator.rank % data
        engine, *_ = polyaccel.initialize(model=model(stages), config=config)
        found = Figures(losses={place: []})
        for step in range(steps):
            found.losses[place].append(float(engine.train_batch(batches(step, place, make))))
            found.norms.append(engine.get_global_grad_norm())
            found.scales.append(engine.get_loss_scale())
        found.values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        engine.destroy()
        return found

    ranks = run_threads(stages * data, run)
    whole = ranks[0]
    for other in ranks[1:]:
        assert (other.norms, other.scales) == (whole.norms, whole.scales)
        assert other.values.keys() == whole.values.keys()
        assert all(torch.equal(other.values[name], value) for name, value in whole.values.items())
        for place, losses in other.losses.items():
            assert whole.losses.setdefault(place, losses) == losses
    return whole


def assert_same(found: Figures, expected: Figures) -> None:
    """To the bit."""
    assert found.losses == expected.losses
    assert (found.norms, found.scales) == (expected.norms, expected.scales)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value), name
