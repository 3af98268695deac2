"""`deepspeed.elasticity`: what scripts and schedulers ask of it, with DeepSpeed's arguments and answers."""

from __future__ import annotations

import json
from typing import Any

import deepspeed.elasticity as elasticity
import pytest
from deepspeed.elasticity.config import ElasticityConfigError, ElasticityIncompatibleWorldSize
from polyaccel_deepspeed.config import normalise

from polyaccel.config import load_resolved

SECTION: dict[str, Any] = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}


def _asked(world_size: int = 0, *, micro: bool = False, **changed: Any) -> tuple[Any, ...]:
    config = {"elasticity": {**SECTION, **changed}}
    found: tuple[Any, ...] = elasticity.compute_elastic_config(config, "0.19.6", world_size, micro)
    return found


def test_version_1_counts_gpus() -> None:
    batch, sizes = _asked()
    assert (batch, len(sizes), sizes[0], sizes[-1]) == (9792, 23, 32, 1224)
    assert _asked(64) == (9792, sizes, 17)
    assert _asked(micro=True)[2] == 17
    with pytest.raises(ElasticityIncompatibleWorldSize) as caught:
        _asked(128)
    assert caught.value.value == 128
    assert all(part in str(caught.value) for part in ("GPUs", "9792"))


def test_version_2_counts_hosts_and_takes_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ElasticityConfigError) as caught:
        _asked(version=0.2)
    assert "GPUs" in str(caught.value)
    of_hosts = {"version": 0.2, "min_gpus": 4, "max_gpus": 512, "num_gpus_per_node": 8}
    of_models = {**of_hosts, "model_parallel_size": 4}
    batch, sizes = _asked(16, **of_hosts)
    assert all(size % 8 == 0 and batch % size == 0 for size in sizes)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert _asked(micro=True, **of_hosts)[:2] == (batch, sizes)
    odd = next(count * 8 for count in range(1, 64) if count * 8 not in sizes)
    other, only, micro = _asked(odd, micro=True, **of_hosts)
    assert only == [odd]
    assert other % (odd * micro) == 0
    assert other <= 10000
    of_copies = _asked(16, **of_models)[1]
    assert all(size % 2 == 0 for size in of_copies)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, '"elasticity"'),
        ({"elasticity": {}}, "elasticity.enabled"),
        ({"elasticity": {"enabled": True}}, "max_train_batch_size"),
        ({"elasticity": {**SECTION, "micro_batch_sizes": [20000]}}, "20000"),
        ({"elasticity": {**SECTION, "version": 0.3}}, "elasticity.version"),
        ({"elasticity": {**SECTION, "min_gpus": 1400}}, "1400"),
        (
            {"elasticity": {**SECTION, "version": 0.2, "num_gpus_per_node": 3, "model_parallel_size": 2}},
            "model_parallel_size",
        ),
    ],
)
def test_a_section_that_cannot_be_used_is_an_error(config: dict[str, Any], named: str) -> None:
    with pytest.raises(elasticity.elasticity.ElasticityConfigError) as caught:
        elasticity.compute_elastic_config(config, "0.19.6", 32)
    assert named in str(caught.value)


def test_a_scheduler_plans_with_the_section_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(elasticity.DEEPSPEED_ELASTICITY_CONFIG, json.dumps(SECTION))
    elasticity.ensure_immutable_elastic_config(SECTION)
    with pytest.raises(ElasticityConfigError) as caught:
        elasticity.ensure_immutable_elastic_config({**SECTION, "max_train_batch_size": 500})
    assert caught.value.value == 500
    assert "10000" in str(caught.value)


def test_a_config_trains_with_its_batch() -> None:
    tree, changes = normalise({"elasticity": {**SECTION, "min_gpus": 1}, "gradient_clipping": 0.0})
    assert changes == ()
    assert elasticity.elasticity_enabled(tree)
    resolved = load_resolved(tree, world_size=4)
    assert resolved.train_batch_size == elasticity.compute_elastic_config(tree, "0.19.6", 4)[0]
