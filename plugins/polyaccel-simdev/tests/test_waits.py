"""How often a step makes the host wait for the device, compared with the table of the guide."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_training import BF16, OFFLOADED, PARAMS_TOO, train

PAGE = Path(__file__).parents[3] / "docs" / "guide" / "host_waits.md"
CLIPPED = {**BF16, "gradient_clipping": 0.5}
UNCHECKED = {"bf16": {"enabled": True, "check_grad_overflow": False}}
EVERY_PARAM = {"stage": 3, "stage3_param_persistence_threshold": 0}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
ALONE: dict[str, tuple[Any, Any]] = {
    "stage 0, one rank": ({"stage": 0}, BF16),
    "stage 3, one rank": ({"stage": 3}, BF16),
    "stage 3, unchecked, one rank": ({"stage": 3}, UNCHECKED),
    "stage 2, states on the host, one rank": ({"stage": 2, **OFFLOADED}, BF16),
    "stage 2, states on the host, fp32, one rank": ({"stage": 2, **OFFLOADED}, {}),
}
SHARED: dict[str, tuple[Any, Any]] = {
    **{f"stage {stage}": ({"stage": stage}, BF16) for stage in range(4)},
    **{f"stage {stage}, unchecked": ({"stage": stage}, UNCHECKED) for stage in range(4)},
    "stage 2, fp32": ({"stage": 2}, {}),
    "stage 3, every parameter sharded": (EVERY_PARAM, BF16),
    "stage 3, every parameter sharded, unchecked": (EVERY_PARAM, UNCHECKED),
    "stage 3, every parameter sharded, fixed order": ({**EVERY_PARAM, "stage3_fixed_order": True}, BF16),
    "stage 0, clipped": ({"stage": 0}, CLIPPED),
    "stage 3, clipped": ({"stage": 3}, CLIPPED),
    "stage 1, fp16": ({"stage": 1}, FP16),
    "stage 3, fp16": ({"stage": 3}, FP16),
    "stage 2, two micro-batches": ({"stage": 2}, {**BF16, "gradient_accumulation_steps": 2}),
    "stage 1, states on the host": ({"stage": 1, **OFFLOADED}, BF16),
    "stage 2, states on the host": ({"stage": 2, **OFFLOADED}, BF16),
    "stage 2, states on the host, fp32": ({"stage": 2, **OFFLOADED}, {}),
    "stage 2, states on the host, two micro-batches": (
        {"stage": 2, **OFFLOADED},
        {**BF16, "gradient_accumulation_steps": 2},
    ),
    "stage 3, parameters and states on the host": ({"stage": 3, **PARAMS_TOO}, BF16),
    "stage 3, all parameters and states on the host": (
        {"stage": 3, **PARAMS_TOO, "stage3_param_persistence_threshold": 0},
        BF16,
    ),
    "stage 3, parameters on the host": (
        {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0},
        BF16,
    ),
    "stage 2, recorded updates, unchecked": ({"stage": 2}, {**UNCHECKED, "graphs": "update"}),
    "stage 2, recorded updates": ({"stage": 2}, {**BF16, "graphs": "update"}),
    "stage 3, recorded updates, clipped": ({"stage": 3}, {**CLIPPED, "graphs": "update"}),
    "stage 3, quantised gradients": ({"stage": 3, "zero_quantized_gradients": True}, BF16),
    "stage 3, quantised weights": ({"stage": 3, "zero_quantized_weights": True}, BF16),
    "stage 2, tensor ranks": ({"stage": 2}, {**BF16, "tensor_parallel": {"autotp_size": 2}}),
    "stage 1, sequence ranks": ({"stage": 1}, {**BF16, "sequence_parallel_size": 2}),
    "stage 2, expert ranks": (
        {"stage": 2},
        {**BF16, "has_experts": True, "expert_parallel": {"enabled": True, "autoep_size": 2}},
    ),
    "stage 1, two stages of a pipeline": (
        {"stage": 1},
        {**BF16, "pipeline": {"stages": 2}, "gradient_accumulation_steps": 2},
    ),
}


def row(name: str, waits: dict[str, int]) -> str:
    """Return the row of the table for a setting. What the model itself waits for is left out."""
    places = Counter[str]()
    for wait, count in waits.items():
        module, _, function = wait.rpartition(", ")[2].rpartition(".")
        if module.startswith("polyaccel."):
            places[f"`{module.rpartition('.')[2]}.{function}`"] += count
    shown = ", ".join(f"{place} {count}" for place, count in sorted(places.items()))
    return f"| {name} | {places.total()} | {shown or 'none'} |"


@pytest.mark.parametrize(("world", "settings"), [(1, ALONE), (2, SHARED)])
def test_a_step_waits_where_the_guide_says(world: int, settings: dict[str, tuple[Any, Any]]) -> None:
    found = train(world, settings, script_name="count_waits.py")
    rows = [row(name, one["waits"]) for name, one in found.items()]
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [each for each in rows if each not in page]
    assert missing == [], "\n".join(rows)
    # A thread of a stream may give its last small tensor back late; one that is lost in each step would count thrice.
    assert {name: one["growth"] for name, one in found.items() if one["growth"] > 512} == {}
