"""Memory as it is foretold after a trial or three, beside what a training of 29 million parameters had: two ranks on a
host, sequences of 128 bytes, the most of either rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyaccel.config import load_config, resolve_config
from polyaccel.core.types import DType, ParamSpec
from polyaccel.engine.policies.muon import element_cost
from polyaccel.planner.autotune.candidates import Candidate
from polyaccel.planner.autotune.cost_model import CostModel
from polyaccel.planner.autotune.hardware_probe import USUAL
from polyaccel.planner.autotune.records import TrialRecord
from polyaccel.planner.model import ModelShape

MIB = 1 << 20
PROCESS_MIB = 261
MEASURED_MIB = {
    (0, 1, False): 833,
    (0, 4, False): 957,
    (0, 8, False): 1133,
    (1, 1, False): 831,
    (1, 2, False): 868,
    (1, 8, False): 1117,
    (2, 1, False): 777,
    (2, 4, False): 903,
    (2, 8, False): 1073,
    (3, 1, False): 767,
    (0, 8, True): 1056,
    (1, 1, True): 866,
    (1, 8, True): 1048,
    (2, 1, True): 814,
    (2, 2, True): 831,
    (3, 1, True): 813,
}
"""MiB by stage, micro-batch and whether blocks are computed again."""
OWN = (1, 1, False)


def specs() -> Iterator[ParamSpec]:
    """About the parameters of a GPT of 9 blocks and a width of 512."""
    for number in range(9):
        for name, rows in (("qkv", 1536), ("out", 512), ("in", 2048), ("back", 2048)):
            yield ParamSpec(f"blocks.{number}.{name}", (rows, 512), DType.FLOAT32)
    yield ParamSpec("tokens", (640, 512), DType.FLOAT32)


@pytest.fixture
def cost_model() -> CostModel:
    tree = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    config = resolve_config(load_config(tree), world_size=2)
    units = {spec.fqn: spec.fqn[:8] for spec in specs() if "blocks" in spec.fqn}
    model = ModelShape("a GPT", tuple(specs()), units)
    return CostModel(config, model, 2, is_remote=False, base_nbytes=PROCESS_MIB * MIB)


def setting(stage: int, rows: int, recomputes: bool) -> Candidate:
    return Candidate(
        stage=stage, micro_batch=rows, accumulation=8 // rows, recomputes=recomputes, bucket_numel=500_000_000
    )


@pytest.mark.parametrize(
    ("tried", "error"),
    [((OWN,), 0.1), ((OWN, (2, 4, False), (0, 4, False)), 0.05)],
    ids=["one trial", "three trials"],
)
def test_the_memory_of_settings_that_nobody_tried_is_foretold(
    tried: tuple[tuple[int, int, bool], ...], error: float, cost_model: CostModel
) -> None:
    cost_model.learn(
        [TrialRecord(candidate=setting(*one), step_s=1.0, peak_nbytes=MEASURED_MIB[one] * MIB) for one in tried]
    )
    for one, mib in MEASURED_MIB.items():
        assert cost_model.predict(setting(*one)).device_nbytes / MIB == pytest.approx(mib, rel=error), one


def test_muon_s_products_count_as_time_of_the_update() -> None:
    """A matrix of m x n takes its iteration's operations, shared out over the ranks that update."""
    found = {}
    for kind in ("AdamW", "Muon"):
        config = resolve_config(load_config({"train_batch_size": 16, "optimizer": {"type": kind}}), world_size=2)
        model = ModelShape("two matrices", tuple(ParamSpec(name, (64, 64), DType.FLOAT32) for name in "ab"), {})
        for stage in (0, 1):
            estimates = CostModel(config, model, 2, is_remote=False)
            found[kind, stage] = estimates._time_features(setting(stage, 8, False))["updates"]
    operations = 2 * 64 * 64 * element_cost(64, 64, 5)
    for stage, ranks in ((0, 1), (1, 2)):
        more = found["Muon", stage] - found["AdamW", stage]
        assert more == pytest.approx(operations / ranks * USUAL.operation_s)
