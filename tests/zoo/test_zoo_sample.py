"""A sample of the zoo: rows that are cheap, of every kind of model and under every mesh. `make test-zoo` has all."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from zoo_models import Entry, build, entries
from zoo_rows import MESHES, Comparison

ALL = tuple(MESHES)
SAMPLE: dict[str, tuple[str, ...]] = {
    "causal/llama": ALL[:5] + ALL[6:],
    "causal/mixtral": ("tensor 2", "expert 2", "tiles", "stage 3"),
    "causal/apertus": ("tensor 2", "ring 2", "pipeline 2", "recomputation"),
    "causal/gpt2": ("tensor 2", "Ulysses 2, stage 3", "pipeline 2", "recomputation"),
    "causal/gemma4_unified": ("Ulysses 2, stage 3",),
    "causal/mamba": ("pipeline 2", "recomputation", "ring 2"),
    "masked/mobilebert": ("tensor 2", "ring 2"),
    "masked/mpnet": ("tensor 2",),
    "masked/bert": ("tensor 2", "ring 2", "pipeline 2", "tiles", "stage 3"),
    "sequence-to-sequence/t5": ("tensor 2", "recomputation", "tiles", "ring 2", "pipeline 2"),
    "sequence-to-sequence/longt5": ("tensor 2", "tensor 3, stage 3"),
    "vision/vit": ("tensor 2", "pipeline 2", "recomputation", "stage 3"),
    "multimodal/aria": ("tensor 2",),
    "audio/wav2vec2-bert": ("recomputation",),
    "speech/whisper": ("recomputation", "stage 3"),
}
HINTED = {
    "causal/gemma4_unified": ("Ulysses 2, stage 3",),
    "causal/mamba": ("ring 2",),
    "causal/mixtral": ("tiles",),
    "masked/mobilebert": ("ring 2",),
    "sequence-to-sequence/t5": ("ring 2",),
}
"""Rows that are equal with what the hint of a refusal says."""
REFUSED = {"masked/flaubert": ("pipeline 2",)}
"""Rows that are refused, with the reasons that docs/zoo.md has."""


@cache
def compared(key: str) -> Comparison:
    torch.set_num_threads(1)
    kind, type_ = key.split("/")
    (entry,) = (one for one in entries() if (one.kind, one.type) == (kind, type_))
    return Comparison(build(entry))


@pytest.mark.parametrize(("key", "mesh"), [(key, mesh) for key, meshes in SAMPLE.items() for mesh in meshes])
def test_a_row_is_equal(key: str, mesh: str) -> None:
    row = compared(key).row(mesh)
    assert row.result == "equal", row.detail
    assert row.acted, "the rewrite changed nothing"
    assert bool(row.hint) == (mesh in HINTED.get(key, ()))


@pytest.mark.parametrize(("key", "mesh"), [(key, mesh) for key, meshes in REFUSED.items() for mesh in meshes])
def test_a_row_is_refused(key: str, mesh: str) -> None:
    row = compared(key).row(mesh)
    assert row.result == "refused", row.detail
    assert "hint" in row.detail


def test_a_difference_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison itself: an engine whose weights are moved before it trains."""
    comparison = compared("causal/llama")
    parameter = comparison.tiny.model.get_parameter("model.layers.1.mlp.down_proj.weight")
    values = comparison._values

    def with_wrong_weights(ranks, config, data_ranks, variant):
        if variant.is_plain:
            return values(ranks, config, data_ranks, variant)
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(1.001)
        try:
            return values(ranks, config, data_ranks, variant)
        finally:
            with torch.no_grad():
                parameter.copy_(before)

    monkeypatch.setattr(comparison, "_values", with_wrong_weights)
    assert comparison.row("stage 3").result == "defect"


def test_the_walk_has_all_kinds_and_the_same_order() -> None:
    walk = entries()
    assert len(walk) > 300
    assert len({one.name for one in walk}) == len(walk)
    assert {one.kind for one in walk[:20]} == {one.kind for one in walk}
    assert walk == entries()
    assert all(isinstance(one, Entry) for one in walk)
