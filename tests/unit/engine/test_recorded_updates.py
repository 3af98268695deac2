"""Which updates can be played from a recording: those of one row of the table of optimizers, on the device alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyaccel.accelerators.base import Capabilities
from polyaccel.accelerators.cpu import CpuAccelerator
from polyaccel.config import load_resolved
from polyaccel.engine.policies.engines import native_optimizer_of
from polyaccel.engine.policies.recordings import record_updates
from polyaccel.errors import ConfigError
from polyaccel.zero.update.optimizers import SliceOptimizer
from polyaccel.zero.update.recorded import RecordedOptimizer


class Recording(CpuAccelerator):
    """Claims to play recordings; nothing here records any."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), graphs=True)


def recorded(optimizer: dict[str, Any], **sections: Any) -> SliceOptimizer | None:
    config = load_resolved(
        {"train_batch_size": 1, "optimizer": optimizer, "graphs": "update", **sections}, world_size=1
    )
    native = native_optimizer_of(config)
    assert native is not None
    return record_updates(config, Recording(), native[0])


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Lion", "Adagrad", "Adamax"])
def test_a_row_of_the_table_is_recorded(kind: str) -> None:
    assert isinstance(recorded({"type": kind}), RecordedOptimizer)


@pytest.mark.parametrize(
    ("optimizer", "sections"),
    [
        ({"type": "Lamb"}, {}),
        ({"type": "ScheduleFreeAdamW"}, {}),
        ({"type": "AdamW", "params": {"state_bits": 8}}, {}),
        ({"type": "AdamW"}, {"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
        ({"type": "AdamW"}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        ({"type": "AdamW"}, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_any_other_update_is_refused(optimizer: dict[str, Any], sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        recorded(optimizer, **sections)
    assert {problem.key for problem in caught.value.problems} == {"graphs"}
